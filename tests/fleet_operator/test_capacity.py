"""Backing out as the operator does it, on the in-memory store: a quota that appears, moves and goes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fleet_operator.cluster.interface import FLEET, NODE, POD, POOL, SERVICE, ClusterError, ForbiddenError, Kind, WatchEvent
from fleet_operator.names import ROLE, TIER
from fleet_planner.roles import ROLES
from tests.fleet_operator.world import NAMESPACE, World, manifest

WAIT_S = 20
MANUAL = {"mode": "manual", "capacityWait": f"{WAIT_S}s"}
AUTO = {"capacityWait": f"{WAIT_S}s", "scaleDownWindow": "5s"}


class Quota:
    """A ResourceQuota over pods of workers; None: there is none."""

    def __init__(self, world: World) -> None:
        self.world, self.limit, self.used, self.tried = world, None, 0, list[str]()
        self.also: Kind | None = None
        """Another kind that is refused, too."""
        self.load: tuple[float, float] | None = None
        world.api.refuse = self.refuse

    limit: int | None

    def refuse(self, verb: str, kind: Kind, name: str) -> ClusterError | None:
        words = (
            f'{kind.plural} "{name}" is forbidden: exceeded quota: gpus, requested: 1, used: {self.used}, limited: {self.limit}'
        )
        if kind == self.also and verb in ("create", "apply"):
            return ForbiddenError(words)
        if kind != POD or verb != "create":
            return None
        self.tried.append(name)
        if self.limit is not None and self.used >= self.limit:
            return ForbiddenError(words)
        self.used += 1
        return None

    async def seconds(self, count: int) -> set[tuple[int, int]]:
        """The sizes that were planned."""
        found = set()
        for _ in range(count):
            pods = await self.world.store.list(POD, NAMESPACE)
            self.used = sum("inferencefleet.io/role" in pod["metadata"]["labels"] for pod in pods)
            if self.load is not None:
                self.world.measure(*self.load)
            self.world.operator.touch((NAMESPACE, "f"))
            await self.world.step()
            found.add(await self.size())
        return found

    async def size(self, tier: int = 0) -> tuple[int, int]:
        status = (await self.world.store.get(FLEET, NAMESPACE, "f"))["status"]["tiers"][tier]
        return status["prefill"]["desired"], status["decode"]["desired"]


def play(scenario: Callable[[World, Quota], Awaitable[None]], **spec: Any) -> None:
    async def whole() -> None:
        world = World()
        await world.user.apply(manifest(**spec))
        await world.settle()
        await scenario(world, Quota(world))

    asyncio.run(whole())


async def scale(world: World, decode: int) -> None:
    name = (await world.pool("decode"))["metadata"]["name"]
    await world.user.patch(POOL, NAMESPACE, name, {"spec": {"replicas": decode}})


@pytest.mark.parametrize("mode", ["manual", "auto", "auto-without-telemetry"])
def test_a_quota_is_backed_out_of_tried_again_and_grown_into(mode: str):
    """From the refusal on: no worker of the other role is stranded, what was asked for is kept, and had when the quota allows."""

    async def go(world: World, quota: Quota) -> None:
        quota.limit = 6
        if mode == "auto":
            quota.load = (2 * 4.0, 8 * 16.0)
        else:
            await scale(world, 8)
        await quota.seconds(5)
        size = await quota.size()
        assert size == (2, 4), "creations come in the wanted ratio: what fits of it serves"
        assert await world.workers() == {"prefill": 2, "decode": 4}
        limited = await world.condition("CapacityLimited")
        assert (limited["status"], limited["reason"]) == ("True", "BackedOut")
        assert "exceeded quota: gpus" in limited["message"]
        assert "tried again at" in limited["message"]
        quota.tried.clear()
        assert await quota.seconds(WAIT_S // 2) == {(2, 4)}
        assert quota.tried == []
        await quota.seconds(2 * WAIT_S)
        assert quota.tried, "it is tried again"
        assert await world.workers() == {"prefill": 2, "decode": 4}
        quota.limit = 8  # half of what is missing
        await quota.seconds(2 * WAIT_S)
        quota.limit = None
        await quota.seconds(2 * WAIT_S)
        assert await world.workers() == {"prefill": 2, "decode": 8}
        limited = await world.condition("CapacityLimited")
        assert (limited["status"], limited["reason"]) == ("False", "Sufficient")

    play(go, scaling=MANUAL if mode == "manual" else AUTO)


def test_an_operator_that_starts_while_a_quota_caps_keeps_what_was_asked_for():
    async def go(world: World, quota: Quota) -> None:
        quota.limit = 6
        await scale(world, 8)
        await quota.seconds(5)
        world.operator = world.new_operator()
        await quota.seconds(WAIT_S // 2)
        assert await quota.size() == (2, 4)
        quota.limit = None
        await quota.seconds(2 * WAIT_S)
        assert await world.workers() == {"prefill": 2, "decode": 8}
        notes = [pool["metadata"]["annotations"] for pool in await world.store.list(POOL, NAMESPACE)]
        assert not any("inferencefleet.io/wish" in note for note in notes), "what is had needs no note"

    play(go, scaling=MANUAL)


def test_another_objects_quota_takes_no_worker():
    """`exceeded quota` of the Service capped the tier that was growing at that moment."""

    async def go(world: World, quota: Quota) -> None:
        quota.also = SERVICE
        await world.user.delete(SERVICE, NAMESPACE, "f-router")
        await quota.seconds(2)
        assert (await world.condition("Provisioned"))["reason"] == "ApplyFailed"
        await scale(world, 8)
        await quota.seconds(5)
        assert await world.workers() == {"prefill": 2, "decode": 8}

    play(go, scaling=MANUAL)


def test_one_tiers_quota_takes_no_worker_of_another():
    async def go(world: World, quota: Quota) -> None:
        pools = await world.store.list(POOL, NAMESPACE)
        names = {pool["spec"]["tier"]: pool["metadata"]["name"] for pool in pools if pool["spec"]["role"] == "decode"}
        refuse = quota.refuse

        def only_a(verb: str, kind: Kind, name: str) -> ClusterError | None:
            return refuse(verb, kind, name) if name.startswith("f-a-") else None

        world.api.refuse, quota.limit = only_a, 0
        for tier in ("a", "b"):  # what was refused of the first is known when the second grows
            await world.user.patch(POOL, NAMESPACE, names[tier], {"spec": {"replicas": 4}})
            await quota.seconds(1)
        await quota.seconds(4)
        assert (await quota.size(0), await quota.size(1)) == ((1, 2), (1, 4))
        pods = await world.store.list(POD, NAMESPACE)
        decode = [pod["metadata"]["labels"][TIER] for pod in pods if pod["metadata"]["labels"].get(ROLE) == "decode"]
        assert (decode.count("a"), decode.count("b")) == (2, 4)

    tiers = [{"name": name, "accelerator": {"type": "cpu"}} for name in ("a", "b")]
    play(go, scaling=MANUAL, tiers=tiers)


def test_a_replacement_that_a_quota_refuses_is_not_asked_for_in_every_pass():
    """Incident: beside a node that goes away nothing is backed out of (the worker on it counts), and each pass asked again."""

    async def go(world: World, quota: Quota) -> None:
        world.operator.feed(NODE, WatchEvent("ADDED", {"metadata": {"name": "node"}, "spec": {"unschedulable": True}}))
        quota.limit = 3
        await quota.seconds(10)
        quota.tried.clear()
        await quota.seconds(300)
        limited = await world.condition("CapacityLimited")
        assert (limited["status"], limited["reason"]) == ("True", "QuotaExceeded"), "it is told all the time"
        tried = Counter(quota.tried)
        assert len(tried) == 3, "the replacements of all three are wanted"
        assert {count for count in tried.values() if not 9 <= count <= 11} == set(), "each 30 s"
        quota.limit, world.node = 6, "other"
        await quota.seconds(35)
        pods = await world.store.list(POD, NAMESPACE)
        assert {pod["spec"]["nodeName"] for pod in pods if pod["metadata"]["labels"].get(ROLE) in ROLES} == {"other"}

    play(go, scaling={"mode": "manual", "capacityWait": "5m"})


def test_what_a_quota_refuses_of_growth_makes_no_fleet_unready():
    """At each try a fleet that served and was backed out said Ready False for a pass, and the time of Ready moved."""

    async def go(world: World, quota: Quota) -> None:
        quota.limit = 6
        since = (await world.condition("Ready"))["lastTransitionTime"]
        await scale(world, 8)
        await quota.seconds(3 * WAIT_S)
        assert quota.tried.count(quota.tried[-1]) >= 2, "it was tried again"
        ready = await world.condition("Ready")
        assert (ready["status"], ready["lastTransitionTime"]) == ("True", since)

    play(go, scaling=MANUAL)
