"""Workers over several nodes that find too few of them, most in a rollout: what the status says while one gives its nodes back
and is tried again."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

from fleet_planner.reconcile import reconcile
from fleet_planner.replicas import replicas_of
from fleet_planner.types import ObservedPod, ObservedPool, RouterView, Template
from fleet_planner.wanted import PodWanted
from tests.fleet_planner.test_reconcile import NOW, fleet, pod, start

NODES = (2, 2)
"""Pods of a worker of each role."""
PASS_S = 10.0
HOUR = 360
UNSEEN: dict[str, Any] = {"node": None, "ready": False, "ready_since": None, "phase": "Pending"}


class Rolling:
    """One worker of each role; each pod needs a node of its own. The scheduler says a pass later that it has none."""

    def __init__(self, nodes: int, *, rolls: bool = True) -> None:
        self.nodes, self.now, self.serial = nodes, NOW, 0
        self.wish = fleet(ratio={"decode": 1}, prefill={"maxReplicas": 1}, decode={"maxReplicas": 1})
        self.observed = start(nodes=NODES, gpus=NODES)
        for _ in range(5):
            self.step()
        if not rolls:
            return
        stored = {"t": {"aaaaaaaa": self.observed.templates["t"]}}
        template = Template("bbbbbbbb", "d", nodes=NODES, gpus=NODES, number=2)
        self.observed = replace(self.observed, stored=stored, templates={"t": template})

    def step(self) -> str:
        """One pass, then the cluster; the reason of RollingOut."""
        self.now += PASS_S
        plan = reconcile(self.wish, self.observed, self.now)
        self.wish = self.wish.model_copy(update={"status": plan.status})
        gone, serving = {one.uid for one in plan.delete}, {one.uid for one in plan.targets if one.state == "serving"}
        pods = [replace(one, serving=one.uid in serving) for one in self._placed() if one.uid not in gone]
        pools = [ObservedPool(p.name, p.name, p.role, p.tier, p.revision, p.replicas, p.replicas, p.size) for p in plan.pools]
        self.observed = replace(
            self.observed, pods=(*pods, *self._made(plan.create)), pools=tuple(pools), memory=plan.memory, router=RouterView(1, 1)
        )
        found = plan.status.condition("RollingOut")
        return found.reason if found is not None else ""

    def _placed(self) -> list[ObservedPod]:
        free, found = self.nodes - sum(one.node is not None for one in self.observed.pods), list[ObservedPod]()
        for one in self.observed.pods:
            if one.node is None and free > 0:
                free -= 1
                found.append(replace(one, node="n", unschedulable=False, scheduled_at=self.now))
            else:
                found.append(replace(one, unschedulable=one.node is None, message="0/7 nodes: no gpu"))
        whole = {one.uid for worker in replicas_of(found, NODES) if worker.placed == worker.size for one in worker.pods}
        on: dict[str, Any] = {"phase": "Running", "ready": True, "ready_since": self.now}
        return [replace(one, **on) if one.uid in whole and not one.ready else one for one in found]

    def _made(self, create: tuple[PodWanted, ...]) -> list[ObservedPod]:
        leaders, made = dict[str, str](), list[ObservedPod]()
        for one in create:
            self.serial += 1
            leader = leaders.setdefault(f"{one.pool}-{one.ordinal}", f"uid-{self.serial}")
            more = {"revision": one.revision, "compat": one.revision, "created_at": self.now, **UNSEEN}
            own = {"uid": f"uid-{self.serial}", "member": one.member, "group": leader if one.member else ""}
            made.append(pod(one.name, one.role, one.ordinal, **{**more, **own}))
        return made

    def reasons(self) -> list[str]:
        """Of an hour, each once where it stays."""
        return [reason for reason, _ in groupby([self.step() for _ in range(HOUR)])]


def test_a_rollout_is_stuck_without_a_break_while_a_half_is_given_back_and_tried_again() -> None:
    """It was Progressing in between, for as long as the half was away: its alert (Stuck for five minutes) never fired, also after
    the deadline for progress, and each change back was a Warning."""
    rolling = Rolling(nodes=7)
    assert rolling.reasons() == ["Progressing", "Stuck"]
    assert sum(one.revision == "aaaaaaaa" and one.serving for one in rolling.observed.pods) == 2
    rolling.nodes = 8
    assert rolling.reasons()[-2:] == ["Progressing", "Complete"]
    assert {one.revision for one in rolling.observed.pods} == {"bbbbbbbb"}


def test_one_that_waits_though_it_never_was_stuck_goes_on() -> None:
    rolling = Rolling(nodes=8)
    assert rolling.reasons() == ["Progressing", "Complete"]


def test_a_revision_that_comes_instead_is_not_stuck_for_what_the_one_before_lacked() -> None:
    rolling = Rolling(nodes=7)
    rolling.reasons()
    rolling.nodes, templates = 8, rolling.observed.templates
    rolling.observed = replace(rolling.observed, templates={"t": replace(templates["t"], revision="cccccccc", number=3)})
    assert "Stuck" not in rolling.reasons()


def told(world: Rolling, kind: str, passes: int) -> list[tuple[str, int]]:
    """The reasons of a condition, and how often each was given one after the other."""
    found = []
    for _ in range(passes):
        world.step()
        known = world.wish.status.condition(kind)
        found.append(known.reason if known is not None else "")
    return [(reason, len(list(group))) for reason, group in groupby(found)]


def test_a_fleet_that_lacks_a_node_is_not_told_to_start_whenever_a_half_is_given_back():
    """Half of the time it was WorkersStarting, so that nobody was called, and later WorkersLate, a Warning each time; and
    pods were "being created" of which none was made for capacityWait."""
    world = Rolling(3, rolls=False)
    (first, _), *rest = told(world, "Available", HOUR)
    assert first in ("WorkersStarting", "WorkersPending")
    assert {reason for reason, _ in rest} <= {"WorkersPending"}
    creating = [passes for reason, passes in told(world, "Provisioned", HOUR) if reason == "Creating"]
    assert set(creating) <= {1}, "in the pass that makes them"
    world.nodes = 4
    assert told(world, "Available", HOUR)[-1][0] == "Serving"
