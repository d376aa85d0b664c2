"""Which knowledge of a worker is believed, and which replays are asked for: what is heard late, twice, or by nobody."""

from __future__ import annotations

import pytest

from fleet_router.config import RouterConfig
from fleet_router.hints import NO_HINTS
from fleet_router.kvindex.believed import HELD_TOKENS_EACH, HELD_TOKENS_MOST, Believed
from fleet_router.kvindex.pieces import key_chain
from fleet_router.kvindex.stream import REPLAY_AGAIN_S
from fleet_router.policy.chosen import Choice
from fleet_router.policy.terms import Offer
from fleet_router.workers import WorkerTable
from fleet_wire.endpoints import Endpoint, Endpoints
from tests.fleet_router.kvindex.test_precise import KEYS, NAMES, Rig, batch, stored


def test_what_was_heard_twice_while_a_replay_was_asked_for_counts_once():
    """Else it looked like a gap, and what came after it was forgotten."""
    rig = Rig()
    rig.worker.store(2)
    rig.sent = 1
    rig.believed.connected("w", 0.0)
    rig.worker.store(5)
    rig.worker.store(7)
    rig.publish()
    rig.believed.live("w", 1, rig.worker.log[1], rig.now)
    rig.believed.not_replayed("w")
    assert (rig.believed.state("w"), rig.known()) == ("partial", 7)


def test_who_is_not_connected_is_asked_for_nothing():
    believed = Believed(1000)
    believed.join("a", 1, "c")
    believed.connected("a", 0.0)
    believed.asks = []
    believed.lost("a")
    believed.check(REPLAY_AGAIN_S)
    assert believed.asks == []
    believed.connected("a", REPLAY_AGAIN_S)
    assert believed.asks == [("a", 0)]


def test_a_replay_that_began_late_and_broke_off_is_not_all_there_is():
    """The rest of it began where it should, and the worker was believed in all that it holds."""
    believed = Believed(1000)
    believed.join("a", 1, "c")
    believed.connected("a", 0.0)
    believed.replayed("a", 0, [(7, batch(stored(NAMES[:1])))], 0.1, last=True, whole=False)
    believed.check(6.0)
    assert believed.asks == [("a", 0), ("a", 8)]
    believed.replayed("a", 8, [(8, batch(stored(NAMES[1:2])))], 6.1, last=True, whole=True)
    assert (believed.trusted, believed.state("a")) == (0, "partial")
    believed.lost("a")
    believed.connected("a", 7.0)
    believed.replayed("a", 0, [(0, batch(stored(NAMES[:1])))], 7.1, last=True, whole=True)
    assert (believed.trusted, believed.state("a")) == (1, "live")


@pytest.mark.parametrize("held", [1, 3])
def test_a_batch_that_no_replay_has_is_not_asked_for_again_and_again(held: int):
    """One of a worker's life before, read behind its end: replays were asked for as fast as they came."""
    believed = Believed(1000)
    believed.join("a", 1, "c")
    believed.connected("a", 0.0)
    for number in range(held):
        believed.live("a", 5_000 + number, batch(ts=1.0), 0.0)
    for at in range(10):
        asks, believed.asks = believed.asks, []
        for worker, first in asks:
            believed.replayed(
                worker, first, [(0, batch(stored(NAMES[:2])))] if first == 0 else [], 0.001 * at, last=True, whole=True
            )
    assert believed.asks == []
    believed.check(REPLAY_AGAIN_S)
    assert believed.asks == [("a", 1)]
    believed.replayed("a", 1, [], REPLAY_AGAIN_S, last=True, whole=True)
    assert (believed.state("a"), believed.trusted) == ("live", 1)
    believed.live("a", 1, batch(stored(NAMES[2:3])), REPLAY_AGAIN_S)
    assert believed.index.depths(KEYS) == [(3, 1)]


