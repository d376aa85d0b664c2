"""PodGroups go with their workers, and only with them."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest

from fleet_operator.cluster.interface import POD, POOL, ForbiddenError, Kind
from tests.fleet_operator.test_gangs import TIER, NoNodes, pods
from tests.fleet_operator.world import NAMESPACE, World, manifest


def refuse(world: World) -> None:
    """No pod may be deleted."""
    world.api.refuse = lambda verb, kind, name: ForbiddenError("no") if (verb, kind) == ("delete", POD) else None


def make_old(world: World) -> None:
    """Whoever looks sees that somebody has just changed the pools."""
    ask, versions = world.api.list, count(1_000_000)

    async def listed(kind: Kind, *where: Any) -> list[dict[str, Any]]:
        found = await ask(kind, *where)
        for pool in found if kind == POOL else ():
            pool["metadata"]["resourceVersion"] = str(next(versions))
        return found

    world.api.list = listed  # type: ignore[method-assign]


@pytest.mark.parametrize("hinder", [refuse, make_old])
def test_a_worker_that_was_not_deleted_keeps_its_pod_group(hinder: Any):
    """Without it the scheduler would place its pods one by one."""

    async def scenario() -> None:
        world = NoNodes()
        await world.user.apply(manifest(tiers=[{**TIER, "placement": {"podGroup": "coscheduling"}}]))
        for _ in range(3):
            await world.step()
        leader, follower = (pod["metadata"]["name"] for pod in await pods(world))
        await world.user.delete(POD, NAMESPACE, follower, grace_s=0)
        hinder(world)
        written = [*await world.step(), *await world.step()]
        assert ("create", "Pod", leader) not in written
        assert ("delete", "PodGroup", leader) not in written

    asyncio.run(scenario())
