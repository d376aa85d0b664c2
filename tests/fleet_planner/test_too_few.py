"""Objectives that need more workers than the requests in flight do: fewer are tried, ever more seldom, and nobody is kept for one
slow request."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from fleet_api.v1alpha1.routing import LatencySpec, SloSpec
from fleet_planner.clock import steady
from fleet_planner.memory import ScaleMemory
from fleet_planner.too_few import Reading, TooFew, kept, noted
from fleet_planner.types import Observed, RoleLoad
from fleet_planner.types import TierTelemetry as Telemetry
from tests.fleet_planner.zero_world import World, fleet

STEP_S, HOUR_S, WINDOW_S = 5, 3_600, 120.0
TIERS = [{"name": "t", "prefill": {"maxReplicas": 16}, "decode": {"maxReplicas": 32}}]


def with_objective(**objectives: str):
    made = fleet(TIERS)
    slo = SloSpec(**{name: LatencySpec(p99=p99) for name, p99 in objectives.items()})
    return made.model_copy(update={"spec": made.spec.model_copy(update={"slo": slo})})


@dataclass
class Slow(World):
    """First tokens are slow with fewer than `enough` prefill workers; eight prompts at once, which are for two of them."""

    spec: object = field(default_factory=lambda: with_objective(ttft="1s"))
    enough: int = 5
    prompts: float = 8.0
    slow: bool = False
    """One request is slow for a reason of its own."""
    minute: deque[float] = field(default_factory=lambda: deque(maxlen=12))
    sizes: list[int] = field(default_factory=list)

    def read(self) -> None:
        ready = sum(pod.ready and pod.role == "prefill" for pod in self.observed.pods)
        self.minute.append(3.0 if ready < self.enough or self.slow else 0.5)
        told = Telemetry(
            RoleLoad(self.prompts, max(self.minute), None, self.now), RoleLoad(8.0, None, 0.01, self.now),
            latencies_since=self.now - 60,
        )  # fmt: skip
        self.observed = replace(self.observed, telemetry={"t": told})

    def goes_on(self, seconds: int, slow_every_s: int = 0) -> None:
        """Workers take a minute at most to come up."""
        for at in range(0, seconds, STEP_S):
            self.slow = bool(slow_every_s) and at % slow_every_s == slow_every_s - STEP_S
            self.step(STEP_S)
            self.sizes.append(sum(pod.role == "prefill" for pod in self.observed.pods))
            if at % 60 == 0:
                self.ready()


def test_workers_that_an_objective_needs_are_not_sent_away_again_and_again():
    """The objective was missed for most of the time, under a load that never changed."""
    world = Slow()
    world.goes_on(2 * HOUR_S)
    since = world.sizes[600 // STEP_S :]
    left = [at for at, (before, after) in enumerate(pairwise(since)) if after < before]
    assert 1 <= len(left) <= 5
    assert sum(size < 5 for size in since) / len(since) < 0.05
    assert max(since) == 5


def test_a_slow_request_now_and_then_keeps_nobody():
    world = Slow(enough=1)
    world.goes_on(600)
    world.sizes.clear()
    world.goes_on(3 * HOUR_S, slow_every_s=400)
    assert max(world.sizes) == 3
    assert sum(world.sizes) / len(world.sizes) < 2.6
    world.sizes.clear()
    world.goes_on(HOUR_S)
    assert world.sizes[-1] == 2


def test_they_go_with_their_load():
    world = Slow()
    world.goes_on(HOUR_S)
    assert world.sizes[-1] == 5
    world.prompts, world.enough = 2.0, 1
    world.goes_on(600)
    assert world.sizes[-1] <= 2


@pytest.mark.parametrize("objectives", [{}, {"itl": "1s"}, {"ttft": "5s"}])
def test_they_go_with_their_objective(objectives: dict[str, str]):
    world = Slow()
    world.goes_on(HOUR_S)
    assert world.sizes[-1] == 5
    world.spec = with_objective(**objectives).model_copy(update={"status": world.spec.status})
    world.goes_on(300)
    assert world.sizes[-1] == 2


FEW = TooFew(4, 8.0, 1.0, at=1_000.0)


def read(now: float, size: int, missed: int = 0, **more: float) -> Reading:
    return replace(Reading(now, size, missed, 8.0, 1.0, WINDOW_S, 5.0), **more)


@pytest.mark.parametrize(
    ("known", "reading", "expected"),
    [
        pytest.param(None, read(1_000.0, 4), None, id="met"),
        pytest.param(None, read(1_000.0, 4, 5), FEW, id="missed"),
        pytest.param(None, read(1_000.0, 4, 4), None, id="some-come-up"),
        pytest.param(FEW, read(1_010.0, 5), replace(FEW, more_at=1_010.0), id="more-are-there"),
        pytest.param(FEW, read(1_010.0, 5, 5), replace(FEW, at=1_010.0, more_at=1_010.0), id="missed-until-they-come"),
        pytest.param(FEW, read(1_010.0, 5, 6), replace(FEW, workers=5, at=1_010.0), id="more-are-too-few-as-well"),
        pytest.param(FEW, read(1_100.0, 4, 5), replace(FEW, at=1_100.0), id="nobody-came"),
        pytest.param(replace(FEW, more_at=1_130.0), read(1_200.0, 2, 3),
                     replace(FEW, at=1_200.0, more_at=1_130.0, stays_s=240.0), id="missed-as-soon-as-they-left"),
        pytest.param(replace(FEW, more_at=1_130.0, stays_s=240.0), read(1_200.0, 2, 3),
                     replace(FEW, at=1_200.0, more_at=1_130.0, stays_s=480.0), id="and-again"),
        pytest.param(replace(FEW, more_at=1_130.0, stays_s=3_000.0), read(1_200.0, 2, 3),
                     replace(FEW, at=1_200.0, more_at=1_130.0, stays_s=3_600.0), id="an-hour-at-most"),
        pytest.param(replace(FEW, more_at=1_130.0), read(1_200.0, 2, 3, window_s=7_200.0),
                     replace(FEW, at=1_200.0, more_at=1_130.0, stays_s=7_200.0), id="a-window-at-least"),
        pytest.param(replace(FEW, more_at=1_130.0), read(1_201.0, 2, 3), TooFew(2, 8.0, 1.0, 1_201.0), id="missed-later"),
        pytest.param(replace(FEW, more_at=1_130.0), read(1_200.0, 2), replace(FEW, more_at=1_130.0), id="not-missed-yet"),
        pytest.param(replace(FEW, more_at=1_130.0), read(1_201.0, 2), None, id="not-missed"),
    ],
)  # fmt: skip
def test_what_is_noted(known: TooFew | None, reading: Reading, expected: TooFew | None):
    assert noted(known, reading) == expected


@pytest.mark.parametrize(
    ("stays_s", "inflight", "now", "expected"),
    [(0.0, 8.0, 1_000.0, 0), (240.0, 8.0, 1_239.0, 5), (240.0, 8.0, 1_240.0, 0), (240.0, 80.0, 1_000.0, 5),
     (240.0, 4.0, 1_000.0, 3), (240.0, 0.0, 1_000.0, 0)],
)  # fmt: skip
def test_who_is_kept(stays_s: float, inflight: float, now: float, expected: int):
    assert kept(replace(FEW, stays_s=stays_s), inflight, now) == expected
    assert kept(replace(FEW, inflight=0.0, stays_s=stays_s), inflight, now) in (0, 5)


@pytest.mark.parametrize("ahead_s", [500.0, -500.0])
def test_its_times_move_with_a_clock_that_is_set(ahead_s: float):
    known = ScaleMemory(too_few=(None, replace(FEW, more_at=1_010.0)))
    observed = Observed(memory={"t": known}, clock_set_s=ahead_s)
    _, found, _ = steady(with_objective(), observed, 1_020.0 + ahead_s)
    assert found.memory["t"].too_few == (None, replace(FEW, at=1_000.0 + ahead_s, more_at=1_010.0 + ahead_s))


def test_a_time_further_ahead_than_clocks_differ_counts_as_now():
    known = ScaleMemory(too_few=(replace(FEW, more_at=9_000.0), None))
    _, found, _ = steady(with_objective(), Observed(memory={"t": known}), 1_020.0)
    assert found.memory["t"].too_few == (replace(FEW, more_at=1_020.0), None)
