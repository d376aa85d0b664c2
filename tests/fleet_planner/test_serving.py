"""Which workers serve: inside the ratio at every observable state, whatever comes, goes, fails or is edited."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_api.quantities import parse_ratio
from fleet_api.v1alpha1.status import FleetStatus
from fleet_planner.flip import on_its_way
from fleet_planner.ratio import within
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.replicas import Replica, replicas_of
from fleet_planner.roles import Role
from fleet_planner.serving import choose_serving, could_serve, still_needed
from fleet_planner.types import FlipReport, Observed, ObservedPod, ObservedPool, RouterView, Template
from tests.fleet_planner.test_reconcile import NOW, fleet, pod, start

LOW, HIGH = parse_ratio("1:4"), parse_ratio("1:1")


def replica(name: str, role: Role, **more: Any) -> Replica:
    return Replica((pod(name, role, 0, **more),))


def names(replicas: list[Replica], ratio: tuple[str, str] = ("1:4", "1:1")) -> list[str]:
    chosen = choose_serving(replicas, parse_ratio(ratio[0]), parse_ratio(ratio[1]))
    return sorted(r.leader.name for r in replicas if r.leader.uid in chosen)


def test_a_ready_worker_without_partner_is_held():
    prefill, decode = replica("p", "prefill"), replica("d", "decode")
    assert names([prefill]) == []
    assert names([prefill, replica("d", "decode", ready=False)]) == []
    assert names([prefill, decode]) == ["d", "p"]


def test_after_a_loss_the_other_role_is_held_down_to_the_ratio_and_what_serves_keeps_its_place():
    decodes = [replica(f"d{n}", "decode", serving=n != 0, ready_since=float(n)) for n in range(6)]
    assert names([replica("p", "prefill", serving=True), *decodes]) == ["d1", "d2", "d3", "d4", "p"]


def test_incompatible_revisions_are_counted_apart():
    old = [replica("p-old", "prefill", compat="old"), replica("d-old", "decode", compat="old")]
    new = [replica("p-new", "prefill", compat="new")]
    assert names([*old, *new]) == ["d-old", "p-old"]
    assert names([old[0], replica("d-new", "decode", compat="new")]) == []


def test_a_fleet_that_lost_a_whole_role_goes_on_with_the_rest():
    decodes = [replica("d0", "decode", serving=True), replica("d1", "decode", serving=True)]
    assert names(decodes) == ["d0", "d1"]
    assert names([replica("d0", "decode"), replica("d1", "decode")]) == []  # at the start nobody waits for it: hold


def test_workers_on_nodes_that_stay_are_preferred():
    decodes = [replica("d0", "decode", leaving="cordoned"), replica("d1", "decode")]
    assert names([replica("p", "prefill"), *decodes], ("1:1", "1:1")) == ["d1", "p"]


def test_failing_devices_get_nothing_while_others_can_serve():
    prefills = [replica("p0", "prefill", sick="node n has taint xid", serving=True), replica("p1", "prefill")]
    assert names([*prefills, replica("d", "decode", serving=True)]) == ["d", "p1"]
    assert names([prefills[0], replica("d", "decode", serving=True)]) == ["d", "p0"]  # else nobody would
    assert names([replica("p0", "prefill", sick="xid"), replica("d", "decode")]) == ["d", "p0"]  # nor ever begin


def test_of_workers_alike_the_one_that_was_ready_first_serves():
    decodes = [replica("a", "decode", ready_since=2.0), replica("z", "decode", ready_since=1.0)]
    assert names([replica("p", "prefill"), *decodes], ("1:1", "1:1")) == ["p", "z"]


def test_failing_devices_could_serve_only_where_nobody_else_does():
    sick, well, decode = replica("p0", "prefill", sick="xid"), replica("p1", "prefill"), replica("d", "decode")
    assert could_serve([sick, well, decode], LOW, HIGH) == {well.leader.uid, decode.leader.uid}
    assert could_serve([sick, decode], LOW, HIGH) == {sick.leader.uid, decode.leader.uid}


@pytest.mark.parametrize(
    ("prefills", "gone", "floor", "kept"),
    [
        pytest.param(1, {}, (1, 1), False, id="less than wanted, no less than the floor"),
        pytest.param(1, {}, (1, 2), True, id="less than the floor"),
        pytest.param(1, {"leaving": "cordoned"}, (1, 1), True, id="its node goes: up to what is wanted"),
        pytest.param(0, {}, (1, 2), True, id="the other role is lost: still less than the floor"),
        pytest.param(0, {}, (1, 1), False, id="the other role is lost: no less than the floor"),
    ],
)
def test_who_must_not_go_yet(prefills: int, gone: dict[str, Any], floor: tuple[int, int], kept: bool):
    going = replica("d1", "decode", serving=True, **gone)
    staying = [replica("p", "prefill", serving=True)] * prefills + [replica("d0", "decode", serving=True)]
    found = still_needed([*staying, going], {going.leader.uid}, (1, 2), floor, (LOW, HIGH))
    assert found == ({going.leader.uid} if kept else set())


RATIOS = [("1:4", "1:1", 1, 2), ("1:3", "1:3", 1, 3), ("2:5", "1:2", 2, 4), ("1:2", "3:1", 2, 2)]
EVENTS = st.tuples(
    st.sampled_from(
        [
            "ready",
            "ready",
            "ready",
            "unready",
            "lose",
            "fail",
            "gone",
            "scale",
            "template",
            "cordon",
            "forget",
            "time",
            "idle",
            "obey",
            "obey",
            "lie",
            "refuse",
        ]
    ),
    st.integers(0, 7),
)


class Model:
    """A cluster in which every step is the user's, a node's or a pod's; the operator plans after each."""

    nodes = (1, 1)
    """Pods of one worker of each role."""

    def __init__(self, low: str, high: str, prefill: int, decode: int) -> None:
        ratio = {"prefill": prefill, "decode": decode, "min": low, "max": high}
        self.wish = fleet(ratio=ratio, prefill={"maxReplicas": 6}, decode={"maxReplicas": 12})
        self.bounds = parse_ratio(low), parse_ratio(high)
        self.observed = start(flippable=self.nodes == (1, 1), nodes=self.nodes)
        self.now = NOW
        self.flips = 0
        self.status = FleetStatus()
        self.plan_once()

    def plan_once(self) -> Plan:
        """What the operator does; the routers hear of it at once."""
        wish = self.wish.model_copy(update={"status": self.status})
        before = self.observed
        plan = reconcile(wish, before, self.now)
        gone = {one.uid for one in plan.delete}
        serving = {target.uid for target in plan.targets if target.state == "serving"}
        told = {target.uid for target in plan.targets if target.state != "draining"}
        self.check(plan, {p.uid for p in before.pods if p.serving and p.ready and p.uid not in gone})
        pods = [
            replace(p, serving=p.uid in serving, told=p.uid in told, terminating=p.terminating or p.uid in gone)
            for p in before.pods
        ]
        pods = [replace(p, ready=p.ready and not p.terminating) for p in pods]
        pods = [self.flip(p, plan) for p in pods]
        assert sum(p.flipping is not None and not p.terminating and p.phase == "Running" for p in pods) <= 1
        pods += [
            pod(w.name, w.role, w.ordinal, uid=f"{w.name}-{len(pods)}-{id(plan)}", revision=w.revision, ready=False,
                compat=self.compat(w.revision), created_at=float(len(pods)), ready_since=len(pods) + 60.0, member=w.member,
                group=f"{w.pool}-{w.ordinal}-{len(pods)}-{id(plan)}" if w.member else "")
            for w in plan.create
        ]  # fmt: skip
        pools = tuple(
            ObservedPool(p.name, p.name, p.role, p.tier, p.revision, p.replicas, p.replicas, p.size) for p in plan.pools
        )
        stored = {"t": {**before.stored.get("t", {}), before.templates["t"].revision: before.templates["t"]}}
        for _, revision in plan.forget:
            stored["t"].pop(revision, None)
        self.observed = replace(before, pods=tuple(pods), pools=pools, stored=stored, memory=plan.memory, router=RouterView(1, 1))
        self.status = plan.status
        return plan

    def flip(self, one: ObservedPod, plan: Plan) -> ObservedPod:
        """What the operator writes about one worker's role."""
        for told in plan.flips:
            if told.uid == one.uid:
                self.flips += told.role is not None
                one = replace(one, flipping=told.role, flip_since=told.since)
        if any(done.uid == one.uid for done in plan.relabels):
            assert one.flipping is not None
            one = replace(one, role=one.flipping, flipping=None, flipped=True)
        return one

    @staticmethod
    def compat(revision: str) -> str:
        """Revisions with odd numbers hand KV to each other, even ones only to themselves."""
        return "shared" if int(revision, 16) % 2 else revision

    def check(self, plan: Plan, served_before: set[str]) -> None:
        """The invariant, at the state that the routers are told of."""
        serving = [target for target in plan.targets if target.state == "serving"]
        prefill = sum(target.role == "prefill" for target in serving)
        decode = len(serving) - prefill
        inside = (prefill, decode) == (0, 0) or within(prefill, decode, *self.bounds)
        if not inside:  # only what served before and has no partner left inside the ratio
            assert {target.uid for target in serving} & served_before
            told = {flip.uid: flip.role for flip in plan.flips}
            pods = [on_its_way(replace(p, flipping=told.get(p.uid, p.flipping))) for p in self.observed.pods]
            possible = self.workers([p for p in pods if p.uid not in {g.uid for g in plan.delete}])
            assert not choose_serving([replace_serving(r) for r in possible], *self.bounds)
        uids = [target.uid for target in plan.targets]
        assert len(uids) == len(set(uids))
        assert {t.uid for t in plan.targets if t.state == "draining"}.isdisjoint(t.uid for t in serving)
        on_way = {p.uid for p in self.observed.pods if p.flipping} | {flip.uid for flip in plan.flips}
        assert on_way.isdisjoint(t.uid for t in serving if t.uid not in {f.uid for f in plan.flips if f.role is None})

    def workers(self, pods: list[ObservedPod]) -> list[Replica]:
        """Pods of all revisions as workers."""
        revisions = sorted({p.revision for p in pods})
        return [r for revision in revisions for r in replicas_of([p for p in pods if p.revision == revision], self.nodes)]

    def report(self, event: str) -> None:
        """Every worker that was told another role does the same."""
        told = [p for p in self.observed.pods if p.flipping is not None and p.flipping != p.role]
        found = {p.uid: replace(REPORTS[event], role=p.role if event == "refuse" else p.flipping) for p in told}
        self.observed = replace(self.observed, flips=found)

    def happen(self, event: str, number: int) -> None:
        pods = list(self.observed.pods)
        if event == "template":
            revision = f"{number + 1:08x}"
            self.observed = replace(
                self.observed,
                templates={
                    "t": Template(
                        revision, self.compat(revision), nodes=self.nodes, number=number, flippable=self.nodes == (1, 1)
                    )
                },
            )
        elif event == "forget":
            self.status = FleetStatus()
        elif event == "time":
            self.now += 60 * number
        elif event in REPORTS:
            self.report(event)
        elif event == "scale" and self.observed.pools:
            index = number % len(self.observed.pools)
            pools = [replace(p, replicas=number) if i == index else p for i, p in enumerate(self.observed.pools)]
            self.observed = replace(self.observed, pools=tuple(pools))
        elif pods:
            index = number % len(pods)
            pods[index : index + 1] = changed(pods[index], event)
            self.observed = replace(self.observed, pods=tuple(pods))


