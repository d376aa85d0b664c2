"""Workers of a tier that left the spec: told first, drained, and not before somebody serves in their place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_api.parse import parse_fleet
from fleet_planner.orphans import TierNow, plan_orphans
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.types import Observed, ObservedPod, Problem, Role, Template
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
WAITS = {"tier": "u", "serving": False, "ready": False}


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
        pytest.param(seen(*THREE), STARTING, 9, 3, id="both-do-not-fit-into-the-budget"),
        pytest.param(seen(*THREE), replace(STARTING, limited="no node"), None, 3, id="the-cluster-is-full"),
        pytest.param(seen(*THREE, problems=(Problem("Forbidden", "exceeded quota: q"),)), STARTING, None, 3, id="quota"),
        pytest.param(seen(*THREE, old("decode", 9, **WAITS, unschedulable=True)), STARTING, None, 3, id="a-pod-waits-long"),
        pytest.param(seen(*THREE, old("decode", 9, **WAITS, gated=True)), STARTING, None, 3, id="a-queue-keeps-a-pod"),
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
            3,
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
