"""The health port: /healthz (restart me when red), /readyz (caches are complete), /metrics. Plain HTTP, GET only, tiny bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from fleet_operator.health.meters import Meters
from fleet_operator.health.pulse import Pulse


class Readiness:
    """Whether the caches are complete: a standby that waits for the lease is ready, too."""

    def __init__(self) -> None:
        self.missing: str = "nothing is listed yet"


def health_app(pulse: Pulse, meters: Meters, readiness: Readiness) -> web.Application:
    """The three routes."""

    async def healthz(_: web.Request) -> web.Response:
        wrong = pulse.ailments()
        return web.Response(text="\n".join(wrong) or "ok", status=503 if wrong else 200)

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text=readiness.missing or "ok", status=503 if readiness.missing else 200)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=meters.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application(client_max_size=1024)
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    return app


@asynccontextmanager
async def serving(app: web.Application, port: int, host: str | None = None) -> AsyncIterator[None]:
    """Serve while the block runs; port 0 serves nothing. OSError when the port is taken."""
    if port == 0:
        yield
        return
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, keepalive_timeout=10, lingering_time=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=16).start()
        yield
    finally:
        await runner.cleanup()
