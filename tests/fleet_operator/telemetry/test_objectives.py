"""Latency as routers count it and the operator reads it: an objective that is kept is not one that is missed.

b42: with bounds of 1 and 2.5 s first tokens that all took 1.2 s had a p99 of 2.485 s: an objective of 2 s was missed at any size,
so that a tier grew to its most, and an alert spoke.
"""

from __future__ import annotations

import pytest

from fleet_operator.telemetry.aggregate import ITL, METRICS, TTFT, Reading, tier_telemetry
from fleet_operator.telemetry.parse import buckets, parse_text, quantile
from fleet_router.histogram import Histogram
from fleet_router.metrics import ITL_BUCKETS_S, TTFT_BUCKETS_S

USUAL = [
    *((TTFT, goal) for goal in (0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 8.0, 10.0, 15.0, 20.0, 60.0)),
    *((TTFT, goal) for goal in (90.0, 120.0, 300.0, 600.0)),
    *((ITL, goal) for goal in (0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5)),
]
BOUNDS = {TTFT: TTFT_BUCKETS_S, ITL: ITL_BUCKETS_S}


def p99(name: str, seconds: float) -> float:
    """Of a hundred that all take so long."""
    histogram = Histogram(BOUNDS[name])
    for _ in range(100):
        histogram.observe(seconds)
    found = quantile(None, buckets(parse_text("\n".join(histogram.lines(name, 'tier="t"'))), name), 0.99)
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "goal"), USUAL)
def test_a_usual_objective_is_judged_exactly(name: str, goal: float):
    assert p99(name, goal * 0.99) <= goal
    assert p99(name, goal * 1.01) > goal


@pytest.mark.parametrize(("name", "least", "most"), [(TTFT, 0.05, 600.0), (ITL, 0.005, 0.5)])
def test_any_other_objective_is_judged_within_a_half(name: str, least: float, most: float):
    goal = least
    while goal < most:
        assert p99(name, goal / 1.51) <= goal
        assert p99(name, goal * 1.51) > goal
        goal *= 1.07


def test_what_nobody_reads_is_not_read():
    """A router has hundreds of lines, and an engine more: the operator needs a few."""
    text = f'{TTFT}_bucket{{tier="t",le="1"}} 3\nfleet_router_whole_answer_seconds_bucket{{le="1"}} 3\nup 1'
    assert [one.name for one in parse_text(text, METRICS)] == [f"{TTFT}_bucket"]


def test_it_is_told_since_when_latencies_are_measured():
    """Of the router that was read first; of one that cannot be read now nothing is measured."""
    old, new = (Reading([], at) for at in (10.0, 70.0))
    assert tier_telemetry("t", [], [new, new, None], [Reading([], 40.0), old, Reading([], 1.0)], 70.0).latencies_since == 10.0
    assert tier_telemetry("t", [], [None, new], [old, None], 70.0).latencies_since is None


@pytest.mark.parametrize("partial", [False, True])
def test_of_a_revision_it_is_told_whether_all_routers_could_be_read(partial: bool):
    read = Reading(parse_text('fleet_router_revision_requests_total{tier="t",revision="r"} 3'), 1.0)
    found = tier_telemetry("t", [], [read, None] if partial else [read], [read, None] if partial else [read], 1.0)
    assert found.revisions["r"].partial == partial
