"""The gRPC server of the Endpoint Picker: ext_proc streams and health checks, in the router's own process and loop.

What the gateway is told when there is nothing to decide from (no endpoints document was read yet) is the failure mode's:
FailClose answers 503, FailOpen fails the stream, and a gateway that is configured so (failure_mode_allow) sends it anywhere: but
never for want of the tenants, without which nobody is let in.
Known and empty is another thing: then there is no endpoint to send it to, and the protocol asks for 503 in either mode.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from math import inf
from typing import Any, Final, Literal

import grpc

from fleet_router.context import Context
from fleet_router.epp.answers import refused
from fleet_router.epp.exchange import Exchange
from fleet_router.epp.messages import (
    HEALTH,
    NOT_SERVING,
    SERVICE,
    SERVING,
    UNKNOWN,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from fleet_router.epp.secure import credentials
from fleet_router.errors import RequestError, leaving
from fleet_router.tls import Certificates
from fleet_wire.address import authority

FailureMode = Literal["FailOpen", "FailClose"]
STREAMS_MOST: Final = 2_048
CONNECTIONS_MOST: Final = 1_024
"""A gateway keeps one for each of its threads. Whoever comes above them is closed at once; gRPC has no bound of its own, and the
files are those of clients, too."""
HANDSHAKE_MS: Final = 10_000
"""Of TLS and of the protocol's preface together; gRPC's own bound is two minutes."""
IDLE_MS: Final = 300_000
"""A connection without a stream is given up after so long."""
KEEPALIVE_MS: Final = 60_000
"""A gateway that is gone without a word is noticed so much later, and 20 s; gRPC's own bound is two hours."""
PINGS_MS: Final = 200
"""A gateway may ask as often whether the connection stands (Envoy's `connection_keepalive`). By gRPC's own bound, five minutes,
it is closed after the third time, with all requests on it."""
ENVOYS_OWN: Final = "x-envoy-internal"
"""Calls that an Envoy makes for itself have this header. Others take one endpoint, whatever they say of who served
(agentgateway#1444)."""
TOLD_S: Final = 0.25
"""For the last words to a gateway."""
LEAVING_S: Final = 10.0
"""A router that is told to go answers what gateways ask for so long: by then who reads endpoints, or asks for our health each few
seconds, asks another one. gRPC has no GOAWAY of which the gateway hears first: a server that stops throws away what it has not
accepted, and what is on its way."""
QUIET_S: Final = 1.0
"""When nobody has asked for so long, all of them have left."""
MESSAGE_BYTES_ANY: Final = -1
"""A gateway that buffers sends a body as one message, whose bound are its own buffers. gRPC fails the call of a longer one than
it was told, and a gateway that fails open then lets the request in: a body that is too long is for the router to refuse."""


class EndpointPicker:
    """One per process. `not_ready`: why nothing can be decided yet, empty when it can."""

    def __init__(self, context: Context, not_ready: Callable[[], str], failure_mode: FailureMode) -> None:
        self._context, self._not_ready, self._failure_mode = context, not_ready, failure_mode
        self.exchanges: set[Exchange] = set()
        """Requests that gateways proxy now."""
        self._telling: set[str] = set()
        """Addresses of Envoys that say who served."""
        self._server: Any = None
        self._asked_at = -inf
        """When a gateway has asked last."""

    async def start(self, host: str, port: int, tls: Certificates | None = None, *, shared: bool = False) -> int:
        """Listen; the port. OSError when the address is taken. `shared`: with other processes of ours."""
        import grpc.aio

        server = grpc.aio.server(
            options=[
                ("grpc.max_concurrent_streams", STREAMS_MOST),
                ("grpc.max_receive_message_length", MESSAGE_BYTES_ANY),
                ("grpc.so_reuseport", int(shared)),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.max_allowed_incoming_connections", CONNECTIONS_MOST),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_permit_without_calls", 1),  # gateways ask between requests, too
                ("grpc.http2.min_ping_interval_without_data_ms", PINGS_MS),
            ]
        )
        process = grpc.stream_stream_rpc_method_handler(
            self._process, request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )  # fmt: skip
        check = grpc.unary_unary_rpc_method_handler(
            self._check, request_deserializer=HealthCheckRequest.FromString,
            response_serializer=HealthCheckResponse.SerializeToString,
        )  # fmt: skip
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
                grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),
            )
        )
        try:
            at = authority(host, port)
            bound: int = server.add_insecure_port(at) if tls is None else server.add_secure_port(at, credentials(tls))
        except RuntimeError as error:
            raise OSError(str(error)) from error
        await server.start()
        self._server = server
        return bound

    async def stop(self, grace_s: float) -> None:
        """No new streams once the gateways have left; what runs may end within `grace_s`. For whom nothing is decided then is
        told so: a call that is only cancelled is a 500 at the gateway."""
        if self._server is None:
            return
        grace_s -= await self._left(min(LEAVING_S, grace_s / 2))
        stopping = asyncio.create_task(self._server.stop(grace_s + TOLD_S))
        await asyncio.wait({stopping}, timeout=grace_s)
        self._context.desk.closed |= bool(self.exchanges)  # else each that is cut lets one begin, only to be cancelled
        for exchange in list(self.exchanges):
            try:
                exchange.cut(leaving())
            except Exception as error:
                self._context.desk.faults.end(error, exchange.fail)
        await stopping

    async def _left(self, most_s: float) -> float:
        """Until gateways ask no more, `most_s` at most; how long that took."""
        clock = asyncio.get_running_loop().time
        since = clock()
        while True:
            left_s = min(since + most_s, self._asked_at + QUIET_S) - clock()
            if left_s <= 0:
                return clock() - since
            await asyncio.sleep(left_s)

    def sweep(self, now: float) -> None:
        """Twice a second: deadlines."""
        for exchange in list(self.exchanges):
            try:
                exchange.sweep(now)
            except Exception as error:
                self._context.desk.faults.end(error, exchange.fail)

    async def _process(self, messages: AsyncIterator[Any], call: Any) -> AsyncIterator[Any]:
        if why := self._not_ready():
            if self._failure_mode == "FailOpen" and self._context.desk.ready:
                await call.abort(grpc.StatusCode.UNAVAILABLE, why)
            yield refused(RequestError(503, why, code="not_ready"), b"", "")
            return
        self._asked_at = asyncio.get_running_loop().time()
        if len(self._telling) > CONNECTIONS_MOST:
            self._telling.clear()
        telling = self._telling if ENVOYS_OWN in {key for key, _ in call.invocation_metadata()} else None
        exchange = Exchange(self._context, call.peer().rpartition(":")[0], telling)
        self.exchanges.add(exchange)
        try:
            async for said in exchange.answers(messages):
                yield said
        finally:
            self.exchanges.discard(exchange)
            exchange.gone()

    async def _check(self, request: Any, _call: Any) -> Any:
        if request.service == "liveness":
            return HealthCheckResponse(status=SERVING)
        if request.service not in ("", "readiness", SERVICE):
            return HealthCheckResponse(status=UNKNOWN)
        leaving = self._context.draining  # who asks another one now loses nothing
        return HealthCheckResponse(status=NOT_SERVING if leaving or self._not_ready() else SERVING)
