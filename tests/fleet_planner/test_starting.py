"""A first start, or a wake, is no outage, for as long as it may take; what served and does not is one at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_planner.reconcile import Plan
from tests.fleet_planner.zero_world import NEW, OLD, World, condition, fleet

DEADLINE_S = 1_800.0
MANY = [{"name": "t"}, {"name": "u"}]


def change(world: World, **fields: Any) -> None:
    world.observed = replace(world.observed, pods=tuple(replace(pod, **fields) for pod in world.observed.pods))


def available(plan: Plan) -> str:
    return condition(plan, "Available")[1]


@pytest.mark.parametrize("to_zero", [True, False])
def test_a_first_start_and_an_outage_are_told_apart_over_a_restart_of_the_operator(to_zero: bool):
    """3 am: a model that takes 15 minutes to load woke somebody at its first start, as the status said the same of an outage."""
    world = World(fleet(toZero={"enabled": to_zero, "idle": "60s"}))
    assert available(world.step()) == "WorkersStarting"
    world.restart()
    assert available(world.step(900.0)) == "WorkersStarting"
    assert world.spec.status.tiers[0].starting_since
    plan = world.settle()
    assert condition(plan, "Ready") == ("True", "AllGood")
    assert not plan.status.tiers[0].starting_since
    world.observed = replace(world.observed, pods=())  # its nodes went
    assert available(world.step()) == "WorkersLost"
    world.restart()
    plan = world.step(60.0)
    assert (available(plan), condition(plan, "Ready")) == ("WorkersLost", ("False", "WorkersLost"))
    assert condition(world.settle(), "Ready") == ("True", "AllGood")


@pytest.mark.parametrize("tiers", [MANY, MANY[::-1]], ids=["last", "first"])
def test_a_tier_that_is_new_starts_while_the_other_serves(tiers: list[dict[str, Any]]):
    """And it hides no outage of the other, wherever it stands."""
    world = World(fleet(MANY[:1]))
    world.settle()
    old = world.observed
    world.spec = fleet(tiers, status=world.spec.status)
    world.observed = replace(old, templates={name: old.templates["t"] for name in ("t", "u")})
    assert available(world.step()) == "WorkersStarting"
    change(world, **{"ready": False, "ready_since": None})  # and now what served is lost
    assert available(world.step()) == "WorkersLost"


def test_workers_that_are_replaced_for_ever_do_not_start_for_ever():
    """A node under pressure evicts each of them before it is ready: none of them is late by itself."""
    world = World()
    reasons = []
    for _ in range(50):
        world.observed = replace(world.observed, pods=())
        reasons.append(available(world.step(60.0)))
    assert reasons[:30] == ["WorkersStarting"] * 30
    assert set(reasons[32:]) == {"WorkersLate"}


def test_a_spec_that_was_mended_starts_anew():
    world = World()
    world.step()
    world.observed = replace(world.observed, templates={"t": replace(world.observed.templates["t"], revision=NEW)}, pods=())
    began = world.step(DEADLINE_S - 1).status.tiers[0]
    assert began.revision == NEW != OLD
    world.observed = replace(world.observed, pods=())
    assert available(world.step(DEADLINE_S)) == "WorkersStarting"


def test_who_waited_in_a_queue_for_long_has_the_time_of_a_start_from_then_on():
    world = World()
    world.step()
    change(world, gated=True, node=None, phase="Pending")
    assert available(world.step(3 * DEADLINE_S)) == "WorkersStarting"
    change(world, gated=False, node="n", phase="Running", unready_since=world.now)
    assert available(world.step(DEADLINE_S)) == "WorkersStarting"
    assert available(world.step(1.0)) == "WorkersLate"


def test_a_wake_for_which_there_are_no_nodes_is_no_wake_for_ever():
    """Waking is nothing to be woken for: that there is no room after half an hour is."""
    world = World()
    world.rest()
    world.held, world.fits = 1, False
    assert available(world.step()) == "Waking"
    assert available(world.step(DEADLINE_S)) == "Waking"
    assert available(world.step(1.0)) == "WorkersPending"
