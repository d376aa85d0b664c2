"""A kubelet without containers: `python -m e2e.faultproxy.kubelet KUBECONFIG [NETWORK]` registers a node, and every pod that the
scheduler binds to it, or to a node whose name begins like its, is Running and Ready at once; a deleted one is gone at once.
Addresses are of 127.200.0.0/16, where nobody answers, or NETWORK.0.0/16: an EndpointSlice takes no loopback address.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from e2e.kube.controlplane import refuse_strangers
from fleet_api.conditions import rfc3339
from fleet_operator.cluster.interface import NODE, POD, ClusterError, ConflictError, NotFoundError
from fleet_operator.cluster.kube import KubeCluster

NAME = "paper"
CAPACITY = {"cpu": "10000", "memory": "100Ti", "pods": "10000", "nvidia.com/gpu": "10000"}
ADDRESSES = count(1)
NETWORK = "127.200"
BROKEN, CRASHING = ":broken", ":crashing"
"""Pods whose image ends like this are never ready, or end again and again."""
RESTARTS = 5


async def run(kubeconfig: Path, network: str = NETWORK) -> None:
    """Until cancelled."""
    refuse_strangers(kubeconfig)
    cluster = await KubeCluster.connect(kubeconfig, manager="paper-kubelet")
    try:
        await cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NAME}})
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "paper", "lastTransitionTime": _now(),
                 "lastHeartbeatTime": _now()}  # fmt: skip
        await cluster.patch_status(NODE, None, NAME, {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": [ready]})
        print("node registered", flush=True)
        done: dict[str, str] = {}
        async for event in cluster.watch(POD):
            if event.type in ("SYNCED", "DELETED"):
                continue
            try:
                await _one(cluster, event.object, done, network)
            except (NotFoundError, ConflictError):
                continue
            except ClusterError as error:
                print(error, flush=True)
    finally:
        await cluster.close()


async def _one(cluster: KubeCluster, pod: dict[str, Any], done: dict[str, str], network: str) -> None:
    meta, spec = pod["metadata"], pod["spec"]
    if not (spec.get("nodeName") or "").startswith(NAME):
        return
    if "deletionTimestamp" in meta:
        await cluster.delete(POD, meta["namespace"], meta["name"], uid=meta["uid"], grace_s=0)
        return
    wish = "False" if spec["containers"][0]["image"].endswith((BROKEN, CRASHING)) else "True"
    if done.get(meta["uid"]) == wish:
        return
    done[meta["uid"]] = wish
    await cluster.patch_status(POD, meta["namespace"], meta["name"], _status(pod, wish, network))


def _status(pod: dict[str, Any], ready: str, network: str) -> dict[str, Any]:
    number = next(ADDRESSES)
    address = f"{network}.{number // 250 % 250}.{number % 250 + 1}"
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    container = {"name": pod["spec"]["containers"][0]["name"], "ready": ready == "True", "started": True, "restartCount": 0,
                 "image": "", "imageID": "", "state": {"running": {"startedAt": _now()}}}  # fmt: skip
    if pod["spec"]["containers"][0]["image"].endswith(CRASHING):
        container |= {"started": False, "restartCount": RESTARTS, **_crashed()}
    return {
        "phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "hostIP": "127.0.0.1", "startTime": _now(),
        "conditions": [
            {"type": kind, "status": ready if "eady" in kind else "True", "lastTransitionTime": _now()} for kind in kinds
        ],
        "containerStatuses": [container],
    }  # fmt: skip


def _crashed() -> dict[str, Any]:
    """As a kubelet tells it between two attempts."""
    back_off = {"reason": "CrashLoopBackOff", "message": "back-off 2m40s restarting failed container"}
    ended = {"exitCode": 1, "reason": "Error", "message": "EngineDied: no such device", "startedAt": _now(), "finishedAt": _now()}
    return {"state": {"waiting": back_off}, "lastState": {"terminated": ended}}


def _now() -> str:
    return rfc3339(time.time())


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(Path(sys.argv[1]), *sys.argv[2:]))
