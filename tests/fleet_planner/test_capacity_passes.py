"""Backing out over many passes: what was asked for is kept, tried again and had again, also through rollouts and restarts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import Condition
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.types import Observed, RoleLoad, Template, TierTelemetry
from tests.fleet_planner.test_reconcile import NOW, carry_out, counts, fleet, start

WAIT_S = 300.0
STEP_S = 10.0
OLD, NEW = "aaaaaaaa", "bbbbbbbb"
Pair = tuple[int, int]


def of(spec: dict[str, Any] | None = None, **tier: Any) -> InferenceFleet:
    found = fleet(**tier)
    return found.model_copy(update={"spec": found.spec.model_validate({**found.spec.to_dict(), **(spec or {})})})


class Nodes:
    """A cluster with room for so many workers of a fleet; time moves by passes."""

    def __init__(self, wish: InferenceFleet, room: int, load: Pair | None = None) -> None:
        self.fleet, self.room, self.load, self.now = wish, room, load, NOW
        self.observed: Observed = start(OLD, gpus=(1, 1))
        self.plan: Plan = self.step(0)

    def step(self, seconds: float = STEP_S) -> Plan:
        """One pass, and what follows from it."""
        self.now += seconds
        if self.load is not None:
            target = self.fleet.spec.scaling.target_inflight
            loads = [self.load[0] * target.prefill, self.load[1] * target.decode]
            roles = [RoleLoad(inflight=float(load), measured_at=self.now) for load in loads]
            self.observed = replace(self.observed, telemetry={"t": TierTelemetry(prefill=roles[0], decode=roles[1])})
        self.plan = reconcile(self.fleet, self.observed, self.now)
        self.fleet = self.fleet.model_copy(update={"status": self.plan.status})
        there = {pod.uid for pod in self.observed.pods}
        after = carry_out(self.plan, self.observed)
        pods = [pod if pod.uid in there else replace(pod, created_at=self.now, node=None) for pod in after.pods]
        placed = sorted(pods, key=lambda pod: (pod.node is None, pod.created_at, pod.name))
        rows = enumerate(placed)
        seen = [
            replace(p, ready=n < self.room, node="n" if n < self.room else None, unschedulable=n >= self.room) for n, p in rows
        ]
        self.observed = replace(after, pods=tuple(sorted(seen, key=lambda pod: pod.name)))
        return self.plan

    def run(self, seconds: float) -> set[Pair]:
        """Passes for so long; the sizes that were planned."""
        found = set()
        for _ in range(round(seconds / STEP_S)):
            self.step()
            found.add(self.size)
        return found

    @property
    def size(self) -> Pair:
        tier = self.plan.status.tiers[0]
        return tier.prefill.desired, tier.decode.desired

    def scale(self, decode: int) -> None:
        """kubectl scale, of the decode pool."""
        rows = [replace(pool, replicas=decode) if pool.role == "decode" else pool for pool in self.observed.pools]
        self.observed = replace(self.observed, pools=tuple(rows))

    def restart(self) -> None:
        """The operator's memory is gone."""
        self.observed = replace(self.observed, memory={}, telemetry={} if self.load is None else self.observed.telemetry)

    def rollout(self) -> None:
        """A new template."""
        self.observed = replace(self.observed, templates={"t": Template(NEW, "c", gpus=(1, 1), number=2)})

    def verdict(self, kind: str) -> tuple[str, str]:
        found = self.plan.status.condition(kind)
        assert found is not None
        return found.reason, found.message


MODES: dict[str, dict[str, Any]] = {"manual": {"scaling": {"mode": "manual"}}, "auto-without-telemetry": {}}


