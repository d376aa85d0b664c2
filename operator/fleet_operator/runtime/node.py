"""The node that a process runtime pretends to be: Node object, Ready condition, lease heartbeats."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fleet_operator.cluster.interface import NODE, Cluster, ClusterError, Object
from fleet_operator.cluster.kinds import LEASE
from fleet_operator.runtime.container import timestamp

logger = logging.getLogger(__name__)
LEASE_S = 40


class NodeHeart:
    """Registers the node, then keeps its lease fresh until cancelled."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        capacity: Mapping[str, str],
        heartbeat_s: float,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._capacity = {"cpu": str(os.cpu_count() or 1), "memory": "16Gi", "pods": "110", **capacity}
        self._heartbeat_s = heartbeat_s
        self._labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})}

    async def register(self) -> None:
        """Create or update the Node and say that it is Ready; ClusterError."""
        metadata = {"name": self._name, "labels": dict(self._labels)}
        await self._cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}})
        await self._renew()
        await self._cluster.patch_status(NODE, None, self._name, self._status())

    async def beat(self) -> None:
        """Renew the lease for ever."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            try:
                await self._renew()
            except ClusterError as error:
                logger.warning("node=%s heartbeat failed: %s", self._name, error)

    async def leave(self) -> None:
        """Say that the node is no longer ready, so that nobody binds pods to it."""
        conditions = [_ready(False, "the process runtime has stopped")]
        try:
            await self._cluster.patch_status(NODE, None, self._name, {"conditions": conditions})
        except ClusterError as error:
            logger.info("node=%s could not say good-bye: %s", self._name, error)

    def _status(self) -> Object:
        return {
            "capacity": dict(self._capacity),
            "allocatable": dict(self._capacity),
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": self._name}],
            "conditions": [_ready(True, "the process runtime is running")],
            "nodeInfo": _node_info(),
        }

    async def _renew(self) -> None:
        now = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self._name, "leaseDurationSeconds": LEASE_S, "renewTime": now}
        metadata = {"name": self._name, "namespace": "kube-node-lease"}
        await self._cluster.apply({"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec})


def _ready(ready: bool, message: str) -> Object:
    now = timestamp(time.time())
    return {
        "type": "Ready",
        "status": "True" if ready else "False",
        "reason": "KubeletReady" if ready else "KubeletNotReady",
        "message": message,
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }


def _node_info() -> dict[str, Any]:
    unknown = ("machineID", "systemUUID", "bootID", "kubeProxyVersion")
    return {
        **dict.fromkeys(unknown, ""),
        "architecture": "amd64" if platform.machine() == "x86_64" else "arm64",
        "containerRuntimeVersion": "process://1",
        "kernelVersion": platform.release(),
        "kubeletVersion": "v1.36.0-process-runtime",
        "operatingSystem": "linux",
        "osImage": "local processes",
    }
