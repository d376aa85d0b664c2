"""Backing out of what the cluster cannot hold: nodes, quota, budget; the other role is not stranded over the ratio."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from fleet_planner.capacity import fit_budget, fit_cluster, refusals
from fleet_planner.memory import ScaleMemory
from fleet_planner.money import Purse
from fleet_planner.ratio import bounds_of
from fleet_planner.reconcile import reconcile
from fleet_planner.roles import Role
from fleet_planner.types import Observed, ObservedPod, ObservedPool, Problem, Template
from tests.fleet_planner.test_reconcile import NOW, carry_out, fleet, pod, start

TIER = fleet(prefill={"maxReplicas": 4}, decode={"maxReplicas": 8}).spec.tiers[0]
WAIT_S = 300.0


def pods(prefill: int, decode: int, *, stuck: dict[Role, int] | None = None) -> list[ObservedPod]:
    waiting = stuck or {}
    found = [pod(f"p{n}", "prefill", n) for n in range(prefill)] + [pod(f"d{n}", "decode", n) for n in range(decode)]
    for role, count in waiting.items():
        more: dict[str, Any] = {"ready": False, "unschedulable": True, "message": "0/4 nodes: Insufficient nvidia.com/gpu"}
        found += [pod(f"{role}-stuck{n}", role, 9 + n, **more) for n in range(count)]
    return found


def fitted(want: tuple[int, int], have: list[ObservedPod], memory: ScaleMemory | None = None, now: float = WAIT_S, **more: Any):
    return fit_cluster(TIER, want, have, more.get("problems", ()), memory or ScaleMemory(), WAIT_S, now)


def test_what_finds_no_node_is_backed_out_of_together_with_what_it_strands():
    have = pods(1, 8, stuck={"prefill": 1})
    early = fitted((2, 8), have, now=WAIT_S - 1)
    assert (early.size, early.limited) == ((2, 8), "")
    found = fitted((2, 8), have)
    assert found.size == (1, 4)
    assert "no node for prefill-stuck0: 0/4 nodes: Insufficient nvidia.com/gpu" in found.limited


def test_it_is_tried_again_after_as_long():
    memory = fitted((2, 4), pods(1, 4, stuck={"prefill": 1})).memory
    calm = pods(1, 4)
    assert fitted((2, 4), calm, memory, now=2 * WAIT_S - 1).size == (1, 4)
    again = fitted((2, 4), calm, memory, now=2 * WAIT_S)
    assert (again.size, again.limited, again.memory.cap) == ((2, 4), "", None)


def test_what_goes_already_is_no_lack_of_nodes():
    have = [replace(one, terminating=one.unschedulable) for one in pods(1, 8, stuck={"prefill": 1})]
    assert fitted((2, 8), have).memory.cap is None


def test_one_that_nobody_wants_any_more_is_no_lack_of_nodes():
    """It would cap what is wanted next, which nobody has tried yet."""
    assert fitted((1, 4), pods(1, 4, stuck={"decode": 1})).memory.cap is None


def test_who_goes_is_none_that_there_is():
    """Else the cap would hold a place for it that nobody takes."""
    going = pod("d9", "decode", 9, terminating=True, ready=False)
    assert fitted((2, 8), [*pods(1, 4, stuck={"decode": 1}), going]).memory.cap == (1, 4)


def test_the_time_of_a_cap_stands_while_one_of_the_minimum_finds_no_node():
    """Else nothing would ever be tried again: that one is asked for in every pass."""
    memory = ScaleMemory(cap=(0, 4), cap_until=2 * WAIT_S - 1, cap_reason="no node")
    found = fitted((2, 8), pods(0, 4, stuck={"prefill": 1}), memory)
    assert (found.memory.cap, found.memory.cap_until) == ((0, 4), 2 * WAIT_S - 1)


def test_a_cap_never_grows_while_it_holds():
    """Nodes that change hands: more is seen to have one than could be kept a moment ago."""
    memory = ScaleMemory(cap=(1, 8), cap_until=2 * WAIT_S - 1, cap_reason="no node")
    found = fitted((4, 8), pods(2, 4, stuck={"prefill": 1}), memory)
    assert (found.memory.cap, found.size) == ((1, 4), (1, 4))


def test_a_clock_that_was_set_back_ends_the_wait():
    """The tier stayed capped until the clock had caught up."""
    memory = fitted((2, 8), pods(1, 8, stuck={"prefill": 1}), now=3600.0 + WAIT_S).memory
    assert fitted((2, 8), pods(1, 4), memory, now=WAIT_S).size == (2, 8)
    assert fitted((2, 8), pods(1, 4), memory, now=3600.0 + WAIT_S).size == (1, 4), "the longest that it may last"


ROLLS: dict[str, tuple[tuple[int, int] | None, tuple[int, int]]] = {
    "what it had before": ((2, 8), (2, 8)),
    "less than is wanted now": ((1, 4), (1, 4)),
    "not known: the operator has just started": (None, (2, 8)),
}


@pytest.mark.parametrize("name", ROLLS)
def test_a_rollout_that_takes_workers_away_is_no_lack_of_nodes(name: str):
    placed, size = ROLLS[name]
    have = pods(1, 3, stuck={"decode": 2})
    found = fit_cluster(TIER, (2, 8), have, (), ScaleMemory(placed=placed), WAIT_S, WAIT_S, rolls=True)
    assert (found.size, found.memory.placed) == (size, placed)


@pytest.mark.parametrize(("paused", "size"), [(False, (1, 4)), (True, (2, 8))])
def test_a_cap_holds_as_long_as_a_rollout_moves(paused: bool, size: tuple[int, int]):
    memory = ScaleMemory(cap=(1, 4), cap_until=WAIT_S, cap_reason="no node", placed=(1, 4))
    found = fit_cluster(TIER, (2, 8), pods(1, 4), (), memory, WAIT_S, 9 * WAIT_S, rolls=True, paused=paused)
    assert found.size == size
    assert ("tried again when the rollout is over" in found.limited) is not paused


QUOTA = "is forbidden: exceeded quota: gpus"
REFUSED: dict[str, tuple[str, bool]] = {
    "a pod of it": (f'Pod f-t-decode-aaaaaaaa-3: pods "f-t-decode-aaaaaaaa-3" {QUOTA}', True),
    "a pod of a group": (f"Pod f-t-prefill-aaaaaaaa-0-1: pods {QUOTA}", True),
    "another tier's": (f"Pod f-t2-decode-aaaaaaaa-3: pods {QUOTA}", False),
    "a tier whose name goes on": (f"Pod f-t-decode-decode-aaaaaaaa-3: pods {QUOTA}", False),
    "a pod that fetches": (f"Pod f-fetch-aaaaaaaa-bbbbbbbb: pods {QUOTA}", False),
    "another kind": (f'Service f-router: services "f-router" {QUOTA}', False),
    "another problem": ("Pod f-t-decode-aaaaaaaa-3: pods is forbidden: no such ServiceAccount", False),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_quota_caps_whose_pods_it_refused(name: str):
    """One tier's refused pod, or a refused Service, capped every tier of the fleet."""
    words, mine = REFUSED[name]
    assert bool(refusals("f", "t", [words])) is mine


