"""controller.kubernetes.io/pod-deletion-cost at a scale-down, as a user writes it."""

from __future__ import annotations

import pytest

from fleet_operator.cluster.interface import POD, POOL
from tests.fleet_operator.world import NAMESPACE, World, play


@pytest.mark.parametrize(
    ("costs", "gone"),
    [
        pytest.param({}, {"2"}, id="equal-the-last-made"),
        pytest.param({"0": "-100"}, {"0"}, id="the-cheapest"),
        pytest.param({"2": "1"}, {"0"}, id="the-dear-one-stays"),
        pytest.param({"0": "-5", "1": "-9"}, {"1"}, id="the-cheaper-of-two"),
        pytest.param({"0": "none of it"}, {"2"}, id="a-word-costs-nothing"),
    ],
)
def test_of_workers_that_may_go_the_one_with_the_lowest_deletion_cost_goes(costs: dict[str, str], gone: set[str]):
    async def scenario(world: World) -> None:
        pool = (await world.pool("decode"))["metadata"]["name"]
        await world.user.patch(POOL, NAMESPACE, pool, {"spec": {"replicas": 3}})
        await world.settle()
        for place, cost in costs.items():
            notes = {"controller.kubernetes.io/pod-deletion-cost": cost}
            await world.user.patch(POD, NAMESPACE, f"{pool}-{place}", {"metadata": {"annotations": notes}})
        await world.settle()
        await world.user.patch(POOL, NAMESPACE, pool, {"spec": {"replicas": 2}})
        await world.settle()
        left = {pod["metadata"]["name"] for pod in await world.store.list(POD, NAMESPACE)}
        assert {f"{pool}-{place}" for place in "012"} - left == {f"{pool}-{place}" for place in gone}

    play(scenario, scaling={"mode": "manual"})
