"""The precise index and its streams: any loss, order or restart of events ends in the truth, or in not being believed."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_router.kvindex.believed import Believed
from fleet_router.kvindex.precise import SLOW_WORTH, UNPROVEN_MOST, PreciseIndex, key_of
from fleet_router.kvindex.stream import REPLAY_AGAIN_S, STALE_AFTER_S
from fleet_wire.blocks import chain, chain_packed, root_hash, tenant_root
from fleet_wire.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, decode, encode

SIZE = 4
ROOT = root_hash("c", SIZE)
TOKENS = list(range(40))
NAMES = list(chain(ROOT, TOKENS, SIZE))
KEYS = [key_of(name) for name in NAMES]


def stored(names, tokens=(), parent=None, medium="GPU", lora=None) -> BlockStored:
    return BlockStored(list(names), parent, list(tokens), SIZE, None, medium, lora)


def batch(*events, ts: float = 1.0) -> KVEventBatch:
    return KVEventBatch(ts, list(events))


def index() -> PreciseIndex:
    made = PreciseIndex(10_000)
    made.join("a", 1, "c")
    made.join("b", 2, "c")
    return made


def test_packed_tokens_have_the_names_of_plain_ones():
    packed = b"".join(token.to_bytes(4, "little") for token in TOKENS)
    assert chain_packed(ROOT, packed, SIZE) == NAMES


def test_blocks_are_counted_up_to_the_first_that_is_missing():
    made = index()
    made.apply("a", [stored(NAMES[:5])])
    made.apply("b", [stored(NAMES[:2])])
    assert made.depths(KEYS) == [(5, 1), (2, 2)]
    made.apply("a", [BlockRemoved(NAMES[4:5], "GPU"), BlockRemoved(NAMES[3:4], "GPU")])
    assert made.depths(KEYS) == [(3, 1), (2, 2)]
    made.apply("a", [AllBlocksCleared()])
    assert made.depths(KEYS) == [(2, 2)]
    made.remove("b")
    assert (len(made), made._fast) == (0, {})


@pytest.mark.parametrize("names", [[bytes([i]) * 32 for i in range(10)], list(range(10))], ids=["vllm sha256", "vllm int"])
def test_other_engines_names_are_translated_by_their_tokens(names: list):
    made = index()
    made.apply("a", [stored(names[:3], TOKENS[:12])])
    made.apply("a", [stored(names[3:5], TOKENS[12:20], names[2])])
    assert made.depths(KEYS) == [(5, 1)]
    made.apply("a", [stored(names[9:], TOKENS[36:], names[8])])  # its parent is not known: passed over
    assert made.depths(KEYS) == [(5, 1)]
    made.apply("a", [BlockRemoved(names[4:5], "GPU")])
    assert made.depths(KEYS) == [(4, 1)]


def xxhash_names(tokens: list[int], size: int = SIZE) -> list[bytes]:
    """As vLLM makes them with --prefix-caching-hash-algo xxhash: 16 bytes, and not ours."""
    out, parent = [], b"seed"
    for at in range(0, len(tokens), size):
        parent = xxhash.xxh3_128_digest(parent + repr(tokens[at : at + size]).encode())
        out.append(parent)
    return out


@pytest.mark.parametrize("steps", [[5], [1, 4], [2, 3], [1, 1, 1, 1, 1]])
def test_names_of_16_bytes_that_are_not_ours_are_translated_as_well(steps: list[int]):
    """vLLM with xxhash: nothing that it held was found, and the worker was believed to hold nothing else."""
    made, names, at = index(), xxhash_names(TOKENS), 0
    for count in steps:
        tokens = TOKENS[at * SIZE : (at + count) * SIZE]
        made.apply("a", [stored(names[at : at + count], tokens, names[at - 1] if at else None)])
        at += count
    assert made.depths(KEYS) == [(5, 1)]
    assert (made.named(), made.named_by("a")) == (0, False)
    made.apply("a", [BlockRemoved(names[3:5], "GPU")])
    assert made.depths(KEYS) == [(3, 1)]


def test_a_tenants_first_block_is_ours_as_soon_as_the_next_shows_it():
    made, salted = index(), list(chain(tenant_root(ROOT, "salt"), TOKENS, SIZE))
    keys = [key_of(name) for name in salted]
    made.apply("a", [stored(salted[:1], TOKENS[:SIZE])])
    assert (made.depths(keys), made.named()) == ([], 0)
    made.apply("a", [stored(salted[1:2], TOKENS[SIZE : 2 * SIZE], salted[0])])
    assert (made.depths(keys), made.named()) == ([(2, 1)], 1)
    made.apply("b", [stored(salted[:1], TOKENS[:SIZE]), BlockRemoved(salted[:1], "GPU"), stored(NAMES[:1], TOKENS[:SIZE])])
    assert made.depths(keys) == [(2, 1)]
    made.apply("b", [stored([bytes([number]) * 16], TOKENS[:SIZE]) for number in range(200)])
    assert made.named() == 3
    made.clear("b")
    made.apply("b", [stored([bytes([number]) * 16], TOKENS[:SIZE]) for number in range(200)])
    assert len(made) > 100  # those behind the first 64, and what they are is not known
    assert len(made._holdings["b"].unproven) <= UNPROVEN_MOST


def test_an_adapters_blocks_are_not_the_models():
    made = index()
    names = list(chain(root_hash("c", SIZE, "secret of the engine"), TOKENS, SIZE))
    made.apply("a", [stored(names[:3], TOKENS[:12], lora="billing")])
    assert made.depths(KEYS) == []
    own = [key_of(name) for name in chain(root_hash("c", SIZE, "billing"), TOKENS, SIZE)]
    assert made.depths(own) == [(3, 1)]


def test_offloaded_blocks_count_less_until_they_are_gone():
    made = index()
    made.apply("a", [stored(NAMES[:4]), stored(NAMES[:6], medium="CPU")])
    assert made.depths(KEYS) == [(4 + SLOW_WORTH * 2, 1)]
    made.apply("a", [BlockRemoved(NAMES[2:4], "GPU")])
    assert made.depths(KEYS) == [(2 + SLOW_WORTH * 4, 1)]
    made.apply("a", [BlockRemoved(NAMES[2:6], "CPU")])
    assert made.depths(KEYS) == [(2, 1)]
    made.apply("a", [BlockRemoved(NAMES[:2], "GPU")])
    assert made.depths(KEYS) == [(SLOW_WORTH * 2, 1)]
    made.apply("a", [BlockRemoved(NAMES[:2], "CPU")])
    assert (made._fast, made._slow, len(made)) == ({}, {}, 0)


def test_a_name_that_means_two_things_in_two_media_leaves_nothing_behind():
    """The next worker with this one's bit seemed to hold a block of it, for ever."""
    made = index()
    made.apply("a", [stored(NAMES[:1], TOKENS[:SIZE]), stored(NAMES[:1], TOKENS[:SIZE], medium="CPU", lora="billing")])
    made.apply("a", [BlockRemoved(NAMES[:1], "GPU"), BlockRemoved(NAMES[:1], "CPU")])
    assert (made._fast, made._slow, len(made)) == ({}, {}, 0)


