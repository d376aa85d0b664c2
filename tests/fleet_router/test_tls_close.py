"""TLS connections that we close: loops give such an end two seconds, and what its client has not taken by then is thrown away."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from e2e.certs import Authority
from fleet_router.config import HttpBounds, RouterConfig
from fleet_router.port import Port
from fleet_router.process import Router, Settings
from fleet_router.tls import TlsFiles, context_of
from tests.fleet_router.test_lingering import swept

SIZE = 1_000_000
ASKED = b"GET /health HTTP/1.1\r\nhost: h\r\n%b\r\n"


@contextlib.asynccontextmanager
async def serving(context: ssl.SSLContext) -> AsyncIterator[tuple[Router, int]]:
    router = Router(Settings("dir:/none", "127.0.0.1", 0))
    router._context.config = RouterConfig(fleet="f", served_name="m", bounds=HttpBounds(linger_s=0.1))
    router.plain = lambda _path: (200, b"text/plain", b"x" * SIZE)  # type: ignore[method-assign]
    port = Port("127.0.0.1", 0, router.connection)
    await port.open(context)
    port._sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
    sweeps = asyncio.create_task(swept(router))
    try:
        yield router, port.addresses[0][1]
    finally:
        sweeps.cancel()
        await port.close()


def read_slowly(port: int, context: ssl.SSLContext, asked: bytes) -> int:
    """Bytes of the body."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8_192)
    plain.settimeout(10)
    plain.connect(("127.0.0.1", port))
    got = b""
    with context.wrap_socket(plain, server_hostname="h") as client:
        client.sendall(asked)
        with contextlib.suppress(OSError):
            while got.count(b"x") < SIZE and (piece := client.recv(16_384)):
                got += piece
                time.sleep(0.01)
    return got.partition(b"\r\n\r\n")[2].count(b"x")


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("drains", [False, True], ids=["its-client-asked", "the-router-drains"])
def test_who_reads_slowly_gets_the_whole_last_answer(loop: Any, drains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It was cut off two seconds behind the answer's last byte, of which hundreds of KB may wait."""
    monkeypatch.setattr("fleet_router.port.SHUTDOWN_S", 0.2)
    authority = Authority(tmp_path, "ca")
    ours = context_of(TlsFiles(*authority.leaf("h", "h")))
    theirs = ssl.create_default_context(cafile=str(authority.file))

    async def go() -> None:
        async with serving(ours) as (router, port):
            router._context.draining = drains
            asked = ASKED % (b"" if drains else b"connection: close\r\n")
            assert await asyncio.to_thread(read_slowly, port, theirs, asked) == SIZE
            for _ in range(200):
                if not router._connections:
                    return
                await asyncio.sleep(0.02)
            raise AssertionError("the connection stays")

    loop(go())