def test_time_in_a_queue_is_no_time_in_which_a_node_was_looked_for():
    """A pod that Kueue held for an hour may find no node for a moment after it was let in: an autoscaler is bringing one."""
    have = pods(1, 8, stuck={"prefill": 1})
    queued = [replace(one, unschedulable=False, gated=one.unschedulable) for one in have]
    memory = fitted((2, 8), queued, now=12 * WAIT_S).memory
    another = pods(0, 0, stuck={"prefill": 2})[-1]  # its own time is over
    assert fitted((3, 8), [*queued, another], memory, now=12 * WAIT_S).limited
    early = fitted((2, 8), have, memory, now=13 * WAIT_S - 1)
    assert (early.size, early.limited) == ((2, 8), "")
    assert fitted((2, 8), have, early.memory, now=13 * WAIT_S).size == (1, 4)


def test_a_quota_backs_out_at_once_and_names_itself():
    words = 'Pod x: pods "x" is forbidden: exceeded quota: gpus'
    found = fitted((2, 4), pods(1, 4), problems=[words], now=0.0)
    assert found.size == (1, 4)
    assert found.limited.startswith(words)


def test_the_minimum_is_always_asked_for():
    assert fitted((1, 2), pods(0, 0, stuck={"prefill": 1, "decode": 2})).size == (1, 1)


def test_wanting_less_than_the_cap_is_no_limit():
    memory = ScaleMemory((), (2, 4), 1e9, "no node")
    assert fitted((1, 2), pods(2, 4), memory).limited == ""


def test_what_takes_no_device_is_paid_for_though_others_are_over_the_budget():
    """Minima of two GPU tiers over the budget kept a tier of CPUs at its own minimum: "need 0 devices, ... leaves 0"."""
    assert fit_budget(TIER, (2, 4), (0, 0), Purse(-1)) == ((2, 4), "")
    assert fit_budget(TIER, (2, 4), (1, 0), Purse(-1))[0] == (1, 1)


@pytest.mark.parametrize("gpus", [(1, 1), (1, 4), (8, 2), (0, 0)])
def test_a_budget_is_kept_inside_the_ratio(gpus: tuple[int, int]):
    bounds = bounds_of(TIER)
    for want, left in product(product(range(1, 5), range(1, 9)), [None, *range(40)]):
        if not bounds.allow(*want):
            continue
        size, words = fit_budget(TIER, want, gpus, Purse(left))
        assert bounds.allow(*size)
        cost = size[0] * gpus[0] + size[1] * gpus[1]
        assert left is None or cost <= left or size == (1, 1)
        assert bool(words) == (size != want)


