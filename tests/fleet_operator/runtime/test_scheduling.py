"""The in-memory store's scheduler and Deployment controller, as tables."""

from decimal import Decimal

import pytest

from fleet_operator.runtime.deployments import HASH_LABEL, plan, template_hash
from fleet_operator.runtime.scheduler import choose, quantity

GPU = "nvidia.com/gpu"


def pod(name, gpus=0, node=None, phase="Running"):
    limits = {GPU: str(gpus)} if gpus else {}
    spec = {"containers": [{"name": "c", "resources": {"limits": limits}}], **({"nodeName": node} if node else {})}
    return {"metadata": {"name": name, "namespace": "d"}, "spec": spec, "status": {"phase": phase}}


NODES = {"a": {GPU: Decimal(4), "pods": Decimal(3)}, "b": {GPU: Decimal(4), "pods": Decimal(3)}}


@pytest.mark.parametrize(
    ("wanted", "there", "node", "words"),
    [
        (pod("p", 4), [], "a", ""),
        (pod("p", 1), [pod("x", 1, "a")], "b", ""),
        (pod("p", 2), [pod("x", 3, "a"), pod("y", 3, "b")], None, "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."),
        (pod("p", 2), [pod("x", 3, "a", "Succeeded"), pod("y", 3, "b")], "a", ""),
        (pod("p"), [pod(f"{n}{i}", 0, n) for n in "ab" for i in range(3)], None, "0/2 nodes are available: 2 Too many pods."),
        (pod("p", 5), [], None, "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."),
    ],
)
def test_choose(wanted, there, node, words):
    assert choose(wanted, there, NODES) == (node, words)


def test_a_device_that_no_node_has_is_absent():
    assert choose(pod("p", 1), [], {"a": {}}) == (None, "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")


@pytest.mark.parametrize(("text", "number"), [("4", 4), ("500m", "0.5"), ("2Gi", 2 * 2**30), ("1k", 1000), (3, 3)])
def test_quantities(text, number):
    assert quantity(text) == Decimal(number)


def deployment(replicas, image="one"):
    template = {"metadata": {"labels": {"app": "r"}}, "spec": {"containers": [{"name": "c", "image": image}]}}
    return {"metadata": {"name": "r", "namespace": "d", "uid": "u"}, "spec": {"replicas": replicas, "template": template}}


def replica(of, name, ready=True, phase="Running", **metadata):
    status = {"phase": phase, "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}
    return {"metadata": {"name": name, "labels": {HASH_LABEL: template_hash(of)}, **metadata}, "status": status}


def outcome(want, pods):
    create, delete = plan(want, pods)
    return len(create), delete


ONE, OTHER = deployment(1), deployment(1, "two")


@pytest.mark.parametrize(
    ("want", "pods", "created", "deleted"),
    [
        (deployment(2), [], 2, []),
        (deployment(1), [replica(ONE, "a")], 0, []),
        (deployment(1), [replica(ONE, "a"), replica(ONE, "b", ready=False)], 0, ["b"]),
        (deployment(0), [replica(ONE, "a")], 0, ["a"]),
        (deployment(1), [replica(ONE, "a", deletionTimestamp="T")], 1, []),
        (deployment(1), [replica(OTHER, "old")], 1, []),
        (deployment(1), [replica(OTHER, "old"), replica(ONE, "new", ready=False)], 0, []),
        (deployment(1), [replica(OTHER, "old"), replica(ONE, "new")], 0, ["old"]),
        (deployment(1), [replica(ONE, "dead", ready=False, phase="Failed")], 1, ["dead"]),
    ],
)
def test_deployment_plan(want, pods, created, deleted):
    assert outcome(want, pods) == (created, deleted)


def test_a_new_pod_never_takes_the_name_of_one_that_is_still_there():
    first = plan(ONE, [])[0][0]["metadata"]["name"]
    again = plan(ONE, [replica(ONE, first, deletionTimestamp="T")])[0][0]["metadata"]["name"]
    assert again != first
