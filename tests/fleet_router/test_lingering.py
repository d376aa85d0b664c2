"""Clients that are refused while they still send: they read why, and are no open connection for ever."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import requests
import uvloop

from e2e.certs import Authority
from fleet_router.closing import Lingering
from fleet_router.config import HttpBounds
from fleet_router.port import SHUTDOWN_S
from fleet_router.process import Router, Settings
from fleet_router.server import ClientConnection
from fleet_router.tls import TlsFiles, context_of
from tests.fleet_router.rig import CONFIG, Rig, run, until

LARGE = 8 * 1024 * 1024
"""More than the kernel takes of a client that is not read."""
MALFORMED = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % LARGE
TOO_LARGE = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % LARGE


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None, **bounds: Any) -> AsyncIterator[tuple[Router, int]]:
    router = Router(Settings("dir:/none", "127.0.0.1", 0))
    changed = msgspec.structs.replace(CONFIG.bounds, **bounds)
    router._context.config = msgspec.structs.replace(CONFIG, bounds=changed)
    made: Callable[[], Any] = lambda: ClientConnection(router._context, router._connections, router.plain)  # noqa: E731
    end_s = SHUTDOWN_S if tls is not None else None  # as the router's own port
    server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0, ssl=tls, ssl_shutdown_timeout=end_s)
    sweeps = asyncio.create_task(swept(router))
    try:
        yield router, server.sockets[0].getsockname()[1]
    finally:
        sweeps.cancel()
        server.close()


async def swept(router: Router) -> None:
    while True:
        await asyncio.sleep(0.02)
        router.sweep(router._context.clock())


def talking(port: int, tls: ssl.SSLContext | None) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=10)
    return plain if tls is None else tls.wrap_socket(plain, server_hostname="h")


def sends_all_then_reads(port: int, head: bytes, tls: ssl.SSLContext | None) -> int:
    """A client that looks at nothing before it has sent everything; its status."""
    with talking(port, tls) as talk:
        talk.sendall(head)
        for _ in range(LARGE // 65_536):
            talk.sendall(b"x" * 65_536)
        answer = http.client.HTTPResponse(talk)
        answer.begin()
        assert json.loads(answer.read())["error"]["request_id"]
        return answer.status


def by_httpx(port: int, head: bytes, tls: ssl.SSLContext | None) -> int:
    scheme = "http" if tls is None else "https"
    with httpx.Client(verify=False, trust_env=False, timeout=10) as client:  # noqa: S501
        return client.post(f"{scheme}://127.0.0.1:{port}/v1/completions", content=pieces(), headers=length(head)).status_code


def by_requests(port: int, head: bytes, tls: ssl.SSLContext | None) -> int:
    scheme = "http" if tls is None else "https"
    with requests.Session() as session:
        session.trust_env, session.verify = False, False
        url = f"{scheme}://127.0.0.1:{port}/v1/completions"
        return session.post(url, data=pieces(), headers=length(head), timeout=10).status_code


def pieces() -> Iterator[bytes]:
    for _ in range(LARGE // 65_536):
        yield b"x" * 65_536


def length(head: bytes) -> dict[str, str]:
    """A head that is refused at once; without a length the body comes in chunks and is refused in its middle."""
    return {"content-encoding": "gzip"} if head is MALFORMED else {}


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    folder: Path = tmp_path_factory.mktemp("tls")
    authority = Authority(folder, "ca")
    return context_of(TlsFiles(*authority.leaf("h", "h"))), ssl.create_default_context(cafile=str(authority.file))


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("over", ["tcp", "tls"])
@pytest.mark.parametrize("client", [sends_all_then_reads, by_httpx, by_requests])
@pytest.mark.parametrize(("head", "status"), [(MALFORMED, 400), (TOO_LARGE, 413)], ids=["malformed", "too large"])
def test_h1_who_is_refused_while_it_sends_a_large_body_reads_why(
    loop: Any, over: str, client: Any, head: bytes, status: int, secure: tuple[ssl.SSLContext, ssl.SSLContext]
):
    async def go() -> None:
        ours, theirs = secure if over == "tls" else (None, None)
        async with serving(ours) as (router, port):
            assert await asyncio.to_thread(client, port, head, theirs) == status
            await until(lambda: not router._connections)

    loop(go())


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("over", ["tcp", "tls"])
@pytest.mark.parametrize("bound", [{"linger_s": 0.05}, {"linger_bytes": 100_000}], ids=["time", "bytes"])
def test_who_sends_on_after_its_refusal_is_read_up_to_a_bound(
    loop: Any, over: str, bound: dict[str, Any], secure: tuple[ssl.SSLContext, ssl.SSLContext]
):
    """Over TLS uvloop reads on for as long as the other end may take to end it, two seconds: a gigabyte."""

    def send_for_ever(port: int, tls: ssl.SSLContext | None) -> int:
        sent, late = 0, time.monotonic() + 20
        with talking(port, tls) as talk:
            talk.sendall(TOO_LARGE)
            try:
                while time.monotonic() < late:
                    talk.sendall(b"x" * 65_536)
                    sent += 65_536
            except OSError:
                return sent
        raise AssertionError(f"it was read for 20 s, {sent} bytes of it")

    async def go() -> None:
        ours, theirs = secure if over == "tls" else (None, None)
        async with serving(ours, **({"linger_bytes": 1 << 40} | bound)) as (router, port):
            sent = await asyncio.to_thread(send_for_ever, port, theirs)
            assert sent < bound.get("linger_bytes", 1 << 40) + 16 * 1024 * 1024
            await until(lambda: not router._connections)

    loop(go())


def test_who_says_nothing_after_its_refusal_is_closed_in_time_and_nothing_of_its_body_is_kept():
    async def go(rig: Rig) -> None:
        reader, writer, connection = await rig.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n3000\r\n" + b"x" * 0x3000)
        await until(lambda: connection.begun_at is not None)
        writer.write(b"\r\n4000\r\n" + b"x" * 0x4000)
        assert b"413" in await asyncio.wait_for(reader.read(), 3)  # our half is closed
        assert connection in rig.connections
        assert not connection._request.body
        rig.sweep(4.9)
        await asyncio.sleep(0.02)
        assert connection in rig.connections
        rig.sweep(5.1)
        await until(lambda: connection not in rig.connections)

    run(go)


def test_an_idle_connection_and_one_whose_client_asked_for_its_end_close_at_once():
    """The idle one is let go when its client closes, too, and a second later whatever the client does."""

    async def go(rig: Rig) -> None:
        for stays in (True, False):
            reader, writer, idle = await rig.connect()
            rig.sweep(76)
            assert await asyncio.wait_for(reader.read(), 3) == b""
            if stays:
                assert idle in rig.connections
                idle.sweep(rig.context.clock() + 1.1)
            else:
                writer.close()
            await until(lambda idle=idle: idle not in rig.connections)
        reader, writer, last = await rig.connect()
        writer.write(b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        assert b"200 OK" in await asyncio.wait_for(reader.read(), 3)
        await until(lambda: last not in rig.connections)

    run(go)


class Stub:
    """A transport that remembers whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def can_write_eof(self) -> bool:
        return False

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, _name: str) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("comes_at", "ends_after"), [([], 5.0), ([1.0], 6.0), ([4.9, 9.8], 14.8), ([1.0 * i for i in range(1, 60)], 30.0)]
)
def test_who_still_sends_has_longer(comes_at: list[float], ends_after: float):
    """A wrong key with a body that took longer than 5 s to send was a reset connection instead of a 401."""
    transport: Any = Stub()
    lingering = Lingering(transport, HttpBounds(), 100.0, 5.0)
    for tenth in range(1, 400):
        now = tenth / 10
        if now in comes_at:
            lingering.read(1_000)
        lingering.sweep(100.0 + now)
        assert transport.closed == (now > ends_after), now
        if transport.closed:
            break