def test_what_goes_that_was_never_told_of_and_what_tells_of_no_block_is_nothing():
    """Blocks from before a router listened, and those for which it had no room, go all the time."""
    made = index()
    made.apply("a", [stored(NAMES[:3]), stored(NAMES[:1], medium="CPU")])
    made.apply("a", [BlockRemoved(NAMES[4:6], "GPU"), BlockRemoved(NAMES[1:2], "CPU"), BlockRemoved(NAMES[:1], "DISK")])
    for parent in (None, NAMES[2], 7):
        made.apply("a", [stored([], TOKENS[:SIZE], parent)])
    assert (made.depths(KEYS), len(made)) == ([(3, 1)], 4)


def test_names_of_adapters_are_not_kept_for_ever():
    made = index()
    for number in range(1_000):
        made.apply("a", [stored(NAMES[:1], TOKENS[:SIZE], lora=f"adapter-{number}"), BlockRemoved(NAMES[:1], "GPU")])
    assert len(made._holdings["a"].roots) <= 256
    made.apply("a", [stored(NAMES[:1], TOKENS[:SIZE], lora="adapter-0")])
    assert made.depths([key_of(name) for name in chain(root_hash("c", SIZE, "adapter-0"), TOKENS, SIZE)]) == [(1, 1)]


def test_it_is_bounded():
    made = PreciseIndex(6)
    made.join("a", 1, "c")
    made.join("b", 2, "c")
    made.apply("a", [stored(NAMES[:5])])
    assert len(made) == 3
    assert made.depths(KEYS) == [(3, 1)]


