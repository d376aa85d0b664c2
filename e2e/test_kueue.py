"""placement.queue with a real Kueue: it admits workers as its quota allows, each with all of its pods or not at all.

Control plane, scheduler, Kueue and operator are real; nodes are paper ones (`e2e/faultproxy/kubelet.py`), so no engine runs here.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.fleet import Fleet, manifest
from e2e.kube.controlplane import ROOT, ControlPlane
from e2e.kube.kueue import kueue
from e2e.kube.service import Service

pytestmark = pytest.mark.timeout(590)
SYSTEM = "inferencefleet-system"
QUEUE, GATE = "gpus", "kueue.x-k8s.io/admission"
GROUP = "inferencefleet.io/group"
GPU = "nvidia.com/gpu"
API = "kueue.x-k8s.io/v1beta2"
WAIT_S = 3.0
"""scaling.capacityWait: a worker without a node for this long would be backed out of."""
JUDGED_S = 8.0
LEASED_OUT = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "somebody", "labels": {"kueue.x-k8s.io/queue-name": QUEUE}}}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """With Kueue, our CRDs, the operator's rights and a node with more devices than any quota here."""
    with ControlPlane() as made:
        made.install_crds()
        made.kubectl("create", "namespace", SYSTEM)
        made.kubectl("apply", "-f", str(ROOT / "charts/rbac/operator.yaml"))
        argv = [sys.executable, "-m", "e2e.faultproxy.kubelet", str(made.kubeconfig)]
        made.services.append(Service("paper-kubelet", argv, made.dir / "kubelet.log", dict(os.environ)))
        with kueue(made):
            made.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(object_of("ResourceFlavor", "any", {})))
            made.wait("a node without taints", lambda: schedulable(made), 60)
            yield made


@pytest.fixture(scope="module")
def operator(plane: ControlPlane) -> Iterator[Service]:
    """Under the rights of charts/rbac/operator.yaml: it needs none of Kueue's."""
    kubeconfig = plane.service_account_kubeconfig(SYSTEM, "inferencefleet-operator")
    flags = ["--drain-timeout", "1", "--health-port", "0"]
    argv = [sys.executable, "-m", "fleet_operator", "--kubeconfig", str(kubeconfig), *flags]
    service = Service("operator", argv, plane.dir / "operator.log", dict(os.environ))
    yield service
    service.stop()


@pytest.fixture
def fleet(plane: ControlPlane, operator: Service) -> Iterator[Fleet]:
    """In a namespace with a queue of its own; `quota` gives it devices."""
    name = f"kueue-{uuid.uuid4().hex[:8]}"
    plane.kubectl("create", "namespace", name)
    plane.wait("its service account", lambda: plane.exists(f"/api/v1/namespaces/{name}/serviceaccounts/default"))
    yield Fleet(plane, name, operator)
    plane.kubectl("delete", "namespace", name, "--wait=false")


def object_of(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": spec}


def schedulable(plane: ControlPlane) -> bool:
    return any(
        node["spec"].get("taints") is None and node["status"].get("allocatable") for node in plane.get("/api/v1/nodes")["items"]
    )


def quota(fleet: Fleet, gpus: int, stop: str = "None") -> None:
    """So many devices for the namespace's queue, and whatever CPU and memory."""
    amounts = [("cpu", "1000"), ("memory", "10Ti"), (GPU, str(gpus))]
    flavor = {"name": "any", "resources": [{"name": name, "nominalQuota": amount} for name, amount in amounts]}
    group = {"coveredResources": [name for name, _ in amounts], "flavors": [flavor]}
    spec = {"namespaceSelector": {}, "resourceGroups": [group], "stopPolicy": stop}
    wish = [
        object_of("ClusterQueue", fleet.namespace, spec),
        object_of("LocalQueue", QUEUE, {"clusterQueue": fleet.namespace}),
    ]
    fleet.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(wish))


