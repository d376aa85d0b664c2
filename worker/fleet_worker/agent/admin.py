"""The agent's HTTP surface: probes, state, drain and metrics of one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

KEEP_ALIVE_S = 75
MAX_CONNECTIONS = 64


class Probes(Protocol):
    """What the HTTP surface needs from the agent."""

    def live(self) -> bool: ...
    def started(self) -> bool: ...
    def ready(self) -> bool: ...
    def state(self) -> dict[str, object]: ...
    async def drain(self) -> dict[str, object]: ...
    async def metrics(self) -> str: ...


def build_app(probes: Probes) -> Starlette:
    """Routes of the agent; every probe answers 200 or 503 with the phase as text."""

    def probe(answer: Callable[[], bool]) -> Callable[[Request], Response]:
        def handle(_: Request) -> Response:
            return PlainTextResponse(str(probes.state()["phase"]) + "\n", status_code=200 if answer() else 503)

        return handle

    async def state(_: Request) -> Response:
        return JSONResponse(probes.state())

    async def drain(_: Request) -> Response:
        return JSONResponse(await probes.drain())

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(await probes.metrics(), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[
            Route("/live", _async(probe(probes.live))),
            Route("/started", _async(probe(probes.started))),
            Route("/ready", _async(probe(probes.ready))),
            Route("/state", state),
            Route("/drain", drain, methods=["GET", "POST"]),
            Route("/metrics", metrics),
        ]
    )


def _async(handle: Callable[[Request], Response]) -> Callable[[Request], object]:
    async def endpoint(request: Request) -> Response:
        return handle(request)

    return endpoint


class AdminServer(uvicorn.Server):
    """uvicorn without its signal handlers: signals belong to the agent."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def build_server(app: Starlette, host: str, port: int) -> AdminServer:
    """h11 for its header bound; probes keep their connections open between periods."""
    return AdminServer(
        uvicorn.Config(
            app, host=host, port=port, http="h11", loop="asyncio", lifespan="off", log_level="warning",
            access_log=False, timeout_keep_alive=KEEP_ALIVE_S, limit_concurrency=MAX_CONNECTIONS,
        )
    )  # fmt: skip
