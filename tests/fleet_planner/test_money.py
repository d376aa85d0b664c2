"""A budget of money by the hour bounds sizes as one of devices does: ratio kept, minima first, nothing stranded, and told."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_api.parse import ManifestError, parse_fleet
from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.render.revision import revision_of
from fleet_planner.capacity import fit_budget, least_devices
from fleet_planner.money import Purse, exact, said
from fleet_planner.ratio import bounds_of
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.roles import Role
from fleet_planner.types import Observed, Template
from tests.fleet_planner.test_reconcile import NOW, carry_out, pod

REVISION = "aaaaaaaa"
BOTH = {"prefill": {"maxReplicas": 4}, "decode": {"maxReplicas": 8}}


def fleet(*tiers: dict[str, Any], budget: dict[str, Any] | None = None, **scaling: Any) -> InferenceFleet:
    spec: dict[str, Any] = {
        "model": {"source": "file:///m"},
        "tiers": [{"accelerator": {"type": "h100"}, **one} for one in tiers],
    }
    spec["scaling"] = {**scaling, **({"budget": budget} if budget is not None else {})}
    meta = {"name": "f", "namespace": "n"}
    return parse_fleet({"apiVersion": "inferencefleet.io/v1alpha1", "kind": "InferenceFleet", "metadata": meta, "spec": spec})


def priced(name: str, price: float, prefill: int = 1, decode: int = 2, **more: Any) -> dict[str, Any]:
    roles = {"prefill": {"replicas": prefill, "maxReplicas": 4}, "decode": {"replicas": decode, "maxReplicas": 8}}
    return {"name": name, "cost": {"perGpuHour": price}, **roles, **more}


def seen(*names: str, gpus: tuple[int, int] = (1, 1), **more: Any) -> Observed:
    templates = {name: Template(REVISION, "c", gpus=gpus) for name in names}
    return Observed(templates=templates, stored={name: {REVISION: one} for name, one in templates.items()}, **more)


def sizes(plan: Plan) -> dict[str, tuple[int, int]]:
    found = {(pool.tier, pool.role): pool.replicas for pool in plan.pools}
    return {tier: (found[tier, "prefill"], found[tier, "decode"]) for tier, role in found if role == "prefill"}


def limited(plan: Plan) -> tuple[str, str]:
    found = plan.status.condition("CapacityLimited")
    assert found is not None
    return found.reason, found.message


TIER = fleet({"name": "t", "cost": {"perGpuHour": 2.5}, **BOTH}).spec.tiers[0]


@pytest.mark.parametrize("gpus", [(1, 1), (1, 4), (8, 2), (0, 0), (0, 1)])
@pytest.mark.parametrize("devices", [None, 3, 9])
def test_money_is_kept_inside_the_ratio_and_no_more_would_be_paid_for(gpus: tuple[int, int], devices: int | None):
    """Every wish of 4:8, every budget: the role that lags is as far along as the money lets it be."""
    bounds, price = bounds_of(TIER), Fraction(5, 2)
    allowed = [pair for pair in product(range(1, 5), range(1, 9)) if bounds.allow(*pair)]

    def cost(pair: tuple[int, int]) -> int:
        return pair[0] * gpus[0] + pair[1] * gpus[1]

    def lag(pair: tuple[int, int], want: tuple[int, int]) -> Fraction:
        return min(Fraction(pair[0], want[0]), Fraction(pair[1], want[1]))

    for want, money in product(allowed, [Fraction(n, 2) for n in range(-4, 80, 3)]):
        left = Purse(devices, money)

        def paid(pair: tuple[int, int], left: Purse = left) -> bool:
            fits = left.gpus is None or cost(pair) <= max(0, left.gpus)
            return fits and left.per_hour is not None and cost(pair) * price <= max(Fraction(0), left.per_hour)

        size, words = fit_budget(TIER, want, gpus, left)
        assert bounds.allow(*size)
        assert paid(size) or size == (1, 1), (want, left, size)
        assert bool(words) == (size != want)
        others = [pair for pair in allowed if pair[0] <= want[0] and pair[1] <= want[1] and paid(pair)]
        assert all(lag(pair, want) <= lag(size, want) for pair in others), (want, left, size)


@given(st.integers(0, 60), st.integers(1, 4), st.integers(1, 8), st.sampled_from([0.1, 0.3, 1.0, 4.0, 98.32]))
def test_so_much_money_is_so_many_devices(devices: int, prefill: int, decode: int, price: float):
    """Exactly: 0.1 and 0.2 are 0.3, or a worker that is paid for was not made."""
    tier = fleet({"name": "t", "cost": {"perGpuHour": price}, **BOTH}).spec.tiers[0]
    if not bounds_of(tier).allow(prefill, decode):
        return
    by_money = fit_budget(tier, (prefill, decode), (1, 2), Purse(None, devices * exact(price)))[0]
    assert by_money == fit_budget(tier, (prefill, decode), (1, 2), Purse(devices))[0]


prices = st.sampled_from((0.0, 0.1, 1.9, 4.0))
pairs = st.sampled_from([pair for pair in product(range(1, 5), range(1, 9)) if pair[0] <= pair[1] <= 4 * pair[0]])


@given(
    st.lists(st.tuples(prices, pairs), min_size=1, max_size=4), st.floats(0, 60, allow_nan=False), st.none() | st.integers(0, 20),
    st.sampled_from([(1, 1), (2, 1), (1, 4)]),
)  # fmt: skip
def test_all_tiers_together_cost_no_more_than_the_budget_or_their_minima(
    tiers: list[tuple[float, tuple[int, int]]], per_hour: float, gpus: int | None, each: tuple[int, int]
):
    """And what one leaves is the next one's, in the spec's order; made again from what is there nothing changes."""
    budget = {"perHour": per_hour, **({"gpus": gpus} if gpus is not None else {})}
    wish = fleet(*(priced(f"t{n}", price, *pair) for n, (price, pair) in enumerate(tiers)), budget=budget, mode="manual")
    observed = seen(*(tier.name for tier in wish.spec.tiers), gpus=each)
    plan = reconcile(wish, observed, NOW)
    total = minima = Fraction(0)
    for tier, (price, pair) in zip(wish.spec.tiers, tiers, strict=True):
        size = sizes(plan)[tier.name]
        assert bounds_of(tier).allow(*size)
        assert size[0] <= pair[0]
        assert size[1] <= pair[1]
        total += (size[0] * each[0] + size[1] * each[1]) * exact(price)
        minima += least_devices(tier, each) * exact(price)
    assert total <= max(exact(per_hour), minima)
    again = reconcile(wish, replace(carry_out(plan, observed), templates=observed.templates), NOW + 1)
    assert sizes(again) == sizes(plan)


@pytest.mark.parametrize(
    ("budget", "first", "second", "words"),
    [
        ({"perHour": 40}, (2, 4), (2, 4), ""),
        ({"perHour": 30}, (2, 4), (2, 4), ""),
        ({"perHour": 29.99}, (2, 4), (2, 3), "tier b: {0} cost 6 an hour, scaling.budget.perHour leaves 5.99: 0.01 is missing"),
        ({"perHour": 20}, (2, 2), (2, 2), "tier a: {0} cost 24 an hour, scaling.budget.perHour leaves 18: 6 is missing"),
        ({"perHour": 0}, (1, 1), (1, 1), "scaling.budget.perHour leaves 0: 24 is missing"),
        ({"perHour": 100, "gpus": 10}, (2, 4), (2, 2), "tier b: {0} need 6 devices, scaling.budget.gpus leaves 4"),
        ({"perHour": 20, "gpus": 4}, (1, 1), (1, 1), "{0} need 6 devices, scaling.budget.gpus leaves 2 and cost 24 an hour, "),
    ],
)
def test_tiers_share_it_in_their_order_and_what_is_missing_is_told(
    budget: dict[str, Any], first: tuple[int, int], second: tuple[int, int], words: str
):
    """Tier a at 4 a device, tier b at 1; the minimum of b is put aside first."""
    wish = fleet(priced("a", 4.0, 2, 4), priced("b", 1.0, 2, 4), budget=budget, mode="manual")
    plan = reconcile(wish, seen("a", "b"), NOW)
    assert sizes(plan) == {"a": first, "b": second}
    assert limited(plan)[0] == ("BackedOut" if words else "Sufficient")
    assert words.format("2 prefill and 4 decode workers") in limited(plan)[1]


def test_money_that_is_raised_or_a_price_that_falls_gives_back_what_was_asked_for():
    dear = fleet(priced("t", 4.0, 2, 4), budget={"perHour": 12}, mode="manual")
    observed = seen("t")
    plan = reconcile(dear, observed, NOW)
    assert sizes(plan) == {"t": (1, 2)}
    there = replace(carry_out(plan, observed), templates=observed.templates)
    for better in (
        fleet(priced("t", 4.0, 2, 4), budget={"perHour": 24}, mode="manual"),
        fleet(priced("t", 2.0, 2, 4), budget={"perHour": 12}, mode="manual"),
    ):
        assert sizes(reconcile(better, there, NOW + 1)) == {"t": (2, 4)}


def test_a_price_is_no_part_of_a_revision():
    """A new price restarts nothing, nor does the first one."""
    found = {revision_of(one, one.spec.tiers[0]) for one in (fleet({"name": "t"}), *(fleet(
        {"name": "t", "cost": {"perGpuHour": price}}) for price in (0, 1, 4.5)))}  # fmt: skip
    assert len(found) == 1


@pytest.mark.parametrize(
    ("tiers", "budget", "words"),
    [
        (
            [{"name": "a"}],
            {"perHour": 5},
            "spec.tiers: Invalid value: scaling.budget.perHour needs cost.perGpuHour of every tier",
        ),
        ([priced("a", 1.0), {"name": "b"}], {"perHour": 5}, "scaling.budget.perHour needs cost.perGpuHour of every tier"),
        ([priced("a", 1.0)], {}, "spec.scaling.budget: Invalid value: gpus or perHour is needed"),
        ([priced("a", -1.0)], {"perHour": 5}, "spec.tiers[0].cost.perGpuHour"),
        ([priced("a", 1.0)], {"perHour": -5}, "spec.scaling.budget.perHour"),
        ([{"name": "a"}], {"gpus": 5}, ""),
        ([priced("a", 1.0)], {"perHour": 5}, ""),
        ([priced("a", 0)], {"perHour": 5, "gpus": 0}, ""),
    ],
)
def test_a_tier_without_a_price_is_refused_where_money_is_limited(
    tiers: list[dict[str, Any]], budget: dict[str, Any], words: str
):
    if not words:
        fleet(*tiers, budget=budget)
        return
    with pytest.raises(ManifestError) as refused:
        fleet(*tiers, budget=budget)
    assert words in "; ".join(refused.value.errors)


def cost(wish: InferenceFleet, observed: Observed) -> tuple[float | None, list[float | None]]:
    status = reconcile(wish, observed, NOW).status
    return status.cost_per_hour, [tier.cost_per_hour for tier in status.tiers]


def test_the_status_says_what_the_devices_that_are_held_cost():
    wish = fleet(priced("a", 4.1), priced("b", 0.1))
    observed = seen("a", "b", gpus=(2, 1))
    assert cost(wish, observed) == (0.0, [0.0, 0.0])
    workers = [pod("p", "prefill", 0, tier="a"), pod("d", "decode", 0, tier="a"), pod("e", "decode", 0, tier="b")]
    assert cost(wish, replace(observed, pods=tuple(workers))) == (12.4, [12.3, 0.1])
    waits = pod("w", "prefill", 1, tier="a", node=None, ready=False, phase="Pending")
    assert cost(wish, replace(observed, pods=(*workers, waits)))[0] == 12.4, "it has no node"
    goes = pod("g", "decode", 1, tier="a", terminating=True)
    assert cost(wish, replace(observed, pods=(*workers, goes)))[0] == 16.5, "it has its devices to its end"


def test_a_cost_that_is_not_known_in_full_is_none():
    observed = seen("a", "b", "gone")
    workers = (pod("p", "prefill", 0, tier="a"), pod("d", "decode", 0, tier="b"))
    assert cost(fleet({"name": "a"}, {"name": "b"}), replace(observed, pods=workers)) == (None, [None, None])
    assert cost(fleet(priced("a", 4), {"name": "b"}), replace(observed, pods=workers)) == (None, [4.0, None])
    left = (*workers, pod("x", "decode", 3, tier="gone"))
    assert cost(fleet(priced("a", 4), priced("b", 1)), replace(observed, pods=left)) == (None, [4.0, 1.0])
    cpu = replace(observed, stored={**observed.stored, "gone": {REVISION: Template(REVISION, "c")}}, pods=left)
    assert cost(fleet(priced("a", 4), priced("b", 1)), cpu)[0] == 5.0, "what has no device costs nothing"
    remembered = remembering(replace(observed, pods=left), "gone", 8.0)
    assert cost(fleet(priced("a", 4), priced("b", 1)), remembered)[0] == 13.0, "what it cost when it was stored"
    free = remembering(replace(observed, pods=left), "gone", 0.0)
    assert cost(fleet(priced("a", 4), priced("b", 1)), free)[0] == 5.0, "nothing is known, too"
    spec_says_none = remembering(replace(observed, pods=workers), "b", 8.0)
    assert cost(fleet(priced("a", 4), {"name": "b"}), spec_says_none)[0] is None, "the spec's word counts for its own tiers"


@pytest.mark.parametrize("tier", ["a", "gone"])
def test_what_workers_without_a_template_cost_nobody_knows(tier: str):
    """Somebody deleted it, and the operator began anew: the sum said that they cost nothing."""
    observed = seen("a", "b", "gone")
    workers = (
        pod("p", "prefill", 0, tier="a"),
        pod("d", "decode", 0, tier="b"),
        pod("x", "decode", 3, tier=tier, revision="lost"),
    )
    there = remembering(replace(observed, pods=workers), "gone", 8.0)
    assert cost(fleet(priced("a", 4), priced("b", 1)), there) == (None, [None if tier == "a" else 4.0, 1.0])
    waits = replace(there, pods=(*workers[:2], replace(workers[2], node=None, ready=False)))
    assert cost(fleet(priced("a", 4), priced("b", 1)), waits) == (5.0, [4.0, 1.0]), "it holds none"


def test_a_template_that_the_spec_still_says_is_known_though_somebody_deleted_it():
    observed = seen("a", gpus=(2, 2))
    workers = (pod("p", "prefill", 0, tier="a"), pod("d", "decode", 0, tier="a"))
    assert cost(fleet(priced("a", 4)), replace(observed, stored={}, pods=workers)) == (16.0, [16.0])


def test_workers_without_a_template_count_in_the_budget_as_the_largest():
    """They were taken for none, and others grew into what they hold."""
    wish = fleet(priced("a", 1.0, 2, 4), budget={"perHour": 12}, mode="manual")
    old = tuple(pod(f"o{n}", role, n, tier="t", serving=True) for n, role in enumerate(("prefill", "decode", "decode")))
    observed = replace(seen("a", gpus=(1, 2)), pods=old)
    assert sizes(reconcile(wish, observed, NOW)) == {"a": (2, 2)}, "5 of 12 are theirs"


def remembering(observed: Observed, tier: str, price: float) -> Observed:
    """With a price that was stored with the tier's revision."""
    priced = {REVISION: replace(observed.stored[tier][REVISION], price=price)}
    return replace(observed, stored={**observed.stored, tier: priced})