def queued_fleet(namespace: str, nodes: int, decode: int) -> dict[str, Any]:
    """A prefill and so many decode workers over so many nodes, one device per pod."""
    wish = manifest(namespace, Path("/m"))
    tier = wish["spec"]["tiers"][0]
    tier |= {"accelerator": {"type": "h100-sxm", "count": nodes}, "parallelism": {"nodes": nodes}}
    tier |= {"ratio": {"prefill": 1, "decode": 1, "min": "1:4", "max": "1:1"}, "placement": {"queue": QUEUE}}
    tier |= {"prefill": {"maxReplicas": 1}, "decode": {"minReplicas": decode, "maxReplicas": 4}}
    wish["spec"]["scaling"]["capacityWait"] = f"{WAIT_S:g}s"
    return wish


def somebody(gpus: int) -> str:
    """A pod of another user of the queue."""
    container = {"name": "c", "image": "x", "resources": {"limits": {GPU: str(gpus), "cpu": "1", "memory": "1Gi"}}}
    return json.dumps({**LEASED_OUT, "spec": {"containers": [container], "terminationGracePeriodSeconds": 0}})


def workers(fleet: Fleet) -> list[dict[str, Any]]:
    return [pod for role in ("prefill", "decode") for pod in fleet.pods(role)]


def gated(pod: dict[str, Any]) -> bool:
    return GATE in [gate["name"] for gate in pod["spec"].get("schedulingGates") or []]


