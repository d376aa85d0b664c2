"""What a fleet costs an hour, from the spec's prices to the status that the API has and the operator's metric."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet_operator.cluster.interface import FLEET, POD, POOL
from fleet_operator.recorder import cost_of
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
        assert world.operator.cost_per_hour() is None
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
        assert world.operator.cost_per_hour() == 32.8
        assert await world.touch() == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("status", "found"),
    [
        ({"costPerHour": 4}, 4.0), ({"costPerHour": 4.5}, 4.5), ({"costPerHour": "4"}, None), ({"costPerHour": True}, None),
        ({}, None), ("x", None), (None, None),
    ],
)  # fmt: skip
def test_only_a_number_in_a_status_is_a_cost(status: Any, found: float | None):
    assert cost_of({"status": status}) == found
