"""Hot prefixes from one engine to a new one, over two real NIXL agents in one process: what is proven is found, nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fleet_wire.blocks import root_hash, tenant_root
from fleet_wire.sidechannel import AskHot, HotBlock, Hottest, Refused
from fleet_worker.config import KvSettings, SeedSettings, WorkerConfig
from fleet_worker.engine import lending, seeding
from fleet_worker.engine.adapterfiles import load_adapter
from fleet_worker.engine.assemble import build_core, build_hot
from fleet_worker.engine.core import EngineCore
from fleet_worker.engine.heat import Heat
from fleet_worker.engine.llama import Llama
from fleet_worker.engine.lora import Adapter
from fleet_worker.engine.modelconfig import read_config
from fleet_worker.engine.seeding import Order, Seeded, right_blocks
from fleet_worker.engine.sequence import Sampling, Sequence
from fleet_worker.engine.weights import load_weights
from fleet_worker.transfer.base import KvTransferError
from fleet_worker.transfer.hot import Heard
from fleet_worker.transfer.nixl import NixlConnector
from fleet_worker.transfer.owner import TransferSettings
from tests.adapters import make_adapter
from tests.peerkeys import key_file

BLOCK = 16
HOT = tuple(range(5, 5 + 6 * BLOCK + 3))
COLD = tuple(range(300, 300 + 6 * BLOCK))
MIB = 1024 * 1024


@lru_cache
def loaded(tiny: Path, block_tokens: int, text: str) -> Llama:
    """The model, whose digest is of a `text` as well."""
    architecture = read_config(tiny)
    return Llama(architecture, load_weights(tiny, architecture), block_tokens, text)


class Side:
    """One engine with its connector, stepped by the test."""

    def __init__(
        self, tiny: Path, host: str, compat: str = "same", lease_s: float = 30.0, weights: str = "", key: str = "k", **kv: Any
    ) -> None:
        self.host = host
        kv = {"seed": SeedSettings(), "lease_s": lease_s, "cache_bytes": 4 * MIB, **kv}
        config = WorkerConfig(
            fleet="f", namespace="n", tier="t", role="prefill", revision="r", compat=compat, model=str(tiny), served_name="tiny",
            max_model_len=512, kv=KvSettings(**kv),
        )  # fmt: skip
        llama = loaded(tiny, config.kv.block_tokens, weights)
        self.core, pool = build_core(config, llama, llama.config.eos_ids)
        settings = TransferSettings(host, 5600, compat, lease_s=lease_s, peer_key=key_file(key), scope="n/f")
        self.connector = self.core.connector = NixlConnector(settings, pool)
        if config.kv.seed is not msgspec.UNSET:
            self.core.hot = build_hot(config, self.core, pool, self.connector)
        self.is_open = True

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.connector.close()


@contextmanager
def engines(tiny: Path, host: int, owner: dict[str, Any] | None = None, reader: dict[str, Any] | None = None) -> Iterator[Any]:
    sides = Side(tiny, f"127.77.{host}.1", **(owner or {})), Side(tiny, f"127.77.{host}.2", **(reader or {}))
    try:
        yield sides
    finally:
        for side in sides:
            side.close()


def answer(side: Side, prompt: tuple[int, ...], salt: str = "", adapter: Adapter | None = None) -> tuple[int, list[int]]:
    """(prompt tokens that were there, what came out)."""
    sequence = Sequence(f"{time.monotonic_ns()}", prompt, Sampling(max_tokens=8), 0, 0.0, False, None, adapter, salt)
    side.core.add(sequence)
    for _ in range(500):
        if any(output.finish for output in side.core.step()):
            return sequence.cached_tokens, sequence.output
    raise AssertionError("no end")


def warmed(side: Side, *prompts: tuple[int, ...], **more: Any) -> list[list[int]]:
    """Each asked twice: it is shared."""
    return [[answer(side, prompt, **more) for _ in range(2)][-1][1] for prompt in prompts]


def seed(owner: Side, reader: Side, within_s: float = 5.0, most: int = 10_000, at: Callable[[], None] | None = None) -> Seeded:
    """Step both until it is over; `at` is called between two steps."""
    assert reader.core.hot is not None
    ended: list[Seeded] = []
    reader.core.hot.begin(Order(owner.host, 5600, most, within_s), ended.append)
    end = time.monotonic() + within_s + 3
    while not ended:
        assert time.monotonic() < end, "it does not end"
        if owner.is_open:
            owner.core.step()
        if at is not None:
            at()
        reader.core.step()
    return ended[0]


def nothing_held(*sides: Side, within_s: float = 5.0) -> None:
    end = time.monotonic() + within_s
    for side in sides:
        while side.core.blocks.used or side.connector.open_leases():
            assert time.monotonic() < end, f"{side.host}: {side.core.blocks.used} blocks, {side.connector.open_leases()} leases"
            for one in sides:
                one.core.step()
        side.core.check_integrity()


def test_a_new_engine_has_the_hot_prefix_and_gives_the_same_answer(tiny: Path):
    with engines(tiny, 10) as (owner, reader):
        (expected,) = warmed(owner, HOT)
        answer(owner, COLD)
        found = seed(owner, reader)
        assert (found.reason, found.blocks, found.refused) == ("", 6, 0)
        assert found.nbytes == 6 * owner.core._pool[0].nbytes
        nothing_held(owner, reader)
        stored = [event for event in reader.core.take_cache_events() if event.stored]
        assert [event.tokens for event in stored] == [HOT[at : at + BLOCK] for at in range(0, 6 * BLOCK, BLOCK)]
        assert [event.parent for event in stored] == [None, *(event.name for event in stored[:-1])]
        assert answer(reader, HOT) == (6 * BLOCK, expected)
        assert answer(reader, COLD)[0] == 0, "one prompt alone had it"
        assert owner.core.hot.lender.lent_blocks == reader.core.hot.seeder.seeded_blocks == 6


def test_who_was_seeded_seeds_the_next_one(tiny: Path):
    with engines(tiny, 11) as (owner, reader):
        (expected,) = warmed(owner, HOT)
        seed(owner, reader)
        third = Side(tiny, "127.77.11.3")
        try:
            assert seed(reader, third).blocks == 6
            assert answer(third, HOT) == (6 * BLOCK, expected)
        finally:
            third.close()


def test_many_parts_are_bounded_and_hottest_first(tiny: Path):
    with engines(tiny, 12) as (owner, reader):
        prompts = [tuple(range(100 * k, 100 * k + 4 * BLOCK + 1)) for k in range(1, 9)]
        expected = warmed(owner, *prompts)
        warmed(owner, prompts[3])  # used once more: the hottest
        owner.core.hot.lender._part_blocks = 3
        found = seed(owner, reader, most=10)
        assert (found.blocks, found.reason) == (10, "")
        assert answer(reader, prompts[3]) == (4 * BLOCK, expected[3])
        assert owner.core.hot.lender.lent_blocks <= 12
        nothing_held(owner, reader)


def test_parts_are_paced_and_what_is_late_is_left(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    with engines(tiny, 25) as (owner, reader):
        warmed(owner, HOT)
        owner.core.hot.lender._part_blocks = 2
        monkeypatch.setattr(seeding, "MOST_BYTES_PER_S", owner.core._pool[0].nbytes / 1000)  # the next part in 2,000 s
        found = seed(owner, reader, within_s=2.0)
        assert (found.blocks, found.reason) == (2, "deadline")
        assert owner.core.hot.lender.lent_blocks == 2
        nothing_held(owner, reader)


def test_the_hottest_are_given_up_last(tiny: Path):
    with engines(tiny, 13) as (owner, reader):
        warmed(owner, HOT)
        seed(owner, reader)
        blocks = reader.core.blocks
        taken = blocks.allocate(blocks.total - 5)
        gone = [event.tokens for event in reader.core.take_cache_events() if not event.stored]
        assert taken is not None
        assert len(gone) == 1
        assert answer_names(reader, HOT) == 5, "the last block of the chain went first"


def answer_names(side: Side, prompt: tuple[int, ...]) -> int:
    sequence = Sequence("x", prompt, Sampling(), 0, 0.0)
    return len(side.core.blocks.find(side.core.scheduler._named(sequence, len(prompt) // BLOCK)))


def test_a_block_that_was_changed_on_its_way_is_not_there_and_the_answer_is_right(tiny: Path):
    with engines(tiny, 14) as (owner, reader):
        (expected,) = warmed(owner, HOT)
        corrupted = []

        def corrupt() -> None:
            if owner.connector.open_leases() and not corrupted:
                corrupted.extend(next(iter(owner.core._leased.values())))
                owner.core._pool[corrupted[2]] += 1.0

        found = seed(owner, reader, at=corrupt)
        assert (found.reason, found.blocks, found.refused) == ("digest", 0, 6)
        nothing_held(owner, reader)
        assert not any(event.stored for event in reader.core.take_cache_events())
        assert torch.count_nonzero(reader.core._pool) == 0, "not one byte of it stayed"
        assert answer(reader, HOT) == (0, expected)


def test_parts_before_a_bad_one_stay(tiny: Path):
    with engines(tiny, 15) as (owner, reader):
        (expected,) = warmed(owner, HOT)
        owner.core.hot.lender._part_blocks = 2
        seen = set()

        def corrupt() -> None:
            for name, blocks in owner.core._leased.items():
                if name not in seen and len(seen) == 1:
                    owner.core._pool[blocks[0]] += 1.0
                seen.add(name)

        found = seed(owner, reader, at=corrupt)
        assert (found.reason, found.blocks, found.refused) == ("digest", 2, 2)
        assert answer(reader, HOT) == (2 * BLOCK, expected)
        nothing_held(owner, reader)


@pytest.mark.parametrize(
    ("owner", "reason"),
    [
        ({"compat": "another"}, "incompatible"),
        ({"block_tokens": 32}, "incompatible"),
        ({"weights": "another tokenizer"}, "weights"),
        ({"seed": msgspec.UNSET}, "off"),
        ({"key": "x"}, "proof"),
        ({"key": ""}, "proof"),
    ],
    ids=["compat", "block-size", "weights", "off", "another-key", "no-key"],
)
def test_who_does_not_fit_gives_nothing(tiny: Path, owner: dict[str, Any], reason: str):
    with engines(tiny, 16, owner=owner) as (there, here):
        warmed(there, HOT)
        assert seed(there, here).reason == reason
        assert there.connector.open_leases() == 0
        assert answer(here, HOT)[0] == 0
        nothing_held(here)


def test_who_took_a_peers_address_gives_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    """It answers as a peer would, KV and digests that fit each other included, and has not the fleet's key."""
    with engines(tiny, 29) as (owner, reader):
        warmed(owner, HOT)
        monkeypatch.setattr(owner.connector.hot.trust, "answering", lambda answer, nonce: answer)
        found = seed(owner, reader)
        assert (found.reason, found.blocks) == ("proof", 0)
        assert reader.connector.hot.strangers()["answer"] == 1
        assert answer(reader, HOT)[0] == 0
    with engines(tiny, 29, reader={"key": ""}) as (owner, reader):
        warmed(owner, HOT)
        assert seed(owner, reader).reason == "no_key", "nobody is asked in vain"


