"""Clients of the gRPC port that open connections and say nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from e2e.certs import Authority
from fleet_router.epp import server
from fleet_router.epp.messages import HEALTH, SERVING, HealthCheckRequest, HealthCheckResponse
from fleet_router.epp.server import EndpointPicker
from fleet_router.tls import TlsFiles
from tests.fleet_router.rig import Rig, run, until
from tests.fleet_router.test_handshakes import ended

BOUND = 8


@pytest.fixture(params=["plain", "tls"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> TlsFiles | None:
    return TlsFiles(*Authority(tmp_path, "ca").leaf("router", "localhost")) if request.param == "tls" else None


@contextlib.asynccontextmanager
async def serving(rig: Rig, files: TlsFiles | None) -> AsyncIterator[int]:
    picker = EndpointPicker(rig.context, lambda: "", "FailClose")
    port = await picker.start("127.0.0.1", 0, files)
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
