"""Clients of the gRPC port that open connections and say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest

from e2e.certs import Authority
from fleet_router.config import HttpBounds
from fleet_router.epp import server
from fleet_router.epp.messages import (
    BUFFERED,
    FULL_DUPLEX,
    HEALTH,
    NOT_SERVING,
    SERVICE,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from fleet_router.epp.server import EndpointPicker, FailureMode
from fleet_router.tls import Certificates, TlsFiles, context_of
from tests.fleet_router.rig import CONFIG, Rig, ask, run, until
from tests.fleet_router.test_handshakes import ended
from tests.fleet_router.test_picker import answer_of, body_of, head_of, known

BOUND = 8


@pytest.fixture(params=["plain", "tls"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> TlsFiles | None:
    return TlsFiles(*Authority(tmp_path, "ca").leaf("router", "localhost")) if request.param == "tls" else None


@contextlib.asynccontextmanager
async def serving(rig: Rig, files: TlsFiles | None) -> AsyncIterator[int]:
    picker = EndpointPicker(rig.context, lambda: "", "FailClose")
    certificates = Certificates(files) if files is not None else None
    if certificates is not None:
        certificates.begin()
    port = await picker.start("127.0.0.1", 0, certificates)
    try:
        yield port
    finally:
        await picker.stop(0)


def silent(port: int) -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", port))
    opened.setblocking(False)
    return opened


def test_connections_to_the_picker_are_bounded(files: TlsFiles | None, monkeypatch: pytest.MonkeyPatch):
    """There was no bound: whoever reached the port could take all files of the process, and clients of the other one had none."""
    monkeypatch.setattr(server, "CONNECTIONS_MOST", BOUND)

    async def go(rig: Rig) -> None:
        async with serving(rig, files) as port:
            clients = [silent(port) for _ in range(3 * BOUND)]
            await until(lambda: sum(map(ended_of, clients)) >= 2 * BOUND)
            assert sum(map(ended_of, clients)) == 2 * BOUND
            for one in clients:
                one.close()

    run(go, prefill=0)


def test_handshakes_with_the_picker_that_never_end_are_ended(files: TlsFiles | None, monkeypatch: pytest.MonkeyPatch):
    """They were held for two minutes; and then there is room for who means it."""
    monkeypatch.setattr(server, "CONNECTIONS_MOST", BOUND)
    monkeypatch.setattr(server, "HANDSHAKE_MS", 200)

    async def go(rig: Rig) -> None:
        async with serving(rig, files) as port:
            clients = [silent(port) for _ in range(BOUND)]
            await until(lambda: all(map(ended_of, clients)))
            for one in clients:
                one.close()
            if files is None:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    check = channel.unary_unary(
                        f"/{HEALTH}/Check", request_serializer=HealthCheckRequest.SerializeToString,
                        response_deserializer=HealthCheckResponse.FromString,
                    )  # fmt: skip
                    assert (await check(HealthCheckRequest(), timeout=5)).status == SERVING

    run(go, prefill=0)


def ended_of(one: socket.socket) -> bool:
    """It has been closed; what was said before (a plain port begins by itself) is passed over."""
    with contextlib.suppress(BlockingIOError, ConnectionError):
        one.recv(65_536)
    return ended(one)


def test_what_waits_when_the_picker_goes_is_told_why():
    """The call was cancelled, which is a 500 at the gateway and no word of the router."""

    async def go(rig: Rig) -> None:
        picker = EndpointPicker(rig.context, lambda: "", "FailClose")
        port = await picker.start("127.0.0.1", 0)
        rig.context.desk.gate.running = 1  # the one slot is taken
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream(
                f"/{SERVICE}/Process", request_serializer=ProcessingRequest.SerializeToString,
                response_deserializer=ProcessingResponse.FromString,
            )()  # fmt: skip
            await call.write(head_of())
            await call.write(body_of(ask(prompt="short")))
            await until(lambda: rig.context.desk.gate.waiting == 1)
            stopping = asyncio.create_task(picker.stop(0.1))
            said = await call.read()
            await call.done_writing()
            await stopping
        assert said.immediate_response.status.code == 503
        assert b'"code":"shutting_down"' in said.immediate_response.body
        rig.context.desk.gate.running = 0

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, worker_slots=1))


def test_a_picker_that_goes_answers_who_asks_until_gateways_have_left():
    """gRPC throws away what a server that stops has not accepted, and what comes until the gateway has read its GOAWAY: up to 11
    of 24 requests under way were 500 at an Envoy that heard of the end at the same moment."""

    async def go(rig: Rig) -> None:
        known(rig)
        picker = EndpointPicker(rig.context, lambda: "", "FailClose")
        port = await picker.start("127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            asked = channel.stream_stream(
                f"/{SERVICE}/Process", request_serializer=ProcessingRequest.SerializeToString,
                response_deserializer=ProcessingResponse.FromString,
            )  # fmt: skip

            async def answered() -> bool:
                call = asked()
                await call.write(head_of())
                await call.write(body_of(ask(prompt="short")))
                kind = (await call.read()).WhichOneof("response")
                await call.done_writing()
                return kind == "request_headers"

            check = channel.unary_unary(
                f"/{HEALTH}/Check", request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )  # fmt: skip
            assert await answered()
            rig.context.draining = True
            stopping = asyncio.create_task(picker.stop(30))
            for _ in range(6):
                await asyncio.sleep(0.2)
                assert await answered()
            health = [(await check(HealthCheckRequest(service=one))).status for one in ("readiness", "liveness")]
            assert health == [NOT_SERVING, SERVING]
            await asyncio.wait_for(stopping, 5)  # and does not wait for more when nobody asks

    run(go, prefill=0)


def test_gateways_that_do_not_leave_are_waited_for_no_longer_than_half_of_the_time():
    async def go(rig: Rig) -> None:
        picker = EndpointPicker(rig.context, lambda: "", "FailClose")
        await picker.start("127.0.0.1", 0)
        since, picker._asked_at = asyncio.get_running_loop().time(), inf
        await picker.stop(0.6)
        assert 0.3 <= asyncio.get_running_loop().time() - since < 0.6

    run(go, prefill=0)


@contextlib.asynccontextmanager
async def calling(port: int, metadata: Sequence[tuple[str, str]] = (), **options: int) -> AsyncIterator[Any]:
    """A gateway's call for one request; `metadata`: its own headers; `options`: of its channel."""
    given = [(f"grpc.{name}", value) for name, value in options.items()]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=given) as channel:
        yield channel.stream_stream(
            f"/{SERVICE}/Process", request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )(metadata=metadata)  # fmt: skip