def test_who_holds_more_than_there_is_room_for_is_known_in_part_until_it_begins_anew():
    made = PreciseIndex(6)
    made.join("a", 1, "c")
    made.join("b", 2, "c")
    made.apply("b", [stored(NAMES[:3])])
    assert made.lacking == 0
    made.apply("b", [stored(NAMES[3:4])])
    assert made.lacking == 2
    made.apply("b", [BlockRemoved(NAMES[:3], "GPU")])  # what it holds besides is not known
    assert made.lacking == 2
    made.clear("b")
    assert made.lacking == 0


@pytest.mark.parametrize("lora", [None, "billing"])
def test_an_engine_that_begins_anew_with_blocks_of_another_size_is_found(lora: str | None):
    """The parent of its first blocks was that of its last life: nothing that it held was found, and nobody else was believed."""
    made = index()
    made.apply("a", [stored([1, 2, 3], TOKENS[: 3 * SIZE], lora=lora)])
    made.clear("a")
    made.apply("a", [msgspec.structs.replace(stored([4, 5], TOKENS[: 4 * SIZE], lora=lora), block_size=2 * SIZE)])
    keys = [key_of(name) for name in chain(root_hash("c", 2 * SIZE, lora or ""), TOKENS, 2 * SIZE)]
    assert made.depths(keys) == [(2, 1)]


class Worker:
    """A publisher in memory: what it holds, its log, its buffer. As vLLM it has a copy for each time that it computed a block."""

    def __init__(self) -> None:
        self.restart(0.0)

    def restart(self, ts: float) -> None:
        self.ts, self.log, self.held = ts, [], Counter[bytes]()

    def store(self, depth: int) -> None:
        self.ts += 1
        self.held.update(NAMES[:depth])
        self.log.append(batch(stored(NAMES[:depth]), ts=self.ts))

    def evict(self, depth: int) -> None:
        self._gone([name for name in NAMES[depth:] for _ in range(self.held[name])])

    def evict_copies(self, depth: int) -> None:
        """One of each."""
        self._gone([name for name in NAMES[depth:] if self.held[name]])

    def _gone(self, names: list[bytes]) -> None:
        self.ts += 1
        self.held -= Counter(names)
        self.log.append(batch(*(BlockRemoved([name], "GPU") for name in names), ts=self.ts))


class Rig:
    """One worker and its reader, with a network that loses and repeats."""

    def __init__(self) -> None:
        self.worker, self.believed, self.sent, self.now = Worker(), Believed(1000), 0, 0.0
        self.believed.join("w", 1, "c")

    def publish(self, *, lose: bool = False) -> None:
        while self.sent < len(self.worker.log):
            if not lose:
                self.believed.live("w", self.sent, self.worker.log[self.sent], self.now)
            self.sent += 1

    def answer(self, keep: int = 10_000, *, whole: bool = True) -> None:
        asks, self.believed.asks = self.believed.asks, []
        for name, first in asks:
            rows = [(n, b) for n, b in enumerate(self.worker.log) if n >= first][-keep:]
            half = len(rows) // 2
            self.believed.replayed(name, first, rows[:half], self.now, last=False, whole=True)
            self.believed.replayed(name, first, rows[half:], self.now, last=True, whole=whole)

    def settle(self) -> None:
        for _ in range(3):
            self.now += REPLAY_AGAIN_S + 1
            self.believed.check(self.now)
            self.answer()

    def known(self) -> float:
        return next((blocks for blocks, mask in self.believed.index.depths(KEYS) if mask & 1), 0)

    def truth(self) -> int:
        return next((i for i, name in enumerate(NAMES) if name not in self.worker.held), len(NAMES))


def test_a_router_that_comes_late_learns_all_by_replay():
    rig = Rig()
    rig.worker.store(3)
    rig.worker.store(7)
    rig.sent = 2
    rig.believed.connected("w", 0.0)
    assert rig.believed.trusted == 0
    rig.answer()
    assert (rig.believed.trusted, rig.known()) == (1, 7)


def test_a_gap_is_filled_and_meanwhile_nobody_believes():
    rig = Rig()
    rig.believed.connected("w", 0.0)
    rig.answer()
    assert rig.believed.state("w") == "live"  # nothing was ever published: nothing is missing
    rig.worker.store(3)
    rig.publish()
    rig.worker.store(5)
    rig.publish(lose=True)
    rig.worker.store(9)
    rig.publish()
    assert (rig.believed.state("w"), rig.believed.trusted, rig.believed.asks) == ("behind", 0, [("w", 1)])
    rig.worker.store(10)
    rig.publish()  # while the replay is under way
    rig.answer()
    assert (rig.believed.state("w"), rig.believed.trusted, rig.known()) == ("live", 1, 10)


