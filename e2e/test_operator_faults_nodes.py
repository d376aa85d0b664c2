"""Nodes that fail or go away under a running worker, on the real control plane: one that is not ready, which the real node
controller then taints, ones whose devices fail, by taint or by condition, one that is cordoned, and one that a real `kubectl
drain` empties. Stage one: the worker is on that node, and what the node says stands there; of a drain, an eviction was refused
by the role's budget. Stage two, from every state that the API server ever told: a worker in its place serves before it goes, no
other one goes, what serves is inside the ratio all the time; on failing devices it gets no new request before there is another.
Room for one comes late, so that an order that only luck kept would show."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from e2e.faultproxy import history, machines
from e2e.faultproxy.fixtures import FAMILY, Played
from e2e.faultproxy.lab import Lab, fleet_manifest

pytestmark = FAMILY
LOW, HIGH = 1 / 3, 1.0
NOT_READY = "node.kubernetes.io/not-ready"
"""Of the real node controller."""


@dataclass(frozen=True)
class Failure:
    """What happens to the node."""

    name: str
    condition: dict[str, str] = field(default_factory=dict)
    taint: str = ""
    sick: bool = True
    """Its devices fail: requests go elsewhere at once."""
    cordon: bool = False
    drain: bool = False
    """By evictions, which a budget may refuse."""


ROWS = {
    row.name: row
    for row in (
        Failure("not-ready", {"type": "Ready", "status": "False", "reason": "KubeletNotReady"}, NOT_READY, sick=False),
        Failure("xid-taint", taint="nvidia.com/gpu-xid"),
        Failure("xid-condition", {"type": "GPUXIDError", "status": "True", "reason": "XID79"}),
        Failure("cordoned", sick=False, cordon=True),
        Failure("drained", sick=False, cordon=True, drain=True),
    )
}


def fail(lab: Lab, row: Failure) -> None:
    """As a kubelet, or a watcher of devices, tells it."""
    path = f"/api/v1/nodes/{machines.node_name(lab, 'b')}"
    node = lab.admin.get(path)
    if row.cordon and not row.drain:  # a drain does it by itself
        machines.cordon(lab, "b")
    if row.taint and row.sick:
        taints = [*node["spec"]["taints"], {"key": row.taint, "effect": "NoSchedule"}]
        lab.admin.merge(path, {"spec": {"taints": taints}})
    if row.condition:
        others = [c for c in node["status"]["conditions"] if c["type"] != row.condition["type"]]
        lab.admin.merge(f"{path}/status", {"status": {"conditions": [*others, {**row.condition, "message": "paper"}]}})


def happened(lab: Lab, row: Failure) -> bool:
    """Stage one: the node says it; of one that is not ready the real node controller does, too (it looks each 5 s)."""
    node = lab.admin.get(f"/api/v1/nodes/{machines.node_name(lab, 'b')}")
    told = {c["type"]: c["status"] for c in node["status"]["conditions"]}
    told |= {taint["key"]: "tainted" for taint in node["spec"]["taints"]}
    told |= {"cordoned": str(node["spec"].get("unschedulable", False))}
    wanted = {row.condition["type"]: row.condition["status"]} if row.condition else {}
    wanted |= {"cordoned": "True"} if row.cordon else {}
    return told.items() >= {**wanted, **({row.taint: "tainted"} if row.taint else {})}.items()


@contextmanager
def draining(lab: Lab) -> Iterator[None]:
    """`kubectl drain` of the node while the block runs; it must have met a budget's refusal, and have ended well."""
    argv = [*lab.plane.kubectl_argv(), "drain", machines.node_name(lab, "b"), "--delete-emptydir-data"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as drain:
        try:
            yield
            said = drain.communicate(timeout=60)[0]
        finally:
            drain.kill()
    assert drain.returncode == 0, said
    assert "would violate the pod's disruption budget" in said, said


def on_node(lab: Lab, letter: str) -> list[dict[str, Any]]:
    """Its workers."""
    name = machines.node_name(lab, letter)
    return [pod for role in ("prefill", "decode") for pod in lab.pods(role) if pod["spec"].get("nodeName") == name]


def three_and_one(lab: Lab) -> str:
    """One prefill and two decode workers on node a, a third decode worker alone on node b, no room for more; its uid."""
    machines.add_node(lab, "a", pods=3)
    lab.start()
    spec = machines.on_own_nodes(lab) | {"scaling": {"mode": "manual"}}
    spec["tiers"][0]["ratio"] = {"prefill": 1, "decode": 2, "min": "1:3", "max": "1:1"}
    lab.apply(fleet_manifest(lab.namespace, **spec))
    lab.until("a running fleet", lambda: lab.serving(1, 2), 60)
    machines.add_node(lab, "b", pods=1)
    lab.scale("decode", 3)
    lab.until("a worker on node b", lambda: lab.serving(1, 3) and len(on_node(lab, "b")) == 1, 60)
    lab.at_rest()
    uid: str = on_node(lab, "b")[0]["metadata"]["uid"]
    return uid


def play(lab: Lab, row: Failure) -> str:
    victim = three_and_one(lab)
    others, since = lab.uids() - {victim}, history.mark(lab)
    fail(lab, row)
    with draining(lab) if row.drain else nullcontext():
        lab.until("the node says it", lambda: happened(lab, row), 20)
        lab.until("one more is asked for", lambda: len(lab.uids()) == 5)
        machines.add_node(lab, "c")
        took_s = lab.until("another in its place", lambda: victim not in lab.uids() and lab.serving(1, 3), 60)
    assert others < lab.uids(), "a worker of a node that is well was replaced"
    assert [len(on_node(lab, letter)) for letter in "abc"] == [3, 0, 1]
    told = judge(lab, row, victim, since)
    lab.at_rest()
    lab.honest()
    return f"{row.name}: {told}, in order after {took_s:.1f} s"


def judge(lab: Lab, row: Failure, victim: str, since: str) -> str:
    pods: dict[str, dict[str, Any]] = {}
    went = serves = 0
    states = [state for state in history.pods(lab, since) if not state.gone]
    for state in states:
        meta = state.object["metadata"]
        pods[meta["uid"]] = state.object
        if meta["uid"] == victim and "deletionTimestamp" in meta and not went:
            went = state.version
        elif meta["uid"] != victim and not serves and ready(state.object):
            serves = state.version
    assert 0 < serves < went, f"it went at {went}, the one in its place served from {serves} on"
    assert "deletionTimestamp" not in str([pod["metadata"] for uid, pod in pods.items() if uid != victim])
    name = pods[victim]["metadata"]["name"]
    documents = list(history.documents(lab, since))
    held = [one.version for one in documents if one.workers.get(name) == ("decode", "held")]
    told = next(one.version for one in documents if one.workers.get(name) != ("decode", "serving"))
    assert told < went, "routers heard of it after it was told to go"
    if row.sick:
        assert held, [one.workers for one in documents]
        assert held[0] < serves, "requests were sent to failing devices until the one in its place served"
        assert not [one for one in documents if one.version > held[0] and one.workers.get(name) == ("decode", "serving")]
    outside = [one for one in documents if not LOW <= one.serving("prefill") / max(one.serving("decode"), 0.1) <= HIGH]
    assert not outside
    assert min(one.serving("decode") for one in documents) >= 2
    return f"{len(documents)} documents, {len(states)} states of pods"


def ready(pod: dict[str, Any]) -> bool:
    """As the pod's own condition has it."""
    return {c["type"]: c["status"] for c in pod.get("status", {}).get("conditions") or []}.get("Ready") == "True"


PLAYS = {name: partial(play, row=row) for name, row in ROWS.items()}


@pytest.mark.parametrize("row", ROWS)
def test_a_worker_on_a_node_that_fails_has_one_in_its_place_before_it_goes(played: Played, row: str):
    print(played[row].result())
