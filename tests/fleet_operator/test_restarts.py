"""What an operator writes that starts anew: what is missing, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_operator.cluster.interface import POD
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

GPU = {"name": "t", "accelerator": {"type": "h100"}}
RESTING: dict[str, dict[str, Any]] = {
    "plain": {},
    "two-tiers": {"tiers": [{"name": "t", "accelerator": {"type": "cpu"}}, {"name": "u", "accelerator": {"type": "cpu"}}]},
    "gang": {"engine": {"type": "vllm"}, "tiers": [{**GPU, "parallelism": {"tensor": 2, "nodes": 2}}]},
    "claims": {"engine": {"type": "vllm"}, "tiers": [{**GPU, "kvTransfer": {"via": "dra", "dra": {"nic": "n"}}}]},
    "adapters": {"model": {"source": "file:///m", "adapters": [{"name": "a", "source": "file:///m/a"}]}},
    "budget": {"engine": {"type": "vllm"}, "tiers": [GPU], "scaling": {"budget": {"gpus": 3}}},
    "to-zero": {"scaling": {"toZero": {"enabled": True, "idle": "1m"}}},
}


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("more", [{}, {"rollout": {"paused": True}, "limits": {"maxOutputTokens": 99}}], ids=["", "held"])
@pytest.mark.parametrize("shape", RESTING)
def test_an_operator_that_starts_writes_nothing_to_a_fleet_at_rest(shape: str, more: dict[str, Any], load: bool):
    async def scenario(world: World) -> None:
        await world.user.apply(manifest(**RESTING[shape], **more))
        for second in range(20):
            if second == 10:
                world.operator = world.new_operator()
            if load:
                world.measure(1, 1)
            written = await world.step()
            assert second < 10 or not written

    play(scenario, **RESTING[shape])


def test_a_pod_that_was_lost_while_no_operator_ran_costs_two_writes_of_its_pool():
    """It was written once more: with the count before the new pod was made, by the pass that made it."""

    async def scenario(world: World) -> None:
        names = [pod["metadata"]["name"] for pod in await world.store.list(POD, NAMESPACE)]
        await world.user.delete(POD, NAMESPACE, next(name for name in names if "decode" in name), grace_s=0)
        world.operator = world.new_operator()
        written = [write for _ in range(4) for write in await world.step()]
        pool = (await world.pool("decode"))["metadata"]["name"]
        assert written.count(("status", "WorkerPool", pool)) == 2  # it is there, and it is ready
        assert (await world.pool("decode"))["status"]["readyReplicas"] == 2

    play(scenario)
