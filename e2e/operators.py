"""Several operators on one control plane that writes down who asked for what."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from e2e.kube.controlplane import ControlPlane
from e2e.kube.service import Service, free_ports

ROOT = Path(__file__).resolve().parents[1]
SYSTEM = "inferencefleet-system"
RIGHTS = ROOT / "charts/rbac/operator.yaml"
MORE_RIGHTS = f"""
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: several-operators}}
rules:
- {{apiGroups: [coordination.k8s.io], resources: [leases], verbs: [get, list, create, patch, delete]}}
- {{apiGroups: [""], resources: [namespaces], verbs: [list, watch]}}
- {{apiGroups: [inferencefleet.io], resources: [inferencefleets, workerpools], verbs: [get]}}
- apiGroups: [admissionregistration.k8s.io]
  resources: [mutatingwebhookconfigurations, validatingwebhookconfigurations]
  resourceNames: [inferencefleet]
  verbs: [get, patch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: certificates, namespace: {SYSTEM}}}
rules:
- {{apiGroups: [""], resources: [secrets], resourceNames: [inferencefleet-webhook], verbs: [get, create, patch]}}
"""
"""What election, claims and admission need beside the rights that every operator has."""
WRITES = ("create", "update", "patch", "delete", "deletecollection")


class Plane(ControlPlane):
    """With an audit log of all writes by service accounts."""

    @property
    def token(self) -> str:
        """The administrator's."""
        return self._token

    @property
    def _log(self) -> Path:
        return self.dir / "audit.log"

    def _apiserver_flags(self) -> list[str]:
        policy = self.dir / "audit-policy.yaml"
        rules = [
            {"level": "Metadata", "userGroups": [f"system:serviceaccounts:{SYSTEM}"], "verbs": list(WRITES)},
            {"level": "None"},
        ]
        document = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["ResponseComplete"], "rules": rules}
        policy.write_text(yaml.safe_dump(document))
        return [*super()._apiserver_flags(), f"--audit-policy-file={policy}", f"--audit-log-path={self._log}"]

    def writes(self, account: str, *, leases: bool = False) -> list[dict[str, Any]]:
        """What a service account tried to write, oldest first, noted when the request arrived; the election's own left out."""
        user = f"system:serviceaccount:{SYSTEM}:{account}"
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        events = [event for event in map(json.loads, lines) if event["user"]["username"] == user and "objectRef" in event]
        return [event for event in events if leases or event["objectRef"]["resource"] != "leases"]

    def account(self, name: str) -> Path:
        """A kubeconfig of a service account with the operator's rights."""
        self.kubectl("create", "serviceaccount", name, "-n", SYSTEM)
        subject = f"--serviceaccount={SYSTEM}:{name}"
        documents = [*yaml.safe_load_all(RIGHTS.read_text()), *yaml.safe_load_all(MORE_RIGHTS)]
        for role in (one["metadata"]["name"] for one in documents if one["kind"] == "ClusterRole"):
            self.kubectl("create", "clusterrolebinding", f"{name}-{role}", "--clusterrole", role, subject)
        self.kubectl("create", "rolebinding", name, "-n", SYSTEM, "--role", "certificates", subject)
        return self.service_account_kubeconfig(SYSTEM, name)


@dataclass
class Operator:
    """One operator process under rights of its own."""

    name: str
    service: Service
    health: str

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.health + path, timeout=5)

    def metric(self, name: str) -> float:
        """The value of a metric without labels, or with exactly these."""
        values = [line.rsplit(" ", 1)[1] for line in self.get("/metrics").text.splitlines() if line.rsplit(" ", 1)[0] == name]
        assert len(values) == 1, (name, self.get("/metrics").text)
        return float(values[0])

    def up(self, path: str = "/readyz") -> bool:
        self.service.check()
        try:
            return self.get(path).status_code == 200
        except httpx.HTTPError:
            return False


@contextmanager
def operator(plane: Plane, name: str, kubeconfig: Path, *flags: str) -> Iterator[Operator]:
    """Runs while the block runs."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "fleet_operator", "--kubeconfig", str(kubeconfig), "--health-port", str(port), *flags]
    service = Service(name, argv, plane.dir / f"{name}.log", dict(os.environ))
    try:
        yield Operator(name, service, f"http://127.0.0.1:{port}")
    except BaseException:
        print(f"{name} ended with {service.exit_code()}:\n{service.tail(6_000)}")  # pytest shows it with the failure
        raise
    finally:
        service.stop()


def paper_node(made: Plane) -> None:
    """A node that takes every pod and runs none: without one the operator would back out of what cannot be scheduled."""
    made.kubectl("apply", "-f", "-", stdin='{"apiVersion":"v1","kind":"Node","metadata":{"name":"paper"}}')
    room = {"cpu": "1000", "memory": "10Ti", "pods": "1000"}
    ready = {"type": "Ready", "status": "True", "reason": "Paper", "message": "nobody runs pods here"}
    status = json.dumps({"status": {"capacity": room, "allocatable": room, "conditions": [ready]}})
    made.kubectl("patch", "node", "paper", "--subresource=status", "--type=merge", "-p", status)
    made.wait("a node without taints", lambda: not made.get("/api/v1/nodes/paper")["spec"].get("taints"), 60)


@contextmanager
def plane() -> Iterator[Plane]:
    """With CRDs, the operator's rights, its empty Secret and a node."""
    with Plane() as made:
        made.install_crds()
        made.kubectl("create", "namespace", SYSTEM)
        made.kubectl("apply", "-f", str(RIGHTS))
        made.kubectl("apply", "-f", "-", stdin=MORE_RIGHTS)
        paper_node(made)
        made.kubectl("create", "secret", "generic", "inferencefleet-webhook", "-n", SYSTEM)
        yield made


def fleet(namespace: str, name: str, **spec: Any) -> str:
    """A small manifest as text; nobody runs its pods."""
    tiers = [{"name": "t", "accelerator": {"type": "cpu"}, "prefill": {"maxReplicas": 4}, "decode": {"maxReplicas": 4}}]
    return json.dumps(
        {
            "apiVersion": "inferencefleet.io/v1alpha1",
            "kind": "InferenceFleet",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"model": {"source": "file:///m"}, "tiers": tiers, **spec},
        }
    )
