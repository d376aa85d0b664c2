"""Disruption budgets: there as soon as there is something to guard, and as long as the spec needs them."""

from __future__ import annotations

import asyncio

from fleet_operator.cluster.interface import PDB, POD
from tests.fleet_operator.world import NAMESPACE, World, manifest


async def _budgets(world: World) -> set[str]:
    return {found["metadata"]["name"] for found in await world.store.list(PDB, NAMESPACE)}


async def _ready(world: World, role: str, status: str) -> None:
    """The first worker of a role becomes Ready, or ceases to be."""
    pods = await world.store.list(POD, NAMESPACE, {"inferencefleet.io/role": role})
    conditions = [{"type": "Ready", "status": status, "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    given = {"phase": "Running", "podIP": "127.0.0.9", "conditions": conditions}
    await world.user.patch_status(POD, NAMESPACE, pods[0]["metadata"]["name"], given)
    await world.look()
    await world.operator.drain()


def test_a_roles_budget_comes_with_its_first_ready_worker_and_stays():
    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest())
        await world.look()
        await world.operator.drain()
        assert len(await world.store.list(POD, NAMESPACE)) == 3
        assert await _budgets(world) == set()
        await _ready(world, "decode", "True")
        assert await _budgets(world) == {"f-t-decode"}
        await _ready(world, "decode", "False")
        assert await _budgets(world) == {"f-t-decode"}
        await _ready(world, "prefill", "True")
        assert await _budgets(world) == {"f-t-decode", "f-t-prefill"}

    asyncio.run(scenario())


def test_who_is_not_ready_may_be_evicted():
    """By default the API server refuses that while fewer are ready than needed: workers or routers that never became ready (a bad
    image) held up the drain of their node for ever. They serve nobody."""

    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(routing={"replicas": 2}))
        await world.settle()
        specs = {found["metadata"]["name"]: found["spec"] for found in await world.store.list(PDB, NAMESPACE)}
        assert specs.keys() == {"f-t-decode", "f-t-prefill", "f-router"}
        assert {spec.get("unhealthyPodEvictionPolicy") for spec in specs.values()} == {"AlwaysAllow"}

    asyncio.run(scenario())


def test_routers_have_a_budget_while_there_are_several():
    async def scenario() -> None:
        world = World()
        for replicas, has in ((1, False), (2, True), (1, False)):
            await world.user.apply(manifest(routing={"replicas": replicas}))
            await world.settle()
            assert ("f-router" in await _budgets(world)) is has
        assert not [line for line in await world.events() if "was missing" in line]

    asyncio.run(scenario())