@pytest.mark.parametrize("mode", [FULL_DUPLEX, BUFFERED])
def test_behind_a_gateway_too_a_body_has_its_time(mode: int):
    """It had none: whoever sent half of long ones and waited held what all bodies in part may have together, as long as it liked,
    and everybody's longer requests were 503, also on the router's own port."""

    async def go(rig: Rig) -> None:
        known(rig)
        head, piece = head_of(), body_of(b"x" * 19_000)
        head.protocol_config.request_body_mode, piece.request_body.end_of_stream = mode, False
        async with serving(rig, None) as port, calling(port) as call:
            await call.write(head)
            if mode == FULL_DUPLEX:
                await call.write(piece)
                await until(lambda: rig.context.receiving.bytes == 19_000)
            else:
                assert (await call.read()).WhichOneof("response") == "request_headers"
            said = await asyncio.wait_for(call.read(), 5)
            assert said.immediate_response.status.code == 408
            assert b'"code":"timeout"' in said.immediate_response.body
            assert rig.context.receiving.bytes == 0
            assert await call.read() is grpc.aio.EOF
            assert rig.context.recorder.refusals[-1].error.status == 408

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, bounds=HttpBounds(body_bytes=20_000, body_deadline_s=0.3)))


@pytest.mark.parametrize(
    "heads", [[], [head_of("/v1/models", "GET", end=True)], [head_of("/other", "GET")]], ids=["none", "told", "refused"]
)
def test_a_call_of_which_nothing_is_expected_any_more_is_ended(heads: list[Any]):
    """Each held 10 to 27 KB for as long as its connection stood, and a connection may have 2,048: whoever reached the port had a
    router killed for its memory, without a key."""

    async def go(rig: Rig) -> None:
        known(rig)
        async with serving(rig, None) as port, calling(port) as call:
            for head in heads:
                await call.write(head)
                assert (await call.read()).immediate_response.status.code in (200, 404)
            assert await asyncio.wait_for(call.read(), 5) is grpc.aio.EOF
            assert len(rig.context.recorder.refusals) == sum(head.request_headers.end_of_stream is False for head in heads)

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, bounds=HttpBounds(body_bytes=20_000, body_deadline_s=0.3)))