@pytest.mark.parametrize("mode", MODES)
def test_what_was_backed_out_of_stays_wished(mode: str):
    """The capped size was written as the size, read back as the wish, and never tried again."""
    nodes = Nodes(of(MODES[mode]), room=5)
    nodes.scale(decode=8)
    nodes.run(WAIT_S + 2 * STEP_S)
    assert (nodes.size, nodes.verdict("CapacityLimited")[0]) == ((1, 4), "BackedOut")
    assert nodes.run(WAIT_S / 2) == {(1, 4)}
    assert "tried again at" in nodes.verdict("CapacityLimited")[1]
    assert nodes.run(2 * WAIT_S) == {(1, 4), (2, 8)}, "it is tried once in a while"
    nodes.room = 100
    nodes.run(2 * WAIT_S)
    assert (nodes.size, nodes.verdict("CapacityLimited")[0]) == ((2, 8), "Sufficient")
    assert counts(nodes.observed) == {"prefill": 2, "decode": 8}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_size_that_a_user_set_stays_wished_for_its_window_though_load_is_known(restarted: bool):
    """One pass after it was backed out of it was forgotten: never tried again, with `CapacityLimited` Sufficient."""
    nodes = Nodes(of({"scaling": {"scaleDownWindow": "1h"}}), room=5, load=(1, 2))
    nodes.scale(decode=8)
    nodes.run(WAIT_S + 2 * STEP_S)
    if restarted:
        nodes.restart()
    nodes.run(WAIT_S / 2)
    assert nodes.verdict("CapacityLimited")[0] == ("Unschedulable" if restarted else "BackedOut")
    nodes.run(WAIT_S)
    nodes.room = 100
    nodes.run(2 * WAIT_S)
    assert (nodes.size, counts(nodes.observed)) == ((2, 8), {"prefill": 2, "decode": 8})
    nodes.run(3_600 + WAIT_S)
    assert nodes.size == (1, 2), "for one window, then the load decides"


@pytest.mark.parametrize("mode", MODES)
def test_an_operator_that_starts_knows_what_was_wished(mode: str):
    nodes = Nodes(of(MODES[mode]), room=5)
    nodes.scale(decode=8)
    nodes.run(WAIT_S + 2 * STEP_S)
    nodes.restart()
    assert nodes.run(WAIT_S + 3 * STEP_S) == {(1, 4), (2, 8)}


@pytest.mark.parametrize(("scaled", "size"), [(3, (1, 3)), (6, (1, 4)), (2, (1, 2))])
def test_who_scales_a_capped_pool_is_followed(scaled: int, size: Pair):
    """What the pool shows is the capped size: the new number counts, not its difference to the old wish."""
    nodes = Nodes(of(MODES["manual"]), room=5)
    nodes.scale(decode=8)
    nodes.run(WAIT_S + 2 * STEP_S)
    nodes.scale(decode=scaled)
    assert nodes.run(5 * STEP_S) == {size}
    nodes.room = 100
    nodes.run(2 * WAIT_S)
    assert nodes.size == (2, scaled)


@pytest.mark.parametrize("mode", MODES)
def test_a_budget_that_grows_gives_back_what_it_took(mode: str):
    spec = MODES[mode].get("scaling", {})
    nodes = Nodes(of({"scaling": {**spec, "budget": {"gpus": 5}}}), room=100)
    nodes.scale(decode=8)
    assert nodes.run(WAIT_S) == {(1, 4)}
    assert "scaling.budget.gpus leaves 5" in nodes.verdict("CapacityLimited")[1]
    nodes.fleet = of({"scaling": {**spec, "budget": {"gpus": 10}}}).model_copy(update={"status": nodes.fleet.status})
    nodes.run(2 * STEP_S)
    assert (nodes.size, nodes.verdict("CapacityLimited")[0]) == ((2, 8), "Sufficient")


def capped(nodes: Nodes) -> None:
    """Until the tier was just backed out, to 1 prefill and 4 decode workers."""
    while nodes.size != (1, 4) or nodes.observed.memory["t"].cap_until < nodes.now + WAIT_S - 2 * STEP_S:
        nodes.step()
        assert nodes.now < NOW + 10 * WAIT_S


ROLLING = {"rollout": {"maxUnavailable": 3}}
TIER: dict[str, Any] = {"prefill": {"minReplicas": 1, "replicas": 2}, "decode": {"minReplicas": 1, "replicas": 8}}


