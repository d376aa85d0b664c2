"""The agent's HTTP surface: probes, state, drain, role and metrics of one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.agent.role import MAX_BODY_BYTES, parse_role
from fleet_worker.config import AdapterWish, Role, decode_adapters
from fleet_worker.connections import LAST, Bounds, bounded, is_too_long

KEEP_ALIVE_S = 75
BOUNDS = Bounds(receive_s=10.0, most=256, most_of_peer=32, may_cut=True)
"""May cut: a probe that is refused may end the pod, /drain that is cut goes on, and everything else can be asked again."""
MAX_ADAPTERS_BYTES = 256 * 1024


class Probes(Protocol):
    """What the HTTP surface needs from the agent."""

    def live(self) -> bool: ...
    def started(self) -> bool: ...
    def ready(self) -> bool: ...
    def state(self) -> dict[str, object]: ...
    async def drain(self) -> dict[str, object]: ...
    def take_role(self, asked: Role) -> tuple[int, dict[str, object]]: ...
    def take_adapters(self, wished: Sequence[AdapterWish]) -> dict[str, object]: ...
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

    def role(body: bytes) -> tuple[int, dict[str, object]]:
        return probes.take_role(parse_role(body))

    def adapters(body: bytes) -> tuple[int, dict[str, object]]:
        return 200, probes.take_adapters(decode_adapters(body))

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(await probes.metrics(), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[
            Route("/live", _async(probe(probes.live))),
            Route("/started", _async(probe(probes.started))),
            Route("/ready", _async(probe(probes.ready))),
            Route("/state", state),
            # it changes something and should be POST alone, but a pod's preStop httpGet can only GET
            Route("/drain", drain, methods=["GET", "POST"]),
            Route("/role", _posted(MAX_BODY_BYTES, role), methods=["POST"]),
            Route("/adapters", _posted(MAX_ADAPTERS_BYTES, adapters), methods=["POST"]),
            Route("/metrics", metrics),
            Route("/tokenizer", _tokenizer(probes)),
        ]
    )


def _tokenizer(probes: Probes) -> Callable[[Request], Awaitable[Response]]:
    async def tokenizer(_: Request) -> Response:
        found = await asyncio.to_thread(probes.tokenizer)
        return JSONResponse(found) if found else JSONResponse({"reason": "NoTokenizer"}, status_code=404)

    return tokenizer


def _posted(most: int, act: Callable[[bytes], tuple[int, dict[str, object]]]) -> Callable[[Request], object]:
    """A bounded JSON body → status and answer; msgspec's words are the 400."""

    async def endpoint(request: Request) -> Response:
        body = b""
        too_large = JSONResponse({"reason": "BodyTooLarge"}, status_code=413, headers=LAST)
        if is_too_long(request, most):
            return too_large
        try:
            async for part in request.stream():
                body += part
                if len(body) > most:
                    return too_large
            status, said = act(body)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except UNREADABLE as error:
            return JSONResponse({"reason": "BadRequest", "message": str(error)}, status_code=400)
        return JSONResponse(said, status_code=status)

    return endpoint


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
    """h11 for its header bound; probes keep their connections open between periods, and are never refused for others' sake."""
    return AdminServer(
        uvicorn.Config(
            app, host=host, port=port, http=bounded(BOUNDS), ws="none", loop="asyncio", lifespan="off", log_level="warning",
            access_log=False, timeout_keep_alive=KEEP_ALIVE_S,
        )
    )  # fmt: skip
