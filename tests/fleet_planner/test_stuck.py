"""Workers that should have been gone for long: a process that nothing ends, a finalizer of somebody who is away. Nobody waits for
them for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_api.conditions import rfc3339
from fleet_planner.clock import steady
from fleet_planner.memory import GangMemory, ScaleMemory
from fleet_planner.orphans import plan_orphans
from fleet_planner.reconcile import reconcile
from fleet_planner.replicas import STUCK_S
from fleet_planner.types import Observed, Template
from tests.fleet_planner import test_orphans as orphans
from tests.fleet_planner.test_gang import gang, offered, workers
from tests.fleet_planner.test_reconcile import NOW, carry_out, counts, fleet, start

OLD, NEW = "aaaaaaaa", "bbbbbbbb"
GOING: dict[str, Any] = {"terminating": True, "ready": False}
LATER = NOW + 1_000.0


def with_one_that_goes(gone_by: float | None) -> Observed:
    """A fleet of 1 + 1 whose first decode worker was replaced and goes, and that then gets a new template."""
    observed = carry_out(reconcile(fleet(ratio={"decode": 1}), start(), NOW), start())
    pods = tuple(replace(p, **GOING, gone_by=gone_by) if p.role == "decode" else p for p in observed.pods)
    observed = replace(observed, pods=pods)
    observed = carry_out(reconcile(fleet(ratio={"decode": 1}), observed, NOW + 1), observed)
    return replace(observed, templates={"t": Template(NEW, "c", number=2)})


def rolled(observed: Observed, **rollout: Any) -> Observed:
    """After thirty passes in which whoever is told to go is gone at once, but for the one that goes already."""
    wish = fleet(ratio={"decode": 1})
    wish = wish.model_copy(update={"spec": wish.spec.model_validate(wish.spec.to_dict() | {"rollout": rollout})})
    for step in range(30):
        plan = reconcile(wish, observed, LATER + step)
        observed, wish = carry_out(plan, observed), wish.model_copy(update={"status": plan.status})
    return observed


ROLLOUTS: list[Any] = [
    pytest.param({}, id="no old one goes first"),
    pytest.param({"maxSurgeGpus": 2}, id="by a surge"),
    pytest.param({"maxUnavailable": 1}, id="old ones go first"),
]


@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_a_rollout_does_not_wait_for_a_worker_that_should_have_been_gone(rollout: dict[str, Any]) -> None:
    """Incident: its devices counted, so that no new worker was made; with maxUnavailable 1 the old ones went all the same, and of
    the new revision one role was never made: nothing served."""
    observed = rolled(with_one_that_goes(LATER - STUCK_S - 1), **rollout)
    assert counts(observed, NEW) == {"prefill": 1, "decode": 1}
    assert [p.terminating for p in observed.pods if p.revision == OLD] == [True]


@pytest.mark.parametrize("gone_by", [None, LATER + 600, LATER - STUCK_S + 60], ids=["not known", "in its grace", "just over"])
def test_one_inside_its_grace_holds_its_devices(gone_by: float | None) -> None:
    assert counts(rolled(with_one_that_goes(gone_by)), NEW) == {"prefill": 0, "decode": 0}


@pytest.mark.parametrize(("over_s", "given"), [(-600.0, 0), (STUCK_S, 0), (STUCK_S + 1, 2)])
def test_halves_are_given_back_beside_a_worker_of_several_nodes_that_never_goes(over_s: float, given: int) -> None:
    """Its nodes are nobody's next ones."""
    there = workers(gang("a", **GOING, gone_by=LATER - over_s), gang("b", placed=1))
    assert len(offered(there, GangMemory(), LATER).gone) == given


@pytest.mark.parametrize(("over_s", "gone"), [(-600.0, 0), (STUCK_S, 0), (STUCK_S + 1, 1)])
def test_workers_of_a_tier_that_left_make_room_beside_one_that_never_goes(over_s: float, gone: int) -> None:
    """It moved the time at which the next one may, in every pass."""
    goes = orphans.old("decode", 5, **GOING, gone_by=orphans.NOW - over_s)
    seen = orphans.seen(*orphans.THREE, orphans.LONG, goes)
    seen = replace(seen, memory={"u": ScaleMemory(room_at=orphans.NOW - 99.0)})
    assert len(plan_orphans(orphans.fleet("u"), seen, {"u": orphans.STARTING}, orphans.NOW).gone) == gone


def test_a_clock_that_is_set_makes_no_drain_late() -> None:
    """The operator's clock was set forward by an hour."""
    observed = with_one_that_goes(LATER + 600)
    moved = steady(fleet(), replace(observed, clock_set_s=3_600.0), LATER + 3_600)[1]
    assert [p.gone_by for p in moved.pods if p.terminating] == [LATER + 4_200]


@pytest.mark.parametrize(
    ("over_s", "words"),
    [
        (STUCK_S, "every object exists"),
        (STUCK_S + 1, "every object exists; f-t-decode-aaaaaaaa-0: should have been gone at {}, and is there still on node n"),
    ],
)
def test_the_status_names_one_that_should_have_been_gone(over_s: float, words: str) -> None:
    observed = with_one_that_goes(LATER - over_s)
    told = reconcile(fleet(ratio={"decode": 1}), replace(observed, templates=start().templates), LATER).status
    found = told.condition("Provisioned")
    assert found is not None
    assert (found.reason, found.message) == ("AllCreated", words.format(rfc3339(LATER - over_s)))
