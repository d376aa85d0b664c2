"""O17: a new revision that is never ready, ends again and again, or finds no node. Stage one: its pods are there and are what
they should be, by the kubelet's or the scheduler's own words. Stage two: it stands still inside its surge, never fewer serve than
may, the status says why, and going back restores what was; a canary goes back by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from e2e.faultproxy.census import Census
from e2e.faultproxy.fixtures import FAMILY, Played
from e2e.faultproxy.kubelet import RESTARTS
from e2e.faultproxy.lab import Lab, fleet_manifest

pytestmark = FAMILY
WANT = (2, 4)
DEADLINE_S = 6
STILL_S = 3.0


@dataclass(frozen=True)
class Bad:
    """One revision that cannot serve, and what the rollout may use."""

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    node_selector: dict[str, str] = field(default_factory=dict)
    surge: int = 2
    unavailable: int = 0
    canary: bool = False
    reason: str = "ProgressDeadlineExceeded"
    smoke: bool = False


def broken() -> dict[str, Any]:
    return {"image": "example.com/worker:broken"}


def crashing() -> dict[str, Any]:
    return {"image": "example.com/worker:crashing"}


NOWHERE = {"example.com/there-is": "no-such-node"}
ROWS = {
    row.name: row
    for row in (
        Bad("never-ready", broken()),
        Bad("never-ready-in-place", broken(), surge=0, unavailable=1),
        Bad("never-ready-canary", broken(), canary=True, reason="RolledBack"),
        Bad("crash-loop", crashing(), smoke=True),
        Bad("crash-loop-in-place", crashing(), surge=0, unavailable=1),
        Bad("crash-loop-canary", crashing(), canary=True, reason="RolledBack"),
        Bad("unschedulable", node_selector=NOWHERE, reason="Stuck"),
        Bad("unschedulable-in-place", node_selector=NOWHERE, surge=0, unavailable=1, reason="Stuck"),
        Bad("unschedulable-canary", node_selector=NOWHERE, canary=True, reason="RolledBack"),
    )
}


def wish(lab: Lab, row: Bad, *, bad: bool) -> dict[str, Any]:
    """The same fleet, good or bad."""
    role: dict[str, Any] = {"podTemplate": {"nodeSelector": row.node_selector}} if bad and row.node_selector else {}
    tier = {
        "name": "t", "accelerator": {"type": "h100-sxm"}, "ratio": {"prefill": 1, "decode": 2},
        "prefill": {"replicas": WANT[0], **role}, "decode": {"replicas": WANT[1], **role},
    }  # fmt: skip
    rollout: dict[str, Any] = {
        "maxSurgeGpus": row.surge, "maxUnavailable": row.unavailable, "progressDeadline": f"{DEADLINE_S}s",
    }  # fmt: skip
    if row.canary:
        rollout["canary"] = {"steps": [50], "interval": "1s"}
    return fleet_manifest(lab.namespace, tiers=[tier], rollout=rollout, **({"engine": row.engine} if bad and row.engine else {}))


def fresh_pods(lab: Lab, before: set[str]) -> list[dict[str, Any]]:
    roles = ("prefill", "decode")
    found = [pod for pod in lab.pods() if pod["metadata"]["labels"]["inferencefleet.io/role"] in roles]
    return [pod for pod in found if pod["metadata"]["uid"] not in before]


def is_bad(row: Bad, pod: dict[str, Any]) -> bool:
    """Stage one: what the scheduler or the kubelet says about a pod."""
    told = {c["type"]: c for c in pod["status"].get("conditions") or []}
    if row.node_selector:
        return told.get("PodScheduled", {}).get("reason") == "Unschedulable"
    restarts = sum(container["restartCount"] for container in pod["status"].get("containerStatuses") or [])
    return told.get("Ready", {}).get("status") == "False" and restarts == (RESTARTS if row.engine == crashing() else 0)


def play(lab: Lab, row: Bad) -> str:
    lab.start()
    lab.apply(wish(lab, row, bad=False))
    lab.until("a running fleet", lambda: lab.serving(*WANT), 60)
    before = lab.uids()
    with Census(lab) as census:
        lab.apply(wish(lab, row, bad=True))
        lab.until("the fault", lambda: bool(new := fresh_pods(lab, before)) and all(is_bad(row, pod) for pod in new), 30)
        told_s = lab.until("it is told", lambda: told(lab, row), DEADLINE_S + 20)
        if not row.canary:
            stands_still(lab)
            assert lab.ready(), "the old revision serves on"
            lab.apply(wish(lab, row, bad=False))
        lab.until("back", lambda: lab.serving(*WANT) and in_order(lab, row, before), 30)
    judge(lab, row, before, census)
    lab.at_rest()
    lab.honest()
    return f"{row.name}: told after {told_s:.1f} s, {census.states} states, at most {census.most}, at least {census.least}"


def told(lab: Lab, row: Bad) -> bool:
    found = lab.condition("RollingOut")
    return (found["status"], found["reason"]) == ("False", row.reason) and bool(found["message"])


def in_order(lab: Lab, row: Bad, before: set[str]) -> bool:
    """No worker of the bad revision any more. What went for the sake of an unavailable one is made anew."""
    return not any(is_bad(row, pod) for pod in fresh_pods(lab, before)) and len(lab.revisions()) == 1


def stands_still(lab: Lab) -> None:
    pods = lab.uids()
    lab.at_rest()
    time.sleep(STILL_S)
    assert lab.uids() == pods, "it goes on creating or deleting"


def judge(lab: Lab, row: Bad, before: set[str], census: Census) -> None:
    assert census.most <= sum(WANT) + row.surge
    assert census.most > sum(WANT) or not row.surge, "the surge was not used"
    for role, want in zip(("prefill", "decode"), WANT, strict=True):
        assert census.least[role] >= want - row.unavailable, census.least
    assert row.unavailable or lab.uids() == before, "a worker of the good revision was restarted"
    assert len(lab.lives) == 1


PLAYS: dict[str, Callable[[Lab], str | None]] = {name: partial(play, row=row) for name, row in ROWS.items()}


@pytest.mark.parametrize("row", [pytest.param(n, marks=[pytest.mark.smoke] if r.smoke else []) for n, r in ROWS.items()])
def test_a_revision_that_cannot_serve_stops_inside_its_surge(played: Played, row: str):
    print(played[row].result())
