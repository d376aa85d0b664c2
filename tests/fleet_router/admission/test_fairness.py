"""One tenant floods: what others notice of it, on a clock of our own.

Workers are 8 slots that take 0.5 to 1.5 s per request. Alone, a light tenant never waits. While another sends twelve times what
all slots can do, a light one waits for the next slot that is freed (1/8 s on average) and never behind the flood. As long as it
asks for less than its fair share of the slots, its p99 from arrival to the end stays within 1.5 times of alone, its mean within
1.25 times, and none of its requests is turned away.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Mapping

import pytest

from fleet_router.admission.bound import BUDGET_SHARE
from fleet_router.errors import RequestError
from tests.fleet_router.admission.made import CLASSES, Clock, Remembers, ask_of, desk_with, key_of

SLOTS = 8
SECONDS = 120.0
FACTOR = 1.5


def tenant_of(name: str) -> str:
    """Of requests that are called TENANT or TENANT-KIND."""
    return name.partition("-")[0]


class World:
    """A desk, workers that only take time, and who asks when."""

    def __init__(
        self, rates: dict[str, float], durations_s: Mapping[str, tuple[float, float]] | None = None, slo_class: str = "batch"
    ) -> None:
        self.durations_s = durations_s or {}
        self.waits: dict[str, list[float]] = {name: [] for name in rates}
        """Until a slot was there, or until it was turned away."""
        self.clock, self.rng = Clock(), random.Random(7)
        self.desk = desk_with(self.clock, SLOTS, **{tenant_of(name): {"class": slo_class} for name in rates})
        self.events: list[tuple[float, int, str | Flow]] = []
        self.times: dict[str, list[float]] = {name: [] for name in rates}
        self.refused: Counter[str] = Counter()
        self.came = 0
        start = self.clock.now
        for name, rate in rates.items():
            at = start + self.rng.expovariate(rate)
            while at < start + SECONDS:
                self.later(at, name)
                at += self.rng.expovariate(rate)

    def later(self, at: float, what: str | Flow) -> None:
        heapq.heappush(self.events, (at, len(self.events) + self.rng.getrandbits(60), what))

    def run(self) -> None:
        while self.events:
            self.clock.now, _, what = heapq.heappop(self.events)
            if isinstance(what, Flow):
                self.times[what.name].append(self.clock.now - what.came)
                self.desk.leave(what.ticket, "answered", (100, 100))
            else:
                self.arrive(what)
            self.desk.tick()

    def arrive(self, name: str) -> None:
        self.came += 1
        flow = Flow(self, name)
        try:
            _, flow.ticket = self.desk.admit(self.desk.lane(key_of(tenant_of(name)).encode(), b""), ask_of())
        except RequestError:
            self.refused[name] += 1
        else:
            self.desk.start(flow.ticket, flow)


class Flow(Remembers):
    """A request that runs for a while."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__()
        self.world, self.name, self.came = world, name, world.clock.now

    def begin(self) -> None:
        self.world.waits[self.name].append(self.world.clock.now - self.came)
        seconds = self.world.rng.uniform(*self.world.durations_s.get(self.name, (0.5, 1.5)))
        self.world.later(self.world.clock.now + seconds, self)

    admitted = begin

    def cut(self, error: RequestError) -> None:
        self.world.waits[self.name].append(self.world.clock.now - self.came)
        self.world.refused[self.name] += 1


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


@pytest.mark.parametrize("light", [1, 4])
def test_a_flood_is_not_noticed_by_others(light: int):
    rates = {f"light{i}": 1.0 / light for i in range(light)}
    alone, beside = World(rates), World(rates | {"flood": 100.0})
    alone.run()
    beside.run()
    assert beside.refused["flood"] > 0.8 * 100 * SECONDS  # it really was a flood
    assert set(beside.refused) == {"flood"}
    assert not alone.refused
    before, now = ([t for name in rates for t in world.times[name]] for world in (alone, beside))
    assert p99(now) <= FACTOR * p99(before)
    assert sum(now) / len(now) <= 1.25 * sum(before) / len(before)
    assert len(beside.times["flood"]) > 0.7 * SLOTS * SECONDS  # and no slot was kept idle for anybody


@pytest.mark.parametrize("tenants", [("one", "one"), ("longs", "shorts")], ids=["one-tenant", "two-tenants"])
def test_l5_long_requests_among_short_ones_wait_no_longer_than_the_bound(tenants: tuple[str, str]):
    """Requests that hold a slot for ten seconds, five times as much load of short ones, half as much again as fits. Nobody who
    was let in waits for ever, nobody is forgotten, and neither kind keeps the other out."""
    long, short = (f"{tenant}-{kind}" for tenant, kind in zip(tenants, ("long", "short"), strict=True))
    world = World({long: 0.24 * SLOTS / 10, short: 1.26 * SLOTS / 0.3}, {long: (8.0, 12.0), short: (0.2, 0.4)}, "interactive")
    world.run()
    most_s = BUDGET_SHARE * CLASSES[0].ttft_budget_s
    for name in (long, short):
        assert len(world.times[name]) > 0.3 * len(world.waits[name]) > 0
        assert max(world.waits[name]) <= most_s + 0.2  # looked at whenever anything happens
    assert world.refused[long] + world.refused[short] > 0
    assert sum(len(times) for times in world.times.values()) + sum(world.refused.values()) == world.came
