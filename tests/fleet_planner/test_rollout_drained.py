"""A node is drained while a rollout stands still: the operator takes its workers off, for their budgets let nobody evict them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_planner.reconcile import Plan
from fleet_planner.types import Problem
from tests.fleet_planner.test_rollout_plan import CANARY, NEW, OLD, World

WAIT_S = 300.0
"""scaling.capacityWait."""


def nobody_starts(world: World, since: float) -> None:
    """No worker of the new revision gets ready."""
    pods = [replace(p, ready=False, unready_since=since) if p.revision == NEW else p for p in world.observed.pods]
    world.observed = replace(world.observed, pods=tuple(pods))


def cordon(world: World) -> set[str]:
    """The node of an old pair."""
    pair = {next(p.uid for p in world.observed.pods if (p.revision, p.role) == (OLD, role)) for role in ("prefill", "decode")}
    pods = [replace(p, leaving="node n is cordoned") if p.uid in pair else p for p in world.observed.pods]
    world.observed = replace(world.observed, pods=tuple(pods))
    return pair


def left(world: World, pair: set[str]) -> int:
    return sum(p.uid in pair for p in world.observed.pods)


def stand_still(world: World, passes: int, since: float) -> Plan:
    for _ in range(passes):
        plan = world.steps(1)
        nobody_starts(world, since)
    return plan


ROLLOUTS: list[Any] = [
    pytest.param({}, (2, 4), id="all are made anew"),
    pytest.param({"maxUnavailable": 1}, (1, 3), id="one of each role may be missing"),
]


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize(("rollout", "least"), ROLLOUTS)
def test_workers_of_the_node_go_though_the_new_revision_never_serves(
    rollout: dict[str, Any], least: tuple[int, int], paused: bool
) -> None:
    """Incident: they were kept to make up for those that may be missing, which nobody made, and the drain of their node never
    came to its end."""
    world = World(**rollout)
    began = world.now
    stand_still(world, 2, began)
    assert any(p.revision == NEW for p in world.observed.pods)
    world.configure(**rollout, paused=paused)
    pair = cordon(world)
    stand_still(world, 5, began)
    assert left(world, pair) == (2 if rollout else 0)  # those that start may be enough in a moment
    world.now += WAIT_S
    plan = stand_still(world, 5, began)
    assert left(world, pair) == 0
    serving = [target.role for target in plan.targets if target.state == "serving"]
    assert (serving.count("prefill"), serving.count("decode")) == least


def test_a_quota_that_refuses_the_new_workers_keeps_nobody_on_the_node() -> None:
    world = World(maxUnavailable=1)
    world.quota = len(world.observed.pods)
    world.steps(2)
    pair = cordon(world)
    refused = Problem("Forbidden", f'Pod f-t-decode-{NEW}-0: pods "x" is forbidden: exceeded quota: gpus')
    for _ in range(5):
        world.observed = replace(world.observed, problems=(refused,))
        world.steps(1)
    assert left(world, pair) == 0


def test_the_last_ones_stay_while_nobody_takes_their_place() -> None:
    """Whatever may be missing."""
    world = World(maxUnavailable=9, canary=CANARY)
    began = world.now
    stand_still(world, 2, began)
    pods = [replace(p, leaving="node n is cordoned") if p.revision == OLD else p for p in world.observed.pods]
    world.observed = replace(world.observed, pods=tuple(pods))
    world.now += WAIT_S
    plan = stand_still(world, 5, began)
    assert {target.role for target in plan.targets if target.state == "serving"} == {"prefill", "decode"}
