"""Decode workers that are not ready for the moment, as the routers' document names them."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_api.conditions import rfc3339
from fleet_operator.cluster.interface import CONFIG_MAP, POD
from fleet_operator.names import ROLE
from fleet_planner.revisions import ABSENT_S
from fleet_wire.endpoints import ENDPOINTS_KEY, Endpoints, decode
from tests.fleet_operator.world import NAMESPACE, World, play


async def document(world: World) -> Endpoints:
    return decode((await world.store.get(CONFIG_MAP, NAMESPACE, "f-router"))["data"][ENDPOINTS_KEY])


async def worker(world: World, role: str) -> dict[str, Any]:
    pods = await world.store.list(POD, NAMESPACE)
    return next(pod for pod in pods if pod["metadata"]["labels"].get(ROLE) == role)


async def is_ready(world: World, pod: dict[str, Any], ready: bool) -> None:
    told = {"type": "Ready", "status": str(ready), "lastTransitionTime": rfc3339(world.now)}
    status = {**pod["status"], "conditions": [told]}
    await world.user.patch_status(POD, NAMESPACE, pod["metadata"]["name"], status)
    await world.step()
    await world.touch()


@pytest.mark.parametrize("restarts", [False, True], ids=["", "the operator starts again"])
def test_a_decode_worker_that_is_not_ready_is_named_for_a_while(restarts: bool):
    """A router that started then knew of nobody, and refused what others held."""

    async def go(world: World) -> None:
        pod = await worker(world, "decode")
        uid = pod["metadata"]["uid"]
        assert (await document(world)).absent == ()
        await is_ready(world, pod, False)
        if restarts:
            world.operator = world.new_operator()
            await world.touch()
        found = await document(world)
        assert [(one.uid, one.tier) for one in found.absent] == [(uid, "t")]
        assert uid not in {one.uid for one in found.workers}
        world.now += ABSENT_S - 10
        await world.touch()
        assert len((await document(world)).absent) == 1
        await is_ready(world, pod, True)
        assert (await document(world)).absent == ()
        await is_ready(world, pod, False)
        world.now += ABSENT_S
        await world.touch()
        await world.touch()
        assert (await document(world)).absent == ()

    play(go)


def test_who_never_served_or_goes_is_not_waited_for():
    async def go(world: World) -> None:
        prefill, decode_pod = await worker(world, "prefill"), await worker(world, "decode")
        await is_ready(world, prefill, False)
        assert (await document(world)).absent == ()  # requests do not need it
        await is_ready(world, prefill, True)
        await world.user.delete(POD, NAMESPACE, decode_pod["metadata"]["name"], grace_s=30)
        await world.touch()
        assert (await document(world)).absent == ()
        world.kubelet = _nothing  # type: ignore[method-assign]
        await world.user.delete(POD, NAMESPACE, decode_pod["metadata"]["name"], grace_s=0)
        await world.step()
        await world.touch()
        replacement = await worker(world, "decode")
        assert replacement["metadata"]["uid"] != decode_pod["metadata"]["uid"]
        assert (await document(world)).absent == ()  # it has yet to load its model

    play(go)


async def _nothing() -> None:
    """Pods that are made do not start."""