REPORTS = {
    "obey": FlipReport(phase="Serving", proof="equal tokens"),
    "lie": FlipReport(phase="Serving", problem="other tokens"),
    "refuse": FlipReport(phase="Draining", refused="it drains"),
}


def replace_serving(replica: Replica) -> Replica:
    return Replica(tuple(replace(p, serving=False) for p in replica.pods), replica.size)


def changed(one: ObservedPod, event: str) -> list[ObservedPod]:
    if event == "lose" or (event == "gone" and one.terminating):
        return []
    if event == "ready":
        return [replace(one, ready=not one.terminating and one.phase == "Running")]
    if event == "unready":
        return [replace(one, ready=False)]
    if event == "fail":
        return [replace(one, ready=False, phase="Failed")]
    if event == "idle":
        return [replace(one, busy=0.0)]
    if event == "cordon":
        return [replace(one, leaving="" if one.leaving else "cordoned")]
    return [one]


@pytest.mark.parametrize("ratio", RATIOS, ids=[f"{low}..{high}" for low, high, _, _ in RATIOS])
@settings(max_examples=150, deadline=None)
@given(events=st.lists(EVENTS, max_size=40))
def test_at_every_observable_state_what_serves_is_inside_the_ratio(
    ratio: tuple[str, str, int, int], events: list[tuple[str, int]]
):
    play(Model(*ratio), events)