@pytest.mark.parametrize(
    ("price", "budget", "expected"),
    [
        pytest.param(None, 30, {"a": (2, 4), "b": (1, 2)}, id="not-known-is-the-dearest"),
        pytest.param(None, 23, {"a": (1, 2), "b": (1, 1)}, id="not-known-and-less-money"),
        pytest.param(4.01, 30, {"a": (2, 4), "b": (1, 1)}, id="more-than-the-dearest-of-those-that-stay"),
        pytest.param(8.0, 33, {"a": (1, 1), "b": (1, 1)}, id="much-more"),
        pytest.param(0.5, 23, {"a": (2, 4), "b": (1, 2)}, id="less-than-the-dearest"),
        pytest.param(0.0, 18, {"a": (2, 4), "b": (1, 2)}, id="nothing-is-no-unknown-price"),
        pytest.param(0.0, 17, {"a": (2, 4), "b": (1, 1)}, id="and-no-more-than-that"),
    ],
)
def test_workers_of_a_tier_that_left_the_spec_count_at_their_price_or_else_at_the_dearest(
    price: float | None, budget: float, expected: dict[str, tuple[int, int]]
):
    """Theirs went with the tier: one that was dearer than all others counted as the dearest of these, and more was spent."""
    wish = fleet(priced("a", 1.0, 2, 4), priced("b", 4.0), budget={"perHour": budget}, mode="manual")
    gone = seen("a", "b", "t")
    old = tuple(pod(f"o{n}", role, n, tier="t", serving=True) for n, role in enumerate(("prefill", "decode", "decode")))
    gone = replace(gone, templates={name: gone.templates[name] for name in ("a", "b")}, pods=old)
    plan = reconcile(wish, gone if price is None else remembering(gone, "t", price), NOW)
    assert sizes(plan) == expected


