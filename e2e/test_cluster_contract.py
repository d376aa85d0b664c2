"""The Kubernetes implementation keeps the same contract as the in-memory store, on a real API server."""

import asyncio

import pytest

from fleet_operator.cluster.kube import KubeCluster
from tests.fleet_operator.cluster import contract, contract_status

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("promise", [*contract.PROMISES, *contract_status.PROMISES], ids=lambda check: check.__name__)
def test_contract(promise, control_plane, namespace):
    async def scenario() -> None:
        cluster = await KubeCluster.connect(control_plane.kubeconfig)
        try:
            await promise(contract.Store(cluster, cluster.writer("somebody-else"), namespace, 0.05))
        finally:
            await cluster.close()

    asyncio.run(scenario())
