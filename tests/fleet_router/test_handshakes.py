"""Clients that open TLS connections and shake hands slowly, or never."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from e2e.certs import Authority
from fleet_router import handshakes, process
from fleet_router.config import RouterConfig
from fleet_router.process import Router, Settings
from fleet_router.tls import TlsFiles
from tests.fleet_router.rig import CONFIG, until

BOUND = 12
LEAST = 4
Runs = Callable[[Coroutine[Any, Any, None]], None]
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return TlsFiles(*Authority(tmp_path, "ca").leaf("router", "localhost"))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "HANDSHAKES_LEAST", LEAST)


def config() -> RouterConfig:
    return msgspec.structs.replace(CONFIG, bounds=msgspec.structs.replace(CONFIG.bounds, connections=BOUND))


@contextlib.asynccontextmanager
async def serving(files: TlsFiles) -> AsyncIterator[Router]:
    router = Router(Settings("dir:/none", "127.0.0.1", 0, tls=files))
    router._context.config = config()
    assert await router._open()
    try:
        yield router
    finally:
        for port in router._ports:
            await port.close()
        for connection in list(router._connections):
            connection.cut()


def silent(router: Router) -> socket.socket:
    """A client that says nothing."""
    opened = socket.create_connection(router._ports[0].addresses[0])
    opened.setblocking(False)
    return opened


def ended(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def healthy(router: Router, path: str = "/health") -> tuple[asyncio.StreamWriter, bytes]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(*router._ports[0].addresses[0], ssl=context)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: h\r\n\r\n".encode())
    return writer, await reader.readline()


@LOOPS
def test_handshakes_that_never_end_hold_no_more_sockets_than_connections_may(files: TlsFiles, run: Runs):
    """They were nobody's connections: a client could hold as many files as a router has, for ten seconds each."""

    async def go() -> None:
        async with serving(files) as router:
            clients = []
            for _ in range(3 * BOUND):
                clients.append(silent(router))
                await asyncio.sleep(0.002)
            under_way = router._ports[0].handshakes
            await until(lambda: sum(map(ended, clients)) == 2 * BOUND)
            assert (len(under_way), under_way.dropped) == (BOUND, 2 * BOUND)
            shown = router.plain(b"/metrics")[2].decode()
            assert f"\nfleet_router_handshakes {BOUND}\n" in shown
            assert f"\nfleet_router_handshakes_dropped_total {2 * BOUND}\n" in shown
            assert [ended(one) for one in clients] == [True] * 2 * BOUND + [False] * BOUND  # the oldest gave way
            for _ in range(3):  # who means it is served
                writer, first = await healthy(router)
                assert first == b"HTTP/1.1 200 OK\r\n"
                writer.close()
            for one in clients:
                one.close()
            await until(lambda: len(under_way) == 0)

    run(go())


@LOOPS
def test_connections_and_handshakes_are_counted_together(files: TlsFiles, run: Runs):
    async def go() -> None:
        async with serving(files) as router:
            there = [(await healthy(router))[0] for _ in range(BOUND)]
            clients = [silent(router) for _ in range(BOUND)]
            under_way = router._ports[0].handshakes
            await until(lambda: sum(map(ended, clients)) == BOUND - LEAST)
            assert len(under_way) == LEAST
            writer, first = await healthy(router, "/v1/models")
            assert first.startswith(b"HTTP/1.1 503")  # some always may, to be told that there are too many
            for one in (*there, writer):
                one.close()
            for client in clients:
                client.close()

    run(go())


@LOOPS
def test_nonsense_and_clients_that_leave_are_nobodys_concern(files: TlsFiles, run: Runs):
    async def go() -> None:
        said = list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: said.append(context))
        async with serving(files) as router:
            for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b""):
                one = silent(router)
                one.send(data)
                one.close()
            under_way = router._ports[0].handshakes
            await asyncio.sleep(0.02)
            await until(lambda: len(under_way) == 0)
            writer, first = await healthy(router)
            assert first == b"HTTP/1.1 200 OK\r\n"
            writer.close()
        assert said == []

    run(go())


@LOOPS
def test_without_files_left_it_goes_on_when_there_are_some(files: TlsFiles, run: Runs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handshakes, "AGAIN_S", 0.05)
    accept, left = socket.socket.accept, [1]

    def full(one: socket.socket) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(one)

    async def go() -> None:
        async with serving(files) as router:
            monkeypatch.setattr(socket.socket, "accept", full)
            writer, first = await healthy(router)
            assert (first, left[0] < 0) == (b"HTTP/1.1 200 OK\r\n", True)
            writer.close()

    run(go())


class Begun:
    """Handshakes that are told of what was accepted, and do nothing with it."""

    def __init__(self) -> None:
        self.accepted: list[socket.socket] = []

    def begin(self, accepted: socket.socket, _context: object) -> None:
        self.accepted.append(accepted)


def listening() -> tuple[socket.socket, Begun, handshakes.Listener]:
    opened = socket.create_server(("127.0.0.1", 0))
    opened.setblocking(False)
    begun = Begun()
    return opened, begun, handshakes.Listener(opened, begun, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # type: ignore[arg-type]


@LOOPS
def test_what_is_accepted_blocks_nobody_and_waits_for_no_more_bytes(run: Runs):
    async def go() -> None:
        opened, begun, listener = listening()
        with socket.create_connection(opened.getsockname()):
            await until(lambda: bool(begun.accepted))
        (accepted,) = begun.accepted
        assert accepted.getblocking() is False
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        accepted.close()
        listener.close()

    run(go())


@LOOPS
def test_without_files_left_nobody_asks_again_and_again(run: Runs, monkeypatch: pytest.MonkeyPatch):
    """A client waits to be accepted, so that its socket is ready all the time: a loop that looks at it does nothing else."""
    monkeypatch.setattr(handshakes, "AGAIN_S", 0.1)
    asked = [0]

    def full(_one: socket.socket) -> Any:
        asked[0] += 1
        raise OSError(errno.EMFILE, "Too many open files")

    async def go() -> None:
        said = list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: said.append(context))
        opened, _, listener = listening()
        monkeypatch.setattr(socket.socket, "accept", full)
        with socket.create_connection(opened.getsockname()):
            await until(lambda: asked[0] >= 2)
            for _ in range(100):
                await asyncio.sleep(0)
            assert asked[0] == 2
            listener.close()
            await asyncio.sleep(0.2)  # it does not ask for a socket that is closed, either
        assert (asked[0], said) == (2, [])

    run(go())


@LOOPS
def test_a_closed_listener_leaves_no_reader_behind(run: Runs):
    """The next socket has its number: who listens there would hear of that one's connections."""

    async def go() -> None:
        opened, begun, listener = listening()
        number = opened.fileno()
        listener.close()
        assert not asyncio.get_running_loop().remove_reader(number)
        assert begun.accepted == []

    run(go())
