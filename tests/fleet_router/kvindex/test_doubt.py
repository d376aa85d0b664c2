"""Workers that hold blocks that are not known: in the end they do not, and are believed alone; never before."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from fleet_router.kvindex.believed import Believed
from fleet_router.kvindex.doubt import TURNED
from fleet_router.kvindex.precise import PreciseIndex, key_of
from fleet_wire.blocks import chain, root_hash
from fleet_wire.events import AllBlocksCleared, BlockRemoved
from tests.fleet_router.kvindex.test_precise import SIZE, batch, stored

ROOT = root_hash("c", SIZE)


class Engine:
    """A prefix cache: what was used longest ago goes first, of one prompt its end before its beginning."""

    def __init__(self, blocks: int, *, ours: bool) -> None:
        self.blocks, self.ours, self.log = blocks, ours, []
        self.held: OrderedDict[bytes, None] = OrderedDict()
        """Our names; the least recently used first."""

    def name(self, digest: bytes) -> bytes:
        return digest if self.ours else digest * 2

    def prompt(self, tokens: list[int]) -> None:
        names, events = list(chain(ROOT, tokens, SIZE)), []
        known = next((at for at, name in enumerate(names) if name not in self.held), len(names))
        for name in names[:known]:
            del self.held[name]  # in use
        while len(self.held) + len(names) > self.blocks:
            gone, _ = self.held.popitem(last=False)
            events.append(BlockRemoved([self.name(gone)], "GPU"))
        if known < len(names):
            parent = self.name(names[known - 1]) if known else None
            events.append(stored(map(self.name, names[known:]), tokens[known * SIZE : len(names) * SIZE], parent))
        for name in reversed(names):
            self.held[name] = None
        self.log.append(batch(*events, ts=float(len(self.log) + 1)))


def random_prompt(rng: random.Random, hot: int) -> list[int]:
    """Some begin with what many begin with."""
    lead = [1] * SIZE * 3 if rng.random() < hot / 10 else []
    return [*lead, rng.randrange(40), *[rng.randrange(3) for _ in range(rng.randrange(2, 8) * SIZE)]]


def missing(index: PreciseIndex, engine: Engine) -> int:
    return sum(not index.holds("w", key_of(name)) for name in engine.held)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "vllm"])
@pytest.mark.parametrize("seed", range(20))
def test_who_was_known_in_part_is_known_as_a_whole_when_it_has_forgotten_the_rest(seed: int, ours: bool):
    """A vLLM that had published more than 10,000 batches when a router began was half believed for its whole life."""
    rng, engine, believed = random.Random(seed), Engine(80, ours=ours), Believed(10_000)
    believed.join("w", 64, "c")
    for _ in range(60):
        engine.prompt(random_prompt(rng, hot=5))
    believed.connected("w", 0.0)
    believed.replayed("w", 0, list(enumerate(engine.log))[50:], 0.0, last=True, whole=True)
    assert (believed.state("w"), believed.trusted, missing(believed.index, engine) > 0) == ("partial", 0, True)
    for turn in range(300):
        engine.prompt(random_prompt(rng, hot=5 if turn < 100 else 0))
        believed.live("w", len(engine.log) - 1, engine.log[-1], 1.0)
        assert not (believed.trusted and missing(believed.index, engine))
    assert (believed.state("w"), believed.trusted) == ("live", 64)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "vllm"])
@pytest.mark.parametrize("seed", range(10))
def test_whose_blocks_found_no_room_is_believed_alone_when_they_are_gone(seed: int, ours: bool):
    """While many workers were there, say: it was lacking for its whole life."""
    rng, engine, index = random.Random(seed), Engine(80, ours=ours), PreciseIndex(100)
    index.join("w", 64, "c")
    index.join("other", 128, "c")
    for turn in range(400):
        if turn == 100:
            index.remove("other")
        engine.prompt(random_prompt(rng, hot=5 if turn < 200 else 0))
        index.apply("w", engine.log[-1].events)
        assert index.lacking or not missing(index, engine)
        assert index.lacking or turn != 99
    assert index.lacking == 0


def test_who_empties_its_cache_holds_nothing_else():
    believed = Believed(1_000)
    believed.join("w", 64, "c")
    believed.connected("w", 0.0)
    believed.replayed("w", 0, [(9, batch(stored([1], range(SIZE))))], 0.0, last=True, whole=True)
    assert (believed.state("w"), believed.trusted) == ("partial", 0)
    believed.live("w", 10, batch(AllBlocksCleared(), stored([2], range(SIZE))), 0.0)
    assert (believed.state("w"), believed.trusted, len(believed.index)) == ("live", 64, 1)
    believed.live("w", 12, batch(), 0.0)
    believed.replayed("w", 11, [(11, batch()), (12, batch())], 0.0, last=True, whole=True)
    assert (believed.state("w"), believed.trusted) == ("live", 64)
    believed.connected("w", 1.0)
    believed.replayed("w", 0, [(9, batch(stored([1], range(SIZE)))), (10, batch(AllBlocksCleared()))], 1.0, last=True, whole=True)
    assert (believed.state("w"), believed.trusted, len(believed.index)) == ("live", 64, 0)


def test_who_replays_nothing_is_in_doubt_as_well():
    believed = Believed(1_000)
    believed.join("w", 64, "c")
    believed.connected("w", 0.0)
    believed.not_replayed("w")
    names = [bytes([number]) * 32 for number in range(2 * TURNED)]
    for number, name in enumerate(names):
        believed.live("w", number, batch(stored([name], range(SIZE))), 0.0)
        believed.not_replayed("w")
    assert believed.state("w") == "partial"
    for number, name in enumerate(names[:TURNED], len(names)):
        assert believed.trusted == 0
        believed.live("w", number, batch(BlockRemoved([name], "GPU")), 0.0)
    assert (believed.state("w"), believed.trusted) == ("live", 64)


def test_what_goes_in_one_medium_tells_nothing_of_another():
    index = PreciseIndex(1_000)
    index.join("w", 64, "c")
    index.doubt("w")
    names = [bytes([number]) * 32 for number in range(2 * TURNED)]
    index.apply("w", [stored([name], range(SIZE), medium=medium) for name in names for medium in ("GPU", "CPU")])
    index.apply("w", [BlockRemoved([name], "GPU") for name in names])
    assert not index.is_whole("w")
    index.apply("w", [AllBlocksCleared()])
    assert not index.is_whole("w")


def test_a_replay_whose_end_alone_was_lost_was_all_there_is():
    """The socket that drops what does not fit drops its end as well: nothing was missing, and the worker was half believed."""
    believed = Believed(1_000)
    believed.join("w", 64, "c")
    believed.connected("w", 0.0)
    believed.replayed("w", 0, [(0, batch(stored([1], range(SIZE))))], 0.0, last=True, whole=False)
    believed.check(6.0)
    assert believed.asks == [("w", 0), ("w", 1)]
    believed.replayed("w", 1, [], 6.0, last=True, whole=True)
    assert (believed.state("w"), believed.trusted) == ("live", 64)
