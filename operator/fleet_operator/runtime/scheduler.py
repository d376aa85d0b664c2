"""Binds pods to nodes for the in-memory store: first node with room, counting cpu, memory, pods and devices."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from fleet_operator.cluster.interface import POD, ClusterError, Object
from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.runtime.container import timestamp

logger = logging.getLogger(__name__)
Resources = dict[str, Decimal]
_SUFFIXES = {
    "m": Decimal("0.001"), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
}  # fmt: skip


class MemoryScheduler:
    """`nodes` maps node names to capacity, as the kubelets' `capacity`; a resource that a node does not name is absent."""

    def __init__(self, cluster: MemoryCluster, nodes: Mapping[str, Mapping[str, str]]) -> None:
        self._cluster = cluster
        self._nodes = {name: {key: quantity(text) for key, text in has.items()} for name, has in nodes.items()}

    async def run(self) -> None:
        """Until cancelled: one pass whenever a pod appears, changes or leaves."""
        async for event in self._cluster.watch(POD):
            if event.type in ("ADDED", "SYNCED", "DELETED") or not event.object["spec"].get("nodeName"):
                await self.schedule()

    async def schedule(self) -> None:
        """Bind every pod that fits somewhere; tell the others why not."""
        pods = await self._cluster.list(POD)
        for pod in pods:
            if pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
                continue
            where = (pod["metadata"]["namespace"], pod["metadata"]["name"])
            node, reason = choose(pod, pods, self._nodes)
            try:
                if node is not None:
                    bound = await self._cluster.bind(*where, node)
                    pod["spec"]["nodeName"] = bound["spec"]["nodeName"]
                else:
                    await self._refuse(pod, reason)
            except ClusterError as error:
                logger.info("pod=%s/%s not scheduled: %s", *where, error)

    async def _refuse(self, pod: Object, message: str) -> None:
        known = (pod.get("status") or {}).get("conditions") or []
        if any(condition["type"] == "PodScheduled" and condition.get("message") == message for condition in known):
            return
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        condition["lastTransitionTime"] = timestamp(self._cluster.now())
        status = {"conditions": [condition]}
        await self._cluster.patch_status(POD, pod["metadata"]["namespace"], pod["metadata"]["name"], status)


def choose(pod: Object, pods: list[Object], nodes: Mapping[str, Resources]) -> tuple[str | None, str]:
    """Pure: the node with the most free room that fits, else None and the scheduler's words."""
    wanted = requests(pod)
    lacking: Counter[str] = Counter()
    fitting: list[tuple[int, str]] = []
    for name, capacity in nodes.items():
        there = [other for other in pods if other["spec"].get("nodeName") == name and not _ended(other)]
        used: Counter[str] = Counter()
        for other in there:
            used.update(requests(other))
        short = [key for key, amount in wanted.items() if _is_short(key, amount, capacity, used)]
        lacking.update(short)
        if not short:
            fitting.append((len(there), name))
    if fitting:
        return min(fitting)[1], ""
    reasons = ", ".join(f"{count} {_words(key)}" for key, count in sorted(lacking.items()))
    return None, f"0/{len(nodes)} nodes are available: {reasons}."


def requests(pod: Object) -> Resources:
    """What a pod asks for, summed over its containers; one of `pods`."""
    total: Resources = {"pods": Decimal(1)}
    for container in pod["spec"].get("containers") or []:
        resources: dict[str, Any] = container.get("resources") or {}
        for key, text in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            total[key] = total.get(key, Decimal(0)) + quantity(text)
    return total


def quantity(text: str | int | float) -> Decimal:
    """A Kubernetes quantity as a number; decimal.InvalidOperation for anything else."""
    raw = str(text)
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if raw.endswith(suffix):
            return Decimal(raw[: -len(suffix)]) * _SUFFIXES[suffix]
    return Decimal(raw)


def _is_short(key: str, amount: Decimal, capacity: Mapping[str, Decimal], used: Mapping[str, Any]) -> bool:
    """cpu, memory and pods that a node does not name are unlimited; a device that it does not name is absent."""
    if key not in capacity:
        return "/" in key and amount > 0
    return Decimal(used.get(key, 0)) + amount > capacity[key]


def _words(key: str) -> str:
    return "Too many pods" if key == "pods" else f"Insufficient {key}"


def _ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
