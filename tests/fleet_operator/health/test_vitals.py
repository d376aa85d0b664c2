"""When the operator calls itself ill: a table, and the pulse that feeds it with a real watch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from fleet_operator.cluster.guarded import Write
from fleet_operator.cluster.interface import POD, UnavailableError
from fleet_operator.health.meters import Meters
from fleet_operator.health.pulse import Pulse
from fleet_operator.health.vitals import Bounds, Vitals, ailments

NOW = 10_000.0


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (Vitals(), ""),
        # a standby's loop does not turn
        (Vitals(working=False, loop_at=NOW - 9_999), ""),
        (Vitals(working=True, loop_at=NOW - 119), ""),
        (Vitals(working=True, loop_at=NOW - 121), "the work loop has not turned for 121 s"),
        # a long pass is not a loop that hangs, until it is too long
        (Vitals(working=True, loop_at=NOW, pass_since=NOW - 200), ""),
        (Vitals(working=True, loop_at=NOW, pass_since=NOW - 301), "one pass over a fleet has not moved for 301 s"),
        (Vitals(heard={"pods": NOW - 149}, answered_at=NOW), ""),
        (Vitals(heard={"pods": NOW - 151}, answered_at=NOW), "the watch of pods has been silent for 151 s"),
        (Vitals(heard={"pods": NOW - 151, "services": NOW}, answered_at=NOW), "the watch of pods"),
        # the API server is away: a restart helps nobody
        (Vitals(heard={"pods": NOW - 900}), ""),
        (Vitals(heard={"pods": NOW - 900}, answered_at=NOW - 890), ""),
    ],
)
def test_what_is_wrong(seen: Vitals, words: str):
    found = ailments(seen, NOW, Bounds())
    assert (len(found) == 1 and words in found[0]) if words else found == ()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def played(scenario: Callable[[Pulse, Clock, str, Any], Awaitable[None]]) -> None:
    """With an HTTP server that streams a watch when told to."""

    async def whole() -> None:
        clock = Clock()
        pulse, app = Pulse(clock=clock), web.Application()
        said: asyncio.Queue[bytes] = asyncio.Queue()

        async def watch(request: web.Request) -> web.StreamResponse:
            answer = web.StreamResponse()
            await answer.prepare(request)
            while piece := await said.get():
                await answer.write(piece)
            return answer

        for path in ("/api/v1/pods", "/api/v1/namespaces/{name}/pods"):
            app.router.add_get(path, watch)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            await scenario(pulse, clock, f"http://127.0.0.1:{port}/api/v1/pods", said)
        finally:
            await said.put(b"")
            await runner.cleanup()

    asyncio.run(whole())


async def answers() -> None:
    """The API server answers."""


async def away() -> None:
    raise UnavailableError("away")


def test_bytes_of_a_watch_are_heard_and_silence_is_told():
    async def scenario(pulse: Pulse, clock: Clock, url: str, said: Any) -> None:
        async with aiohttp.ClientSession(trace_configs=[pulse.trace()]) as session:
            async with session.get(url, params={"watch": "true"}) as answer:
                assert pulse.watch_ages() == {"pods": 0.0}
                clock.now = 100.0
                assert pulse.watch_ages() == {"pods": 100.0}
                await said.put(b'{"type":"BOOKMARK"}\n')
                await answer.content.readline()
                assert pulse.watch_ages() == {"pods": 0.0}
                clock.now = 300.0
                await pulse.check(away)
                assert pulse.ailments() == ()
                await pulse.check(answers)
                assert "the watch of pods has been silent for 200 s" in pulse.ailments()[0]
            # it is connected anew
            async with session.get(url, params={"watch": "true"}):
                assert pulse.ailments() == ()

    played(scenario)


def test_each_namespace_has_its_own_watch_until_it_is_gone():
    """Only the one that was opened last was listened to: others of the kind could hang, and where its namespace was deleted the
    operator was restarted for a silence that was none."""

    async def scenario(pulse: Pulse, clock: Clock, url: str, said: Any) -> None:
        def watched(session: aiohttp.ClientSession, name: str) -> Any:
            return session.get(url.replace("pods", f"namespaces/{name}/pods"), params={"watch": "true"})

        async with aiohttp.ClientSession(trace_configs=[pulse.trace()]) as session, watched(session, "a") as first:
            clock.now = 1.0
            async with watched(session, "b"):
                clock.now = 200.0
                await said.put(b'{"type":"BOOKMARK"}\n')  # the server's first handler waits for it first
                await first.content.readline()
                assert pulse.watch_ages() == {"pods": 199.0}, "the other one is silent"
                await pulse.check(answers)
                assert "the watch of pods has been silent for 199 s" in pulse.ailments()[0]
            assert pulse.watch_ages() == {"pods": 0.0}, "its namespace is gone"
            assert pulse.ailments() == ()
        clock.now = 400.0
        assert pulse.watch_ages() == {"pods": 200.0}, "none is open, and none is opened anew"

    played(scenario)


def test_other_requests_are_no_watches():
    async def scenario(pulse: Pulse, clock: Clock, url: str, said: Any) -> None:
        async with aiohttp.ClientSession(trace_configs=[pulse.trace()]) as session:
            async with session.get(url, params={"limit": "5"}):
                assert pulse.watch_ages() == {}
            async with session.get(url.replace("pods", "nothing"), params={"watch": "true"}):
                assert pulse.watch_ages() == {}

    played(scenario)


def test_the_loop_is_watched_from_its_first_turn():
    clock = Clock()
    pulse = Pulse(clock=clock)
    clock.now = 1_000.0
    assert pulse.ailments() == ()
    pulse.turned()
    clock.now += 121
    assert pulse.ailments() != ()
    pulse.turned()
    assert pulse.ailments() == ()


def test_one_pass_that_hangs_is_not_hidden_by_those_beside_it():
    clock = Clock()
    pulse = Pulse(clock=clock)
    pulse.turned()
    hangs = pulse.began()
    for _ in range(31):
        clock.now += 10
        pulse.turned()
        pulse.ended(pulse.began())
    assert "one pass over a fleet has not moved for 310 s" in pulse.ailments()[0]
    pulse.ended(hangs)
    assert pulse.ailments() == ()


def test_a_pass_of_many_slow_writes_moves_and_one_beside_it_that_hangs_does_not():
    """An API server that took three seconds for each of a hundred pods had every leader restarted, in the middle of its pass."""
    clock = Clock()
    pulse = Pulse(clock=clock)
    meters = Meters(pulse)

    async def slow() -> None:
        clock.now += 3.0
        pulse.turned()

    async def writes(count: int) -> tuple[str, ...]:
        begun = meters.began()
        for _ in range(count):
            await meters.guard(Write("create", POD, "ml", "p"), slow)
        found = pulse.ailments()
        meters.ended(begun, [])
        return found

    async def scenario() -> None:
        assert await writes(200) == ()
        begun = await asyncio.create_task(began())
        told = await asyncio.create_task(writes(200))
        assert "one pass over a fleet has not moved for 600 s" in told[0]
        meters.ended(begun, [])
        assert pulse.ailments() == ()

    async def began() -> int:
        return meters.began()

    asyncio.run(scenario())
