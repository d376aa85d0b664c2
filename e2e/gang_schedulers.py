"""Fleets whose decode workers span nodes, beside a scheduler that knows groups (test_gang_schedulers.py asks of it).

Control plane, schedulers and operator are real; nodes are paper ones (`e2e/faultproxy/kubelet.py`), so no engine runs here. Each
test has nodes of its own, by a label.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.faultproxy.kubelet import CAPACITY, NAME
from e2e.fleet import Fleet, manifest
from e2e.helm.chart import NAMESPACE, RIGHTS, objects, render
from e2e.kube.controlplane import ControlPlane
from e2e.kube.service import Service
from fleet_operator.cluster.kinds import POD_GROUP_KINDS

BLOCK = "example.com/block"
GROUP = "inferencefleet.io/group"
WAIT_S = 4
"""scaling.capacityWait."""


@dataclass(frozen=True)
class Gangs:
    """A control plane with a scheduler that knows groups."""

    plane: ControlPlane
    operator: Service
    pod_group: str
    """As in placement.podGroup."""
    scheduler: str | None
    """As in podTemplate.schedulerName."""

    def fleet(self) -> GangFleet:
        """In a new namespace."""
        name = f"gang-{uuid.uuid4().hex[:8]}"
        self.plane.kubectl("create", "namespace", name)
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        self.plane.wait("its service account", lambda: self.plane.exists(account))
        return GangFleet(self, name)


class GangFleet(Fleet):
    """A prefill worker of one pod that fits anywhere, and decode workers over several nodes with one device each."""

    def __init__(self, gangs: Gangs, namespace: str) -> None:
        super().__init__(gangs.plane, namespace, gangs.operator)
        self.gangs = gangs
        self.block = namespace

    def start(self, nodes: int, block: str | None = None) -> None:
        """Each decode worker over so many nodes of the block, by default the namespace's own."""
        self.block = block or self.namespace
        template: dict[str, Any] = {"nodeSelector": {BLOCK: self.block}}
        if self.gangs.scheduler is not None:
            template["schedulerName"] = self.gangs.scheduler
        wish = manifest(self.namespace, Path("/m"))
        tier = wish["spec"]["tiers"][0]
        decode = {"accelerator": {"type": "h100-sxm", "count": nodes}, "parallelism": {"nodes": nodes}, "maxReplicas": 2}
        tier |= {"accelerator": {"type": "cpu"}, "ratio": {"prefill": 1, "decode": 1, "min": "1:4", "max": "1:1"}}
        tier |= {"prefill": {"maxReplicas": 1}, "decode": {**decode, "podTemplate": template}}
        tier["placement"] = {"podGroup": self.gangs.pod_group}
        wish["spec"]["scaling"]["capacityWait"] = f"{WAIT_S}s"
        self.apply(wish)

    def add_node(self, number: int) -> None:
        """With one device; the paper kubelet runs what is bound to it."""
        name = f"{NAME}-{self.block}-{number}"
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {BLOCK: self.block}}}
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(node))
        room = {**CAPACITY, "nvidia.com/gpu": "1"}
        status = {"capacity": room, "allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]}
        patch = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
        self.kubectl("patch", "node", name, *patch)

    def grow(self) -> None:
        """Somebody asks for two decode workers."""
        pool = next(pool for pool in self.objects("workerpools") if pool["spec"]["role"] == "decode")
        self.kubectl("scale", "wpool", pool["metadata"]["name"], "--replicas=2")

    def workers(self) -> dict[str, list[dict[str, Any]]]:
        """Decode workers and their pods."""
        found: dict[str, list[dict[str, Any]]] = {}
        for pod in self.pods("decode"):
            found.setdefault(pod["metadata"]["labels"][GROUP], []).append(pod)
        return found

    def bound(self) -> list[int]:
        """How many pods of each decode worker have a node, fewest first."""
        return sorted(sum(bool(pod["spec"].get("nodeName")) for pod in pods) for pods in self.workers().values())

    def uids(self) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.pods("decode")}

    def refused(self, pods: int) -> bool:
        """Whether so many pods have no node, and the scheduler found none for any of them or for their group."""
        waiting = [pod for pod in self.pods("decode") if not pod["spec"].get("nodeName")]
        return len(waiting) == pods and all(_scheduled(pod).get("status") == "False" for pod in waiting)

    def groups(self) -> dict[str, dict[str, Any]]:
        """PodGroups by name."""
        kind = POD_GROUP_KINDS[self.gangs.pod_group]
        found = self.objects(f"{kind.plural}.{kind.api_version.partition('/')[0]}")
        return {one["metadata"]["name"]: one for one in found}

    def forget_group(self, name: str) -> None:
        """Somebody deletes a PodGroup."""
        kind = POD_GROUP_KINDS[self.gangs.pod_group]
        self.kubectl("delete", f"{kind.plural}.{kind.api_version.partition('/')[0]}", name)

    def capacity(self) -> tuple[str, str]:
        condition = self.condition("CapacityLimited")
        return condition["status"], condition.get("reason", "")

    def delete_and_leave_no_group(self) -> None:
        """Garbage collection takes them with the pools."""
        self.delete_and_leave_nothing()
        self.wait("no PodGroup left", lambda: not self.groups(), 60)


def _scheduled(pod: dict[str, Any]) -> dict[str, Any]:
    return next((c for c in pod["status"].get("conditions") or [] if c["type"] == "PodScheduled"), {})


@contextmanager
def operator_of(plane: ControlPlane, pod_group: str) -> Iterator[Service]:
    """Under the rights that the chart gives it for this scheduler, and no others."""
    rights = [o for o in objects(render({"scope": "cluster", "rbac": {"podGroups": [pod_group]}})) if o["kind"] in RIGHTS]
    rights = [o for o in rights if "helm.sh/hook" not in (o["metadata"].get("annotations") or {})]
    plane.kubectl("create", "namespace", NAMESPACE)
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(rights))
    argv = [sys.executable, "-m", "e2e.faultproxy.kubelet", str(plane.kubeconfig)]
    plane.services.append(Service("paper-kubelet", argv, plane.dir / "kubelet.log", dict(os.environ)))
    kubeconfig = plane.service_account_kubeconfig(NAMESPACE, "inferencefleet-operator")
    flags = ["--drain-timeout", "1", "--health-port", "0"]
    argv = [sys.executable, "-m", "fleet_operator", "--kubeconfig", str(kubeconfig), *flags]
    service = Service("operator", argv, plane.dir / "operator.log", dict(os.environ))
    try:
        yield service
    finally:
        service.stop()
