"""kopf asks an API server that cannot serve it now and then, not as often as it can: with the real kopf on a real socket."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from fleet_operator import kopf_pace
from fleet_operator.kopf_pace import Pace
from fleet_operator.shell_kopf import Wiring, run_in_cluster
from tests.fleet_operator.test_shell_kopf import Discovery
from tests.fleet_operator.world import World

LOOK_S = 1.5
FEW = 6
"""Requests for one path in LOOK_S: half a second apart, and one or two more where a machine is slow."""


class Poor(Discovery):
    """An API server that does not keep any watch, or knows nobody."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.seen: Counter[str] = Counter()
        self.first = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked = 2  # it knows InferenceFleets
        watch = "watch" in request.query
        self.seen["watch" if watch else request.path] += 1
        if self.how == "refuses" and not watch:
            self.first.set()
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        if not watch:
            return await super().handle(request)
        self.first.set()
        answer = web.StreamResponse()
        await answer.prepare(request)
        if self.how == "cuts":
            assert request.transport is not None
            request.transport.abort()
        return answer


async def asked_for_a_while(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Counter[str]:
    """What kopf asked for LOOK_S after the first question that counts."""
    poor, app = Poor(how), web.Application()
    app.router.add_route("*", "/{path:.*}", poor.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (tmp_path / "token").write_text("t")
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    for name, value in {"URL": url, "TOKEN_FILE": str(tmp_path / "token"), "CA_FILE": ""}.items():
        monkeypatch.setenv(f"FLEET_KUBE_{name}", value)
    world, trace, sessions = World(), aiohttp.TraceConfig(), set[aiohttp.ClientSession]()

    async def begins(session: aiohttp.ClientSession, *_: Any) -> None:
        sessions.add(session)

    trace.on_request_start.append(begins)
    running = asyncio.ensure_future(run_in_cluster(world.store, world.operator, None, (), Wiring(trace=trace)))
    try:
        await asyncio.wait_for(poor.first.wait(), 5)
        poor.seen.clear()
        await asyncio.sleep(LOOK_S)
        return Counter(poor.seen)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for session in sessions:  # kopf closes them when it ends by itself
            await session.close()
        await runner.cleanup()


@pytest.mark.parametrize(("how", "what"), [("ends", "watch"), ("cuts", "watch"), ("refuses", "/api")])
def test_an_api_server_that_does_not_serve_kopf_is_not_flooded(
    how: str, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    """1,300 watches a second, each replica, with all CPU of the process that reconciles; logins as fast as TLS can be begun."""
    seen = asyncio.run(asked_for_a_while(how, monkeypatch, tmp_path))
    assert 1 <= seen[what] <= FEW, seen


def test_logins_wait_longer_each_time_until_one_was_good_for_a_while():
    now, slept = [0.0], list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    async def go() -> None:
        pace = Pace(lambda: now[0], sleep)
        for _ in range(6):
            await pace.login()
        now[0] += kopf_pace.CALM_S + 1
        await pace.login()
        await pace.login()

    asyncio.run(go())
    assert slept == [0.5, 1.0, 2.0, 5.0, 5.0, 0.5]
