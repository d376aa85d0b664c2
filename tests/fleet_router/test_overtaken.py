"""Who swallows what it is sent is found though hedges overtake it; who is slow is not put out for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_router.health.races import LOST_MOST
from fleet_router.overtaken import DUE_MOST_S, Overtaken, RunsOn
from fleet_router.policy.candidate import prefill_sent
from fleet_router.upstream import NOTHING_TOLD
from fleet_router.watching import watch
from fleet_router.workers import Worker
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import LONG, Rig, ask, run, until
from tests.fleet_router.test_hedging import HEDGED

SILENT_S = HEDGED.silent_s
NEVER_S = float("inf")


# -- on real sockets -------------------------------------------------------------------------------------------------------
class Swallowing:
    """The first prefill worker takes what it is sent and says nothing, until it is told what. All others answer at once."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.fake, self.later_s = rig, rig.prefill[0], 0.0
        self.told: list[asyncio.Future[int]] = []
        self.left = 0
        self.fake.behave = self.behaves
        rig.context.hedges.saved, rig.context.hedges.saved_tokens = 10.0, 1e6
        before = rig.context.clock
        rig.context.clock = lambda: before() + self.later_s
        self.numbers = itertools.count()

    async def behaves(self, _: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.told.append(told)
        while not told.done():
            await asyncio.sleep(0.005)
            if self.fake.is_left(writer):
                self.left += 1
                return True
        if told.result():
            answer(writer, told.result(), {"choices": []})
        else:
            writer.transport.abort()
        return True

    @property
    def worker(self) -> Worker:
        return self.rig.context.table.workers[f"u{self.fake.port}"]

    @property
    def events(self) -> dict[str, int]:
        return self.rig.context.metrics.hedges

    async def lose(self, until_watched: int) -> None:
        """Requests, until so many legs of it have run on."""
        for _ in range(80):
            self.rig.context.hedges.saved = 10.0
            assert (await self.rig.post(ask(prompt=f"{next(self.numbers)} {LONG}")))[0] == 200
            if self.events["watched"] >= until_watched:
                return
        raise AssertionError(self.events)

    def look(self, later_s: float = 0.0) -> None:
        self.later_s += later_s
        watch(self.rig.context, self.rig.connections, self.rig.context.clock())


def with_swallowing(test: Callable[[Swallowing], Awaitable[None]]) -> None:
    async def go(rig: Rig) -> None:
        one = Swallowing(rig)
        await test(one)
        rig.context.overtaken.stop(rig.context.clock())
        await until(rig.idle)
        assert one.worker.pending == 0
        await until(lambda: len(one.fake.released) == len(one.told))
        assert len(set(one.fake.released)) == len(one.told), "each leg's KV is given back, and once"

    run(go, prefill=3, config=HEDGED)


def test_a_worker_that_swallows_is_put_out_though_it_is_overtaken_each_time():
    """It got a leg again and again: each was cut before it had been silent for long."""

    async def test(one: Swallowing) -> None:
        await one.lose(1)
        legs = len(one.told)
        assert (legs, one.left) == (LOST_MOST, LOST_MOST - 1)
        one.look(SILENT_S / 2)
        assert one.worker.breaker.closed
        one.look(SILENT_S / 2 + 1)
        assert not one.worker.breaker.allows(one.rig.context.clock(), 0)
        assert (one.events["swallowed"], one.worker.own) == (1, 0)
        for _ in range(20):
            assert (await one.rig.post(ask(prompt=f"{next(one.numbers)} {LONG}")))[0] == 200
        assert len(one.told) == legs

    with_swallowing(test)


def test_on_trial_it_gets_one_leg_and_no_more():
    """Each trial was overtaken and cut as well, so that the next one began at once."""

    async def test(one: Swallowing) -> None:
        await one.lose(1)
        one.look(SILENT_S + 1)
        one.later_s += 6.0
        legs = len(one.told)
        await one.lose(2)
        for _ in range(20):
            assert (await one.rig.post(ask(prompt=f"{next(one.numbers)} {LONG}")))[0] == 200
        assert len(one.told) == legs + 1
        one.look(SILENT_S + 1)
        assert one.worker.breaker.until > one.rig.context.clock() + 9.0, "for longer than the first time"

    with_swallowing(test)


def test_a_slow_worker_answers_what_runs_on_and_is_known_to_be_slow():
    async def test(one: Swallowing) -> None:
        await one.lose(1)
        one.later_s += 10.0
        one.told[-1].set_result(200)
        await until(lambda: one.worker.own == 0)
        assert (one.worker.races.lost, one.worker.prefill.weight > 0) == (LOST_MOST, True)
        assert one.worker.prefill.at(500) > 0.1
        one.look(SILENT_S + 1)
        assert (one.worker.breaker.closed, one.events["swallowed"]) == (True, 0)
        one.worker.races.lost_one(one.rig.context.clock(), one.rig.context.clock() + 1, 0.0, one.worker.heard_at)
        assert one.worker.races.lost == 1, "it counts anew"

    with_swallowing(test)


@pytest.mark.parametrize(("status", "failures"), [(500, 1), (0, 1), (400, 0)], ids=["5xx", "broken", "refused"])
def test_how_it_fails_counts_as_ever(status: int, failures: int):
    async def test(one: Swallowing) -> None:
        await one.lose(1)
        one.told[-1].set_result(status)
        await until(lambda: one.worker.own == 0)
        assert one.worker.breaker.failures == failures
        one.look()
        assert one.rig.context.overtaken.has_room(one.worker)

    with_swallowing(test)


def test_of_a_worker_that_is_heard_of_otherwise_nothing_is_to_be_found_out():
    async def test(one: Swallowing) -> None:
        await one.lose(1)
        one.worker.heard_at = one.rig.context.clock()
        one.look(SILENT_S + 1)
        assert (one.worker.breaker.closed, one.worker.own) == (True, 0)
        await until(lambda: one.left == LOST_MOST)

    with_swallowing(test)


def test_what_runs_on_at_a_worker_that_leaves_ends():
    async def go(rig: Rig) -> None:
        one = Swallowing(rig)
        await one.lose(1)
        worker = one.worker
        rig.apply(rig.prefill[1:], rig.decode, HEDGED)
        one.look()
        await until(lambda: one.left == LOST_MOST)
        assert (worker.own, worker.pending, one.events["swallowed"]) == (0, 0, 0)

    run(go, prefill=3, config=HEDGED)


def test_what_is_overtaken_while_a_router_drains_is_ended_with_it():
    """A drain takes minutes: legs that ran on were ended when it began, those of its own streams never, and their KV stayed."""

    async def test(one: Swallowing) -> None:
        router = one.rig.router
        router._settings = replace(router._settings, drain_s=0.0)
        await one.lose(1)
        await router._drain()
        assert (one.worker.own, len(one.fake.released)) == (0, LOST_MOST)
        await until(lambda: one.left == LOST_MOST)

    with_swallowing(test)


def test_a_client_that_does_not_read_keeps_no_leg_from_being_read():
    """Its connection is paused: what the worker said would never be heard, and it be taken for one that swallows."""

    async def test(one: Swallowing) -> None:
        await one.lose(1)
        (running,) = one.rig.context.overtaken._by_worker.values()
        connection = running._connection
        connection.pause()
        connection.goes_to(running)
        one.told[-1].set_result(200)
        await until(lambda: one.worker.own == 0)

    with_swallowing(test)


# -- whatever the times are ------------------------------------------------------------------------------------------------
class Connection:
    """Who hears it."""

    got_bytes = False

    def goes_to(self, leg: RunsOn) -> None:
        self.leg = leg

    def abandon(self, leg: RunsOn) -> None: ...


class Fleet:
    """Two workers, a clock, and races between them as hedges run them: one after the other."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.now = rig, rig.context.clock()
        nobody: Any = SimpleNamespace(send=lambda *_: None)
        context: Any = SimpleNamespace(metrics=rig.context.metrics, releases=nobody, clock=lambda: self.now)
        self.overtaken = Overtaken(context)
        self.workers = rig.context.table.by_role["prefill"]
        self.answers: list[tuple[float, RunsOn]] = []
        self.put_out: set[str] = set()

    def goes_on(self, to: float) -> None:
        """Looks twice a second, and legs that run on answer."""
        while self.now < to:
            self.now = min(to, self.now + 0.5)
            for at, leg in list(self.answers):
                if at <= self.now:
                    self.answers.remove((at, leg))
                    if not leg.over:
                        leg.on_head(200, NOTHING_TOLD)
                        leg.on_end()
            self.overtaken.look(self.rig.context.table.workers, self.now, SILENT_S)
            self.put_out |= {worker.uid for worker in self.workers if not worker.breaker.closed}

    def races(self, first: int, wait_s: float, took_s: tuple[float, float]) -> None:
        """One is asked, and after a while the other as well."""
        sent = [self.now, self.now + wait_s]
        done = [sent[0] + took_s[0], sent[1] + took_s[1]]
        legs = [self.workers[first], self.workers[1 - first]]
        expected = [prefill_sent(worker, 100, at) for worker, at in zip(legs, sent, strict=True)]
        winner = int(done[1] < done[0] and done[0] > sent[1])
        self.goes_on(done[winner])
        legs[winner].answers(sent[winner], self.now)
        loser, overtaken = legs[1 - winner], self.overtaken
        if (
            done[0] > sent[1]
            and loser.races.lost_one(sent[1 - winner], self.now, 0.0, loser.heard_at)
            and overtaken.has_room(loser)
        ):
            connection = Connection()
            overtaken.take(loser, connection, sent[1 - winner], expected[1 - winner], b"")
            self.answers.append((done[1 - winner], connection.leg))


LATENCY_S = st.one_of(st.floats(0.001, 1.0), st.floats(0.001, SILENT_S - 1.0))
RACES = st.lists(
    st.tuples(st.booleans(), st.floats(0.001, 3.0), st.tuples(LATENCY_S, LATENCY_S), st.floats(0.0, 30.0)),
    min_size=1,
    max_size=60,
)


def race(races: list[Any], change: Callable[[int, float], float], then: Callable[[Fleet], None]) -> None:
    async def go(rig: Rig) -> None:
        fleet = Fleet(rig)
        for first, wait_s, took_s, pause_s in races:
            by = [int(first), 1 - int(first)]
            fleet.races(int(first), wait_s, (change(by[0], took_s[0]), change(by[1], took_s[1])))
            fleet.goes_on(fleet.now + pause_s)
        fleet.goes_on(fleet.now + DUE_MOST_S + SILENT_S + 1)
        then(fleet)
        fleet.overtaken.stop(fleet.now)
        for worker in fleet.workers:
            while worker.own:
                worker.ended()

    run(go, prefill=2, config=HEDGED)


@settings(max_examples=40, deadline=None)
@given(RACES)
def test_whose_times_are_like_the_others_is_never_put_out(races: list[Any]):
    def none(fleet: Fleet) -> None:
        assert fleet.put_out == set()

    race(races, lambda _, took_s: took_s, none)


@settings(max_examples=20, deadline=None)
@given(RACES, st.floats(1.0, 10.0))
def test_nor_is_one_that_is_slower_each_time(races: list[Any], times: float):
    def none(fleet: Fleet) -> None:
        assert fleet.put_out == set()

    race(races, lambda who, took_s: min(SILENT_S - 1.0, took_s * times) if who == 0 else took_s / times, none)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0.001, 3.0), st.floats(0.001, 1.0)), min_size=LOST_MOST, max_size=30))
def test_one_that_answers_nothing_always_is(races: list[Any]):
    def it(fleet: Fleet) -> None:
        assert fleet.put_out == {fleet.workers[0].uid}

    def forever(who: int, took_s: float) -> float:
        return NEVER_S if who == 0 else took_s

    late = [(first, wait_s, (0.001 + wait_s + took_s, took_s), 0.0) for first, wait_s, took_s in races]
    race(late, forever, it)
