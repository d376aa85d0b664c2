"""A client that ends its side of a TLS connection in mid-request is told so, as over plain HTTP, if it sends close_notify."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from e2e.certs import Authority
from fleet_router.process import Router, Settings
from fleet_router.server import ClientConnection
from fleet_router.tls import TlsFiles, context_of

HALF = b"GET /health HTTP/1.1\r\nho"
WHOLE = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"


class Client:
    """TLS by hand: Python's streams can end no half of a connection."""

    def __init__(self, context: ssl.SSLContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._coming, self._going, server_hostname="h")

    async def says(self, data: bytes) -> bytes:
        """What comes back until the end, after `data` and close_notify."""
        await self._until_done(self._tls.do_handshake)
        self._tls.write(data)
        with pytest.raises(ssl.SSLWantReadError):
            self._tls.unwrap()
        got = b""
        while piece := await self._until_done(self._read):
            got += piece
        return got

    def _read(self) -> bytes:
        try:
            return self._tls.read(65_536)
        except ssl.SSLZeroReturnError:
            return b""

    async def _until_done(self, step: Callable[[], Any]) -> Any:
        while True:
            try:
                found = step()
            except ssl.SSLWantReadError:
                self._send()
                self._coming.write(await self._reader.read(65_536) or b"\0")  # an end without close_notify is an error
                continue
            self._send()
            return found

    def _send(self) -> None:
        if self._going.pending:
            self._writer.write(self._going.read())


async def answered(server: ssl.SSLContext, client: ssl.SSLContext, data: bytes) -> bytes:
    router = Router(Settings("dir:/none", "127.0.0.1", 0))
    made: Callable[[], Any] = lambda: ClientConnection(router._context, router._connections, router.plain)  # noqa: E731
    port = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0, ssl=server)
    reader, writer = await asyncio.open_connection(*port.sockets[0].getsockname())
    try:
        async with asyncio.timeout(10):
            return await Client(client, reader, writer).says(data)
    finally:
        writer.close()
        await writer.wait_closed()
        port.close()
        await port.wait_closed()


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    folder: Path = tmp_path_factory.mktemp("tls")
    authority = Authority(folder, "ca")
    return context_of(TlsFiles(*authority.leaf("h", "h"))), ssl.create_default_context(cafile=str(authority.file))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("sent", "statuses"),
    [(b"", []), (HALF, [400]), (WHOLE, [200]), (WHOLE + HALF, [200, 400])],
    ids=["no", "half", "one", "both"],
)
def test_half_a_request_over_tls_is_told_that_it_ended_early(
    secure: tuple[ssl.SSLContext, ssl.SSLContext], run: Callable[[Coroutine[Any, Any, bytes]], bytes], sent: bytes, statuses: list
):
    got = run(answered(*secure, sent))
    assert [int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:]] == statuses
    if 400 in statuses:
        head, _, body = got.rpartition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert json.loads(body)["error"]["reason"] == "ended_early"