@pytest.mark.parametrize(
    ("budget", "first", "second", "words"),
    [
        (8, (2, 3), (1, 2), "scaling.budget.gpus leaves 5"),
        (12, (2, 4), (2, 4), ""),
        (5, (1, 2), (1, 2), "scaling.budget.gpus leaves 2"),
    ],
    ids=["minima-first-then-in-order", "enough", "less-than-the-minima"],
)
def test_tiers_share_a_budget_in_their_order(budget: int, first: tuple[int, int], second: tuple[int, int], words: str):
    """What a later tier has at least is not given to an earlier one: both together were over the budget by that."""
    tiers = [{"name": name, "accelerator": {"type": "h100"}, "decode": {"minReplicas": 2}} for name in ("a", "b")]
    wish = fleet()
    wish = type(wish).model_validate(
        {**wish.model_dump(by_alias=True, exclude={"status"}, exclude_none=True),
         "spec": {"model": {"source": "file:///m"}, "tiers": tiers, "scaling": {"budget": {"gpus": budget}}}}
    )  # fmt: skip
    observed = Observed(templates={name: Template("aaaaaaaa", "c", gpus=(1, 1)) for name in ("a", "b")})
    big = [{**tier, "prefill": {"replicas": 2}, "decode": {"minReplicas": 2, "replicas": 4}} for tier in tiers]
    wish = wish.model_copy(update={"spec": wish.spec.model_validate({**wish.spec.to_dict(), "tiers": big})})
    plan = reconcile(wish, observed, NOW)
    assert {(pool.tier, pool.role): pool.replicas for pool in plan.pools} == {
        ("a", "prefill"): first[0], ("a", "decode"): first[1], ("b", "prefill"): second[0], ("b", "decode"): second[1],
    }  # fmt: skip
    limited = plan.status.condition("CapacityLimited")
    assert limited is not None
    assert (limited.status, limited.reason) == (("True", "BackedOut") if words else ("False", "Sufficient"))
    assert words in limited.message


def test_a_fleet_that_backed_out_rests_and_says_why():
    observed = carry_out(reconcile(fleet(), start(), NOW), start())
    pools = tuple(replace(p, replicas=8) if p.role == "decode" else p for p in observed.pools)
    observed = carry_out(reconcile(fleet(), replace(observed, pools=pools), NOW), observed, ready=False)
    stuck = [
        replace(p, ready=p.role == "decode" or p.ordinal == 0, unschedulable=p.role == "prefill" and p.ordinal > 0)
        for p in observed.pods
    ]
    observed = replace(observed, pods=tuple(stuck))
    plan = reconcile(fleet(), observed, NOW + WAIT_S)
    assert {p.role: p.replicas for p in plan.pools} == {"prefill": 1, "decode": 4}
    assert len(plan.delete) == 5
    after = carry_out(plan, observed)
    again = reconcile(fleet(), after, NOW + WAIT_S + 1)
    assert (again.create, again.delete) == ((), ())


@pytest.mark.parametrize("refused", ["f-a-decode-aaaaaaaa-9", "f-b-decode-aaaaaaaa-9"])
def test_a_tier_that_waits_for_a_node_is_not_capped_by_another_tiers_quota(refused: str):
    """Its worker had seconds of its five minutes: any `exceeded quota` of the fleet took it away."""
    tiers = [{"name": name, "accelerator": {"type": "cpu"}} for name in ("a", "b")]
    wish = fleet().model_copy(update={"spec": fleet().spec.model_validate({"model": {"source": "file:///m"}, "tiers": tiers})})
    observed = Observed(templates={name: Template("aaaaaaaa", "c") for name in ("a", "b")})
    plan = reconcile(wish, observed, NOW)
    made = [pod(w.name, w.role, w.ordinal, tier=w.tier, created_at=NOW) for w in plan.create]
    late = [replace(p, ready=False, unschedulable=True) if p.name == "f-b-decode-aaaaaaaa-1" else p for p in made]
    problem = Problem("Forbidden", f'Pod {refused}: pods "{refused}" is forbidden: exceeded quota: gpus')
    pools = tuple(ObservedPool(p.name, p.name, p.role, p.tier, p.revision, p.replicas, p.replicas, p.size) for p in plan.pools)
    after = reconcile(wish, replace(observed, pods=tuple(late), pools=pools, problems=(problem,)), NOW + 5)
    sizes = {(pool.tier, pool.role): pool.replicas for pool in after.pools}
    assert sizes["a", "decode"] == 2
    assert sizes["b", "decode"] == (2 if refused.startswith("f-a") else 1)
