"""Replacements that the scheduler sends to the very node that goes away: a condition keeps nobody from it, nor does a taint those
who tolerate it."""

from __future__ import annotations

import asyncio
from collections import Counter

from fleet_operator.cluster.interface import NODE, POD, POOL, WatchEvent
from fleet_operator.turned_away import MOST_S
from fleet_planner.replicas import LATE_MOST
from tests.fleet_operator.test_nodes import node, told
from tests.fleet_operator.world import NAMESPACE, World, manifest

SICK = node("bad", AcceleratedHardwareReady="False")


class Scheduler(World):
    """Prefers the bad node, while it has a device; then the others."""

    devices = 4
    rest = "other"

    async def kubelet(self) -> None:
        used = Counter(pod["spec"].get("nodeName") for pod in await self.store.list(POD, NAMESPACE))
        waiting = [pod["metadata"]["name"] for pod in await self.store.list(POD, NAMESPACE) if not pod["spec"].get("nodeName")]
        free = max(0, self.devices - used["bad"])
        self.node, self.late = "bad", set(waiting[free:])
        await super().kubelet()
        if self.rest:
            self.node, self.late = self.rest, set()
            await super().kubelet()

    async def no_room(self) -> None:
        """As a scheduler says it of those that find no node."""
        for pod in await self.store.list(POD, NAMESPACE):
            if not pod["spec"].get("nodeName"):
                told = {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/2 nodes are available",
                }
                await self.user.patch_status(POD, NAMESPACE, pod["metadata"]["name"], {"phase": "Pending", "conditions": [told]})

    async def begin(self) -> None:
        """Three decode workers, one of them on the node that is bad from now on."""
        devices, self.devices = self.devices, 0
        await self.user.apply(manifest(scaling={"mode": "manual"}))
        await self.settle()
        self.devices = 1
        pool = await self.pool("decode")
        await self.user.patch(POOL, NAMESPACE, pool["metadata"]["name"], {"spec": {"replicas": 3}})
        await self.settle()
        self.devices = devices
        self.operator.feed(NODE, WatchEvent("MODIFIED", SICK))

    async def made(self, seconds: int) -> int:
        """Pods that were made meanwhile."""
        return sum([[write[:2] for write in await self.step()].count(("create", "Pod")) for _ in range(seconds)])


def test_a_worker_gets_off_a_bad_node_that_has_room_for_its_replacement():
    """The one in its place came to the same node, was deleted at once as one too many, and so was the next, for ever."""

    async def scenario() -> None:
        world = Scheduler()
        await world.begin()
        assert await world.made(120) <= 12
        states = await told(world)
        assert list(states.values()) == ["serving"] * 4
        nodes = [pod["spec"]["nodeName"] for pod in await world.store.list(POD, NAMESPACE)]
        assert "bad" not in nodes
        assert await world.made(60) == 0

    asyncio.run(scenario())


def test_where_no_other_node_has_room_the_bad_one_is_not_asked_in_a_loop():
    async def scenario() -> None:
        world = Scheduler()
        await world.begin()
        world.rest = ""
        await world.made(int(MOST_S) * 3)
        assert await world.made(int(MOST_S) * 5) <= 5 * world.devices
        pods = await world.store.list(POD, NAMESPACE)
        assert len(pods) <= 1 + 3 + world.devices
        assert sorted((await told(world)).values()).count("serving") == 3

    asyncio.run(scenario())


def test_bad_nodes_with_much_room_are_not_filled_with_replacements():
    async def scenario() -> None:
        world = Scheduler()
        await world.begin()
        world.devices = 1_000
        most = 0
        for _ in range(90):
            await world.step()
            most = max(most, len(await world.store.list(POD, NAMESPACE)))
        assert LATE_MOST <= most <= 4 + LATE_MOST + 3

    asyncio.run(scenario())


def test_where_replacements_find_no_node_the_status_says_for_whose_sake_they_are_made():
    """It said that pods of a fleet that nobody had changed could not be scheduled, and AllGood: no word of the nodes."""

    async def scenario() -> None:
        world = Scheduler()
        await world.begin()
        world.rest, world.devices = "", 0
        await world.made(2)
        await world.no_room()
        await world.made(2)
        told = await world.condition("CapacityLimited")
        assert told["reason"] == "Unschedulable"
        why = "node bad has condition AcceleratedHardwareReady=False"
        assert told["message"].endswith(f"0/2 nodes are available; to be replaced: f-t-decode-7815bff2-2: {why}")

    asyncio.run(scenario())
