"""Workers of a tier that left the spec: told first, drained, and not before somebody serves in their place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_api.parse import parse_fleet
from fleet_planner.memory import ScaleMemory
from fleet_planner.orphans import TierNow, plan_orphans
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.roles import ROLES, Role
from fleet_planner.types import Observed, ObservedPod, Problem, RoleLoad, Template, TierTelemetry
from tests.fleet_planner.test_capacity_passes import NEW, OLD, STEP_S, WAIT_S, Nodes, of
from tests.fleet_planner.test_reconcile import carry_out, pod

NOW = 10_000.0
GPUS = (1, 2)


def fleet(*tiers: str, gpus: int | None = None):
    """`gpus`: the budget."""
    spec: dict[str, Any] = {"model": {"source": "file:///m"}}
    spec["tiers"] = [{"name": name, "accelerator": {"type": "cpu"}} for name in tiers]
    if gpus is not None:
        spec["scaling"] = {"budget": {"gpus": gpus}}
    meta = {"name": "f", "namespace": "n"}
    return parse_fleet({"apiVersion": "inferencefleet.io/v1alpha1", "kind": "InferenceFleet", "metadata": meta, "spec": spec})


def old(role: Role, number: int, **more: Any) -> ObservedPod:
    return pod(f"f-t-{role}-aaaaaaaa-{number}", role, number, **{"tier": "t", "serving": True, "created_at": 0.0, **more})


def seen(*pods: ObservedPod, **more: Any) -> Observed:
    return Observed(pods=pods, stored={"t": {"aaaaaaaa": Template("aaaaaaaa", "c", gpus=GPUS)}}, **more)


THREE = (old("prefill", 0), old("decode", 0), old("decode", 1))
NOBODY_TOLD = tuple(replace(one, serving=False) for one in THREE)
STARTING = TierNow(wanted=(1, 2), serving=(0, 0), devices=5)
WAITS = {"tier": "u", "serving": False, "ready": False, "node": None}


@pytest.mark.parametrize(
    ("observed", "tier", "budget", "gone"),
    [
        pytest.param(seen(*THREE), STARTING, None, 0, id="successors-start"),
        pytest.param(seen(*THREE), replace(STARTING, serving=(1, 1)), None, 0, id="half-of-them-serve"),
        pytest.param(seen(*THREE), replace(STARTING, serving=(1, 2)), None, 3, id="they-serve"),
        pytest.param(seen(*THREE), TierNow((1, 1), (1, 1), 3), None, 3, id="as-many-as-are-wanted-serve"),
        pytest.param(seen(*THREE), TierNow((9, 9), (2, 3), 27), None, 3, id="as-many-as-go-serve-though-more-are-wanted"),
        pytest.param(seen(*THREE), TierNow((0, 0), (0, 0), 0), None, 3, id="a-tier-at-zero-wakes-by-itself"),
        pytest.param(seen(*THREE), STARTING, 10, 0, id="both-fit-into-the-budget"),
        pytest.param(seen(*THREE), STARTING, 9, 1, id="both-do-not-fit-into-the-budget"),
        pytest.param(seen(*THREE), replace(STARTING, made=False), 9, 0, id="what-the-budget-always-pays-for-is-made-first"),
        pytest.param(
            seen(*THREE, old("decode", 9, **WAITS | {"node": "n", "created_at": NOW - 14})), STARTING, 9, 0, id="and-starts"
        ),
        pytest.param(seen(*THREE), replace(STARTING, limited="no node"), None, 1, id="the-cluster-is-full"),
        pytest.param(seen(*THREE, problems=(Problem("Forbidden", "exceeded quota: q"),)), STARTING, None, 1, id="quota"),
        pytest.param(seen(*THREE, old("decode", 9, **WAITS, unschedulable=True)), STARTING, None, 1, id="a-pod-waits-long"),
        pytest.param(seen(*THREE, old("decode", 9, **WAITS, gated=True)), STARTING, None, 1, id="a-queue-keeps-a-pod"),
        pytest.param(
            seen(*THREE, old("decode", 9, **WAITS | {"created_at": NOW - 1}, unschedulable=True)),
            STARTING,
            None,
            0,
            id="a-moment",
        ),
        pytest.param(
            seen(*THREE, old("decode", 9, **WAITS | {"created_at": NOW + 1}, unschedulable=True)),
            STARTING,
            None,
            0,
            id="a-moment-by-an-API-server-whose-clock-is-ahead",
        ),
        pytest.param(
            seen(*THREE, old("decode", 9, **WAITS | {"created_at": NOW - 300}, unschedulable=True)),
            STARTING,
            None,
            1,
            id="just-as-long-as-nodes-are-waited-for",
        ),
        pytest.param(
            seen(*THREE, old("decode", 9, **WAITS, gated=True, terminating=True)),
            STARTING,
            None,
            0,
            id="who-goes-waits-no-more",
        ),
        pytest.param(replace(seen(*THREE), stored={}), STARTING, 5, 0, id="a-template-that-is-gone-costs-nothing"),
        pytest.param(seen(*THREE, old("decode", 2, ready=False)), STARTING, None, 1, id="not-ready-goes-at-once"),
        pytest.param(seen(*THREE, old("decode", 2, serving=False)), STARTING, None, 1, id="held-goes-at-once"),
        pytest.param(seen(*THREE, old("decode", 2, sick="xid")), STARTING, None, 1, id="sick-goes-at-once"),
        pytest.param(seen(*THREE, old("decode", 2, flipping="prefill")), STARTING, None, 1, id="one-that-changes-its-role"),
        pytest.param(seen(*THREE, old("decode", 2, terminating=True, ready=False)), STARTING, None, 0, id="goes-already"),
        pytest.param(seen(*NOBODY_TOLD), STARTING, None, 0, id="the-routers-document-is-gone"),
        pytest.param(seen(*NOBODY_TOLD), replace(STARTING, serving=(1, 2)), None, 3, id="it-is-gone-and-they-serve"),
        pytest.param(seen(), STARTING, None, 0, id="none"),
    ],
)
def test_who_goes(observed: Observed, tier: TierNow, budget: int | None, gone: int):
    found = plan_orphans(fleet("u", gpus=budget), observed, {"u": tier}, NOW)
    assert len(found.gone) == gone
    told = {target.uid: target.state for target in found.targets}
    ours = [one for one in observed.pods if one.tier == "t"]
    assert {one.uid for one in found.gone} <= {one.uid for one in ours}
    for one in ours:
        going = one.terminating or one.uid in {each.uid for each in found.gone}
        assert told[one.uid] == ("draining" if going else "serving")


FIVE = (*THREE, old("prefill", 1), old("decode", 2))
STARTS = WAITS | {"node": "n"}
LONG = old("decode", 9, **WAITS, unschedulable=True)


@pytest.mark.parametrize(
    ("pods", "room_at", "gone"),
    [
        pytest.param((*FIVE, LONG), 0.0, ["decode-0", "prefill-0"], id="one-of-each-role"),
        pytest.param((*THREE, LONG), 0.0, ["decode-0"], id="one-pair-stays"),
        pytest.param((*THREE[:2], LONG), 0.0, ["decode-0", "prefill-0"], id="to-the-last"),
        pytest.param((THREE[1], THREE[2], LONG), 0.0, ["decode-0"], id="without-a-pair-one-by-one"),
        pytest.param((*THREE, LONG), NOW - 14.0, [], id="what-went-has-no-new-owner-yet"),
        pytest.param((*THREE, LONG), NOW - 15.0, ["decode-0"], id="it-had-time-to-find-one"),
        pytest.param((*THREE, LONG), NOW + 900.0, [], id="a-time-that-has-not-come"),
        pytest.param((*THREE, replace(LONG, created_at=NOW - 14.0)), NOW - 99.0, [], id="the-next-one-was-just-made"),
        pytest.param((*THREE, replace(LONG, created_at=NOW - 15.0)), NOW - 99.0, ["decode-0"], id="the-next-one-finds-none"),
        pytest.param((*THREE, LONG, old("decode", 5, terminating=True, ready=False)), NOW - 99.0, [], id="one-still-goes"),
        pytest.param((*THREE, LONG, old("decode", 8, **STARTS, unready_since=NOW - 99.0)), NOW - 99.0, [], id="one-comes-up"),
        pytest.param(
            (*THREE, LONG, old("decode", 8, **STARTS, unready_since=NOW - 1_800.0)), NOW - 99.0, ["decode-0"], id="it-never-will"
        ),
        pytest.param((*THREE,), NOW - 99.0, [], id="nobody-lacks-room"),
        pytest.param((*THREE, replace(LONG, gated=True, unschedulable=False)), NOW - 99.0, ["decode-0"], id="in-a-queue"),
    ],
)
def test_who_makes_room_and_when(pods: tuple[ObservedPod, ...], room_at: float, gone: list[str]):
    memory = {"u": ScaleMemory(room_at=room_at)}
    found = plan_orphans(fleet("u"), replace(seen(*pods), memory=memory), {"u": STARTING}, NOW)
    assert sorted(one.name.removeprefix("f-t-").replace("-aaaaaaaa", "") for one in found.gone) == gone
    going = any(one.terminating for one in pods)
    assert found.room_at == (NOW if gone or going else min(NOW, room_at))


def test_as_many_make_room_as_may_be_missing_in_a_rollout():
    wish = fleet("u")
    rollout = wish.spec.rollout.model_copy(update={"max_unavailable": 2})
    wish = wish.model_copy(update={"spec": wish.spec.model_copy(update={"rollout": rollout})})
    more = (*FIVE, old("decode", 3), LONG)
    assert len(plan_orphans(wish, seen(*more), {"u": STARTING}, NOW).gone) == 3


def test_one_tier_makes_room_after_the_other_and_what_serves_for_both_is_all_that_is_wanted():
    another = tuple(replace(one, tier="s", name=f"s-{one.name}", uid=f"s-{one.uid}") for one in THREE)
    found = plan_orphans(fleet("u"), seen(*THREE, *another, LONG), {"u": STARTING}, NOW)
    assert [gone.uid for gone in found.gone] == [another[1].uid]
    begun = {"u": ScaleMemory(room_at=NOW - 99.0)}
    for serving, gone in (((1, 1), 0), ((1, 2), 2)):  # as many as are left of the old, and all that is wanted
        now = {"u": replace(STARTING, serving=serving, limited="step by step")}
        assert len(plan_orphans(fleet("u"), seen(*THREE[:2], memory=begun), now, NOW).gone) == gone
    assert plan_orphans(fleet("u"), seen(LONG, memory=begun), {"u": STARTING}, NOW).room_at == 0.0


def test_one_without_an_address_is_told_to_nobody():
    found = plan_orphans(fleet("u"), seen(*THREE, old("decode", 2, ip=None, ready=False)), {"u": STARTING}, NOW)
    assert [gone.name for gone in found.gone] == ["f-t-decode-aaaaaaaa-2"]
    assert [target.state for target in found.targets] == ["serving"] * 3


def step(spec: Any, observed: Observed, now: float, *, ready: bool) -> tuple[Plan, Observed]:
    """One pass that is carried out; pods that go are seen once as terminating."""
    plan = reconcile(spec, observed, now)
    left = tuple(replace(one, terminating=True, ready=False) for one in observed.pods if one.uid in {g.uid for g in plan.delete})
    after = carry_out(plan, replace(observed, pods=tuple(p for p in observed.pods if not p.terminating)), ready=ready)
    tiers = {wanted.name: wanted.tier for wanted in plan.create}
    pods = tuple(replace(one, tier=tiers.get(one.name, one.tier)) for one in after.pods)
    return plan, replace(after, pods=(*pods, *left))


def settled() -> Observed:
    observed = Observed(templates={"t": Template("aaaaaaaa", "c")})
    for second in range(3):
        _, observed = step(fleet("t"), observed, NOW + second, ready=True)
    return observed


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_a_renamed_tier_never_leaves_the_routers_without_workers(readiness: list[bool]):
    """b15: every worker was deleted in the pass that created its successors, and none was told as draining."""
    observed = replace(settled(), templates={"u": Template("bbbbbbbb", "c")})
    told: dict[str, str] = {}
    for second, ready in enumerate([*readiness, *[True] * 6]):
        plan, observed = step(fleet("u"), observed, NOW + 10 + second, ready=ready)
        before, told = told, {target.uid: target.state for target in plan.targets}
        states = [target.role for target in plan.targets if target.state == "serving"]
        assert (states.count("prefill") >= 1, states.count("decode") >= 2) == (True, True)
        assert all(told[gone.uid] == "draining" for gone in plan.delete if gone.uid in before)
        for one in observed.pods:
            assert not one.terminating or told.get(one.uid) == "draining"  # as long as it is there
        if not ready:
            observed = replace(observed, pods=tuple(replace(p, ready=True) if p.tier == "u" else p for p in observed.pods))
    assert {one.tier for one in observed.pods} == {"u"}
    assert plan.delete == ()
    assert {c.type: c.reason for c in plan.status.conditions}["RollingOut"] == "Complete"


def test_the_status_says_what_an_orphan_waits_for():
    observed = replace(settled(), templates={"u": Template("bbbbbbbb", "c")})
    plan = reconcile(fleet("u"), observed, NOW + 10)
    rolling = plan.status.condition("RollingOut")
    assert rolling is not None
    assert (rolling.status, rolling.reason) == ("True", "Progressing")
    assert "tier t: left the spec; its workers go when the tiers of the spec serve in their place" in rolling.message
    assert "3 left" in rolling.message


def test_a_tier_that_is_taken_out_beside_one_that_serves_goes_at_once():
    observed = Observed(templates={"t": Template("aaaaaaaa", "c"), "u": Template("bbbbbbbb", "c")})
    for second in range(3):
        _, observed = step(fleet("t", "u"), observed, NOW + second, ready=True)
    observed = replace(observed, templates={"t": observed.templates["t"]})
    plan = reconcile(fleet("t"), observed, NOW + 10)
    assert {gone.reason for gone in plan.delete} == {"its tier is not in the spec"}
    assert len(plan.delete) == 3
    assert sorted(t.state for t in plan.targets if t.tier == "u") == ["draining"] * 3


class Renamed(Nodes):
    """A cluster with room for so many workers, in which a tier gets another name. Workers serve 30 s after they got a node."""

    def step(self, seconds: float = STEP_S) -> Plan:
        plan = super().step(seconds)
        pods = [replace(one, tier=one.name.split("-")[1]) for one in self.observed.pods]
        pods = [one if one.node is None else replace(one, scheduled_at=one.scheduled_at or self.now) for one in pods]
        started = [replace(p, ready=p.node is not None and self.now - (p.scheduled_at or self.now) >= 30.0) for p in pods]
        left = {one.tier for one in started} - {"u"}  # its template is kept for as long as it has pods
        before = {"t": {OLD: Template(OLD, "c", gpus=(1, 1), number=1)}} if left else {}
        self.observed = replace(self.observed, pods=tuple(started), stored={**before, **self.observed.stored})
        return plan

    def rename(self) -> None:
        spec = self.fleet.spec.to_dict()
        spec["tiers"][0]["name"] = "u"
        self.fleet = self.fleet.model_copy(update={"spec": self.fleet.spec.model_validate(spec)})
        wanted, before = Template(NEW, "c", gpus=(1, 1), number=1), Template(OLD, "c", gpus=(1, 1), number=1)
        self.observed = replace(self.observed, templates={"u": wanted}, stored={"t": {OLD: before}, "u": {NEW: wanted}})

    def serving(self) -> tuple[int, int]:
        """Of both tiers."""
        roles = [target.role for target in self.plan.targets if target.state == "serving"]
        return roles.count("prefill"), roles.count("decode")


@pytest.mark.parametrize(
    ("want", "budget", "room", "least"),
    [((2, 4), 6, 6, 4), ((2, 4), 6, 99, 4), ((2, 4), 7, 99, 4), ((1, 2), 3, 99, 2), ((1, 2), 3, 4, 2), ((2, 4), 12, 99, 6)],
)
def test_a_budget_that_does_not_pay_for_both_is_handed_over_as_well(want: tuple[int, int], budget: int, room: int, least: int):
    """Incident: all of them went in the pass of the edit, before any of their successors had a node."""
    roles = {role: {"replicas": count, "minReplicas": 1, "maxReplicas": 9} for role, count in zip(ROLES, want, strict=True)}
    nodes = Renamed(of({"scaling": {"mode": "manual", "budget": {"gpus": budget}}}, **roles), room)
    nodes.run(WAIT_S)
    nodes.rename()
    for _ in range(80):
        nodes.step()
        assert sum(nodes.serving()) >= least
        assert min(nodes.serving()) >= 1
        assert len(nodes.observed.pods) <= max(budget, sum(want)) + 2, "the minimum is always paid for"
    assert {one.tier for one in nodes.observed.pods} == {"u"}
    assert (nodes.serving(), nodes.size) == (want, want)


@pytest.mark.parametrize("mode", ["manual", "auto"])
@pytest.mark.parametrize(
    ("want", "room", "least"),
    [((2, 4), 6, 4), ((2, 4), 7, 4), ((3, 6), 9, 7), ((1, 4), 5, 3), ((1, 2), 3, 0), ((1, 2), 5, 2), ((1, 2), 6, 3)],
)
def test_a_tier_that_is_renamed_in_a_full_cluster_is_handed_over_step_by_step(
    want: tuple[int, int], room: int, least: int, mode: str
):
    """Incident: after `capacityWait` all of its workers went in one pass, and nothing served until their successors did."""
    roles = {role: {"replicas": count, "minReplicas": 1, "maxReplicas": 9} for role, count in zip(ROLES, want, strict=True)}
    nodes = Renamed(of({"scaling": {"mode": mode}}, **roles), room)
    nodes.run(WAIT_S)
    nodes.rename()
    fewest = 99
    for _ in range(80):
        nodes.step()
        found = nodes.serving()
        assert min(found) >= 1 or least == 0
        fewest = min(fewest, sum(found))
    assert {one.tier for one in nodes.observed.pods} == {"u"}
    assert (nodes.serving(), nodes.size) == (want, want)
    assert fewest >= least
    assert nodes.verdict("RollingOut")[0] == "Complete"


def test_load_that_the_old_tier_carries_meanwhile_makes_the_new_one_no_smaller():
    """The new tier's own load is a share: by it 1+1 were enough, all old workers went at once, and 1+1 had the whole of it."""
    roles: dict[str, Any] = {"prefill": {"replicas": 2, "minReplicas": 1}, "decode": {"replicas": 4, "minReplicas": 1}}
    nodes = Renamed(of({"scaling": {"mode": "auto", "scaleDownWindow": "30s"}}, **roles), 6)
    nodes.run(WAIT_S)
    nodes.rename()
    sizes = set()
    for _ in range(60):
        little = RoleLoad(inflight=1.0, measured_at=nodes.now + STEP_S)
        nodes.observed = replace(nodes.observed, telemetry={"u": TierTelemetry(prefill=little, decode=little)})
        was_left = any(one.tier == "t" for one in nodes.observed.pods)
        nodes.step()
        sizes |= {nodes.size} if was_left else set()
        assert sum(nodes.serving()) >= 4 or not was_left
    assert max(sizes) == (2, 4)
    nodes.step(60.0)
    assert nodes.size == (1, 1), "its load is its own when it had it for a whole window"
