"""What the router's own counters say, read by the operator's own parser: no name and no label is written a second time here, so
that one that changes on one side shows. And what the canary's judge does with it: a rollback, by TTFT, by ITL, by errors."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_api.quantities import Ratio
from fleet_api.v1alpha1.rollout import RolloutSpec
from fleet_api.v1alpha1.status import RolloutStatus
from fleet_operator.telemetry.aggregate import Reading, WorkerReading, tier_telemetry
from fleet_operator.telemetry.parse import parse_text
from fleet_planner.canary import Scene, plot_course
from fleet_planner.rollout import Group, Limits
from fleet_planner.types import RevisionLoad, TierTelemetry
from fleet_router.metrics import Metrics
from fleet_router.workers import WorkerTable
from fleet_wire.endpoints import Endpoint, Endpoints, Role

OLD, NEW = "aaaaaaaa", "bbbbbbbb"
REQUESTS = 100
FAST_S, SLOW_S = 0.04, 4.0
WORKERS = [("p", "prefill", "t", 3), ("d", "decode", "t", 5), ("e", "decode", "u", 7)]


def streams(
    metrics: Metrics, tier: str, revision: str, *, ttft_s: float = FAST_S, itl_s: float = FAST_S, errors: int = 0
) -> None:
    """So many streams of two tokens, counted as the data path does it (flow.py)."""
    served = metrics.of(tier, revision)
    for _ in range(REQUESTS):
        served.requests += 1
        served.ttft.observe(ttft_s)
        served.itl.observe(itl_s)
    served.errors += errors


def endpoint(name: str, role: Role) -> Endpoint:
    return Endpoint(
        name=name, uid=f"uid-{name}", address="127.0.0.1", http_port=1, agent_port=2, role=role, tier="t", revision=OLD,
        compat="c",
    )  # fmt: skip


def reading(metrics: Metrics) -> Reading:
    """As the operator scrapes it."""
    return Reading(parse_text(metrics.exposition(WORKERS, 0.0, 0)), 1.0)


def told(metrics: Metrics, before: Reading | None = None) -> TierTelemetry:
    """Of tier t."""
    return tier_telemetry("t", [], [reading(metrics)], [before], 1.0)


def test_every_revisions_requests_errors_and_latencies_are_read():
    metrics = Metrics()
    streams(metrics, "t", OLD, errors=2)
    before = reading(metrics)
    streams(metrics, "t", OLD)
    streams(metrics, "t", NEW, ttft_s=SLOW_S, itl_s=0.4, errors=7)
    streams(metrics, "u", NEW, ttft_s=30.0, errors=9)  # another tier's are not ours
    found = told(metrics, before)
    fast, slow = pytest.approx(FAST_S, abs=0.001), pytest.approx(0.4, abs=0.01)
    assert found.revisions[OLD] == RevisionLoad(100, 0, 200, 2, pytest.approx(0.05, abs=0.001), fast, streams=100)
    assert found.revisions[NEW] == RevisionLoad(100, 7, 100, 7, pytest.approx(SLOW_S, abs=0.1), slow, streams=100)
    assert (found.prefill.inflight, found.decode.inflight) == (3, 5)
    assert found.prefill.ttft_p99_s == pytest.approx(SLOW_S, abs=0.1)
    assert found.decode.itl_p99_s == pytest.approx(0.4, abs=0.01)


def test_a_revision_that_nobody_asked_has_no_latency():
    """No data is not zero: a canary is not judged by it."""
    metrics = Metrics()
    metrics.of("t", NEW)
    assert told(metrics).revisions == {NEW: RevisionLoad(0, 0, 0, 0, None, None, streams=0)}


@pytest.mark.parametrize(
    ("new", "why"),
    [
        ({}, ""),
        ({"ttft_s": SLOW_S}, "TTFT p99 is"),
        ({"itl_s": SLOW_S}, "ITL p99 is"),
        ({"errors": 20}, "20 of 100 requests failed"),
    ],
    ids=["as-good", "ttft", "itl", "errors"],
)
def test_a_canary_is_rolled_back_by_what_the_router_counts(new: dict[str, Any], why: str):
    metrics, limits, want = Metrics(), Limits(Ratio(1, 4), Ratio(1, 1)), (4, 8)
    streams(metrics, "t", OLD)
    streams(metrics, "t", NEW, **new)
    groups = {OLD: Group(OLD, want, want), NEW: Group(NEW, (1, 2), (1, 2))}
    spec = RolloutSpec.model_validate({"canary": {"steps": [10, 50], "interval": "1m"}})
    course = plot_course(
        spec, RolloutStatus(stable=OLD, target=NEW), Scene(NEW, groups, told(metrics).revisions, want, limits, 0.0)
    )
    assert course.target == (OLD if why else NEW)
    assert why in course.rolled_back
    assert bool(course.rolled_back) == bool(why)


def test_pairs_between_which_no_kv_moves_are_read_by_their_names():
    table = WorkerTable()
    names: list[tuple[str, Role]] = [("p-0", "prefill"), ("d-0", "decode"), ("d-1", "decode")]
    table.update(Endpoints(fleet="f", namespace="n", workers=tuple(endpoint(name, role) for name, role in names)))
    for at in (1.0, 100.0):
        while not table.pairs.failed("uid-p-0", "uid-d-1", at):
            pass
    text = "\n".join(table.lines(100.0)) + '\nfleet_router_pair_failing{tier="t",prefill="p-0",decode="gone"} 1\n'
    there = [WorkerReading("t", role, None, name) for name, role in names]
    routers = [Reading(parse_text(text), 1.0), None, Reading(parse_text(text), 1.0)]
    found = tier_telemetry("t", there, routers, [None] * 3, 1.0)
    assert found.pairs == (("p-0", "d-1"),)  # once, and nobody who is not there
    assert tier_telemetry("u", there, routers, [None] * 3, 1.0).pairs == ()


@pytest.mark.parametrize(
    ("told", "doubtful"),
    [
        pytest.param(["p d0", ""], "", id="of-two-either-counts"),
        pytest.param(["p d0", "", None], "", id="two-can-be-read"),
        pytest.param(["p d0", "", ""], "p d0", id="one-of-three"),
        pytest.param(["p d0", "p d1", ""], "d0 d1", id="two-blame-the-same-one"),
        pytest.param(["p d0", "p d0", ""], "", id="two-say-the-same"),
        pytest.param(["p d0", "x d1", ""], "p d0", id="who-is-not-there-counts-for-nothing"),
        pytest.param(["", "", ""], "", id="nothing-fails"),
    ],
)
def test_of_many_routers_one_alone_is_not_believed(told: list[str | None], doubtful: str):
    there = [WorkerReading("t", "prefill", None, "p"), *(WorkerReading("t", "decode", None, name) for name in ("d0", "d1"))]
    line = 'fleet_router_pair_failing{{tier="t",prefill="{}",decode="{}"}} 1\n'
    readings = [Reading(parse_text(line.format(*one.split()) if one else ""), 1.0) if one is not None else None for one in told]
    found = tier_telemetry("t", there, readings, [None] * len(readings), 1.0)
    assert found.doubtful == frozenset(doubtful.split())