def test_a_price_of_long_ago_takes_nobody_away_who_is_there():
    wish = fleet(priced("a", 1.0, 2, 4), budget={"perHour": 12}, mode="manual")
    gone = seen("a", "t")
    roles: tuple[Role, ...] = ("prefill", "decode", "decode")
    old = tuple(pod(f"o{n}", role, n, tier="t", serving=True) for n, role in enumerate(roles))
    mine = tuple(pod(f"a{n}", role, n, tier="a", serving=True) for n, role in enumerate((*roles, *roles)))
    gone = replace(gone, templates={"a": gone.templates["a"]}, pods=(*old, *mine))
    assert sizes(reconcile(wish, remembering(gone, "t", 100.0), NOW)) == {"a": (2, 4)}


@pytest.mark.parametrize(
    ("money", "words"),
    [
        (Fraction(25, 2), "12.5"),
        (Fraction(6), "6"),
        (Fraction(1, 3), "0.3333"),
        (Fraction(0), "0"),
        (Fraction("0.00031"), "0.00031"),
        (Fraction("0.000031"), "3.1e-05"),
    ],
)
def test_money_is_said_as_people_write_it(money: Fraction, words: str):
    assert said(money) == words


def larger(name: str, price: float, prefill: int, decode: int) -> dict[str, Any]:
    roles = {"prefill": {"replicas": prefill, "maxReplicas": 50}, "decode": {"replicas": decode, "maxReplicas": 100}}
    return {"name": name, "cost": {"perGpuHour": price}, **roles}