def test_a_replay_that_begins_too_late_is_half_believed():
    rig = Rig()
    for depth in range(1, 9):
        rig.worker.store(depth)
    rig.sent = 8
    rig.believed.connected("w", 0.0)
    rig.answer(keep=2)
    assert (rig.believed.state("w"), rig.believed.trusted) == ("partial", 0)
    rig.worker.store(9)
    rig.publish()
    assert (rig.believed.state("w"), rig.known()) == ("partial", 9)


@pytest.mark.parametrize("missing", [2, 3], ids=["first of the replay", "inside the replay"])
def test_a_replay_in_which_one_is_missing_is_half_believed(missing: int):
    """One that cannot be read, or that the worker has thrown away already: it was believed as if nothing were missing, and what
    was evicted with it for ever."""
    rig = Rig()
    rig.believed.connected("w", 0.0)
    rig.answer()
    for depth in (8, 9):
        rig.worker.store(depth)
    rig.publish()
    assert (rig.believed.trusted, rig.known()) == (1, 9)
    for depth in (3, 3):
        rig.worker.evict(depth)
    rig.worker.store(2)
    rig.publish(lose=True)
    rig.worker.store(1)
    rig.publish()
    while rig.believed.asks:  # once more of what is missing in the middle
        _, first = rig.believed.asks.pop()
        assert rig.believed.trusted == 0
        rows = [(n, b) for n, b in enumerate(rig.worker.log) if n >= first and n != missing]
        rig.believed.replayed("w", first, rows, rig.now, last=True, whole=True)
    assert (rig.believed.state("w"), rig.believed.trusted) == ("partial", 0)
    assert rig.known() <= 3


def test_ids_that_are_none_cost_their_block_and_nothing_else():
    made = index()
    made.apply("a", [stored([1, 2], [-1, *TOKENS[1:8]]), stored([3], [2**40, *TOKENS[1:4]]), stored([4], TOKENS[:4])])
    assert made.depths(KEYS) == [(1, 1)]


def test_a_worker_that_gives_no_replay_is_believed_in_what_it_says():
    """vLLM's default: no replay port. What was missed is not known; after a gap nothing of before is believed."""
    rig = Rig()
    rig.worker.store(2)
    rig.sent = 1  # before anybody listened
    rig.believed.connected("w", 0.0)
    rig.worker.store(5)
    rig.publish()  # heard before it is known that there is no replay
    rig.believed.not_replayed("w")
    assert (rig.believed.state("w"), rig.believed.trusted, rig.known()) == ("partial", 0, 5)
    rig.worker.store(7)
    rig.publish()
    assert (rig.known(), rig.believed.index.holds("w", KEYS[6])) == (7, True)
    rig.worker.evict(1)
    rig.publish(lose=True)
    rig.worker.store(4)
    rig.publish()
    rig.believed.not_replayed("w")
    assert (rig.believed.state("w"), rig.known()) == ("partial", 4)
    rig.believed.live("w", 0, batch(stored(NAMES[:9]), ts=0.0), rig.now)  # an old one once more
    assert rig.known() == 4
    rig.settle()
    assert (rig.believed.state("w"), rig.known()) == ("partial", 4)


