"""A minimal Deployment controller for the in-memory store: replicas become pods, a changed template replaces them.

A cluster has the real one. Pods belong to the Deployment directly, without a ReplicaSet between.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from typing import Any

from fleet_operator.cluster.interface import DEPLOYMENT, POD, ClusterError, NotFoundError, Object
from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.runtime.container import timestamp

logger = logging.getLogger(__name__)
HASH_LABEL = "pod-template-hash"


class DeploymentController:
    """Follows Deployments and their pods until `run` is cancelled."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster.writer("deployment-controller")

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_deployments())
            group.create_task(self._follow_pods())

    async def _follow_deployments(self) -> None:
        async for event in self._cluster.watch(DEPLOYMENT):
            if event.type in ("ADDED", "MODIFIED"):
                await self._reconcile(event.object["metadata"]["namespace"], event.object["metadata"]["name"])

    async def _follow_pods(self) -> None:
        async for event in self._cluster.watch(POD):
            for owner in event.object.get("metadata", {}).get("ownerReferences") or []:
                if owner["kind"] == "Deployment":
                    await self._reconcile(event.object["metadata"]["namespace"], owner["name"])

    async def _reconcile(self, namespace: str, name: str) -> None:
        try:
            deployment = await self._cluster.get(DEPLOYMENT, namespace, name)
            if "deletionTimestamp" in deployment["metadata"]:
                return
            pods = [pod for pod in await self._cluster.list(POD, namespace) if _is_owned(pod, deployment)]
            await self._act(deployment, pods)
            await self._cluster.patch_status(DEPLOYMENT, namespace, name, _status(deployment, pods, self._cluster.now()))
        except NotFoundError:
            return
        except ClusterError as error:
            logger.warning("deployment=%s/%s: %s", namespace, name, error)

    async def _act(self, deployment: Object, pods: list[Object]) -> None:
        create, delete = plan(deployment, pods)
        for pod in create:
            await self._cluster.apply(pod)
        for name in delete:
            await self._cluster.delete(POD, deployment["metadata"]["namespace"], name)


def plan(deployment: Object, pods: list[Object]) -> tuple[list[Object], list[str]]:
    """Pure: pods to create and names to delete. An old pod goes when as many new ones are ready, so nothing is lost."""
    replicas = int(deployment["spec"].get("replicas", 1))
    revision = template_hash(deployment)
    staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    new = [pod for pod in staying if (pod["metadata"].get("labels") or {}).get(HASH_LABEL) == revision]
    old = [pod for pod in staying if pod not in new]
    taken = {pod["metadata"]["name"] for pod in pods}
    names = (f"{deployment['metadata']['name']}-{revision}-{index}" for index in range(replicas + len(taken)))
    free = [name for name in names if name not in taken]
    failed = [pod["metadata"]["name"] for pod in new if (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")]
    create = [_pod(deployment, name, revision) for name in free[: max(0, replicas - len(new) + len(failed))]]
    surplus = [pod["metadata"]["name"] for pod in sorted(new, key=is_ready)[: max(0, len(new) - replicas)]]
    ready = sum(is_ready(pod) for pod in new)
    replaced = [pod["metadata"]["name"] for pod in old] if ready >= replicas else []
    return create, sorted({*surplus, *replaced, *failed})


def template_hash(deployment: Object) -> str:
    """Ten hexadecimal digits that follow the pod template."""
    text = json.dumps(deployment["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def is_ready(pod: Object) -> bool:
    """The pod's Ready condition."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _pod(deployment: Object, name: str, revision: str) -> Object:
    template: dict[str, Any] = deployment["spec"]["template"]
    metadata = dict(template.get("metadata") or {})
    owner = {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        "name": deployment["metadata"]["name"],
        "uid": deployment["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata |= {"name": name, "namespace": deployment["metadata"]["namespace"], "ownerReferences": [owner]}
    metadata["labels"] = {**(metadata.get("labels") or {}), HASH_LABEL: revision}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _is_owned(pod: Object, deployment: Object) -> bool:
    owners = pod["metadata"].get("ownerReferences") or []
    return any(owner["uid"] == deployment["metadata"]["uid"] for owner in owners)


def _status(deployment: Object, pods: list[Object], now: float) -> Object:
    staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    revision = template_hash(deployment)
    updated = [pod for pod in staying if (pod["metadata"].get("labels") or {}).get(HASH_LABEL) == revision]
    ready = sum(is_ready(pod) for pod in staying)
    replicas = int(deployment["spec"].get("replicas", 1))
    available = "True" if ready >= replicas else "False"
    known = {c["type"]: c for c in (deployment.get("status") or {}).get("conditions") or []}.get("Available", {})
    since = known["lastTransitionTime"] if known.get("status") == available else timestamp(now)
    condition = {"type": "Available", "status": available, "lastTransitionTime": since}
    condition["reason"] = "MinimumReplicasAvailable" if ready >= replicas else "MinimumReplicasUnavailable"
    return {
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": len(staying),
        "updatedReplicas": len(updated),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "unavailableReplicas": max(0, replicas - ready),
        "conditions": [condition],
    }