@pytest.mark.parametrize("renamed", [False, True], ids=["taken out", "renamed"])
def test_a_guessed_price_of_a_tier_that_left_the_spec_takes_nobody_away_who_is_there(renamed: bool):
    """Of 170 the dear tier cost 120 and the cheap one 40: that one's devices at the dear one's price were 400, for which 10 of
    the 12 workers went that the edit was not about."""
    dear, cheap = larger("dear", 10.0, 4, 8), larger("cheap", 1.0, 10, 30)
    wish = fleet(dear, cheap, budget={"perHour": 170}, mode="manual")
    observed = seen("dear", "cheap")
    plan = reconcile(wish, observed, NOW)
    made = tuple(pod(w.name, w.role, w.ordinal, tier=w.tier, serving=True, told=True) for w in plan.create)
    there = replace(carry_out(plan, observed), pods=made)
    rest = [larger("other", 1.0, 10, 30)] if renamed else []
    wish = fleet(dear, *rest, budget={"perHour": 170}, mode="manual")
    plan = reconcile(wish, replace(there, templates=dict.fromkeys([tier.name for tier in wish.spec.tiers], TEMPLATE)), NOW + 1)
    assert sizes(plan)["dear"] == (4, 8)
    going = {gone.name for gone in plan.delete}
    assert not [one.name for one in made if one.tier == "dear" and one.name in going]