def test_another_way_to_name_blocks_gives_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    with engines(tiny, 17) as (owner, reader):
        warmed(owner, HOT)
        owner.connector.hot._mine = (*owner.connector.hot._mine[:-1], "sha256/2")
        found = seed(owner, reader)
        assert (found.reason, found.blocks) == ("incompatible", 0)
        assert "names of blocks" in found.message


def test_a_tenants_blocks_are_found_with_its_salt_alone(tiny: Path):
    with engines(tiny, 18) as (owner, reader):
        (expected,) = warmed(owner, HOT, salt="tenant-a")
        assert seed(owner, reader).blocks == 6
        assert answer(reader, HOT)[0] == answer(reader, HOT, salt="tenant-b")[0] == 0
        assert answer(reader, HOT, salt="tenant-a") == (6 * BLOCK, expected)


def test_adapters_blocks_stay_where_they_are(tiny: Path, tmp_path: Path):
    with engines(tiny, 19) as (owner, reader):
        model = owner.core.model
        folder = make_adapter(tmp_path / "adapter", 1)
        adapter = load_adapter("one", folder, model.config, model.dtype, 64)
        warmed(owner, HOT, adapter=adapter)
        found = seed(owner, reader)
        assert (found.blocks, found.reason) == (0, "")


@pytest.mark.parametrize("is_told", [False, True], ids=("asked", "told"))
def test_an_owner_that_dies_in_the_midst_costs_the_time_and_no_block(tiny: Path, is_told: bool):
    """Before it answers for the second part, mostly (it may be quicker), or with that part told: over shared memory the read
    ends and its confirmation is waited for (5 s), over TCP it is cut."""
    with engines(tiny, 20) as (owner, reader):
        (expected,) = warmed(owner, HOT)
        owner.core.hot.lender._part_blocks = 2

        def die() -> None:
            if owner.is_open and reader.core.hot.seeder.seeded_blocks and (not is_told or owner.core.hot.lender.lent_blocks == 4):
                while is_told and not reader.connector.hot._heard:
                    time.sleep(0.001)
                owner.close()
                owner.connector._agent.agent = None  # closes UCX's sockets, as the kernel does of a process

        found = seed(owner, reader, within_s=1.0, at=die)
        assert (found.blocks, found.reason in ("deadline", "read")) == (2, True)
        assert found.seconds < 1.2
        assert answer(reader, HOT) == (2 * BLOCK, expected)
        nothing_held(reader, within_s=10.0)