@pytest.mark.parametrize("memory", ["kept", "lost"])
@pytest.mark.parametrize("later_s", [0.0, 50.0, WAIT_S - 20.0])
def test_a_cap_holds_through_a_rollout(later_s: float, memory: str):
    """A rollout in a full cluster forgot the cap: the old revision grew again, and it was stuck for good."""
    nodes = Nodes(of(ROLLING, **TIER), room=6, load=(2, 8))
    capped(nodes)
    nodes.run(later_s)
    nodes.rollout()
    least, passes = 9, 0
    while counts(nodes.observed, NEW) == {"prefill": 0, "decode": 0} or any(counts(nodes.observed, OLD).values()):
        before = counts(nodes.observed, OLD)
        nodes.step()
        if memory == "lost" and any(counts(nodes.observed, NEW).values()):
            nodes.restart()
        after, passes = counts(nodes.observed, OLD), passes + 1
        assert all(after[role] <= before[role] for role in after) or nodes.verdict("RollingOut")[0] == "Complete"
        assert nodes.verdict("RollingOut")[0] != "Stuck"
        least = min(least, sum(pod.ready for pod in nodes.observed.pods))
        assert passes < WAIT_S
    assert least >= 2, "maxUnavailable of what there is"
    nodes.room = 100
    nodes.run(3 * WAIT_S)
    assert (nodes.size, nodes.verdict("CapacityLimited")[0]) == ((2, 8), "Sufficient")


def test_load_that_grows_beyond_the_nodes_in_a_rollout_does_not_end_it():
    """Nothing was capped while two revisions had workers: what no node could hold counted as what must stay."""
    nodes = Nodes(of(ROLLING, **TIER), room=6, load=(1, 4))
    nodes.fleet = nodes.fleet.model_copy(
        update={"spec": nodes.fleet.spec.model_validate({**nodes.fleet.spec.to_dict(), "scaling": {"scaleDownWindow": "1m"}})}
    )
    nodes.run(WAIT_S)
    assert nodes.size == (1, 4)
    nodes.rollout()
    nodes.step()
    nodes.load = (2, 8)
    nodes.run(2 * WAIT_S)
    assert counts(nodes.observed, OLD) == {"prefill": 0, "decode": 0}
    assert nodes.verdict("RollingOut")[0] == "Complete"


def test_a_minimum_that_has_no_room_moves_no_time():
    """Incident: one worker of the minimum found no node; every pass said another time of the next try, and wrote the status."""
    nodes = Nodes(of(MODES["manual"], decode={"minReplicas": 4}), room=4)
    nodes.scale(decode=8)
    nodes.run(WAIT_S + 3 * STEP_S)
    assert nodes.size == (1, 4)
    words = set()
    for _ in range(20):
        nodes.step()
        words.add(nodes.verdict("CapacityLimited"))
        assert (nodes.plan.create, nodes.plan.delete) == ((), ())
    assert len(words) == 1
    nodes.room = 100
    nodes.run(2 * WAIT_S)
    assert (nodes.size, nodes.verdict("CapacityLimited")[0]) == ((2, 8), "Sufficient")


@pytest.mark.parametrize("room", [6, 100], ids=["no room", "nodes came back"])
def test_a_rollout_that_a_small_surge_stops_keeps_no_tier_small(room: int):
    """Nodes came back, and the tier had 1 and 4 workers of 2 and 8 until somebody raised the surge: days later."""
    nodes = Nodes(of({"rollout": {"maxSurgeGpus": 1}}, **TIER), room=6, load=(2, 8))
    capped(nodes)
    nodes.rollout()
    nodes.run(5 * STEP_S)
    assert (nodes.size, nodes.verdict("RollingOut")[0]) == ((1, 4), "Stuck")
    nodes.room = room
    sizes = nodes.run(3 * WAIT_S)
    if room == 100:
        assert nodes.size == (2, 8)
        assert counts(nodes.observed, OLD) == {"prefill": 2, "decode": 8}
    else:
        assert sizes == {(1, 4), (2, 8)}, "tried once in a while"
    assert sum(counts(nodes.observed).values()) <= 11, "never above the surge"


