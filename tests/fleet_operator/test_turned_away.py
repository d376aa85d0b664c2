"""Pods that their node's kubelet turns away before anything of them runs (UnexpectedAdmissionError, OutOfcpu, NodeAffinity)."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from fleet_operator.cluster.interface import POD
from fleet_operator.names import ROLE
from fleet_operator.turned_away import FIRST_S, MOST_S
from tests.fleet_operator.world import NAMESPACE, World, manifest

WHY = "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu"
REJECTED = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": WHY}
EVICTED = {
    "phase": "Failed",
    "reason": "Evicted",
    "message": "The node was low on resource: memory.",
    "containerStatuses": [{"name": "worker", "containerID": "containerd://1", "state": {"terminated": {"exitCode": 137}}}],
}


class Node(World):
    """Its device plugin is not back yet: what is bound to it is turned away at once."""

    rejects = "decode"

    async def kubelet(self) -> None:
        for pod in await self.store.list(POD, NAMESPACE):
            name, meta = pod["metadata"]["name"], pod["metadata"]
            if meta["labels"].get(ROLE) == self.rejects and not pod["spec"].get("nodeName"):
                await self.user.bind(NAMESPACE, name, self.node)
                await self.user.patch_status(POD, NAMESPACE, name, REJECTED)
        await super().kubelet()

    async def made(self, seconds: int) -> list[int]:
        """Seconds in which workers were made."""
        return [second for second in range(seconds) if ("create", "Pod") in [write[:2] for write in await self.step()]]


def test_a_node_that_turns_workers_away_is_not_asked_in_a_loop_and_the_status_says_why():
    """Each was deleted and made again in the next pass, several times a second and for ever, and no word of the kubelet's was
    told: the status said that workers start."""

    async def scenario() -> None:
        world = Node()
        await world.user.apply(manifest())
        times = await world.made(300)
        gaps = [after - before for before, after in pairwise(times)]
        assert gaps[0] <= FIRST_S + 2
        assert max(gaps) <= MOST_S + 2
        assert len(times) <= 16
        available = await world.condition("Available")
        assert available["reason"] == "WorkersFailing"
        assert f"UnexpectedAdmissionError: {WHY}" in available["message"]
        assert any(f"(its phase is Failed: UnexpectedAdmissionError: {WHY}" in line for line in await world.events())
        world.rejects = ""
        await world.made(int(MOST_S) + 5)
        assert (await world.condition("Available"))["reason"] != "WorkersFailing"
        assert await world.workers() == {"prefill": 1, "decode": 2}
        assert {pod["status"]["phase"] for pod in await world.store.list(POD, NAMESPACE)} == {"Running"}

    asyncio.run(scenario())


def test_one_that_ran_and_was_evicted_is_replaced_at_once_and_its_event_says_why():
    async def scenario() -> None:
        world = Node()
        world.rejects = ""
        await world.user.apply(manifest())
        await world.settle()
        (victim, *_) = [pod["metadata"]["name"] for pod in await world.store.list(POD, NAMESPACE)]
        await world.user.patch_status(POD, NAMESPACE, victim, {**EVICTED, "conditions": []})
        assert await world.made(1) == [0]
        words = f"{victim} (its phase is Failed: Evicted: The node was low on resource: memory.)"
        assert any(words in line for line in await world.events())

    asyncio.run(scenario())


def test_what_is_not_wanted_any_more_does_not_wait():
    async def scenario() -> None:
        world = Node()
        await world.user.apply(manifest())
        await world.made(100)
        fleet: dict[str, Any] = manifest(scaling={"toZero": {"enabled": True, "idle": "1m"}})
        fleet["spec"]["tiers"][0]["decode"] = {"minReplicas": 1, "maxReplicas": 1}
        fleet["spec"]["tiers"][0]["ratio"] = {"prefill": 1, "decode": 1}
        await world.user.apply(fleet)
        await world.step()
        await world.step()
        assert (await world.workers())["decode"] <= 1

    asyncio.run(scenario())
