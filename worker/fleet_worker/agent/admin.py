"""The agent's HTTP surface: probes, state, drain, role and metrics of one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from fleet_worker.agent.role import MAX_BODY_BYTES, parse_role
from fleet_worker.config import Role

KEEP_ALIVE_S = 75
MAX_CONNECTIONS = 64


class Probes(Protocol):
    """What the HTTP surface needs from the agent."""

    def live(self) -> bool: ...
    def started(self) -> bool: ...
    def ready(self) -> bool: ...
    def state(self) -> dict[str, object]: ...
    async def drain(self) -> dict[str, object]: ...
    def take_role(self, asked: Role) -> tuple[int, dict[str, object]]: ...
    async def metrics(self) -> str: ...
    def tokenizer(self) -> dict[str, str] | None: ...


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

    async def role(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return JSONResponse({"reason": "BodyTooLarge"}, status_code=413)
        try:
            status, said = probes.take_role(parse_role(body))
        except msgspec.DecodeError as error:
            return JSONResponse({"reason": "BadRequest", "message": str(error)}, status_code=400)
        return JSONResponse(said, status_code=status)

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(await probes.metrics(), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[
            Route("/live", _async(probe(probes.live))),
            Route("/started", _async(probe(probes.started))),
            Route("/ready", _async(probe(probes.ready))),
            Route("/state", state),
            Route("/drain", drain, methods=["GET", "POST"]),
            Route("/role", role, methods=["POST"]),
            Route("/metrics", metrics),
            Route("/tokenizer", _tokenizer(probes)),
        ]
    )


def _tokenizer(probes: Probes) -> Callable[[Request], Awaitable[Response]]:
    async def tokenizer(_: Request) -> Response:
        found = await asyncio.to_thread(probes.tokenizer)
        return JSONResponse(found) if found else JSONResponse({"reason": "NoTokenizer"}, status_code=404)

    return tokenizer


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
