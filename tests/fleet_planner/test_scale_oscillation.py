"""O19: an hour of load that goes up and down around a threshold. Growing is immediate and shrinking waits for a whole quiet
window, so sizes turn to smaller at most once in a window, and to larger again at most once; for what is quicker than the
window nobody leaves.

The list says at most one change of direction in a window. That is held for every change to smaller: none within a window of the
change before it. A change to larger may come sooner after one to smaller, when load rises just after a whole quiet window: who
waits for workers is not made to wait for a window, too, and nobody knows of a rise before it comes. So 5 of the 33 waves have two
changes 5 to 15 s apart (an hour of any wave has at most one per window all the same), and spikes have two per window and a bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_api.v1alpha1.routing import ScalingSpec, SloSpec
from fleet_api.v1alpha1.tier import AcceleratorSpec, RoleSpec, TierSpec
from fleet_planner.memory import ScaleMemory
from fleet_planner.ratio import Pair, bounds_of
from fleet_planner.scale import ScaleInputs, want
from fleet_planner.types import RoleLoad, TierTelemetry

TIER = TierSpec(
    name="t", accelerator=AcceleratorSpec(type="cpu"), prefill=RoleSpec(max_replicas=8), decode=RoleSpec(max_replicas=8)
)
SCALING = ScalingSpec()
INTERVAL_S, HOUR_S = 5, 3_600
WINDOW_S = SCALING.scale_down_window_s
PREFILL, DECODE = SCALING.target_inflight.prefill, SCALING.target_inflight.decode
Load = Callable[[float], float]
"""Seconds to the load in workers: 2.0 is the threshold between two workers and three."""


def an_hour(load: Load) -> list[tuple[float, Pair]]:
    """(time, sizes) of every decision."""
    memory, sizes, found = ScaleMemory(), TIER.initial, []
    for now in range(0, HOUR_S, INTERVAL_S):
        workers = load(now)
        told = TierTelemetry(
            RoleLoad(workers * PREFILL, None, None, now), RoleLoad(2 * workers * DECODE, None, None, now)
        )  # fmt: skip
        decision = want(ScaleInputs(TIER, SloSpec(), SCALING, INTERVAL_S, sizes), told, memory, now)
        memory, sizes = decision.memory, (decision.prefill, decision.decode)
        assert bounds_of(TIER).allow(*sizes)
        found.append((float(now), sizes))
    return found


def turns(hour: list[tuple[float, Pair]]) -> dict[int, list[float]]:
    """When sizes began to fall (-1) after they had risen, and to rise (1) after they had fallen."""
    moves = [(at, 1 if sum(b) > sum(a) else -1) for (_, a), (at, b) in pairwise(hour) if sum(a) != sum(b)]
    return {way: [at for (_, before), (at, after) in pairwise(moves) if after == way != before] for way in (-1, 1)}


def square(period_s: float, high: float = 2.2, low: float = 1.8) -> Load:
    return lambda now: high if now % period_s < period_s / 2 else low


def sine(period_s: float, swing: float = 0.3) -> Load:
    return lambda now: 2.0 + swing * math.sin(2 * math.pi * now / period_s)


def saw(period_s: float) -> Load:
    return lambda now: 1.5 + now % period_s / period_s


def spikes(period_s: float) -> Load:
    return lambda now: 2.2 if now % period_s < INTERVAL_S else 1.8


PERIODS = (10, 30, 60, 110, WINDOW_S, WINDOW_S + 10, 2 * WINDOW_S - 10, 2 * WINDOW_S, 2 * WINDOW_S + 20, 600, 1_200)


@pytest.mark.parametrize("period_s", PERIODS)
@pytest.mark.parametrize("wave", [square, sine, saw])
def test_o19_an_hour_around_a_threshold(wave: Callable[[float], Load], period_s: float):
    hour = an_hour(wave(period_s))
    judge(hour)
    turned = sum(map(len, turns(hour).values()))
    assert turned <= HOUR_S / WINDOW_S, "more than one change of direction in a window, on average"
    if period_s <= WINDOW_S:
        assert turned == 0, "quicker than the window: nobody leaves"
    if period_s > 4 * WINDOW_S and wave is square:
        assert turned > 0, "slow enough to be followed"


@pytest.mark.parametrize("period_s", PERIODS)
def test_o19_an_hour_of_single_high_readings(period_s: float):
    """The shortest way from a rise to the fall after it: exactly a window."""
    judge(an_hour(spikes(period_s)))


@given(st.lists(st.floats(0.2, 3.8), min_size=1, max_size=60), st.integers(1, 12))
@settings(max_examples=60)
def test_o19_an_hour_of_any_steps(levels: list[float], hold: int):
    judge(an_hour(lambda now: levels[int(now / INTERVAL_S / hold) % len(levels)]))


def judge(hour: list[tuple[float, Pair]]) -> None:
    ways = turns(hour)
    for way, times in ways.items():
        assert all(later - earlier >= WINDOW_S for earlier, later in pairwise(times)), (way, times)
    every = sorted((at, way) for way, times in ways.items() for at in times)
    hasty = [(at, after) for (at, _), (after, way) in pairwise(every) if way == -1 and after - at < WINDOW_S]
    assert not hasty, "workers left within a window of the last change of direction"
