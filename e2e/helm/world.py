"""What the tests of the chart have around them: a control plane, two restricted namespaces, a model in a claim, nodes, helm."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from e2e.conftest import ready_nodes
from e2e.fleet import manifest
from e2e.helm.audited import AuditedControlPlane, Right
from e2e.helm.chart import NAMESPACE, helm, objects
from e2e.kube.nodes import NODES
from e2e.kube.service import Service
from fleet_cli.up.bundled import tiny_model

Helm = Callable[..., str]
FLEETS = "ml"
OPERATOR = "inferencefleet-operator"
RESTRICTED = ("pod-security.kubernetes.io/enforce=restricted", "pod-security.kubernetes.io/warn=restricted")
VALUES = {"watchNamespaces": [FLEETS]}
MADE_BY_KUBERNETES = {"ConfigMap/kube-root-ca.crt", "ServiceAccount/default"}


@contextmanager
def control_plane() -> Iterator[AuditedControlPlane]:
    """Three namespaces, two in use, and a model; no CRDs: they come with the chart."""
    with AuditedControlPlane() as plane:
        for namespace in (NAMESPACE, FLEETS, "research"):
            plane.kubectl("create", "namespace", namespace)
            plane.kubectl("label", "namespace", namespace, *RESTRICTED)
        plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(model_volume()))
        yield plane


def model_volume() -> list[dict[str, Any]]:
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "hostPath": {"path": str(tiny_model().parent)},
    }
    claim = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "volumeName": "models",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "models"}, "spec": spec},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models", "namespace": FLEETS}, "spec": claim},
    ]


@contextmanager
def running_nodes(plane: AuditedControlPlane) -> Iterator[Path]:
    """The folder with logs of everything that runs."""
    with tempfile.TemporaryDirectory(prefix="inferencefleet-nodes-") as folder:
        argv = [sys.executable, "-m", "e2e.kube.nodes", str(plane.kubeconfig), folder]
        service = Service("nodes", argv, plane.dir / "nodes.log", dict(os.environ))
        plane.services.append(service)
        try:
            plane.wait("two ready nodes", lambda: ready_nodes(plane) == set(NODES))
            yield Path(folder)
        finally:
            service.stop()
            plane.services.remove(service)


class OperatorPods:
    """The chart's Deployment, as `Fleet` wants to know its operator."""

    def __init__(self, plane: AuditedControlPlane, nodes: Path) -> None:
        self._plane, self._nodes = plane, nodes

    def pods(self) -> list[dict[str, Any]]:
        selector = "app.kubernetes.io/component=operator"
        found = self._plane.kubectl("-n", NAMESPACE, "get", "pods", "-l", selector, "-o", "json").stdout
        return [pod for pod in json.loads(found)["items"] if "deletionTimestamp" not in pod["metadata"]]

    def check(self) -> None:
        """RuntimeError when it was restarted."""
        for pod in self.pods():
            restarts = sum(status["restartCount"] for status in pod["status"].get("containerStatuses") or [])
            if restarts:
                raise RuntimeError(f"the operator ended:\n{self.tail()}")

    def tail(self) -> str:
        logs = sorted(self._nodes.glob(f"*/logs/{OPERATOR}-*/operator.log"), key=os.path.getmtime)
        return "\n".join(log.read_text()[-4_000:] for log in logs)


def helm_on(plane: AuditedControlPlane) -> Helm:
    """helm as the cluster's administrator, in the release's namespace, with a home of its own."""
    home = {f"HELM_{kind}_HOME": str(plane.dir / "helm" / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}

    def run(command: str, *args: str, values: dict[str, Any] | None = None) -> str:
        given = [] if values is None else ["--values", "-"]
        text = None if values is None else yaml.safe_dump(values)
        environment = {"KUBECONFIG": str(plane.kubeconfig), **home}
        return helm(command, *args, "--namespace", NAMESPACE, *given, env=environment, stdin=text)

    return run


def pvc_fleet() -> dict[str, Any]:
    wish = manifest(FLEETS, tiny_model())
    wish["spec"]["model"]["source"] = f"pvc://models/{tiny_model().name}"
    return wish


def everything_in(plane: AuditedControlPlane) -> dict[str, list[str]]:
    """Whatever lies in both namespaces and did not come with them, and what is cluster-wide and ours."""
    kinds = plane.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").stdout.split()
    listed = ",".join(kind for kind in kinds if not kind.startswith(("events", "persistentvolumeclaims")))
    left = {}
    for namespace in (NAMESPACE, FLEETS):
        found = json.loads(plane.kubectl("-n", namespace, "get", listed, "-o", "json").stdout)["items"]
        names = {f"{o['kind']}/{o['metadata']['name']}" for o in found} - MADE_BY_KUBERNETES
        if names:
            left[namespace] = sorted(names)
    wide = plane.kubectl("get", "clusterroles,clusterrolebindings", "-o", "name").stdout.split()
    if ours := [name for name in wide if "inferencefleet" in name]:
        left["cluster"] = ours
    return left


def granted(rendered: str) -> set[Right]:
    """Every (group, resource, verb) of the rendered roles."""
    rules = [rule for o in objects(rendered) if o["kind"] in ("Role", "ClusterRole") for rule in o["rules"]]
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