@pytest.mark.parametrize("workers", [1, 4, 20])
def test_what_waits_for_a_replay_that_never_comes_is_bounded_by_its_tokens(workers: int):
    """A thousand batches of 8,192 tokens are 350 MB, of each worker whose replay port says nothing; and to apply them all when it
    came took the loop half a second, in which no stream moved."""
    believed, tokens = Believed(1000), list(range(10_000))
    for index in range(workers):
        believed.join(f"w{index}", 1 << index, "c")
        believed.connected(f"w{index}", 0.0)
    for number in range(200):
        for index in range(workers):
            believed.live(f"w{index}", number, batch(stored([number], tokens)), 0.0)
    sources = believed._sources.values()
    held = [sum(len(event.token_ids) for _, told in source.held for event in told.events) for source in sources]
    most = min(HELD_TOKENS_EACH, HELD_TOKENS_MOST // workers)
    assert most * 0.9 < min(held) <= max(held) <= most
    assert sum(held) <= HELD_TOKENS_MOST
    count = len(believed._sources["w0"].held)
    believed.replayed("w0", 0, [], 1.0, last=True, whole=True)  # nothing before what was heard
    believed.asks = []
    believed.live("w0", 200, batch(stored(NAMES[:1])), 1.0)
    assert believed.asks == [("w0", count)]  # those that were not held are the next gap
    believed.replayed("w0", count, [(number, batch()) for number in range(count, 201)], 1.1, last=True, whole=True)
    assert (believed.state("w0"), believed._sources["w0"].held_tokens) == ("live", 0)


def test_what_a_replay_left_out_in_its_middle_is_asked_for():
    """vLLM's socket drops what does not fit into its queue of a thousand messages: who had published more was believed in what
    came behind the last hole alone, and never more than half, for its whole life."""
    rig = Rig()
    for depth in (3, 6, 10, 2, 5, 9):
        rig.worker.store(depth)
    rig.sent = len(rig.worker.log)
    rows = list(enumerate(rig.worker.log))
    rig.believed.connected("w", 0.0)
    rig.believed.replayed("w", 0, [*rows[:2], rows[3]], 0.0, last=False, whole=True)
    assert (rig.believed.asks, rig.believed.trusted) == ([("w", 0), ("w", 2)], 0)
    rig.believed.replayed("w", 0, rows[4:], 0.1, last=True, whole=True)  # the rest of the first one, which is on its way
    rig.believed.replayed("w", 2, [rows[2], *rows[4:]], 0.1, last=True, whole=True)
    assert rig.believed.asks[2:] == [("w", 3)]
    rig.believed.replayed("w", 3, rows[3:], 0.2, last=True, whole=True)
    assert (rig.believed.state("w"), rig.believed.trusted, rig.known()) == ("live", 1, 10)


def test_a_replay_that_began_late_and_leaves_something_out_is_asked_for_and_is_not_all_there_is():
    rig = Rig()
    for _ in range(6):
        rig.worker.store(2)
    rig.sent = len(rig.worker.log)
    rows = list(enumerate(rig.worker.log))
    rig.believed.connected("w", 0.0)
    rig.believed.replayed("w", 0, [rows[2], *rows[4:]], 0.0, last=True, whole=True)
    rig.believed.replayed("w", 3, rows[3:], 0.1, last=True, whole=True)
    assert (rig.believed.state("w"), rig.known()) == ("partial", 2)


def test_holes_that_no_replay_fills_are_not_asked_for_again_and_again():
    """Batches of a kind that we cannot read: each would be asked for with all that is behind it."""
    rig = Rig()
    for _ in range(100):
        rig.worker.store(2)
    rig.sent = len(rig.worker.log)
    rig.believed.connected("w", 0.0)
    asked = 0
    while rig.believed.asks:
        ((worker, first),), rig.believed.asks = rig.believed.asks, []
        asked += 1
        rows = [(number, told) for number, told in enumerate(rig.worker.log) if number >= first and number % 3 == 0]
        rig.believed.replayed(worker, first, rows, rig.now, last=True, whole=True)
    assert asked == 2
    assert (rig.believed.state("w"), rig.known()) == ("partial", 2)


@pytest.mark.parametrize(
    ("says", "by_events", "decode", "missing"),
    [
        ("silent", 0, "d1", 0), ("live", 0, "d0", 500), ("live", 300, "d1", 200),
        ("silent", 300, "d1", 0),  # what it told before is true, and may not be all
    ],
)  # fmt: skip
def test_each_worker_is_believed_by_one_index_and_by_the_other_when_its_events_stop(
    says: str, by_events: int, decode: str, missing: int
):
    """A prompt of 500 tokens was sent to d1. As long as its events come they alone tell what became of it."""
    table = WorkerTable()
    rows = [
        Endpoint(
            name=name, uid=name, address="127.0.0.1", http_port=1, agent_port=1, role="decode", tier="t", revision="r", compat="c"
        )
        for name in ("d0", "d1")
    ]
    table.update(Endpoints(fleet="f", namespace="n", workers=tuple(rows)))
    prompt, mine = b"x" * 2048, table.workers["d1"].bit
    keys = key_chain(prompt)
    table.routing.index.add(keys, "d1")
    blocks = ((float(by_events), mine),) if by_events else ()
    hints = NO_HINTS.counted(500.0, blocks, mine if says == "live" else 0)
    table.workers["d1"].began()  # a little busier: without its KV it is the second choice
    found, _ = table.choose(prompt, RouterConfig(fleet="f", served_name="m"), 0.0, frozenset(), hints=hints)
    assert isinstance(found, Choice)
    assert isinstance(found.offer, Offer)
    assert (found.decode, round(found.offer.missing) // 100 * 100) == (decode, missing)