FLIP_EVENTS = st.tuples(
    st.sampled_from(
        ["lose", "lose", "fail", "scale", "scale", "idle", "ready", "obey", "obey", "lie", "refuse", "time", "cordon"]
    ),
    st.integers(0, 11),
)


@pytest.mark.parametrize("ratio", RATIOS, ids=[f"{low}..{high}" for low, high, _, _ in RATIOS])
@settings(max_examples=150, deadline=None)
@given(prefill=st.integers(1, 4), decode=st.integers(2, 8), events=st.lists(FLIP_EVENTS, max_size=30))
def test_a_fleet_at_rest_keeps_the_ratio_through_losses_sizes_and_flips(
    ratio: tuple[str, str, int, int], prefill: int, decode: int, events: list[tuple[str, int]]
):
    model = Model(ratio[0], ratio[1], prefill, decode) if within(prefill, decode, *map(parse_ratio, ratio[:2])) else Model(*ratio)
    for _ in range(3):
        model.observed = replace(model.observed, pods=tuple(replace(p, ready=True) for p in model.observed.pods))
        model.plan_once()
    play(model, events)


def play(model: Model, events: list[tuple[str, int]]) -> None:
    """The events, and then a cluster that calms down."""
    for event, number in events:
        model.happen(event, number)
        model.plan_once()
    for _ in range(200):  # and when the cluster calms down, everything that should serve does
        healed = [replace(p, ready=True, leaving="", phase="Running") for p in model.observed.pods if not p.terminating]
        model.observed = replace(model.observed, pods=tuple(healed))
        model.report("obey")
        plan = model.plan_once()
        settled = not plan.create and not plan.delete and not plan.flips and not plan.relabels
        if settled and all(p.serving for p in model.observed.pods if p.member == 0):
            break
    assert {c.type: c.status for c in plan.status.conditions}["WithinRatio"] == "True"
    assert {p.revision for p in model.observed.pods} == {model.observed.templates["t"].revision}
    assert all(target.state == "serving" for target in plan.targets)
    assert len(plan.targets) == sum(pool.replicas for pool in plan.pools)


