"""The HTTPS server that the API server asks: bounded bodies, connections, judges, time; its certificate may change."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from fleet_operator.cluster.interface import FLEET, POOL, Cluster, ClusterError
from fleet_operator.webhook.judge import ALLOWED, judge_fleet, judge_scale, mark_fleet
from fleet_operator.webhook.review import Request, ReviewError, Verdict, parse_review, render_review


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the server."""

    body_bytes: int = 8 * 1024 * 1024
    """A review carries the object twice, and the API server takes requests of 3 MiB."""
    connections: int = 128
    judges: int = 4
    """Reviews that are judged at the same time; others wait inside their time."""
    review_s: float = 4.0
    """One review from its first to its last byte; less than the timeout in the webhook configuration (5 s)."""
    handshake_s: float = 5.0
    idle_s: float = 120.0
    """A connection without a request. The API server drops its own after 90 s: if we were first, a review could be on its way."""


Judge = Callable[[Request], Awaitable[Verdict]]
WAITING: web.AppKey[set[Any]] = web.AppKey("waiting", set)
"""Connections that have not carried a request yet."""
TOO_DEEP = Verdict(False, "the object is nested too deeply to be judged: no field of an InferenceFleet needs hundreds of levels")
PATHS = ("/validate/fleet", "/mutate/fleet", "/validate/scale")


def admission_app(cluster: Cluster, limits: Limits = Limits()) -> web.Application:
    """The three webhooks. `cluster` is only read, for the bounds of a pool that is scaled."""
    judges = asyncio.Semaphore(limits.judges)

    async def scale(request: Request) -> Verdict:
        try:
            pool = await cluster.get(POOL, request.namespace, request.name)
            fleet = await cluster.get(FLEET, request.namespace, str(pool["spec"]["fleet"]))
        except (ClusterError, KeyError):
            return ALLOWED  # the operator keeps the bounds itself
        return judge_scale(request, pool, fleet)

    def threaded(judge: Callable[[Request], Verdict]) -> Judge:
        # a manifest of a megabyte takes a while; the operator's loop must not wait for it
        return lambda request: asyncio.to_thread(judge, request)

    def route(judge: Judge) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(http: web.Request) -> web.Response:
            async with asyncio.timeout(limits.review_s), judges:
                try:
                    request = parse_review(await http.read())
                except ReviewError as error:
                    return web.json_response({"error": str(error)}, status=400)
                try:
                    verdict = await judge(request)
                except RecursionError:  # no field of ours is nested like this: the API server would prune or refuse it, too
                    verdict = TOO_DEEP
                return web.json_response(render_review(request, verdict))

        return handle

    app = web.Application(client_max_size=limits.body_bytes, middlewares=[_late])
    judged = (threaded(judge_fleet), threaded(mark_fleet), scale)
    app[WAITING] = set()
    app.add_routes([web.post(path, route(judge)) for path, judge in zip(PATHS, judged, strict=True)])
    return app


@web.middleware
async def _late(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Notes that a connection carried a request, and answers for one that was not judged in time."""
    request.app[WAITING].discard(request.protocol)
    try:
        return await handler(request)
    except TimeoutError:
        return web.json_response({"error": "not judged in time"}, status=503, headers={"Connection": "close"})


class _Refused(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.abort()  # type: ignore[attr-defined]


@asynccontextmanager
async def admission_server(
    app: web.Application, context: ssl.SSLContext, port: int, host: str | None = None, limits: Limits = Limits()
) -> AsyncIterator[int]:
    """Serve while the block runs; gives the port. `context` may get another certificate at any time: new handshakes use it, open
    connections go on."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, keepalive_timeout=limits.idle_s, lingering_time=0.5)
    await runner.setup()
    loop, protocols = asyncio.get_running_loop(), runner.server
    assert protocols is not None  # noqa: S101 - set up above

    def connected() -> asyncio.Protocol:
        if len(protocols.connections) >= limits.connections:
            return _Refused()
        protocol = protocols()
        app[WAITING].add(protocol)
        loop.call_later(limits.review_s, _close_silent, protocol, app[WAITING], limits.handshake_s)
        return protocol

    server = await loop.create_server(
        connected, host, port, ssl=context, ssl_handshake_timeout=limits.handshake_s, backlog=limits.connections
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await runner.cleanup()


def _close_silent(protocol: Any, waiting: set[Any], more_s: float = 0.0) -> None:
    """Who connects and then sends no request, or drips its head, leaves. `more_s`: for who has no transport yet, because the
    handshake lasts (or none any more)."""
    if protocol not in waiting:
        return
    if protocol.transport is None and more_s:
        asyncio.get_running_loop().call_later(more_s, _close_silent, protocol, waiting)
        return
    waiting.discard(protocol)
    if protocol.transport is not None:
        protocol.transport.abort()