TEMPLATE = Template(REVISION, "c", gpus=(1, 1))


@pytest.mark.parametrize(
    ("budget", "reason", "words"),
    [
        ({"perHour": 10, "gpus": 4}, "Sufficient", ""),
        ({"perHour": 9.5}, "BeyondBudget", "takes 0.5 an hour more than scaling.budget.perHour, which is 9.5: "),
        ({"gpus": 3}, "BeyondBudget", "takes 1 devices more than scaling.budget.gpus, which is 3: "),
        (
            {"perHour": 1, "gpus": 0},
            "BeyondBudget",
            "takes 4 devices more than scaling.budget.gpus, which is 0 and 9 an hour more",
        ),
    ],
)
def test_minima_beyond_the_budget_are_made_and_told(budget: dict[str, Any], reason: str, words: str):
    """It said that everything was sufficient, and nobody was told that the fleet cost more than it may."""
    wish = fleet(priced("a", 4.0, 1, 1), priced("b", 1.0, 1, 1), budget=budget, mode="manual")
    plan = reconcile(wish, seen("a", "b"), NOW)
    assert sizes(plan) == {"a": (1, 1), "b": (1, 1)}
    found = plan.status.condition("CapacityLimited")
    assert found is not None
    assert (found.status, found.reason) == ("False", reason)
    assert words in found.message
