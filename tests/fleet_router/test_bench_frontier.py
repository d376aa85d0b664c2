"""The frontier benchmark: the bound holds and ours has the most hits, on few workers and prompts; its engine's arithmetic."""

from __future__ import annotations

import statistics

import pytest

from e2e.bench.frontier import (
    BASE_S,
    CACHE_TOKENS,
    RULES,
    SHAPES,
    TOKENS_PER_S,
    Arrival,
    Engine,
    Rule,
    World,
    arrivals,
    beaten,
    over_bound,
)

SMALL, LARGE = 8, 24
"""Looked at whole, and in part."""


def test_an_engine_computes_what_it_has_not_and_drops_what_was_used_least_recently():
    engine = Engine()
    keys = list(range(8))
    assert engine.begin(Arrival(0.0, keys)) == BASE_S + 8 * 64 / TOKENS_PER_S
    assert engine.store(keys) == (keys, [])
    engine.begin(Arrival(0.0, [*keys[:4], 99]))
    assert (engine.hit, engine.computed) == (4 * 64, 9 * 64)
    room = int(CACHE_TOKENS / 64)
    more = [list(range(at, at + 32)) for at in range(1000, 1000 + room, 32)]
    gone = [key for prompt in more for key in engine.store(prompt)[1]]
    assert gone[:8] == keys[::-1]  # the end of a prompt before its beginning
    assert engine.cached <= CACHE_TOKENS


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("workers", [SMALL, LARGE])
def test_the_bound_holds_and_ours_has_more_hits_than_whoever_has_no_more_load(workers: int, shape: str):
    asked = arrivals(workers, shape, 0.7, 3, 1_000)
    found = {rule: World(rule, workers).run(asked) for rule in RULES if rule.bound in (1.25, 1e9)}
    assert all(seen.over_cap == 0 and len(seen.ttft_s) >= 750 for seen in found.values())
    assert (beaten(found), over_bound(found)) == ([], [])
    ours = {rule.events: seen for rule, seen in found.items() if rule.policy == "kvAware"}
    ring = next(seen for rule, seen in found.items() if rule.title == "CHWBL 1.25")
    for seen in ours.values():
        assert seen.hit > ring.hit
        assert statistics.mean(seen.ttft_s) < statistics.mean(ring.ttft_s)


def test_kv_events_are_no_worse_than_what_was_sent_where():
    """Events tell of what is there; what waits in queues has to be known besides: without it there were a fifth fewer hits."""
    asked = arrivals(SMALL, "0.8", 0.7, 1, 3_000)
    sent, told = (World(Rule("", "kvAware", 1.25, events=events), SMALL).run(asked) for events in (False, True))
    assert told.hit > 0.9 * sent.hit
