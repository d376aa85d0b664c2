"""Two GPU nodes whose kubelets are process runtimes: `python -m e2e.kube.nodes KUBECONFIG STATE_DIR` until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from e2e.kube.controlplane import refuse_strangers
from fleet_operator.cluster.kube import KubeCluster
from fleet_operator.runtime.kubelet import ProcessKubelet

NODES = ("gpu-a", "gpu-b")
CAPACITY = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": "4"}
MANAGER = "fleet-process-runtime"


async def run(kubeconfig: Path, state_dir: Path) -> None:
    """Until cancelled."""
    refuse_strangers(kubeconfig)
    cluster = await KubeCluster.connect(kubeconfig, manager=MANAGER)
    env = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    try:
        async with asyncio.TaskGroup() as group:
            for name in NODES:
                kubelet = ProcessKubelet(cluster, name, CAPACITY, state_dir / name, env, api=cluster.access)
                group.create_task(kubelet.run())
    finally:
        await cluster.close()


async def _main() -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(run(Path(sys.argv[1]), Path(sys.argv[2])))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        logging.info("all pods of %s stopped", ", ".join(NODES))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(_main())