def test_what_may_be_null_in_an_event_may_be_left_out():
    """llm-d-inference-sim leaves it out; vLLM, and we, write it."""
    bare = [0.5, [{"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [1], "block_size": 1},
                  {"type": "BlockRemoved", "block_hashes": [7]}]]  # fmt: skip
    found = decode(msgspec.msgpack.encode(bare))
    assert found.events == [BlockStored([7], None, [1], 1), BlockRemoved([7])]
    written = msgspec.msgpack.decode(encode(found))[1]
    assert written[0] | {"lora_id": None, "medium": None, "lora_name": None} == written[0]
    assert written[1] | {"medium": None} == written[1]


def test_a_replay_that_breaks_off_is_asked_for_again():
    rig = Rig()
    rig.believed.connected("w", 0.0)
    rig.answer()
    rig.worker.store(3)
    rig.publish(lose=True)
    rig.worker.store(4)
    rig.publish()
    rig.answer(whole=False)
    assert rig.believed.trusted == 0
    rig.settle()
    assert (rig.believed.trusted, rig.known()) == (1, 4)


def test_a_replay_may_take_as_long_as_it_goes_on():
    """After five seconds another one was asked for, and the rest of the first was taken for one that began too late: the worker
    was half believed for ever. A router that begins beside many workers needs longer."""
    rig = Rig()
    for depth in range(1, 10):
        rig.worker.store(depth)
    rig.sent = len(rig.worker.log)
    rig.believed.connected("w", 0.0)
    rows = list(enumerate(rig.worker.log))
    for number, (at, last) in enumerate([(4.0, False), (8.0, False), (12.0, True)]):
        rig.believed.replayed("w", 0, rows[number * 3 : number * 3 + 3], at, last=last, whole=True)
        rig.believed.check(at + 2.0)
    assert (rig.believed.asks, rig.believed.state("w"), rig.known()) == ([("w", 0)], "live", 9)


def test_a_restart_forgets_the_old_life():
    rig = Rig()
    rig.believed.connected("w", 0.0)
    rig.answer()
    for depth in (3, 6, 8):
        rig.worker.store(depth)
        rig.publish()
    rig.worker.restart(100.0)
    rig.sent = 0
    rig.worker.store(2)
    rig.publish()  # number 0 again, later than all before: a new life
    assert rig.believed.trusted == 0
    rig.answer()
    assert (rig.believed.trusted, rig.known()) == (1, 2)
    rig.believed.live("w", 0, rig.worker.log[0], rig.now)  # the same once more
    assert (rig.believed.trusted, rig.known(), rig.believed.asks) == (1, 2, [])
    rig.believed.lost("w")
    assert (rig.believed.trusted, rig.known()) == (0, 0)


def test_silence_where_there_should_be_events_ends_the_trust_and_an_event_brings_it_back():
    rig = Rig()
    rig.believed.connected("w", 0.0)
    rig.answer()
    rig.worker.store(3)
    rig.publish()
    rig.believed.answered("w", KEYS[:3], 10.0)  # known: nothing is owed
    rig.believed.check(100.0)
    assert rig.believed.trusted == 1
    rig.believed.answered("w", KEYS[:6], 100.0)
    rig.believed.check(100.0 + STALE_AFTER_S - 1)
    assert rig.believed.trusted == 1
    rig.believed.check(100.0 + STALE_AFTER_S + 1)
    assert (rig.believed.state("w"), rig.believed.trusted) == ("stale", 0)
    rig.worker.store(6)
    rig.publish()
    assert (rig.believed.state("w"), rig.believed.trusted, rig.known()) == ("live", 1, 6)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["store", "evict", "evict_copies", "lose", "publish", "answer", "restart", "reconnect"]), max_size=40
    ),
    st.data(),
)
def test_whatever_is_lost_the_end_is_the_truth(steps: list[str], data: st.DataObject):
    """And at no moment is an index believed that says something else than the worker had published when it was last heard."""
    rig = Rig()
    rig.believed.connected("w", 0.0)
    for step in steps:
        rig.now += 1.0
        if step in ("store", "evict", "evict_copies"):
            getattr(rig.worker, step)(data.draw(st.integers(0, 10)))
        elif step == "restart":
            rig.worker.restart(rig.worker.ts + 100)
            rig.sent = 0
            rig.believed.lost("w")
            rig.believed.connected("w", rig.now)
        elif step == "reconnect":
            rig.believed.connected("w", rig.now)
        elif step == "answer":
            rig.answer()
        else:
            rig.publish(lose=step == "lose")
    rig.worker.store(1)
    rig.publish()
    rig.settle()
    if rig.believed.trusted:
        assert rig.known() == rig.truth()
    assert rig.believed.trusted == 1


def test_workers_that_join_one_by_one_have_no_more_room_together():
    """Each got its part of what there was when it came, and nobody gave anything back: a hundred had five times the bound."""
    made, capacity = PreciseIndex(60), 60
    for number in range(30):
        made.join(f"w{number}", 1 << number, "c")
        made.apply(f"w{number}", [stored(range(number * 100, number * 100 + 70), list(range(70 * SIZE)))])
        assert len(made) <= capacity
    assert made.lacking.bit_count() == 30
    made.remove("w0")
    made.apply("w29", [stored(range(7_000, 7_070), list(range(70 * SIZE)))])
    assert len(made) == capacity // 29  # of what is free now
    for number in range(1, 30):
        made.clear(f"w{number}")
    assert (len(made), made._fast, made.lacking) == (0, {}, 0)