def test_however_long_a_buffered_body_is_the_gateway_is_told_that_it_is_refused():
    """gRPC failed the call of one above 16 MiB: an empty 500 at a gateway that fails closed, and at one that fails open the
    request went to any worker, past the limits of its key and of bodies."""

    async def go(rig: Rig) -> None:
        known(rig)
        head = head_of()
        head.protocol_config.request_body_mode = BUFFERED
        async with serving(rig, None) as port, calling(port) as call:
            await call.write(head)
            assert (await call.read()).WhichOneof("response") == "request_headers"
            await call.write(body_of(b"x" * (17 << 20)))
            said = await call.read()
            assert said.immediate_response.status.code == 413

    run(go, prefill=0)


def test_a_body_that_came_in_time_leaves_its_answer_all_the_time_that_it_needs():
    async def go(rig: Rig) -> None:
        known(rig)
        async with serving(rig, None) as port, calling(port) as call:
            await call.write(head_of())
            await call.write(body_of(ask(prompt="short")))
            for kind in ("request_headers", "request_body"):
                assert (await call.read()).WhichOneof("response") == kind
            await asyncio.sleep(0.5)
            for piece in answer_of(b"{}"):
                await call.write(piece)
            assert (await call.read()).WhichOneof("response") == "response_headers"
            await call.done_writing()

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, bounds=HttpBounds(body_bytes=20_000, body_deadline_s=0.3)))


def test_a_gateway_may_ask_each_second_whether_the_picker_is_there():
    """gRPC takes who asks more than every five minutes (Envoy's `connection_keepalive`) for an attacker: the connection was
    closed after the third time, and all requests on it that waited, or whose answers were running, ended with it."""

    async def go(rig: Rig) -> None:
        picker = EndpointPicker(rig.context, lambda: "", "FailClose")
        port = await picker.start("127.0.0.1", 0)
        rig.context.desk.gate.running = 1  # the one slot is taken
        asking = {"keepalive_time_ms": 1_000, "http2.max_pings_without_data": 0, "keepalive_permit_without_calls": 1}
        async with calling(port, **asking) as call:
            await call.write(head_of())
            await call.write(body_of(ask(prompt="short")))
            await until(lambda: rig.context.desk.gate.waiting == 1)
            await asyncio.sleep(4.5)
            assert rig.context.desk.gate.waiting == 1
            rig.context.desk.gate.running = 0
            rig.context.desk.tick()
            assert (await call.read()).WhichOneof("response") == "request_headers"
            await call.done_writing()
        await picker.stop(0)

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, worker_slots=1))


def test_the_picker_has_the_certificates_of_the_routers_own_port(tmp_path: Path):
    """It read the files itself, and took what the other port had refused."""
    authority = Authority(tmp_path, "ca")
    certificates = Certificates(TlsFiles(*authority.leaf("first", "old", to="router")))
    certificates.begin()

    async def go(rig: Rig) -> None:
        picker = EndpointPicker(rig.context, lambda: "", "FailClose")
        port = await picker.start("127.0.0.1", 0, certificates)
        files = TlsFiles(*authority.leaf("next", "new", to="router"))
        assert b"old" in await certificate(port)
        certificates.current = context_of(files)
        assert b"new" in await certificate(port)
        await picker.stop(0)

    run(go, prefill=0)


async def certificate(port: int) -> bytes:
    """Whoever connects is shown this one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


class Failed(Exception):
    """What gRPC raises where a call is failed: a gateway that is told to goes on without an answer."""


@pytest.mark.parametrize("endpoints", [True, False])
@pytest.mark.parametrize("tenants", ["none needed", "known", "not known"])
@pytest.mark.parametrize("mode", ["FailOpen", "FailClose"])
def test_without_its_tenants_a_router_lets_nobody_in_whatever_its_failure_mode(mode: FailureMode, tenants: str, endpoints: bool):
    """A tenants file that could not be read: behind a gateway that fails open everybody was let in, without a key, for as long as
    the file was bad."""

    class Call:
        def peer(self) -> str:
            return "ipv4:10.0.0.1:1"

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return ()

        async def abort(self, *_: object) -> None:
            raise Failed

    async def go(rig: Rig) -> None:
        rig.context.desk.tenants_needed = tenants != "none needed"
        if tenants == "known":
            known(rig)
        rig.router._followed_at = 1.0 if endpoints else None
        picker = EndpointPicker(rig.context, rig.router._undecided, mode)

        async def come() -> AsyncIterator[Any]:
            yield head_of()

        try:
            found = [said async for said in picker._process(come(), Call())]
        except Failed:
            found = ["sent anywhere"]
        if tenants == "not known":
            (said,) = found
            assert said.immediate_response.status.code == 503
        elif not endpoints:
            assert (found == ["sent anywhere"]) is (mode == "FailOpen")
        else:
            assert found == []  # the rest of the request is waited for

    run(go)
