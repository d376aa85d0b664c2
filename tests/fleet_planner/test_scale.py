"""Scaling as a time line: grow at once, shrink after a quiet window, hold without data."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_api.v1alpha1.routing import LatencySpec, ScalingSpec, SloSpec
from fleet_api.v1alpha1.tier import AcceleratorSpec, RoleSpec, TierSpec
from fleet_planner.memory import ScaleMemory
from fleet_planner.ratio import bounds_of
from fleet_planner.scale import ScaleInputs, is_fresh, want
from fleet_planner.types import RoleLoad, TierTelemetry

TIER = TierSpec(name="t", accelerator=AcceleratorSpec(type="cpu"), decode=RoleSpec(warm=1))
SLO = SloSpec(ttft=LatencySpec(p99="1s"), itl=LatencySpec(p99="50ms"))
WINDOW_S = 120.0


def inputs(current: tuple[int, int]) -> ScaleInputs:
    return ScaleInputs(TIER, SLO, ScalingSpec(), 5.0, current)


def load(
    prefill: float | None, decode: float | None, now: float, ttft: float | None = None, itl: float | None = None
) -> TierTelemetry:
    return TierTelemetry(RoleLoad(prefill, ttft, None, now), RoleLoad(decode, None, itl, now))


def covered(current: tuple[int, int], now: float) -> ScaleMemory:
    """Memory of a whole quiet window."""
    return ScaleMemory(((now - WINDOW_S - 1, *current),))


def test_load_grows_a_role_at_once_and_the_ratio_takes_the_other_along():
    found = want(inputs((1, 2)), load(9, 70, 0.0), ScaleMemory(), 0.0)
    assert (found.prefill, found.decode) == (3, 6)  # 9/4 → 3; 70/16 → 5, and one warm


def test_shrinking_waits_for_a_whole_window():
    memory, current = ScaleMemory(), (3, 6)
    for second in range(0, 125, 5):
        found = want(inputs(current), load(0, 0, second), memory, second)
        memory = found.memory
        assert (found.prefill, found.decode) == ((3, 6) if second < 120 else (1, 1)), second


def test_without_a_window_workers_leave_at_once():
    """scaleDownWindow: 0s."""
    at_once = replace(inputs((3, 6)), scaling=ScalingSpec(scale_down_window="0s"))
    memory = ScaleMemory()
    for second, inflight, sizes in ((0, (9, 70), (3, 6)), (5, (0, 0), (1, 1)), (5, (9, 70), (3, 6)), (10, (0, 0), (1, 1))):
        found = want(at_once, load(*inflight, second), memory, second)
        memory = found.memory
        assert (found.prefill, found.decode) == sizes, second
        assert len(memory.wants) == 1


def test_of_two_wants_of_one_moment_the_larger_is_remembered_for_as_long_as_the_later():
    """They are nearer together than what is kept apart."""
    first = want(inputs((3, 6)), load(9, 70, 1_000.1), covered((1, 1), 1_000.0), 1_000.1)
    second = want(inputs((3, 6)), load(0, 0, 1_000.2), first.memory, 1_000.2)
    assert second.memory.wants[1:] == ((1_000.2, 3, 6),)


def test_a_peak_inside_the_window_keeps_its_size():
    memory = ScaleMemory(((0.0, 1, 1), (100.0, 3, 6)))
    found = want(inputs((3, 6)), load(0, 0, 200.0), memory, 200.0)
    assert (found.prefill, found.decode) == (3, 6)
    found = want(inputs((3, 6)), load(0, 0, 321.0), found.memory, 321.0)  # the want of 100 held until 200
    assert (found.prefill, found.decode) == (1, 1)


@pytest.mark.parametrize(
    ("age_s", "interval_s", "fresh"),
    [(0.0, 5.0, True), (20.0, 5.0, True), (20.1, 5.0, False), (95.0, 30.0, True), (95.1, 30.0, False), (-0.1, 5.0, False)],
)
def test_telemetry_is_stale_after_three_intervals_and_a_bit(age_s: float, interval_s: float, fresh: bool):
    assert is_fresh(1000.0 - age_s, interval_s, 1000.0) is fresh


@pytest.mark.parametrize(
    ("gap_s", "waits_s"),
    [(5.0, WINDOW_S), (WINDOW_S, WINDOW_S), (140.0, 140.0), (141.0, 141.0 + WINDOW_S), (3600.0, 3600.0 + WINDOW_S)],
)
def test_a_window_of_which_nothing_is_known_shows_nothing(gap_s: float, waits_s: float):
    """One quiet reading, an hour without any, another one: nine workers of ten went at once."""
    memory = want(inputs((3, 6)), load(9, 70, 0.0), ScaleMemory(), 0.0).memory
    memory, now = want(inputs((3, 6)), load(0, 0, 5.0), memory, 5.0).memory, 5.0 + gap_s
    while (found := want(inputs((3, 6)), load(0, 0, now), memory, now)) and found.prefill == 3:
        memory, now = found.memory, now + 1.0
    assert now - 5.0 == waits_s


@pytest.mark.parametrize(
    ("telemetry", "why"),
    [
        pytest.param(None, "no telemetry", id="none"),
        pytest.param(load(None, 3, 0.0), "no prefill load", id="one-role-unknown"),
        pytest.param(load(0, 0, -30.0), "prefill telemetry is 30 s old", id="stale"),
        pytest.param(load(0, 0, 3600.0), "prefill telemetry is -3600 s old", id="clock-jumped-back"),
        pytest.param(load(math.nan, 0, 0.0), "prefill load is nan", id="nan"),
        pytest.param(load(0, math.inf, 0.0), "decode load is inf", id="infinite"),
        pytest.param(load(-1, 0, 0.0), "prefill load is -1", id="negative"),
        pytest.param(load(0, 1e300, 0.0), "decode load is 1e+300", id="more-than-there-can-be"),
    ],
)
def test_o16_without_usable_data_the_size_stays(telemetry: TierTelemetry | None, why: str):
    memory = covered((4, 8), 0.0)
    found = want(inputs((4, 8)), telemetry, memory, 0.0)
    assert (found.prefill, found.decode, found.held, found.memory) == (4, 8, True, memory)
    assert why in found.reason


def test_a_missed_objective_adds_one_worker_of_the_role_that_it_is_about():
    memory = covered((2, 2), 0.0)
    assert want(inputs((2, 2)), load(4, 10, 0.0, ttft=1.5), memory, 0.0).prefill == 3
    assert want(inputs((2, 2)), load(4, 10, 0.0, itl=0.08), memory, 0.0).decode == 3


@pytest.mark.parametrize("lie", [math.nan, math.inf, -1.0, 1e300])
def test_an_objective_is_not_missed_by_what_cannot_be_measured(lie: float):
    """A 99th percentile of 1e300 s made a tier as large as it may be, one worker after the other."""
    memory = covered((2, 2), 0.0)
    found = want(inputs((2, 2)), load(4, 10, 0.0, ttft=lie, itl=lie), memory, 0.0)
    assert (found.prefill, found.decode) == (2, 2)


@given(st.lists(st.tuples(st.floats(0, 200), st.floats(0, 300)), min_size=1, max_size=60))
def test_o19_sizes_stay_allowed_and_change_direction_at_most_once_a_window(series: list[tuple[float, float]]):
    memory, current, turns = ScaleMemory(), TIER.initial, list[tuple[float, int]]()
    for step, (prefill, decode) in enumerate(series):
        now = step * 5.0
        found = want(inputs(current), load(prefill, decode, now), memory, now)
        memory, size = found.memory, (found.prefill, found.decode)
        assert bounds_of(TIER).allow(*size)
        if sum(size) != sum(current):
            turns.append((now, 1 if sum(size) > sum(current) else -1))
        current = size
    shrinks = [now for now, direction in turns if direction < 0]
    for shrink in shrinks:  # after any growth, a whole window passes before the first shrink
        grown = [now for now, direction in turns if direction > 0 and now < shrink]
        assert not grown or shrink - grown[-1] >= WINDOW_S


@pytest.mark.parametrize("missed", [{"ttft": 1.5}, {"itl": 0.08}])
def test_a_missed_objective_waits_for_the_workers_that_it_has_made(missed: dict[str, float]):
    """One slow reading made a tier as large as it may be within a second: every pass added one to those that still came up."""
    memory, size = covered((2, 2), 0.0), (2, 2)
    for step in range(20):
        inputs = ScaleInputs(TIER, SLO, ScalingSpec(), 5.0, size, (2, 2))
        found = want(inputs, load(4, 10, 0.0, **missed), memory, step * 0.05)
        memory, size = found.memory, (found.prefill, found.decode)
    assert size == ((3, 3) if "ttft" in missed else (2, 3))
    ready = ScaleInputs(TIER, SLO, ScalingSpec(), 5.0, size, size)
    assert sum(size) < sum(astuple(want(ready, load(4, 10, 2.0, **missed), memory, 2.0))[:2])


def test_a_missed_objective_keeps_those_that_come_up_longer_than_the_window():
    memory = covered((2, 6), 0.0)
    for now in range(0, 600, 5):
        found = want(ScaleInputs(TIER, SLO, ScalingSpec(), 5.0, (2, 6), (2, 2)), load(1, 1, now, itl=0.08), memory, now)
        memory = found.memory
        assert found.decode == 6


@pytest.mark.parametrize(("window", "every_s"), [("2h", 5.0), ("24h", 60.0), ("2m", 0.05), ("1s", 0.1)])
def test_a_window_ends_however_long_it_is_and_however_many_passes_are_in_it(window: str, every_s: float):
    """A thousand wants were remembered: a window with more passes was never covered, and nobody ever left."""
    scaling, memory, size = ScalingSpec(scale_down_window=window), ScaleMemory(), (3, 6)
    for step in range(round(scaling.scale_down_window_s * 1.1 / every_s) + 2):
        now = step * every_s
        found = want(ScaleInputs(TIER, SLO, scaling, 5.0, size), load(0, 0, now), memory, now)
        memory, size = found.memory, (found.prefill, found.decode)
        assert size == (3, 6) or now >= scaling.scale_down_window_s
        assert len(memory.wants) <= 515
    assert size == (1, 1)


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 40), st.integers(0, 200)), min_size=2, max_size=80))
def test_no_want_of_the_window_is_forgotten(series: list[tuple[float, int, int]]):
    scaling = ScalingSpec(scale_down_window="10s")
    memory, now, size, wants = ScaleMemory(), 0.0, (1, 1), list[tuple[float, int]]()
    for wait_s, prefill, decode in series:
        now += wait_s
        found = want(ScaleInputs(TIER, SloSpec(), scaling, 5.0, size), load(prefill, decode, now), memory, now)
        memory, size = found.memory, (found.prefill, found.decode)
        wants.append((now, math.ceil(prefill / 4)))
        assert size[0] >= min(TIER.prefill.max_replicas, max(wish for at, wish in wants if at > now - 10))


@pytest.mark.parametrize(
    ("slo", "expected", "words"),
    [
        pytest.param(SLO, (3, 6), True, id="both"),
        pytest.param(SloSpec(ttft=SLO.ttft), (3, 3), True, id="one-role-s"),
        pytest.param(SloSpec(), (1, 2), False, id="none"),
    ],
)
def test_nobody_leaves_while_no_router_says_whether_an_objective_is_met(slo: SloSpec, expected: tuple[int, int], words: bool):
    """Engines tell what runs, and only routers tell how long it takes: with no word of theirs for a window all that an objective
    needed went."""
    memory, size = covered((3, 6), 0.0), (3, 6)
    for now in range(0, 600, 5):
        told = replace(load(1, 1, now), unheard=True)
        found = want(ScaleInputs(TIER, slo, ScalingSpec(), 5.0, size, size), told, memory, now)
        memory, size = found.memory, (found.prefill, found.decode)
    assert size == expected
    assert ("no router can be read" in found.reason) == words
    found = want(ScaleInputs(TIER, slo, ScalingSpec(), 5.0, (3, 6), (3, 6)), replace(load(20, 1, 600), unheard=True), memory, 600)
    assert found.prefill == 5, "load that is known is followed"
