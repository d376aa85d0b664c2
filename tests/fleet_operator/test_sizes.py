"""How large the fleet object gets: etcd takes 1.5 MiB, whatever a fleet has and whatever its pods say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet_api.v1alpha1.fleet import RESOLVED_MOST_BYTES
from fleet_operator.cluster.interface import CONFIG_MAP, FLEET, POD
from fleet_operator.names import ROLE
from fleet_planner.roles import ROLES
from tests.fleet_operator.world import NAMESPACE, World, manifest

SERVING_MOST_BYTES = 8_192
FAILING_MOST_BYTES = 32_768
"""A dozen conditions with three causes each, of a kibibyte each."""
STATUS_MOST_BYTES = 65_536


async def large(workers: int, **tier: Any) -> World:
    """So many of each role."""
    world, each = World(), {"replicas": workers, "minReplicas": workers, "maxReplicas": workers}
    roles = {role: {**each, **tier} for role in ROLES}
    one = {"name": "t", "accelerator": {"type": "cpu"}, "ratio": {"prefill": 1, "decode": 1, "min": "1:1", "max": "1:1"}, **roles}
    await world.user.apply(manifest(tiers=[one], scaling={"mode": "manual"}))
    for _ in range(6):
        await world.step()
    return world


async def bytes_of(world: World) -> tuple[int, dict[str, Any]]:
    status = (await world.store.get(FLEET, NAMESPACE, "f"))["status"]
    return len(json.dumps(status)), status


@pytest.mark.parametrize("workers", [2, 250])
def test_a_status_does_not_grow_with_the_workers(workers: int):
    async def scenario() -> None:
        world = await large(workers)
        size, status = await bytes_of(world)
        assert (await world.condition("Ready"))["status"] == "True"
        assert status["tiers"][0]["decode"]["serving"] == workers
        assert size < SERVING_MOST_BYTES
        documents = await world.store.get(CONFIG_MAP, NAMESPACE, "f-router")
        assert sum(map(len, documents["data"].values())) < 4_096 + workers * 2 * 512, "nor a worker in the routers' document"

    asyncio.run(scenario())


def test_what_pods_say_does_not_fill_it():
    """500 workers, each with words of its own."""

    async def scenario() -> None:
        world = await large(250)
        for pod in [pod for pod in await world.store.list(POD, NAMESPACE) if pod["metadata"]["labels"].get(ROLE) in ROLES]:
            waiting = {"reason": "CrashLoopBackOff", "message": pod["metadata"]["name"] * 40}
            ended = {"exitCode": 1, "reason": "Error", "message": f"{pod['metadata']['name']} {'y' * 4_000}"}
            container = {"name": "worker", "ready": False, "restartCount": 9, "state": {"waiting": waiting}}
            container["lastState"] = {"terminated": ended}
            ready = {"type": "Ready", "status": "False", "lastTransitionTime": "1970-01-12T13:46:41Z"}
            status = {"phase": "Running", "conditions": [ready], "containerStatuses": [container]}
            await world.user.patch_status(POD, NAMESPACE, pod["metadata"]["name"], status)
        for _ in range(4):
            await world.step()
        size, _ = await bytes_of(world)
        assert (await world.condition("Available"))["reason"] == "WorkersFailing"
        assert size < FAILING_MOST_BYTES

    asyncio.run(scenario())


def test_a_large_spec_is_not_written_a_second_time():
    """Half a mebibyte of environment was a status of as much, and an apply by kubectl a third one: such a status is refused."""

    async def scenario() -> None:
        env = [{"name": f"E{number}", "value": "v" * 4_000} for number in range(64)]
        world = await large(2, podTemplate={"env": env})
        size, status = await bytes_of(world)
        assert len(json.dumps((await world.store.get(FLEET, NAMESPACE, "f"))["spec"])) > 2 * RESOLVED_MOST_BYTES * 0.9
        assert (await world.condition("Ready"))["status"] == "True"
        assert list(status["resolved"]) == ["leftOut"]
        assert size < STATUS_MOST_BYTES
        small = [{"name": "E", "value": "v"}]
        tiers = (await world.store.get(FLEET, NAMESPACE, "f"))["spec"]["tiers"]
        for role in ROLES:
            tiers[0][role]["podTemplate"] = {"env": small}
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"tiers": tiers}})
        for _ in range(4):
            await world.step()
        _, status = await bytes_of(world)
        assert "leftOut" not in status["resolved"]
        assert status["resolved"]["tiers"][0]["decode"]["podTemplate"]["env"] == small

    asyncio.run(scenario())