def test_a_reader_that_dies_in_the_midst_leaves_a_lease_that_runs_out(tiny: Path):
    with engines(tiny, 21, owner={"lease_s": 0.5}) as (owner, reader):
        warmed(owner, HOT)
        assert reader.core.hot is not None
        reader.core.hot.begin(Order(owner.host, 5600, 100, 5.0), lambda _: None)
        while not owner.connector.open_leases():
            reader.core.step()
            owner.core.step()
        reader.close()
        assert owner.core.blocks.used == 6
        nothing_held(owner)
        another = Side(tiny, "127.77.21.3")
        try:  # the next one is served when the lost one's time is over
            end = time.monotonic() + 4
            while (found := seed(owner, another)).reason == "busy":
                assert time.monotonic() < end
            assert found.blocks == 6
        finally:
            another.close()


def test_one_reader_at_a_time(tiny: Path):
    with engines(tiny, 22) as (owner, reader):
        warmed(owner, HOT)
        lender, now = owner.core.hot.lender, 100.0
        lender._part_blocks = 2

        def ask(reader: str, start: int = 0, now: float = now) -> Hottest | Refused:
            question = ask_of(owner, reader, start)
            told = lender.answer(question, now)
            for name in list(owner.core._leased):
                owner.connector.release(owner.core._lease_ids[name])
            owner.core.step()
            return told

        first = ask("a")
        assert isinstance(first, Hottest)
        assert (first.more, first.next) == (True, 2)
        assert refusal(ask("b")) == "busy"
        second = ask("a", 2)
        assert isinstance(second, Hottest)
        assert {one.name for one in first.blocks}.isdisjoint(one.name for one in second.blocks)
        assert refusal(ask("b", now=now + 0.9 * lending.LENT_FOR_S)) == "busy"
        assert isinstance(ask("b", now=now + 1.1 * lending.LENT_FOR_S), Hottest), "a has gone"
        assert refusal(ask("a", 4, now=now + 9 * lending.LENT_FOR_S)) == "unknown"
        assert reader.core.blocks.used == 0


