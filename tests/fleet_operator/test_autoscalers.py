"""Two that move the same size: what operator/README.md says of an HPA beside the operator's own scaling."""

from __future__ import annotations

import asyncio

import pytest

from fleet_operator.cluster.interface import POOL
from tests.fleet_operator.world import NAMESPACE, World, manifest

HPA_S = 15.0
"""kube-controller-manager looks this often."""
SIZES = {"prefill": {"maxReplicas": 4}, "decode": {"maxReplicas": 8}}


async def decode_sizes(world: World, wish: int, looks: int) -> list[int]:
    """Sizes of decode, each time that it changed, while an HPA wants `wish` and nobody asks anything."""
    found = list[int]()
    for _ in range(looks):
        pool = await world.pool("decode")
        if pool["spec"]["replicas"] != wish:  # an HPA writes only what differs
            await world.user.patch(POOL, NAMESPACE, pool["metadata"]["name"], {"spec": {"replicas": wish}})
        world.measure(0, 0)
        await world.settle()
        world.now += HPA_S
        world.measure(0, 0)
        await world.touch()
        await world.settle()
        size = (await world.pool("decode"))["spec"]["replicas"]
        found += [size] if size != (found or [2])[-1] else []
    return found


@pytest.mark.parametrize(("mode", "moves"), [("manual", [6]), ("auto", [6, 1] * 3)])
def test_an_hpa_and_load_move_a_size_in_turn_unless_scaling_is_manual(mode: str, moves: list[int]):
    async def scenario() -> None:
        world = World()
        tiers = [{"name": "t", "accelerator": {"type": "cpu"}, **SIZES}]
        await world.user.apply(manifest(tiers=tiers, scaling={"mode": mode, "scaleDownWindow": "5m"}))
        await world.settle()
        looks = round(3.5 * 320 / HPA_S)
        assert (await decode_sizes(world, 6, looks))[:6] == moves

    asyncio.run(scenario())