def test_a_stuck_rollout_stays_so_while_its_old_workers_grow_and_go():
    """What had no room is tried again every ten minutes: each time RollingOut said Progressing for a pass, and warned anew."""
    nodes = Nodes(of({"rollout": {"maxSurgeGpus": 1}}, **TIER), room=6, load=(2, 8))
    capped(nodes)
    nodes.rollout()
    nodes.run(5 * STEP_S)
    reasons, sizes = set(), set()
    for _ in range(round(3 * WAIT_S / STEP_S)):
        nodes.step()
        reasons.add(nodes.verdict("RollingOut")[0])
        sizes.add(nodes.size)
    assert (sizes, reasons) == ({(1, 4), (2, 8)}, {"Stuck"})
    spec = nodes.fleet.spec.to_dict() | {"rollout": {"maxSurgeGpus": 4}}
    nodes.fleet = nodes.fleet.model_copy(update={"spec": nodes.fleet.spec.model_validate(spec)})
    nodes.room = 100
    nodes.step()
    assert nodes.verdict("RollingOut")[0] == "Progressing", "a limit that was raised lets it go on at once"
    nodes.run(WAIT_S)
    assert nodes.verdict("RollingOut")[0] == "Complete"


def judged(percent: int, **scaling: Any) -> Nodes:
    """A full cluster with a tier that was backed out of 2 and 8 workers to 1 and 4, and a canary that serves."""
    canary = {"steps": [percent], "interval": "2h"}
    rollout = {"maxUnavailable": 1, "canary": canary, "progressDeadline": "10m"}
    nodes = Nodes(of({"rollout": rollout, "scaling": scaling}, **TIER), room=6, load=(2, 8))
    while nodes.size != (1, 4):
        nodes.step()
    nodes.rollout()
    nodes.run(5 * STEP_S)
    nodes.room = 7  # old ones that the canary let go come back, and no more
    nodes.run(5 * STEP_S)
    assert (nodes.size, step_since(nodes) != "") == ((1, 4), True)
    return nodes


def step_since(nodes: Nodes) -> str:
    """When the step of its canary began."""
    return nodes.plan.status.tiers[0].rollout.step_since


@pytest.mark.parametrize(
    ("room", "percent", "wait", "sizes"),
    [
        pytest.param(7, 10, "5m", {(1, 4), (2, 5), (2, 8)}, id="no room: tried once in a while, and all nodes are used"),
        pytest.param(100, 10, "5m", {(1, 4), (2, 8)}, id="nodes came back"),
        pytest.param(100, 50, "5m", {(1, 4)}, id="its step would begin anew"),
        pytest.param(100, 10, "10m", {(1, 4)}, id="its next step could be late for it"),
    ],
)
def test_a_canary_that_is_judged_keeps_no_tier_small(room: int, percent: int, wait: str, sizes: set[Pair]):
    """Nodes came back, and the tier stayed small for as long as a canary's steps lasted: hours."""
    nodes = judged(percent, capacityWait=wait)
    since, nodes.room = step_since(nodes), room
    assert nodes.run(6 * WAIT_S) == sizes
    assert step_since(nodes) == since, "its step goes on"
    if room == 100 and len(sizes) == 2:
        assert nodes.size == (2, 8)
        assert sum(pod.ready for pod in nodes.observed.pods) >= 10


def test_what_is_tried_again_is_limited_until_it_is_there():
    """Each try began with a pass that said Sufficient, by an event, too: nobody saw since when room lacked."""
    nodes = Nodes(of(MODES["manual"]), room=5)
    nodes.scale(decode=8)
    nodes.run(WAIT_S)
    since, words, sizes = capacity(nodes).last_transition_time, set(), set()
    for _ in range(round(5 * WAIT_S / STEP_S)):
        nodes.step()
        words.add((capacity(nodes).status, capacity(nodes).last_transition_time, nodes.verdict("CapacityLimited")[0]))
        sizes.add(nodes.size)
    assert sizes == {(1, 4), (2, 8)}
    assert words == {("True", since, reason) for reason in ("Unschedulable", "BackedOut", "TriedAgain")}
    nodes.restart()
    while nodes.verdict("CapacityLimited")[0] != "TriedAgain":
        nodes.step()
    assert nodes.verdict("CapacityLimited")[1] == "there was no room, and it is tried again: pods without a node yet: 5"
    nodes.room = 100
    nodes.run(2 * STEP_S)
    assert nodes.verdict("CapacityLimited") == ("Sufficient", "every pod found a node")


def capacity(nodes: Nodes) -> Condition:
    found = nodes.plan.status.condition("CapacityLimited")
    assert found is not None
    return found
