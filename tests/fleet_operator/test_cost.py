"""What a fleet costs an hour, from the spec's prices to the status that the API has and the operator's metric."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet_operator.cluster.interface import CONTROLLER_REVISION, FLEET, POD, POOL
from fleet_operator.health.fleets import cost_per_hour
from fleet_operator.names import TIER
from fleet_operator.render.revision import observe_revisions
from tests.fleet_operator.world import NAMESPACE, World, manifest

GPU = {"name": "t", "accelerator": {"type": "h100", "count": 2}, "decode": {"maxReplicas": 4}}


def test_money_bounds_what_load_gets_and_no_price_restarts_a_pod():
    """A wish is kept while money is short, and met when there is more; that a tier gets a price makes nothing anew."""

    async def scenario() -> None:
        world = World()
        plain = manifest(engine={"type": "vllm"}, tiers=[GPU], scaling={"mode": "manual"})
        await world.user.apply(plain)
        await world.settle()
        before = {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}
        assert "costPerHour" not in (await world.store.get(FLEET, NAMESPACE, "f"))["status"]
        assert cost_per_hour(world.operator.ours()) is None
        tiers = [{**GPU, "cost": {"perGpuHour": 4.1}}]
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"tiers": tiers, "scaling": {"budget": {"perHour": 25}}}})
        await world.settle()
        assert {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)} == before
        status = (await world.store.get(FLEET, NAMESPACE, "f"))["status"]
        assert (status["costPerHour"], status["tiers"][0]["costPerHour"]) == (24.6, 24.6)
        pool = (await world.pool("decode"))["metadata"]["name"]
        await world.user.patch(POOL, NAMESPACE, pool, {"spec": {"replicas": 3}})
        await world.settle()
        assert await world.workers() == {"prefill": 1, "decode": 2}
        told = await world.condition("CapacityLimited")
        assert (told["status"], told["reason"]) == ("True", "BackedOut")
        assert "cost 32.8 an hour, scaling.budget.perHour leaves 25: 7.8 is missing" in told["message"]
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"scaling": {"budget": {"perHour": 33}}}})
        await world.settle()
        assert await world.workers() == {"prefill": 1, "decode": 3}
        assert cost_per_hour(world.operator.ours()) == 32.8
        assert await world.touch() == []

    asyncio.run(scenario())


def priced(name: str, price: float) -> dict[str, Any]:
    return {"name": name, "accelerator": {"type": "h100"}, "cost": {"perGpuHour": price}}


async def revisions(world: World) -> dict[str, Any]:
    """Stored prices by tier."""
    found = await world.store.list(CONTROLLER_REVISION, NAMESPACE)
    return {one["metadata"]["labels"][TIER]: one["data"].get("perGpuHour", "none") for one in found}


def test_a_tier_that_is_renamed_costs_what_it_did_until_its_workers_are_gone():
    """Its price left the spec with it: the status said no sum, and the budget took its devices for as dear as the new ones."""

    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(engine={"type": "vllm"}, tiers=[priced("old", 8)], scaling={"mode": "manual"}))
        await world.settle()
        assert await revisions(world) == {"old": 8}
        assert isinstance((await revisions(world))["old"], int), "the API server writes 8.0 as 8, and calls that a change"
        workers = len(await world.store.list(POD, NAMESPACE, {TIER: "old"}))
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"tiers": [priced("new", 1)]}})
        costs = []
        for _ in range(9):
            await world.step()
            costs.append((await world.store.get(FLEET, NAMESPACE, "f"))["status"].get("costPerHour"))
        assert None not in costs
        assert max(costs) == 8 * workers + workers, "both are there"
        assert costs[-1] == workers
        assert await revisions(world) == {"new": 1}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        pytest.param(8, 8.0, id="known"),
        pytest.param(0, 0.0, id="nothing"),
        pytest.param(None, None, id="of-an-older-operator"),
        pytest.param("8", None, id="text"),
        pytest.param(True, None, id="no-number"),
        pytest.param(-1, None, id="less-than-nothing"),
        pytest.param(1_000_000, 1e6, id="as-much-as-a-spec-may-say"),
        pytest.param(1e308, None, id="more-than-that"),
    ],
)
def test_a_price_is_stored_with_a_new_revision_and_never_written_again(stored: Any, found: float | None):
    """An operator that is new, and a price that is edited, write to no revision; what is no price there is none."""

    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(engine={"type": "vllm"}, tiers=[priced("t", 8)], scaling={"mode": "manual"}))
        await world.settle()
        (revision,) = await world.store.list(CONTROLLER_REVISION, NAMESPACE)
        data = {name: value for name, value in revision["data"].items() if name != "perGpuHour"}
        data |= {"perGpuHour": stored} if stored is not None else {}
        meta = {key: revision["metadata"][key] for key in ("name", "namespace", "labels", "annotations", "ownerReferences")}
        await world.user.delete(CONTROLLER_REVISION, NAMESPACE, meta["name"])
        await world.user.create({**revision, "metadata": meta, "data": data})
        world.operator = world.new_operator()
        assert await world.touch() == []
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"tiers": [priced("t", 9)]}})
        await world.settle()
        (after,) = await world.store.list(CONTROLLER_REVISION, NAMESPACE)
        assert after["data"] == data
        assert [template.price for template in observe_revisions([after])["t"].values()] == [found]

    asyncio.run(scenario())


@pytest.mark.parametrize("price", [1e308, 9e18, float("nan")])
def test_a_price_that_somebody_made_up_stops_no_pass(price: float):
    """A sum beyond every float ended each pass of the fleet."""

    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(engine={"type": "vllm"}, tiers=[priced("old", 8)], scaling={"mode": "manual"}))
        await world.settle()
        (revision,) = await world.store.list(CONTROLLER_REVISION, NAMESPACE)
        meta = {key: revision["metadata"][key] for key in ("name", "namespace", "labels", "annotations", "ownerReferences")}
        await world.user.delete(CONTROLLER_REVISION, NAMESPACE, meta["name"])
        await world.user.create({**revision, "metadata": meta, "data": {**revision["data"], "perGpuHour": price}})
        world.operator = world.new_operator()
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"tiers": [priced("new", 1)]}})
        await world.settle()
        assert (await world.store.get(FLEET, NAMESPACE, "f"))["status"]["costPerHour"] == 3
        assert not [event for event in await world.events() if "InternalError" in event]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("status", "found"),
    [
        ({"costPerHour": 4}, 4.0), ({"costPerHour": 4.5}, 4.5), ({"costPerHour": "4"}, None), ({"costPerHour": True}, None),
        ({}, None), ("x", None), (None, None),
    ],
)  # fmt: skip
def test_only_a_number_in_a_status_is_a_cost(status: Any, found: float | None):
    assert cost_per_hour([{"status": status}]) == found
