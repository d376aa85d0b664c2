"""The plan: fix point, external scaling, rolling change, pods by ordinal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_api.parse import parse_fleet
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.replicas import plan_replicas, replicas_of
from fleet_planner.roles import Role
from fleet_planner.types import Observed, ObservedPod, ObservedPool, RoleLoad, RouterView, Template, TierTelemetry
from fleet_planner.wanted import PoolWanted

NOW = 1_000.0


def fleet(**tier: Any):
    spec = {"model": {"source": "file:///m"}, "tiers": [{"name": "t", "accelerator": {"type": "cpu"}, **tier}]}
    return parse_fleet(
        {
            "apiVersion": "inferencefleet.io/v1alpha1",
            "kind": "InferenceFleet",
            "metadata": {"name": "f", "namespace": "n"},
            "spec": spec,
        }
    )


def pod(name: str, role: Role, ordinal: int, **more: Any) -> ObservedPod:
    base: dict[str, Any] = {"name": name, "uid": f"uid-{name}", "role": role, "tier": "t", "revision": "aaaaaaaa"}
    base |= {"ordinal": ordinal, "ip": "10.0.0.1", "node": "n", "phase": "Running", "ready": True, "terminating": False}
    base |= {"created_at": 0.0, "ready_since": 1.0, "compat": "c"}
    return ObservedPod(**{**base, **more})


def carry_out(plan: Plan, observed: Observed, ready: bool = True) -> Observed:
    """The cluster after everything in the plan has happened."""
    gone = {item.uid for item in plan.delete}
    serving = {target.uid for target in plan.targets if target.state == "serving"}
    told = {target.uid for target in plan.targets if target.state != "draining"}
    pods = [replace(p, serving=p.uid in serving, told=p.uid in told) for p in observed.pods if p.uid not in gone]
    pods += [pod(w.name, w.role, w.ordinal, tier=w.tier, revision=w.revision, ready=ready) for w in plan.create]
    pools = tuple(
        ObservedPool(p.name, f"u{p.name}", p.role, p.tier, p.revision, p.replicas, p.replicas, p.size, p.wish) for p in plan.pools
    )
    stored = {tier: {**observed.stored.get(tier, {}), t.revision: t} for tier, t in observed.templates.items()}
    for tier, revision in plan.forget:
        stored[tier].pop(revision, None)
    after = replace(observed, pods=tuple(pods), pools=pools, router=RouterView(1, 1), memory=plan.memory, stored=stored)
    return after


def start(revision: str = "aaaaaaaa", **template: Any) -> Observed:
    return Observed(templates={"t": Template(revision, "c", **template)})


def counts(observed: Observed, revision: str | None = None) -> dict[str, int]:
    mine = [p for p in observed.pods if revision in (None, p.revision)]
    return {role: sum(p.role == role for p in mine) for role in ("prefill", "decode")}


def test_a_new_fleet_gets_its_initial_workers_and_then_rests():
    observed = start()
    plan = reconcile(fleet(), observed, NOW)
    assert sorted(w.name for w in plan.create) == ["f-t-decode-aaaaaaaa-0", "f-t-decode-aaaaaaaa-1", "f-t-prefill-aaaaaaaa-0"]
    after = carry_out(plan, observed)
    again = reconcile(fleet(), after, NOW + 1)
    assert (again.create, again.delete, again.pools_gone) == ((), (), ())
    assert again.pools == plan.pools
    assert [t.state for t in again.targets] == ["serving"] * 3
    assert {c.type: c.status for c in again.status.conditions}["Ready"] == "True"


def test_somebody_elses_scale_is_followed_inside_the_ratio():
    observed = carry_out(reconcile(fleet(), start(), NOW), start())
    pools = tuple(replace(p, replicas=8) if p.role == "decode" else p for p in observed.pools)
    plan = reconcile(fleet(), replace(observed, pools=pools), NOW + 1)
    assert {p.role: p.replicas for p in plan.pools} == {"prefill": 2, "decode": 8}
    settled = carry_out(plan, observed)
    assert reconcile(fleet(), settled, NOW + 2).create == ()  # and it stays there


def test_a_replica_edit_restarts_nothing():
    observed = carry_out(reconcile(fleet(), start(), NOW), start())
    plan = reconcile(fleet(decode={"minReplicas": 4}), observed, NOW + 1)
    assert plan.delete == ()
    assert len([w for w in plan.create if w.role == "decode"]) == 2


def test_a_new_template_replaces_pods_without_ever_having_fewer_ready():
    observed = carry_out(reconcile(fleet(), start(), NOW), start())
    observed = replace(observed, templates={"t": Template("bbbbbbbb", "c")})
    for step in range(30):
        plan = reconcile(fleet(), observed, NOW + step)
        observed = carry_out(plan, observed)
        ready = counts(observed)
        assert ready["prefill"] >= 1
        assert ready["decode"] >= 2
        if not plan.create and not plan.delete and not plan.pools_gone:
            break
    assert counts(observed) == counts(observed, "bbbbbbbb") == {"prefill": 1, "decode": 2}


def test_a_new_revision_that_never_gets_ready_takes_nothing_away():
    observed = carry_out(reconcile(fleet(), start(), NOW), start())
    observed = replace(observed, templates={"t": Template("bbbbbbbb", "c")})
    for step in range(10):
        observed = carry_out(reconcile(fleet(), observed, NOW + step), observed, ready=False)
    assert counts(observed, "aaaaaaaa") == {"prefill": 1, "decode": 2}
    assert counts(observed, "bbbbbbbb") == {"prefill": 1, "decode": 1}


def test_a_terminating_pod_is_told_as_draining_and_keeps_its_ordinal():
    observed = carry_out(reconcile(fleet(), start(), NOW), start())
    pods = tuple(replace(p, terminating=True, ready=False) if p.name.endswith("decode-aaaaaaaa-0") else p for p in observed.pods)
    plan = reconcile(fleet(), replace(observed, pods=pods), NOW + 1)
    assert [w.name for w in plan.create] == ["f-t-decode-aaaaaaaa-2"]
    assert [t.name for t in plan.targets if t.state == "draining"] == ["f-t-decode-aaaaaaaa-0"]


@pytest.mark.parametrize(
    ("pods", "replicas", "created", "deleted"),
    [
        pytest.param([], 2, ["p-0", "p-1"], [], id="none"),
        pytest.param([(0, {}), (2, {})], 3, ["p-1"], [], id="gap"),
        pytest.param([(0, {"phase": "Failed"})], 1, ["p-1"], ["p-0"], id="ended-is-replaced"),
        pytest.param([(0, {"ready": False}), (1, {})], 1, [], ["p-0"], id="not-ready-goes-first"),
        pytest.param([(0, {"created_at": 1.0}), (1, {"created_at": 9.0})], 1, [], ["p-1"], id="young-goes-first"),
        pytest.param([(0, {"terminating": True})], 1, ["p-1"], [], id="terminating-holds-its-ordinal"),
    ],
)
def test_pods_of_a_pool(pods: list[tuple[int, dict[str, Any]]], replicas: int, created: list[str], deleted: list[str]):
    pool = PoolWanted("p", "t", "decode", "aaaaaaaa", replicas, replicas)
    new, gone = plan_replicas(pool, replicas_of([pod(f"p-{n}", "decode", n, **more) for n, more in pods], (1, 1)))
    assert ([w.name for w in new], [g.name for g in gone]) == (created, deleted)


EVENTS = st.sampled_from(["lose", "fail", "unready", "scale", "settle", "template"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 9)), max_size=25))
def test_whatever_happens_the_plan_converges_to_the_ratio(events: list[tuple[str, int]]):
    observed, wish = start(), fleet()
    for step, (event, number) in enumerate(events):
        observed = disturb(observed, event, number, step)
        observed = carry_out(reconcile(wish, observed, NOW + step), observed)
    for step in range(80):
        healed = tuple(
            replace(p, ready=p.phase == "Running") for p in observed.pods
        )  # a pod that never gets ready rightly stalls
        observed = replace(observed, pods=healed)
        plan = reconcile(wish, observed, NOW + 100 + step)
        if not plan.create and not plan.delete:
            break
        observed = carry_out(plan, observed)
    found = counts(observed)
    assert plan.create == plan.delete == ()
    assert 1 <= found["prefill"] <= found["decode"] <= 4 * found["prefill"]
    assert {p.revision for p in observed.pods} == {observed.templates["t"].revision}


def disturb(observed: Observed, event: str, number: int, step: int) -> Observed:
    pods = list(observed.pods)
    if event == "template":
        return replace(observed, templates={"t": Template(f"{number:08x}", "c")})
    if event == "scale" and observed.pools:
        index = number % len(observed.pools)
        pools = tuple(replace(p, replicas=number + 1) if i == index else p for i, p in enumerate(observed.pools))
        return replace(observed, pools=pools)
    if pods and event in ("lose", "fail", "unready"):
        index = number % len(pods)
        if event == "lose":
            del pods[index]
        else:
            pods[index] = replace(pods[index], phase="Failed" if event == "fail" else "Running", ready=False)
    return replace(observed, pods=tuple(pods))


def test_one_slow_reading_makes_one_worker():
    """Each pass counted the workers that the one before had made, ready or not: the tier was at its maximum within a second."""
    found = fleet()
    spec = found.spec.model_validate({**found.spec.to_dict(), "slo": {"ttft": {"p99": "1s"}}})
    slow, observed = found.model_copy(update={"spec": spec}), start()
    observed = carry_out(reconcile(slow, observed, NOW), observed)
    told = TierTelemetry(RoleLoad(1, 5.0, None, NOW), RoleLoad(1, None, None, NOW))
    observed = replace(observed, telemetry={"t": told})
    before = counts(observed)
    for step in range(8):
        observed = carry_out(reconcile(slow, observed, NOW + step / 10), observed, ready=False)
    assert counts(observed) == {**before, "prefill": before["prefill"] + 1}
