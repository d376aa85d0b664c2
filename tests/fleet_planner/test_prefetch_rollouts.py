"""Rollouts whose model no node has yet: what waits, what is told of it, and what must not go back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import FleetStatus, RolloutStatus, TierStatus
from fleet_planner.prefetch import held_back
from fleet_planner.reconcile import reconcile
from fleet_planner.roles import ROLES
from fleet_planner.types import Observed, ObservedPod, ObservedPool, Template
from tests.fleet_planner.test_adapters import pod
from tests.fleet_planner.test_prefetch import BOTH, NEW, NOW, OLD, fetching, fleet, node, pools, running, seen


def rolled_back() -> InferenceFleet:
    rollout = RolloutStatus(stable=OLD, failed=NEW, message="rolled back: errors")
    return fleet().model_copy(update={"status": FleetStatus(tiers=(TierStatus(name="t", rollout=rollout),))})


def test_a_revision_that_was_rolled_back_is_not_tried_again_when_a_node_joins():
    wish, records = rolled_back(), (fetching("n1", "Succeeded"),)
    old, new = Template(OLD, "c", gpus=(1, 1), number=1), Template(NEW, "c", gpus=(1, 1), number=2)
    observed = replace(
        seen("n1", "n2"), pods=running(*BOTH, serving=True), pools=pools(1, 2), templates={"t": new},
        stored={"t": {OLD: old, NEW: new}},
    )  # fmt: skip
    for nodes in (("n1",), ("n1", "n2"), ("n1", "n2")):
        here = tuple(node(name) for name in nodes)
        plan = reconcile(wish, replace(observed, nodes=here, fetching=records, memory={}), NOW)
        wish = wish.model_copy(update={"status": plan.status})
        rollout, verdict = plan.status.tiers[0].rollout, plan.status.condition("RollingOut")
        assert rollout is not None
        assert verdict is not None
        assert (rollout.failed, rollout.message, verdict.reason) == (NEW, "rolled back: errors", "RolledBack")
        assert (plan.create, plan.delete) == ((), ())
        if len(nodes) == 2:
            records = (*records, fetching("n2", "Succeeded"))


THIRD = "dddddddd"


def third_wanted(*more: ObservedPod) -> Observed:
    """The spec asks for a revision whose model the node does not have yet; workers of the old one serve, beside `more`."""
    old, new, third = (Template(name, "c", gpus=(1, 1), number=n) for n, name in enumerate((OLD, NEW, THIRD), start=1))
    observed = replace(seen("n1"), pods=(*running(*BOTH, serving=True), *more), templates={"t": third})
    planned = (
        ObservedPool(f"f-t-{role}-{revision}", f"u-{role}-{revision}", role, "t", revision, count, count, size)
        for revision, sizes in ((OLD, (1, 2)), (NEW, (1, 1) if more else (0, 0)))
        for role, count, size in zip(ROLES, sizes, (1, 2), strict=True)
    )
    return replace(observed, pools=tuple(planned), stored={"t": {OLD: old, NEW: new}})


@pytest.mark.parametrize("goes", [False, True], ids=["all-gone", "one-still-goes"])
def test_what_was_rolled_back_is_told_while_the_next_revision_waits_for_its_model(goes: bool):
    """A canary failed, and the mended spec names another model: RollingOut said Progressing, and not what had failed."""
    wish = rolled_back()
    observed = third_wanted(*(running(("decode", 1), revision=NEW, terminating=True, ready=False) if goes else ()))
    for _ in range(3):
        plan = reconcile(wish, observed, NOW)
        wish = wish.model_copy(update={"status": plan.status})
        rollout, verdict = plan.status.tiers[0].rollout, plan.status.condition("RollingOut")
        assert rollout is not None
        assert verdict is not None
        assert (rollout.failed, rollout.stable, verdict.reason, plan.create) == (NEW, OLD, "RolledBack", ())
        waits = f"tier t: revision {THIRD} waits until nodes have its model"
        assert verdict.message == f"tier t: rolled back: errors; the old revision serves; {waits}"
    begun = reconcile(wish, replace(observed, fetching=(fetching("n1", "Succeeded"),)), NOW)
    rollout = begun.status.tiers[0].rollout
    assert rollout is not None
    assert (rollout.target, rollout.failed) == (THIRD, "")


def test_a_paused_rollout_stays_where_it_is_though_the_spec_asks_for_a_model_that_no_node_has():
    """The old revision was the wanted one until nodes had the model: a rollout that somebody paused went back to it."""
    wish = fleet()
    rollout = RolloutStatus(stable=OLD, target=NEW)
    spec = wish.spec.model_validate(wish.spec.to_dict() | {"rollout": {"paused": True}})
    wish = wish.model_copy(update={"spec": spec, "status": FleetStatus(tiers=(TierStatus(name="t", rollout=rollout),))})
    observed = third_wanted(*running(("prefill", 1), ("decode", 1), revision=NEW, serving=True))
    for _ in range(3):
        plan = reconcile(wish, observed, NOW)
        wish = wish.model_copy(update={"status": plan.status})
        assert (plan.create, plan.delete) == ((), ())
        verdict = plan.status.condition("RollingOut")
        assert verdict is not None
        assert verdict.reason == "Paused"


def test_a_rollout_begins_when_the_model_is_there():
    wish = fleet().model_copy(
        update={"status": FleetStatus(tiers=(TierStatus(name="t", rollout=RolloutStatus(stable="bbbbbbbb")),))}
    )
    workers = (pod("w1", revision="bbbbbbbb", node="n1"), pod("w2", revision="bbbbbbbb", node="n1", role="prefill"))
    before, after = Template("bbbbbbbb", "c", number=1), Template("aaaaaaaa", "c", number=2)
    observed = replace(seen("n1", pods=workers), templates={"t": after}, stored={"t": {"bbbbbbbb": before}})
    tier = wish.spec.tiers[0]
    assert held_back(tier, observed, frozenset({"t"}), wish).templates["t"] == before
    assert held_back(tier, observed, frozenset(), wish).templates["t"] == after
    waits = reconcile(wish, replace(observed, pools=pools(1, 1)), NOW)
    rolling = waits.status.condition("RollingOut")
    assert rolling is not None
    words = "tier t: revision aaaaaaaa waits until nodes have its model"
    assert (rolling.reason, rolling.message, waits.create) == ("Progressing", words, ())
    begun = replace(observed, pods=(*workers, pod("w3", revision="aaaaaaaa")))
    assert held_back(tier, begun, frozenset({"t"}), wish).templates["t"] == after, "what has begun goes on"
    assert held_back(tier, replace(observed, stored={}), frozenset({"t"}), wish).templates["t"] == after
