"""A control plane for scale: fake nodes and pods by kwok, no throttling anywhere, and the API server's own record of all writes.

    with KwokPlane(nodes=100) as plane: ...

Settings of the yardstick in facts.md: etcd without fsync, API server without inflight limits, controller-manager and scheduler at
5,000 requests/s. Pods get addresses at which nobody can be: multicast, where a connect fails at once on every machine.
"""

from __future__ import annotations

import base64
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from e2e.kube.controlplane import ROOT, ControlPlane

POD_CIDR = "239.0.0.0/8"
QPS = ("--kube-api-qps=5000", "--kube-api-burst=10000")
CAPACITY = {"cpu": "100k", "memory": "1Pi", "pods": "100k", "nvidia.com/gpu": "100k"}
STAGES = ("node-fast.yaml", "node-heartbeat-with-lease.yaml", "pod-fast.yaml")
OPERATOR = "system:serviceaccount:inferencefleet-system:inferencefleet-operator"


class KwokPlane(ControlPlane):
    """Ready when all of its fake nodes are."""

    def __init__(self, nodes: int, *, reads: bool = False) -> None:
        """`reads`: the record holds the operator's reads, too."""
        super().__init__()
        self.nodes = nodes
        self.reads = reads
        self.audit_file = self.dir / "audit.log"

    def _run(self, name: str, *flags: str) -> None:
        more = QPS if name in {"kube-controller-manager", "kube-scheduler"} else ()
        super()._run(name, *flags, *more)

    def _apiserver_flags(self) -> list[str]:
        policy = self.dir / "audit-policy.yaml"
        policy.write_text(yaml.safe_dump(_audit_policy(self.reads)))
        return [
            *super()._apiserver_flags(),
            "--max-requests-inflight=0",
            "--max-mutating-requests-inflight=0",
            "--enable-priority-and-fairness=false",
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self.audit_file}",
            "--audit-log-mode=blocking",
        ]

    def _start(self) -> None:
        super()._start()
        folder = kwok_assets()
        stages = [f"--config={folder / name}" for name in STAGES]
        flags = ["--manage-all-nodes=true", f"--cidr={POD_CIDR}", "--node-ip=10.0.0.1", f"--kubeconfig={self.kubeconfig}"]
        self._bin, bin_before = folder, self._bin
        self._run("kwok", *flags, "--server-address=", *stages)
        self._bin = bin_before
        self.kubectl("apply", "--server-side", "-f", "-", stdin="---\n".join(map(yaml.safe_dump, map(_node, range(self.nodes)))))
        self.wait("all fake nodes Ready", lambda: self._ready_nodes() == self.nodes)

    def _ready_nodes(self) -> int:
        conditions = [node.get("status", {}).get("conditions") or [] for node in self.get("/api/v1/nodes")["items"]]
        return sum(any(c["type"] == "Ready" and c["status"] == "True" for c in one) for one in conditions)

    def versions(self, prefix: str) -> dict[str, int]:
        """Key → how often it was written since it was made, of all keys of etcd that begin with /registry/PREFIX."""
        start = f"/registry/{prefix}".encode()
        wish = {"key": _b64(start), "range_end": _b64(start[:-1] + bytes([start[-1] + 1])), "keys_only": True}
        request = urllib.request.Request(f"{self._etcd}/v3/kv/range", json.dumps(wish).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.load(answer).get("kvs") or []
        return {base64.b64decode(entry["key"]).decode(): int(entry["version"]) for entry in found}

    def audited(self, since: int = 0) -> Iterator[dict[str, Any]]:
        """Finished write requests of the operator and of Kubernetes' controllers, from byte `since` of the record."""
        with self.audit_file.open("rb") as record:
            record.seek(since)
            for line in record:
                yield json.loads(line)

    def audit_size(self) -> int:
        """Bytes of the record so far: a mark for `audited`."""
        return self.audit_file.stat().st_size if self.audit_file.exists() else 0


def _audit_policy(reads: bool) -> dict[str, Any]:
    verbs = ["create", "update", "patch", "delete", "deletecollection"]
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "omitManagedFields": True,
        "rules": [
            {"level": "Metadata", "users": [OPERATOR], **({} if reads else {"verbs": verbs})},
            {"level": "Metadata", "userGroups": ["system:serviceaccounts:kube-system"], "verbs": verbs},
            {"level": "None"},
        ],
    }


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _node(number: int) -> dict[str, Any]:
    name = f"kwok-{number:03d}"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "type": "kwok"}},
        "status": {"allocatable": CAPACITY, "capacity": CAPACITY},
    }


def kwok_assets() -> Path:
    """The folder with kwok and its stages; builds kwok once per machine (minutes)."""
    done = subprocess.run([ROOT / "e2e/kube/get-kwok"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip().splitlines()[-1])
