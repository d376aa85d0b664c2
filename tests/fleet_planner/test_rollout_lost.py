"""All workers of the old revision are lost at once, in the middle of a rollout: with their node, or somebody deleted them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_planner.types import RevisionLoad, TierTelemetry
from tests.fleet_planner.test_rollout_plan import CANARY, NEW, OLD, World, paused_in_the_middle

GOOD, BAD = RevisionLoad(100, 0, 100, 0), RevisionLoad(100, 50, 100, 50)
HOW: list[Any] = [
    pytest.param(None, id="deleted"),
    pytest.param({"terminating": True, "ready": False}, id="being deleted"),
    pytest.param({"leaving": "node n is not ready", "ready": False}, id="on a lost node"),
    pytest.param({"phase": "Failed", "ready": False}, id="evicted"),
]


def lose_all(world: World, revision: str, change: dict[str, Any] | None) -> None:
    pods = [replace(p, **change or {}) if p.revision == revision else p for p in world.observed.pods]
    world.observed = replace(world.observed, pods=tuple(p for p in pods if change is not None or p.revision != revision))


def forget_terminating(world: World) -> None:
    world.observed = replace(world.observed, pods=tuple(p for p in world.observed.pods if not p.terminating))


def hear(world: World, new: RevisionLoad) -> None:
    world.observed = replace(world.observed, telemetry={"t": TierTelemetry(revisions={OLD: GOOD, NEW: new})})


@pytest.mark.parametrize("change", HOW)
def test_a_canary_whose_old_revision_is_lost_stays_one_and_the_old_one_comes_back(change: dict[str, Any] | None) -> None:
    """Incident: the canary was taken for the end of its rollout: it got all of the tier, was judged no more, and a revision of
    which half of the requests failed was the one to return to."""
    world = World(canary=CANARY)
    world.steps(3)
    assert world.sizes() == ((2, 4), (1, 1))
    lose_all(world, OLD, change)
    plan = world.steps(1)
    forget_terminating(world)
    assert world.sizes()[1] == (1, 1)
    rollout = plan.status.tiers[0].rollout
    assert rollout is not None
    assert (rollout.stable, world.rolling(plan)[0]) == (OLD, "Progressing")
    world.steps(4)
    assert world.sizes() == ((1, 3), (1, 1))  # what the canary serves is not missing
    hear(world, BAD)
    world.steps(8)
    assert world.sizes() == ((2, 4), (0, 0))


@pytest.mark.parametrize("change", HOW)
def test_the_old_revision_comes_back_as_one_pair_though_the_canary_is_as_large_as_the_tier(change: dict[str, Any] | None) -> None:
    """Incident: of a tier of 1:1 any canary is as large as the tier: nothing was missing, so nothing came back. All requests went
    to the revision that was to get 10 % of them, and its rollback had to wait for a cold start."""
    world = World(canary={"steps": [99], "interval": "1m"})
    world.steps(3)
    assert world.sizes() == ((2, 4), (2, 4))
    lose_all(world, OLD, change)
    world.steps(1)
    forget_terminating(world)
    world.steps(4)
    assert world.sizes() == ((1, 1), (2, 4))
    hear(world, BAD)
    world.steps(8)
    assert world.sizes() == ((2, 4), (0, 0))


def test_an_old_role_that_is_lost_beside_a_large_canary_comes_back() -> None:
    """Incident: the old decode workers were left without a prefill worker until the canary was judged."""
    world = World(canary={"steps": [99], "interval": "1m"})
    world.steps(3)
    for _ in range(2):
        world.lose(OLD, "prefill")
    world.steps(4)
    assert world.sizes() == ((1, 4), (2, 4))


def test_an_old_revision_comes_back_only_inside_the_bound() -> None:
    """Where surge has no room for it the canary's workers come first."""
    world = World(canary={"steps": [99], "interval": "1m"}, maxSurgeGpus=0, maxUnavailable=4)
    most = 0
    for _ in range(12):
        world.steps(1)
        most = max(most, len(world.observed.pods))
    assert (world.sizes(), most) == (((0, 0), (2, 4)), 6)


@pytest.mark.parametrize("change", HOW)
@pytest.mark.parametrize("rollout", [{}, {"canary": CANARY}], ids=["plain", "canary"])
def test_a_paused_rollout_whose_old_revision_is_lost_keeps_each_group_at_its_size(
    rollout: dict[str, Any], change: dict[str, Any] | None
) -> None:
    """Incident: the new revision went on to its full size while it was paused, and RollingOut said Complete."""
    world = paused_in_the_middle(**rollout)
    world.steps(1)
    before = world.sizes()
    lose_all(world, OLD, change)
    plan = world.steps(1)
    forget_terminating(world)
    assert world.rolling(plan)[0] == "Paused"
    world.steps(4)
    assert world.sizes() == before
    world.configure(**rollout)
    hear(world, GOOD)
    world.now += 120
    world.steps(2)
    world.now += 120
    world.steps(12)
    assert world.sizes() == ((0, 0), (2, 4))


@pytest.mark.parametrize("change", HOW)
def test_a_rollout_whose_old_revision_is_lost_is_not_complete_before_the_new_one_serves(change: dict[str, Any] | None) -> None:
    """Incident: `fleet rollout status` ended with 0 while nothing served."""
    world = World()
    world.steps(1)
    lose_all(world, OLD, change)
    lose_all(world, NEW, {"ready": False})
    plan = world.steps(1)
    assert world.rolling(plan) == ("Progressing", f"tier t: revision {NEW} has not served yet")
    forget_terminating(world)
    world.observed = replace(world.observed, pods=tuple(replace(p, ready=True) for p in world.observed.pods))
    assert world.rolling(world.steps(2))[0] == "Complete"
    assert world.sizes() == ((0, 0), (2, 4))
