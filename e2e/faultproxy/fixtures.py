"""Fixtures of the fault family: a control plane of its own with a paper node, and a lab per test."""

from __future__ import annotations

import os
import random
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.faultproxy import kubelet
from e2e.faultproxy.lab import Admin, Lab, lab
from e2e.faultproxy.nursery import Nursery
from e2e.kube.controlplane import ControlPlane
from e2e.kube.service import Service

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "inferencefleet-system"
AT_ONCE = 4
FAMILY = [pytest.mark.timeout(400)]
Played = dict[str, Future[str | None]]


@dataclass(frozen=True)
class World:
    """What all labs of a session share."""

    plane: ControlPlane
    admin: Admin
    nursery: Nursery
    credentials: Path
    seed: int

    def namespaces(self, count: int) -> list[str]:
        """New namespaces that pods can be created in."""
        names = [f"faults-{uuid.uuid4().hex[:8]}" for _ in range(count)]
        for name in names:
            made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            self.admin("POST", "/api/v1/namespaces", made).raise_for_status()
        for name in names:
            account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
            self.plane.wait("a service account", lambda path=account: self.admin("GET", path).status_code == 200)
        return names


@pytest.fixture(scope="session")
def fault_world() -> Iterator[World]:
    """A control plane with our CRDs, the operator's rights and a node without containers."""
    seed = int(os.environ.get("FLEET_FAULT_SEED") or random.randrange(10**6))
    with ExitStack() as stack:
        plane = stack.enter_context(ControlPlane())
        plane.install_crds()
        plane.kubectl("create", "namespace", SYSTEM)
        plane.kubectl("apply", "-f", str(ROOT / "charts/rbac/operator.yaml"))
        argv = [sys.executable, "-m", "e2e.faultproxy.kubelet", str(plane.kubeconfig)]
        plane.services.append(Service("paper-kubelet", argv, plane.dir / "kubelet.log", dict(os.environ)))
        admin = Admin(plane)
        stack.callback(admin.close)
        plane.wait("the paper node", lambda: _schedulable(admin))
        nursery = stack.enter_context(Nursery())
        yield World(plane, admin, nursery, plane.service_account_kubeconfig(SYSTEM, "inferencefleet-operator"), seed)


def _schedulable(admin: Admin) -> bool:
    answer = admin("GET", f"/api/v1/nodes/{kubelet.NAME}")
    if answer.status_code != 200:
        return False
    node = answer.json()
    ready = {c["type"]: c["status"] for c in node.get("status", {}).get("conditions") or []}.get("Ready")
    return ready == "True" and not node["spec"].get("taints")


@pytest.fixture
def new_lab(fault_world: World) -> Iterator[Callable[[], Lab]]:
    """Labs in namespaces of their own; they end with the test."""
    with ExitStack() as stack:

        def make(namespace: str = "") -> Lab:
            where = namespace or fault_world.namespaces(1)[0]
            w = fault_world
            return stack.enter_context(lab(w.plane, w.admin, w.nursery, where, w.credentials, w.seed))

        yield make


@pytest.fixture(scope="module")
def played(fault_world: World, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[str | None]]]:
    """The module's PLAYS that this session selected, by row. They wait most of their time, so AT_ONCE of them run side by side,
    each in a lab of its own; a test takes the result of its row."""
    plays: dict[str, Callable[[Lab], str | None]] = request.module.PLAYS
    rows = list(dict.fromkeys(item.callspec.params["row"] for item in request.session.items if _is_row(item, request)))
    places = fault_world.namespaces(len(rows))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {row: pool.submit(_play, fault_world, place, plays[row]) for row, place in zip(rows, places, strict=True)}
        pool.shutdown(cancel_futures=True)


def _play(w: World, namespace: str, play: Callable[[Lab], str | None]) -> str | None:
    with lab(w.plane, w.admin, w.nursery, namespace, w.credentials, w.seed) as made:
        return play(made)


def _is_row(item: pytest.Item, request: pytest.FixtureRequest) -> bool:
    return getattr(item, "module", None) is request.module and "row" in getattr(getattr(item, "callspec", None), "params", {})
