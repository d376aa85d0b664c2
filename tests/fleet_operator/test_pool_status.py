"""What a WorkerPool says of its workers."""

from __future__ import annotations

import asyncio

from fleet_operator.cluster.interface import POD
from fleet_operator.names import ROLE
from tests.fleet_operator.world import NAMESPACE, World, manifest


def test_workers_that_wait_for_their_partners_do_not_serve():
    """`kubectl get workerpools` said that they do: the column repeated the ready ones."""

    async def scenario() -> None:
        world, starting = World(), True
        await world.user.apply(manifest())
        kubelet = world.kubelet

        async def slow() -> None:
            """Prefill workers start for longer."""
            await kubelet()
            for pod in await world.store.list(POD, NAMESPACE):
                if starting and pod["metadata"]["labels"].get(ROLE) == "prefill":
                    await world.user.patch_status(POD, NAMESPACE, pod["metadata"]["name"], {"conditions": []})

        async def said(role: str) -> tuple[int, int]:
            status = (await world.pool(role))["status"]
            return status["readyReplicas"], status["servingReplicas"]

        world.kubelet = slow  # type: ignore[method-assign]
        for _ in range(6):
            await world.step()
        assert (await said("prefill"), await said("decode")) == ((0, 0), (2, 0))
        starting = False
        for pod in await world.store.list(POD, NAMESPACE):
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2001-09-09T01:46:40Z"}
            await world.user.patch_status(POD, NAMESPACE, pod["metadata"]["name"], {"conditions": [ready]})
        await world.settle()
        assert (await said("prefill"), await said("decode")) == ((1, 1), (2, 2))

    asyncio.run(scenario())