def test_no_drain_waits_for_what_is_lent_and_for_every_request_it_does(tiny: Path):
    with engines(tiny, 28) as (owner, _):
        warmed(owner, HOT)
        assert isinstance(owner.core.hot.lender.answer(ask_of(owner, "a", 0), 100.0), Hottest)
        assert (owner.connector.open_leases(), owner.core.requests_leases()) == (1, 0)
        reference = owner.core.connector.grant("r", [0], BLOCK)
        assert owner.core.requests_leases() == 1
        lent = owner.core._lease_ids[owner.core.hot.lender.lease]
        owner.connector.release(lent)  # before the engine hears of it
        assert owner.core.requests_leases() == 1
        owner.connector.release(reference.lease_id)
        assert owner.core.requests_leases() == 0


@pytest.mark.parametrize("most", [0, 1, 100])
def test_who_asks_again_and_again_has_the_cache_sorted_once(tiny: Path, monkeypatch: pytest.MonkeyPatch, most: int):
    """Each list took the engine 20 ms and more, and 16 questions fit into one turn of it."""
    with engines(tiny, 27) as (owner, _):
        warmed(owner, HOT)
        sorted_at, lender, hottest = list[float](), owner.core.hot.lender, Heat.hottest

        def counted(heat: Heat, count: int) -> list[bytes]:
            sorted_at.append(now)
            return hottest(heat, count)

        monkeypatch.setattr(Heat, "hottest", counted)
        for turn in range(200):
            now = 100.0 + turn * 2 * lending.LISTED_FOR_S / 200
            told = lender.answer(msgspec.structs.replace(ask_of(owner, f"reader {turn}", 0), most_blocks=most), now)
            assert isinstance(told, Hottest)
            assert (len(told.blocks), told.more) == (min(most, 6), False)
            for name in list(owner.core._leased):
                owner.connector.release(owner.core._lease_ids[name])
            owner.core.step()
        assert sorted_at == [100.0, 100.0 + lending.LISTED_FOR_S]
        nothing_held(owner)


def ask_of(side: Side, reader: str, start: int) -> Any:
    weights = side.core.model.weights_digest
    version, compat, block_bytes, block_tokens, names = side.connector.hot._mine
    return AskHot(
        call=1, version=version, compat=compat, block_bytes=block_bytes, block_tokens=block_tokens, weights=weights, names=names,
        reader=reader, start=start, most_blocks=100,
    )  # fmt: skip


def refusal(told: Hottest | Refused) -> str:
    return told.reason if isinstance(told, Refused) else ""


