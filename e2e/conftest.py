"""Fixtures of the end-to-end tests: one control plane and two GPU nodes per session, a namespace per test."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.faultproxy.fixtures import fault_world, new_lab, played  # noqa: F401 - fixtures of the fault family
from e2e.fleet import Fleet
from e2e.kube.controlplane import ControlPlane
from e2e.kube.nodes import NODES
from e2e.kube.service import Service, free_ports
from fleet_cli.up.bundled import cache_folder
from tests.hanging import pytest_timeout_cancel_timer, pytest_timeout_set_timer  # noqa: F401 - hooks

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A real API server with our CRDs."""
    with ControlPlane() as plane:
        plane.install_crds()
        yield plane


@pytest.fixture(scope="session")
def gpu_nodes(control_plane: ControlPlane) -> Iterator[Path]:
    """Two nodes with four GPUs each; the folder that holds their pods' logs (NODE/logs/POD/CONTAINER.log)."""
    with tempfile.TemporaryDirectory(prefix="inferencefleet-nodes-") as folder:
        argv = [sys.executable, "-m", "e2e.kube.nodes", str(control_plane.kubeconfig), folder]
        nodes = Service("nodes", argv, control_plane.dir / "nodes.log", {**os.environ, **vllm_environment()})
        control_plane.services.append(nodes)
        try:
            control_plane.wait("two ready nodes", lambda: ready_nodes(control_plane) == set(NODES))
            yield Path(folder)
        finally:
            nodes.stop()
            control_plane.services.remove(nodes)


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace of its own, deleted with everything in it."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    control_plane.kubectl("create", "namespace", name)
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    control_plane.wait("its service account", lambda: control_plane.exists(account))
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")  # a test may have deleted it


def vllm_environment() -> dict[str, str]:
    """Where pods of engine vllm find it: a container image has it on PATH, these nodes have the cache of `make vllm`."""
    return {"FLEET_VLLM_BIN": str(cache_folder() / "vllm-0.32.0/bin/vllm")}


def ready_nodes(plane: ControlPlane) -> set[str]:
    """Names of nodes that are Ready and may receive pods."""
    found = set()
    for node in plane.get("/api/v1/nodes")["items"]:
        conditions = {c["type"]: c["status"] for c in node.get("status", {}).get("conditions") or []}
        if conditions.get("Ready") == "True" and not node["spec"].get("taints"):
            found.add(node["metadata"]["name"])
    return found


@pytest.fixture(scope="session")
def operator_port() -> int:
    """Of the operator's /metrics."""
    (port,) = free_ports(1)
    return port


@pytest.fixture(scope="session")
def operator(control_plane: ControlPlane, operator_port: int) -> Iterator[Service]:
    """The operator under the rights of charts/rbac/operator.yaml and no others."""
    control_plane.kubectl("create", "namespace", "inferencefleet-system")
    control_plane.kubectl("apply", "-f", str(ROOT / "charts/rbac/operator.yaml"))
    kubeconfig = control_plane.service_account_kubeconfig("inferencefleet-system", "inferencefleet-operator")
    flags = ["--drain-timeout", "10", "--health-port", str(operator_port)]
    argv = [sys.executable, "-m", "fleet_operator", "--kubeconfig", str(kubeconfig), *flags]
    service = Service("operator", argv, control_plane.dir / "operator.log", dict(os.environ))
    yield service
    service.stop()


@pytest.fixture
def fleet(control_plane: ControlPlane, gpu_nodes: Path, operator: Service, namespace: str) -> Fleet:
    return Fleet(control_plane, namespace, operator)
