"""A real ResourceQuota that refuses workers, nodes without room for them, or a fleet's own budget. Stage one: the API server
refused one, or the scheduler found no node, in their own words. Stage two: the sizes back out to what there is room for, no role
is stranded over the ratio in any state, the condition names what is missing, and what was asked for is had when there is room
again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from e2e.faultproxy import history, machines
from e2e.faultproxy.fixtures import FAMILY, Played
from e2e.faultproxy.lab import Lab, fleet_manifest

pytestmark = FAMILY
WAIT_S = 6
LOW, HIGH = 1 / 4, 1.0
ROUTERS = 1
"""Pods of the fleet that are no workers, and count, too."""
FULL = (2, 8)
HELD = (2, 4)
QUOTAS = {
    "pods": {"pods": str(ROUTERS + sum(HELD))},
    "devices": {"requests.nvidia.com/gpu": str(sum(HELD))},
}
"""By row: what is limited. Devices are how most quotas of this field are written."""


def refused(lab: Lab) -> list[str]:
    """Stage one: what was asked of the API server and not granted."""
    return [r.name for r in lab.proxy.ledger.writes() if r.kind == "pods" and r.method == "POST" and r.status == 403]


def play(lab: Lab, row: str) -> str:
    quotas, hard = f"/api/v1/namespaces/{lab.namespace}/resourcequotas", QUOTAS[row]
    lab.start()
    ratio = {"prefill": 1, "decode": 2, "min": "1:4", "max": "1:1"}
    tier = {"name": "t", "accelerator": {"type": "h100-sxm"}, "ratio": ratio}
    lab.apply(fleet_manifest(lab.namespace, tiers=[tier], scaling={"mode": "manual", "capacityWait": f"{WAIT_S}s"}))
    lab.until("a running fleet", lambda: lab.serving(1, 2), 60)
    lab.admin("POST", quotas, {"metadata": {"name": "team"}, "spec": {"hard": hard}}).raise_for_status()
    lab.until("a quota that holds", lambda: lab.admin.get(f"{quotas}/team").get("status", {}).get("hard") == hard)
    since = history.mark(lab)
    lab.scale("decode", FULL[1])
    lab.until("refused", lambda: bool(refused(lab)))
    lab.until("what the quota holds", lambda: lab.serving(*HELD))
    lab.until("told", lambda: lab.condition("CapacityLimited")["status"] == "True")
    said = lab.condition("CapacityLimited")
    (resource,) = hard
    assert said["reason"] == "BackedOut"
    assert "exceeded quota: team" in said["message"], said
    assert f"limited: {resource}={hard[resource]}" in said["message"], said
    assert lab.ready(), "what there is serves on"
    lab.honest()
    tried = len(refused(lab))
    lab.until("tried again", lambda: len(refused(lab)) > tried, 3 * WAIT_S)
    more = {resource: str(int(hard[resource]) + 2)}
    lab.admin.merge(f"{quotas}/team", {"spec": {"hard": more}})
    lab.until("grown into it", lambda: lab.serving(2, 6), 4 * WAIT_S)
    lab.admin("DELETE", f"{quotas}/team").raise_for_status()
    took_s = lab.until("what was asked for", lambda: lab.serving(*FULL), 4 * WAIT_S)
    lab.until("no limit is told", lambda: lab.condition("CapacityLimited")["status"] == "False")
    lab.at_rest()
    return f"{row}: {len(refused(lab))} refusals, {inside(lab, since)} documents, full {took_s:.1f} s after it was gone"


def inside(lab: Lab, since: str) -> int:
    """How many documents routers got since then: in none of them is what serves outside the ratio."""
    documents = list(history.documents(lab, since))
    assert len(documents) >= 3
    assert not [one for one in documents if not LOW <= one.serving("prefill") / max(one.serving("decode"), 0.1) <= HIGH]
    return len(documents)


def unplaced(lab: Lab) -> list[dict[str, Any]]:
    """Stage one: pods for which the scheduler found no node."""
    told = [condition for pod in lab.pods() for condition in pod["status"].get("conditions") or []]
    return [one for one in told if (one["type"], one.get("reason")) == ("PodScheduled", "Unschedulable")]


def play_nodes(lab: Lab) -> str:
    machines.add_node(lab, "a", pods=sum(HELD))
    lab.start()
    spec = machines.on_own_nodes(lab) | {"scaling": {"mode": "manual", "capacityWait": f"{WAIT_S}s"}}
    spec["tiers"][0]["ratio"] = {"prefill": 1, "decode": 2, "min": "1:4", "max": "1:1"}
    lab.apply(fleet_manifest(lab.namespace, **spec))
    lab.until("a running fleet", lambda: lab.serving(1, 2), 60)
    since = history.mark(lab)
    lab.scale("decode", FULL[1])
    lab.until("no node for some", lambda: bool(unplaced(lab)))
    lab.until("backed out", lambda: lab.condition("CapacityLimited")["reason"] == "BackedOut", 4 * WAIT_S)
    said = lab.condition("CapacityLimited")
    assert said["status"] == "True"
    assert "Too many pods" in said["message"], said
    lab.until("what the node holds", lambda: lab.serving(*HELD) and not unplaced(lab), 2 * WAIT_S)
    assert lab.ready(), "what there is serves on"
    lab.honest()
    machines.add_node(lab, "b", pods=2)
    lab.until("grown into it", lambda: lab.serving(2, 6), 4 * WAIT_S)
    machines.add_node(lab, "c")
    took_s = lab.until("what was asked for", lambda: lab.serving(*FULL), 4 * WAIT_S)
    lab.until("no limit is told", lambda: lab.condition("CapacityLimited")["status"] == "False")
    lab.at_rest()
    return f"nodes: {inside(lab, since)} documents, full {took_s:.1f} s after there was room"


def play_budget(lab: Lab) -> str:
    """Nobody refuses anything: the fleet's own budget pays for no more."""

    def paid(gpus: int | None) -> None:
        ratio = {"prefill": 1, "decode": 2, "min": "1:4", "max": "1:1"}
        budget = {"budget": {"gpus": gpus}} if gpus is not None else {}
        tier = {"name": "t", "accelerator": {"type": "h100-sxm"}, "ratio": ratio}
        lab.apply(fleet_manifest(lab.namespace, tiers=[tier], scaling={"mode": "manual", **budget}))

    paid(sum(HELD))
    lab.start()
    lab.until("a running fleet", lambda: lab.serving(1, 2), 60)
    since = history.mark(lab)
    lab.scale("decode", FULL[1])
    lab.until("what the budget pays for", lambda: lab.serving(*HELD))
    lab.until("told", lambda: lab.condition("CapacityLimited")["status"] == "True")
    said = lab.condition("CapacityLimited")
    wanted = f"{FULL[0]} prefill and {FULL[1]} decode workers need {sum(FULL)} devices, scaling.budget.gpus leaves {sum(HELD)}"
    assert said["reason"] == "BackedOut"
    assert wanted in said["message"], said
    lab.at_rest()
    lab.honest()
    paid(sum(HELD) + 2)
    lab.until("grown into it", lambda: lab.serving(2, 6))
    paid(None)
    took_s = lab.until("what was asked for", lambda: lab.serving(*FULL))
    lab.until("no limit is told", lambda: lab.condition("CapacityLimited")["status"] == "False")
    assert not refused(lab)
    return f"budget: {inside(lab, since)} documents, full {took_s:.1f} s after it was gone"


PLAYS = {**{row: partial(play, row=row) for row in QUOTAS}, "nodes": play_nodes, "budget": play_budget}


@pytest.mark.parametrize("row", ["budget"])
def test_a_budget_pays_for_no_more_is_named_and_grown_into(played: Played, row: str):
    print(played[row].result())


@pytest.mark.parametrize("row", ["nodes"])
def test_nodes_without_room_are_backed_out_of_named_and_grown_into(played: Played, row: str):
    print(played[row].result())


@pytest.mark.parametrize("row", QUOTAS)
def test_a_quota_is_backed_out_of_named_and_grown_into(played: Played, row: str):
    print(played[row].result())
