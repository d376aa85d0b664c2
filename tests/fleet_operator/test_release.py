"""A fleet whose finalizer nobody takes off any more: its user finds what to do."""

from __future__ import annotations

import asyncio

from fleet_api.v1alpha1.fleet import DRAIN
from fleet_operator.cluster.interface import FLEET
from tests.fleet_operator.world import NAMESPACE, World, manifest


def test_the_status_names_the_finalizer_before_anybody_needs_to_know_it():
    """Of a fleet that no operator watches any more nobody says anything: what was said before has to do."""

    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(deletion={"wait": "10m"}))
        await world.settle()
        accepted = await world.condition("Accepted")
        assert DRAIN in accepted["message"]
        assert "without one kubectl edit" in accepted["message"]
        world.new_operator()  # it watches others
        await world.user.delete(FLEET, NAMESPACE, "f")
        assert (await world.condition("Accepted"))["message"] == accepted["message"]
        await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"finalizers": []}})
        assert await world.exists(FLEET, "f") is False

    asyncio.run(scenario())
