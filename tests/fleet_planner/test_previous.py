"""Which revision was rolled out before the present one: the status says it for `fleet rollout undo`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_planner.types import Template
from tests.fleet_planner.test_rollout_plan import CANARY, World

A, B, C = "aaaaaaaa", "bbbbbbbb", "cccccccc"


def go(world: World, revision: str, number: int) -> None:
    """To its end."""
    world.observed = replace(world.observed, templates={"t": Template(revision, "c", number=number)})
    world.steps(12)


def said(world: World) -> tuple[str, str | None]:
    rollout = world.fleet.status.tiers[0].rollout
    assert rollout is not None
    return rollout.stable, rollout.previous


@pytest.mark.parametrize("restarted", [False, True])
def test_the_revision_before_is_the_one_that_served_and_not_the_newest_other(restarted: bool) -> None:
    """Incident: from A to B, back to A, on to C; an undo of C went to B, which somebody had left for good reason."""
    world = World()
    go(world, A, 1)
    assert said(world) == (A, None)
    for revision, number, before in ((B, 2, A), (A, 1, B), (C, 3, A)):
        go(world, revision, number)
        if restarted:
            world.observed = replace(world.observed, memory={})
            world.steps(2)
        assert said(world) == (revision, before)


@pytest.mark.parametrize("rollout", [{}, {"canary": CANARY}], ids=["plain", "canary"])
def test_it_stands_while_another_one_is_rolled_out_and_when_that_fails(rollout: dict[str, Any]) -> None:
    world = World()
    go(world, A, 1)
    go(world, B, 2)
    world.configure(**rollout)
    world.observed = replace(world.observed, templates={"t": Template(C, "c", number=3)})
    world.steps(2)
    assert said(world) == (B, A)


def test_it_is_kept_whatever_its_number() -> None:
    world = World(historyLimit=1)
    for revision, number in ((A, 1), (B, 2), (A, 1), (C, 3)):
        go(world, revision, number)
    assert world.observed.stored["t"].keys() == {A, C}
