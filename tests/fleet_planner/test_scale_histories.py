"""Sizes over random histories: telemetry with gaps and nonsense, set clocks, lost workers, restarts, small bounds and budgets.

What holds at every pass: each role inside its bounds, the pair inside the ratio, the devices inside the budget (the minimum is
never refused), what serves inside the ratio once it was, the size held while nothing usable is known, and planning again after a
plan was carried out asks for nothing else. After any history a constant load moves sizes one way at most, and then not at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from fleet_api.parse import ManifestError
from fleet_planner.money import exact, price_of
from fleet_planner.ratio import Pair, bounds_of, within
from fleet_planner.reconcile import Plan
from fleet_planner.types import RoleLoad, Template
from fleet_planner.types import TierTelemetry as Telemetry
from tests.fleet_planner.zero_world import OLD, World, fleet

STALE_S = 20.0
NONSENSE = (math.nan, math.inf, -math.inf, -1.0)
Reading = tuple[float | None, float | None, float]
"""In flight on prefill and on decode, and how old that is, seconds; None: not known."""


def usable(reading: Reading | None) -> bool:
    if reading is None:
        return False
    *loads, age_s = reading
    return 0 <= age_s <= STALE_S and all(load is not None and math.isfinite(load) and load >= 0 for load in loads)


@dataclass
class Metered(World):
    """A cluster whose telemetry says what it is told, and whose clock may be set."""

    reading: Reading | None = None
    slow: Pair = (0, 0)
    """Roles whose latency objective is missed."""
    gpus: Pair = (1, 1)
    seen: list[Pair] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        template = Template(OLD, "c", gpus=self.gpus)
        self.observed = replace(self.observed, templates={tier.name: template for tier in self.spec.spec.tiers})

    def read(self) -> None:
        known = {}
        if self.reading is not None:
            prefill, decode, age_s = self.reading
            at = self.now - age_s
            loads = RoleLoad(prefill, 9.0 if self.slow[0] else 0.1, None, at), RoleLoad(decode, None, 9.0 * self.slow[1], at)
            known = {tier.name: Telemetry(*loads) for tier in self.spec.spec.tiers}
        self.observed = replace(self.observed, telemetry=known)

    def set_clock(self, by_s: float, told: bool) -> None:
        self.now += by_s
        self.observed = replace(self.observed, clock_set_s=by_s if told else 0.0)

    def lose(self, nth: int) -> None:
        pods = self.observed.pods
        if pods:
            gone = pods[nth % len(pods)]
            self.observed = replace(self.observed, pods=tuple(pod for pod in pods if pod is not gone))

    def size(self, plan: Plan) -> Pair:
        (status,) = plan.status.tiers
        return status.prefill.desired, status.decode.desired


def step(world: Metered, seconds: float) -> Pair:
    """One pass, and what holds after each."""
    (tier,) = world.spec.spec.tiers
    limits, budget = bounds_of(tier), world.spec.spec.scaling.budget
    before = world.seen[-1] if world.seen else None
    plan = world.step(seconds)
    world.observed = replace(world.observed, clock=plan.clock, clock_set_s=0.0)
    size = world.size(plan)
    assert limits.allow(*size), (size, limits)
    if budget is not None:
        least = min(
            p * world.gpus[0] + d * world.gpus[1]
            for p in range(limits.prefill_min, limits.prefill_max + 1)
            for d in range(limits.decode_min, limits.decode_max + 1)
            if limits.allow(p, d)
        )
        price = price_of(tier)
        paid = [budget.gpus] if budget.gpus is not None else []
        paid += [exact(budget.per_hour) / price] if budget.per_hour is not None and price else []
        assert size[0] * world.gpus[0] + size[1] * world.gpus[1] <= max(min(paid, default=10**6), least), size
    if before is not None and not usable(world.reading):
        assert size == before, "nothing usable is known: the size stays"
    world.seen.append(size)
    again = world.plan()
    assert world.size(again) == size, "planning again asks for something else"
    return size


def serves_in_ratio(world: Metered, reached: bool) -> bool:
    """Once a pair of it was inside the ratio it stays there, until workers are lost."""
    (tier,) = world.spec.spec.tiers
    there = world.served[-1][tier.name]
    fine = 0 not in there and within(*there, tier.ratio.min_ratio, tier.ratio.max_ratio)
    assert fine or not reached, f"{there} serve, outside of {tier.ratio.min}..{tier.ratio.max}"
    return fine


loads = st.floats(0, 40)
steady = st.tuples(loads, loads, st.sampled_from((0.0, 1.0, 19.9)))
"""What can be acted on."""
no_load = st.sampled_from((None, *NONSENSE))
no_age = st.sampled_from((20.1, 500.0, -0.5, -100.0))
broken = st.one_of(
    st.none(), st.tuples(no_load, loads, st.just(0.0)), st.tuples(loads, no_load, st.just(0.0)), st.tuples(loads, loads, no_age)
)
huge = st.tuples(st.just(1e300), loads, st.just(0.0))
EVENTS: dict[str, st.SearchStrategy[Any]] = {
    "reading": steady,
    "idle": st.just((0.0, 0.0, 0.0)),
    "broken": broken,
    "huge": huge,
    "slow": st.tuples(st.integers(0, 1), st.integers(0, 1)),
    "wait": st.sampled_from((0.0, 1.0, 5.0, 29.0, 31.0, 4_000.0)),
    "ready": st.sampled_from((None, "prefill", "decode")),
    "clock": st.tuples(st.sampled_from((-7_200.0, -90.0, -1.0, 1.0, 90.0, 7_200.0)), st.booleans()),
    "lose": st.integers(0, 11),
    "restart": st.none(),
    "fits": st.booleans(),
}
events = st.lists(st.one_of(*(st.tuples(st.just(name), what) for name, what in EVENTS.items())), min_size=1, max_size=40)


@st.composite
def worlds(draw: st.DrawFn) -> Metered:
    def role() -> dict[str, int]:
        least = draw(st.sampled_from((1, 1, 2, 5)))
        most = draw(st.integers(max(least, 3), 6))
        return {"minReplicas": least, "maxReplicas": most, "warm": draw(st.sampled_from((0, 0, 1, most)))}

    low, high = sorted((draw(st.sampled_from(RATIOS)), draw(st.sampled_from(RATIOS))), key=share_of)
    ratio = {"min": low, "max": high, "prefill": draw(st.integers(1, 2)), "decode": draw(st.integers(1, 3))}
    tier = {"name": "t", "ratio": ratio, "prefill": role(), "decode": role()}
    limits = {"gpus": st.integers(1, 14), "perHour": st.sampled_from((0.3, 1.0, 5.7, 9.9, 12.0))}
    budget = draw(st.one_of(st.none(), st.fixed_dictionaries({"gpus": limits["gpus"]}, optional={"perHour": limits["perHour"]}),
                            st.fixed_dictionaries({"perHour": limits["perHour"]})))  # fmt: skip
    if budget is not None and "perHour" in budget:
        tier["cost"] = {"perGpuHour": draw(st.sampled_from((0.0, 0.1, 0.95, 1.9)))}
    more: dict[str, Any] = {"toZero": {"enabled": False}, "scaleDownWindow": "30s", "targetInflight": TARGET}
    if budget is not None:
        more["budget"] = budget
    try:
        spec = fleet([tier], telemetry={"interval": "5s"}, **more)
    except ManifestError:
        assume(False)
    slo = spec.spec.slo.model_validate({"ttft": {"p99": "1s"}, "itl": {"p99": "1s"}})
    spec = spec.model_copy(update={"spec": spec.spec.model_copy(update={"slo": slo})})
    gpus = draw(st.sampled_from(((1, 1), (2, 1), (1, 2)))) if budget is not None else (0, 0)
    return Metered(spec, gpus=gpus)


TARGET = {"prefill": 4, "decode": 4}
RATIOS = ("1:6", "1:4", "1:3", "1:2", "2:3", "1:1", "3:2", "2:1", "4:1")


def share_of(text: str) -> float:
    prefill, decode = map(int, text.split(":"))
    return prefill / decode


def play(world: Metered, name: str, what: Any) -> float:
    """Seconds until the next pass."""
    if name in ("reading", "idle", "broken", "huge"):
        world.reading = what
    elif name == "slow":
        world.slow = what
    elif name == "wait":
        return what
    elif name == "ready":
        world.ready(what)
    elif name == "clock":
        world.set_clock(*what)
    elif name == "lose":
        world.lose(what)
    elif name == "restart":
        world.restart()
    elif name == "fits":
        world.fits = what
    return 1.0


@settings(max_examples=60, deadline=None)
@given(worlds(), events)
def test_any_history_keeps_bounds_ratio_and_budget(world: Metered, history: list[tuple[str, Any]]):
    reached = False
    for name, what in history:
        seconds = play(world, name, what)
        if name == "lose":
            reached = False
        if name in ("fits", "clock"):  # a lack of nodes is another reason to have fewer (test_capacity.py)
            world.seen.clear()
        step(world, seconds)
        if not world.fits:
            world.seen.clear()
        reached = serves_in_ratio(world, reached)


@settings(max_examples=20, deadline=None)
@given(worlds(), events, st.tuples(loads, loads, st.just(0.0)))
def test_a_constant_load_moves_sizes_one_way_and_then_not_at_all(
    world: Metered, history: list[tuple[str, Any]], constant: Reading
):
    for name, what in history:
        world.seen.clear()
        step(world, play(world, name, what))
        world.seen.clear()
    world.fits, world.reading, world.slow = True, constant, (0, 0)
    world.observed = replace(world.observed, pods=tuple(pod for pod in world.observed.pods if pod.node))
    sizes = list[Pair]()
    for _ in range(60):
        world.ready()
        sizes.append(step(world, 15.0))
    for role in (0, 1):
        moves = [b[role] - a[role] for a, b in pairwise(sizes) if a[role] != b[role]]
        rose = [at for at, move in enumerate(moves) if move > 0]
        fell = [at for at, move in enumerate(moves) if move < 0]
        event(f"rose {bool(rose)}, fell {bool(fell)}")
        assert not rose or not fell or max(rose) < min(fell), (role, sizes)
    assert len(set(sizes[45:])) == 1, sizes