def test_a_cordoned_node_loses_its_workers_only_after_their_replacements_serve():
    model = Model("1:4", "1:1", 1, 2)
    for _ in range(3):
        model.observed = replace(model.observed, pods=tuple(replace(p, ready=True) for p in model.observed.pods))
        model.plan_once()
    first = model.observed.pods
    model.observed = replace(model.observed, pods=tuple(replace(p, leaving="node n is cordoned") for p in first))
    plan = model.plan_once()
    assert len(plan.create) == 3
    assert plan.delete == ()
    waiting = model.plan_once()
    assert (waiting.create, waiting.delete) == ((), ())
    assert {t.uid for t in waiting.targets if t.state == "serving"} == {p.uid for p in first}
    model.observed = replace(model.observed, pods=tuple(replace(p, ready=True) for p in model.observed.pods))
    done = model.plan_once()
    assert {gone.uid for gone in done.delete} == {p.uid for p in first}
    assert "replaced: node n is cordoned" in done.delete[0].reason


def test_the_model_flips():
    """Else the sequences above would prove nothing about flips."""
    model = Model("1:4", "1:1", 1, 2)
    for _ in range(3):
        model.observed = replace(model.observed, pods=tuple(replace(p, ready=True) for p in model.observed.pods))
        model.plan_once()
    model.observed = replace(model.observed, pods=tuple(p for p in model.observed.pods if p.role != "prefill"))
    model.plan_once()
    assert model.flips == 1
    model.report("obey")
    model.plan_once()
    assert sorted(p.role for p in model.observed.pods) == ["decode", "decode", "prefill"]


def test_a_calm_fleet_is_planned_the_same_again():
    model = Model("1:4", "1:1", 1, 2)
    for _ in range(5):
        model.observed = replace(model.observed, pods=tuple(replace(p, ready=True) for p in model.observed.pods))
        model.plan_once()
    before: Observed = model.observed
    again = model.plan_once()
    assert (again.create, again.delete, again.forget) == ((), (), ())
    assert model.observed.pods == before.pods
