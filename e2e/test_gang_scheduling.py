"""placement.podGroup kubernetes, with a real kube-scheduler of 1.36 that has its alpha gang scheduling on: all pods or none."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from e2e.kube.controlplane import ControlPlane
from fleet_operator.cluster.interface import POD
from fleet_operator.cluster.kinds import POD_GROUP_KINDS
from tests.fleet_operator.world import NAMESPACE, World, manifest

GATES = "--feature-gates=GenericWorkload=true,GangScheduling=true"
NODES = ("n1", "n2")
JUDGED_S = 6.0
"""The scheduler has seen a pod long before."""
TIER = {
    "name": "t", "accelerator": {"type": "cpu"}, "ratio": {"decode": 1},
    "decode": {"accelerator": {"type": "h100", "count": 4}, "parallelism": {"nodes": 2}}, "placement": {"podGroup": "kubernetes"},
}  # fmt: skip


class GangPlane(ControlPlane):
    """With workload-aware scheduling."""

    def _apiserver_flags(self) -> list[str]:
        return [*super()._apiserver_flags(), GATES, "--runtime-config=scheduling.k8s.io/v1alpha2=true"]

    def _run(self, name: str, *flags: str) -> None:
        super()._run(name, *flags, *([GATES] if name in ("kube-scheduler", "kube-controller-manager") else []))


@pytest.fixture(scope="module")
def plane() -> Iterator[GangPlane]:
    with GangPlane() as made:
        for name in NODES:
            made.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}))
            room = {"cpu": "64", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": "2"}
            ready = {"type": "Ready", "status": "True", "reason": "Paper", "message": ""}
            status = json.dumps({"status": {"capacity": room, "allocatable": room, "conditions": [ready]}})
            made.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", status)
        made.kubectl("create", "namespace", NAMESPACE)
        made.wait("its account", lambda: made.exists(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"))
        made.wait("no taints", lambda: not any(n["spec"].get("taints") for n in made.get("/api/v1/nodes")["items"]), 60)
        yield made


def rendered() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(PodGroups, decode pods) as the operator makes them, without owners and nodes."""

    async def scenario() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        world = World()
        await world.user.apply(manifest(tiers=[TIER]))
        await world.settle()
        pods = [pod for pod in await world.store.list(POD, NAMESPACE) if "-decode-" in pod["metadata"]["name"]]
        return await world.store.list(POD_GROUP_KINDS["kubernetes"], NAMESPACE), pods

    groups, pods = asyncio.run(scenario())
    return [bare(one) for one in groups], [bare(one) for one in pods]


def bare(obj: dict[str, Any]) -> dict[str, Any]:
    meta = {key: obj["metadata"][key] for key in ("name", "namespace", "labels")}
    spec = {key: value for key, value in obj["spec"].items() if key != "nodeName"}
    return {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": meta, "spec": spec}


def placed(plane: GangPlane, names: set[str]) -> int:
    pods = plane.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    return sum(bool(pod["spec"].get("nodeName")) for pod in pods if pod["metadata"]["name"] in names)


def test_a_worker_gets_all_of_its_nodes_or_none(plane: GangPlane):
    groups, pods = rendered()
    assert [group["spec"]["schedulingPolicy"] for group in groups] == [{"gang": {"minCount": 2}}]
    names = {pod["metadata"]["name"] for pod in pods}
    container = {"name": "c", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "2"}}}
    other = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other", "namespace": NAMESPACE},
             "spec": {"containers": [container], "nodeName": "n2"}}  # fmt: skip
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all([other, *groups, *pods]))
    kept = [pod["spec"]["schedulingGroup"] for pod in plane.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
            if pod["metadata"]["name"] in names]  # fmt: skip
    assert kept == [{"podGroupName": groups[0]["metadata"]["name"]}] * 2
    time.sleep(JUDGED_S)
    assert placed(plane, names) == 0  # n1 has room for one of the two

    plane.kubectl("delete", "pod", "other", "-n", NAMESPACE, "--force", "--grace-period=0")
    plane.wait("both pods have a node", lambda: placed(plane, names) == 2, 60)

    # the same pods without their group: half of them would hold a node for nothing
    plane.kubectl("delete", "pod", "-n", NAMESPACE, "--all", "--force", "--grace-period=0")
    loose = [{**pod, "spec": {key: value for key, value in pod["spec"].items() if key != "schedulingGroup"}} for pod in pods]
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(other))
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(loose))
    plane.wait("one of two has a node", lambda: placed(plane, names) == 1, 60)