def blocks_of(side: Side) -> list[HotBlock]:
    heat = side.core.blocks.heat
    assert heat is not None
    return [HotBlock(name, (b := heat.known[name]).parent, b.tokens, b.is_first) for name in heat.hottest(100)]


def test_names_are_computed_again(tiny: Path):
    with engines(tiny, 23) as (owner, _):
        warmed(owner, HOT)
        blocks, root = blocks_of(owner), root_hash("same", BLOCK)

        def right(given: list[HotBlock], here: frozenset[bytes] = frozenset()) -> tuple[list[int], int]:
            found = right_blocks(given, root, BLOCK, here.__contains__)
            return found.wanted, found.wrong

        assert right(blocks) == ([0, 1, 2, 3, 4, 5], 0)
        assert right(blocks, frozenset({blocks[0].name, blocks[1].name})) == ([2, 3, 4, 5], 0)
        assert right([blocks[0], *blocks[2:]]) == ([0], 4), "a hole"
        assert right([blocks[0], *blocks]) == ([0, 2, 3, 4, 5, 6], 0), "twice"
        other = msgspec.structs.replace(blocks[1], tokens=blocks[2].tokens)
        assert right([blocks[0], other, *blocks[2:]]) == ([0], 5), "another content under its name"
        assert right([msgspec.structs.replace(blocks[0], is_first=False)], frozenset({root})) == ([], 1)
        assert right([msgspec.structs.replace(blocks[0], parent=b"short")]) == ([], 1)
        assert right([msgspec.structs.replace(blocks[0], tokens=b"short")]) == ([], 1)
        assert tenant_root(root, "a") != root


class Scripted:
    """A channel whose other end says what the test wants."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.waiting: list[Heard] = []

    def ask_hot(self, host: str, port: int, weights: str, reader: str, start: int, most_blocks: int) -> None:
        self.waiting.append(Heard(reader, start, self.answers.pop(0)))

    def heard(self) -> list[Heard]:
        found, self.waiting = self.waiting, []
        return found

    def asked(self) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(lambda told: Refused(call=1, reason="x" * 900, message="m"), "x" * 64, id="a-long-reason"),
        pytest.param(lambda told: KvTransferError("timeout", "silent"), "timeout", id="silence"),
        pytest.param(lambda told: msgspec.structs.replace(told, more=True, next=0), "protocol", id="a-list-without-an-end"),
        pytest.param(
            lambda told: msgspec.structs.replace(told, blocks=told.blocks[:2]), "protocol", id="fewer-names-than-blocks"
        ),
        pytest.param(lambda told: changed(told, digest=told.reference.digest[:-1]), "protocol", id="half-a-digest"),
        pytest.param(lambda told: changed(told, lease_id="l" * 9_000), "protocol", id="a-long-lease"),
        pytest.param(lambda told: changed(told, lease_id=""), "protocol", id="no-lease"),
        pytest.param(lambda told: changed(told, remote_block_ids=((1,),) * 6), "protocol", id="blocks-of-blocks"),
        pytest.param(lambda told: changed(told, remote_block_ids=(-1,) * 6), "range", id="blocks-that-are-none"),
        pytest.param(lambda told: changed(told, remote_epoch="another"), "epoch", id="another-life"),
        pytest.param(lambda told: changed(told, digest="0" * 96), "digest", id="other-digests"),
        pytest.param(lambda told: changed(told, lease_id="not-granted"), "lease-unknown", id="a-lease-that-is-none"),
    ],
)
def test_what_a_peer_makes_up_is_never_there(tiny: Path, change: Callable[[Any], Any], reason: str):
    with engines(tiny, 26, owner={"lease_s": 0.5}) as (owner, reader):
        (expected,) = warmed(owner, HOT)
        told = owner.core.hot.lender.answer(ask_of(owner, "a", 0), 0.0)
        assert isinstance(told, Hottest)
        reader.core.hot._channel = reader.core.hot.seeder._channel = Scripted(change(told), told)
        found = seed(owner, reader)
        assert (found.reason, found.blocks) == (reason, 0)
        nothing_held(owner, reader)
        assert answer(reader, HOT) == (0, expected)


def changed(told: Hottest, **fields: Any) -> Hottest:
    assert told.reference is not None
    return msgspec.structs.replace(told, reference=msgspec.structs.replace(told.reference, **fields))


def test_without_seeding_nothing_is_remembered(tiny: Path):
    with engines(tiny, 24, owner={"seed": msgspec.UNSET}) as (owner, _):
        warmed(owner, HOT)
        assert owner.core.blocks.heat is None
        assert isinstance(owner.core, EngineCore)