def runs(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def by_worker(fleet: Fleet) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for pod in workers(fleet):
        found.setdefault(pod["metadata"]["labels"].get(GROUP, pod["metadata"]["name"]), []).append(pod)
    return found


def uids(fleet: Fleet) -> set[str]:
    return {pod["metadata"]["uid"] for pod in workers(fleet)}


def workloads(fleet: Fleet) -> dict[str, bool]:
    """Kueue's objects: name → whether it is admitted."""
    found = {}
    for one in fleet.objects("workloads.kueue.x-k8s.io"):
        conditions = {c["type"]: c["status"] for c in one.get("status", {}).get("conditions") or []}
        found[one["metadata"]["name"]] = conditions.get("Admitted") == "True"
    return found


def used(fleet: Fleet) -> int:
    """Devices that Kueue counts as taken."""
    queue = json.loads(fleet.kubectl("get", "clusterqueue", fleet.namespace, "-o", "json"))
    flavors = queue.get("status", {}).get("flavorsReservation") or []
    return sum(int(one["total"]) for flavor in flavors for one in flavor["resources"] if one["name"] == GPU)


def capacity(fleet: Fleet) -> tuple[str, str]:
    condition = fleet.condition("CapacityLimited")
    return condition["status"], condition.get("reason", "")


def leaves_no_workload(fleet: Fleet) -> None:
    """Kueue's finalizers hold nothing back, and its quota is free again."""
    fleet.delete_and_leave_nothing()
    fleet.wait("no Workload left", lambda: not workloads(fleet), 30)
    fleet.wait("the quota is free", lambda: used(fleet) == 0, 30)


def test_workers_of_one_pod_run_as_the_quota_allows(fleet: Fleet):
    quota(fleet, 2)
    fleet.apply(queued_fleet(fleet.namespace, nodes=1, decode=2))
    fleet.wait("two of three run", lambda: sorted(map(runs, workers(fleet))) == [False, True, True], 90)
    fleet.wait("the fleet says so", lambda: capacity(fleet) == ("True", "Queued"), 30)
    waiting = next(pod for pod in workers(fleet) if not runs(pod))
    assert gated(waiting)
    assert not waiting["spec"].get("nodeName")
    assert not any(gated(pod) for pod in workers(fleet) if runs(pod))
    fleet.wait("Kueue's status counts them", lambda: used(fleet) == 2, 30)  # written some time after it has decided
    assert sorted(workloads(fleet).values()) == [False, True, True]
    message = fleet.condition("CapacityLimited")["message"]
    assert f"1 workers wait in queue {QUEUE}: {waiting['metadata']['name']}" in message

    quota(fleet, 3)
    fleet.wait_serving(1, 2, 60)
    fleet.wait("nothing is limited", lambda: capacity(fleet)[0] == "False", 30)
    assert waiting["metadata"]["uid"] in uids(fleet)
    leaves_no_workload(fleet)


def test_a_worker_over_two_nodes_is_admitted_whole_or_not_at_all(fleet: Fleet):
    quota(fleet, 4)
    fleet.kubectl("apply", "-f", "-", stdin=somebody(1))
    fleet.wait("somebody else holds a device", lambda: used(fleet) == 1, 60)
    fleet.apply(queued_fleet(fleet.namespace, nodes=2, decode=1))
    fleet.wait("one of two workers runs", lambda: sum(map(runs, workers(fleet))) == 2, 90)
    fleet.wait("the fleet says so", lambda: capacity(fleet) == ("True", "Queued"), 30)
    admitted, waiting = sorted(by_worker(fleet).values(), key=lambda pods: gated(pods[0]))
    assert [runs(pod) for pod in (*admitted, *waiting)] == [True, True, False, False]
    assert [gated(pod) for pod in (*admitted, *waiting)] == [False, False, True, True]
    fleet.wait("one device is free, and half a worker does not get it", lambda: used(fleet) == 3, 30)
    assert sum(map(runs, workers(fleet))) == 2
    queued_is_not_backed_out_of(fleet, waiting)

    fleet.kubectl("delete", "pod", "somebody")
    fleet.wait_serving(1, 1, 60)
    fleet.wait("nothing is limited", lambda: capacity(fleet)[0] == "False", 30)
    assert {pod["metadata"]["uid"] for pod in waiting} <= uids(fleet)
    fleet.wait("both are counted", lambda: used(fleet) == 4, 30)
    assert set(workloads(fleet)) == set(by_worker(fleet))

    a_lost_pod_comes_back_with_its_worker(fleet)
    a_drained_queue_takes_workers_whole_and_gives_them_back(fleet)
    leaves_no_workload(fleet)


def queued_is_not_backed_out_of(fleet: Fleet, waiting: list[dict[str, Any]]) -> None:
    """Much longer than capacityWait, and the same pods still wait."""
    before = uids(fleet)
    time.sleep(JUDGED_S)
    assert JUDGED_S > 2 * WAIT_S
    assert uids(fleet) == before
    assert fleet.desired() == (1, 1)
    condition = fleet.condition("CapacityLimited")
    assert (condition["status"], condition["reason"]) == ("True", "Queued")
    leader = min(pod["metadata"]["name"] for pod in waiting)
    assert f"1 workers wait in queue {QUEUE}: {leader}" in condition["message"]
    assert fleet.condition("Ready")["status"] == "False"


def a_lost_pod_comes_back_with_its_worker(fleet: Fleet) -> None:
    """Both of its pods are made anew under their names: Kueue's finalizers must not keep the old ones."""
    name, pods = sorted(by_worker(fleet).items())[0]
    before = {pod["metadata"]["uid"] for pod in pods}
    fleet.kubectl("delete", "pod", f"{name}-1", "--force", "--grace-period=0")
    fleet.wait("both pods are new", lambda: before.isdisjoint(uids(fleet)), 60)
    fleet.wait("all four run", lambda: [runs(pod) for pod in workers(fleet)] == [True] * 4, 60)
    fleet.wait_serving(1, 1, 60)
    fleet.wait("both workers are counted again", lambda: used(fleet) == 4, 60)


def a_drained_queue_takes_workers_whole_and_gives_them_back(fleet: Fleet) -> None:
    """An administrator stops the queue: Kueue evicts what runs; the fleet waits, and serves when the queue goes on."""
    before = uids(fleet)
    quota(fleet, 4, stop="HoldAndDrain")
    fleet.wait("new pods wait", lambda: before.isdisjoint(uids(fleet)) and [gated(p) for p in workers(fleet)] == [True] * 4, 90)
    fleet.wait("the fleet says so", lambda: capacity(fleet) == ("True", "Queued"), 30)
    quota(fleet, 4)
    fleet.wait_serving(1, 1, 90)
