"""A real LeaderWorkerSet controller beside a control plane.

with ControlPlane() as plane, lws(plane): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from e2e.kube.controlplane import ControlPlane
from e2e.kube.manager import Manager, running
from e2e.kube.service import Service

LWS = Manager("lws")
API = "leaderworkerset.x-k8s.io/v1"
MARK = "leaderworkerset.sigs.k8s.io/"
EXCLUSIVE = f"{MARK}exclusive-topology"


def leader_worker_set(name: str, namespace: str, size: int, replicas: int = 1, **annotations: str) -> dict[str, Any]:
    """Groups of `size` pods with one container and one init container; everything else as the controller defaults it."""
    pods = {"containers": [{"name": "c", "image": "example.com/c"}], "initContainers": [{"name": "i", "image": "example.com/i"}]}
    return {
        "apiVersion": API,
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name, "namespace": namespace, "annotations": annotations},
        "spec": {"replicas": replicas, "leaderWorkerTemplate": {"size": size, "workerTemplate": {"spec": pods}}},
    }


@contextmanager
def lws(plane: ControlPlane) -> Iterator[Service]:
    """Groups are made while the block runs; TimeoutError."""
    with running(plane, LWS) as service:
        probe = yaml.safe_dump(leader_worker_set("probe", "default", 1))
        # it says that it is ready before its webhooks answer
        dry = ("apply", "--server-side", "--dry-run=server", "-f", "-")
        plane.wait("LeaderWorkerSet's webhooks", lambda: plane.kubectl(*dry, stdin=probe, check=False).returncode == 0)
        yield service
