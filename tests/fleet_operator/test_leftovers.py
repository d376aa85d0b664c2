"""Pods of a fleet that is gone and that nobody owns are told, and never deleted: somebody may have left them on purpose."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from fleet_operator.cluster.interface import FLEET, POD, WatchEvent
from fleet_operator.reconciler import CHILDREN
from tests.fleet_operator.test_ownership import part, workers
from tests.fleet_operator.world import NAMESPACE, World, play


async def starts_anew(world: World, *, owned: bool = True, listed: bool = True) -> None:
    """An operator that has seen nothing before."""
    world.operator = world.new_operator()
    if not owned:
        world.operator._claimed = lambda namespace: False
    await world.look()
    for kind in (FLEET, *CHILDREN) if listed else ():
        world.operator.feed(kind, WatchEvent("SYNCED", {}))
    await world.operator.drain()


async def leave(world: World, *kinds: Any) -> None:
    """No operator runs: somebody takes the owners of these kinds away, and the fleet is deleted."""
    await part(world, *kinds)
    await world.user.delete(FLEET, NAMESPACE, "f")


@pytest.mark.parametrize(
    ("options", "found"), [({}, 3), ({"owned": False}, 0), ({"listed": False}, 0)], ids=["", "anothers-namespace", "not-listed"]
)
def test_workers_without_owner_of_a_fleet_that_is_gone_are_counted(options: dict[str, bool], found: int):
    """They kept their devices for ever, and nothing said so."""

    async def scenario(world: World) -> None:
        await leave(world, POD)
        await starts_anew(world, **options)
        assert world.operator.ownerless() == found
        assert len(await workers(world)) == 3

    play(scenario)


def test_each_is_told_once_and_counts_until_it_goes(caplog: pytest.LogCaptureFixture):
    async def scenario(world: World) -> None:
        await leave(world, POD)
        await starts_anew(world)
        caplog.clear()  # in a run of all tests another one may have had the passes say more
        with caplog.at_level(logging.WARNING, "fleet.operator"):
            for _ in range(3):
                world.operator.leftovers.tell()
        names = sorted(pod["metadata"]["name"] for pod in await workers(world))
        assert [record.getMessage().split()[0] for record in caplog.records] == [f"pod={NAMESPACE}/{name}" for name in names]
        assert all("fleet f is gone" in record.getMessage() for record in caplog.records)
        for name in names:
            await world.user.delete(POD, NAMESPACE, name)
        await world.look()
        assert world.operator.ownerless() == 0

    play(scenario)


@pytest.mark.parametrize(
    "kinds", [(), tuple(kind for kind in CHILDREN if kind != POD)], ids=["deleted", "deleted-with-cascade-orphan"]
)
def test_what_goes_and_what_was_left_with_its_owners_is_not_counted(kinds: tuple[Any, ...]):
    """`kubectl delete ifleet --cascade=orphan` leaves pools without an owner, and their pods with theirs."""

    async def scenario(world: World) -> None:
        await leave(world, *kinds)
        await starts_anew(world)
        assert world.operator.ownerless() == 0

    play(scenario)


def test_a_fleet_that_is_there_gives_its_workers_their_owner_again():
    async def scenario(world: World) -> None:
        await part(world, POD)
        await starts_anew(world)
        assert world.operator.ownerless() == 0

    play(scenario)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_one_that_has_ended_holds_nothing(phase: str):
    async def scenario(world: World) -> None:
        await leave(world, POD)
        for pod in await workers(world):
            await world.user.patch_status(POD, NAMESPACE, pod["metadata"]["name"], {"phase": phase})
        await starts_anew(world)
        assert world.operator.ownerless() == 0

    play(scenario)
