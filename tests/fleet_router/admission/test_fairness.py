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

import pytest

from fleet_router.errors import RequestError
from tests.fleet_router.admission.made import Clock, Remembers, ask_of, desk_with, key_of

SLOTS = 8
SECONDS = 120.0
FACTOR = 1.5


class World:
    """A desk, workers that only take time, and who asks when."""

    def __init__(self, rates: dict[str, float]) -> None:
        self.clock, self.rng = Clock(), random.Random(7)
        self.desk = desk_with(self.clock, SLOTS, **{name: {"class": "batch"} for name in rates})
        self.events: list[tuple[float, int, str | Flow]] = []
        self.times: dict[str, list[float]] = {name: [] for name in rates}
        self.refused: Counter[str] = Counter()
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
        flow = Flow(self, name)
        try:
            _, flow.ticket = self.desk.admit(self.desk.lane(key_of(name).encode(), b""), ask_of())
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
        self.world.later(self.world.clock.now + self.world.rng.uniform(0.5, 1.5), self)

    admitted = begin

    def cut(self, error: RequestError) -> None:
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
