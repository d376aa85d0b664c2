"""Ports of a worker over real sockets: who is silent is let go, and nobody's many connections keep a probe from its answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import uvicorn

from fleet_worker import connections
from fleet_worker.agent import admin
from fleet_worker.agent.admin import AdminServer, build_app, build_server
from fleet_worker.connections import BoundedProtocol, Bounds, bounded, files_for_connections
from fleet_worker.engine import assemble

HOST = "127.79.3.1"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Probes:
    """An agent that is fine; its drain waits until it is told."""

    def __init__(self) -> None:
        self.empty = asyncio.Event()
        self.drains = 0

    def live(self) -> bool:
        return True

    started = ready = live

    def state(self) -> dict[str, object]:
        return {"phase": "Serving"}

    async def drain(self) -> dict[str, object]:
        self.drains += 1
        await self.empty.wait()
        return {"drained": True}

    def take_role(self, asked: object) -> tuple[int, dict[str, object]]:
        return 200, {}


class Port:
    """A served port, and who is connected to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.held: list[Stream] = []

    async def connect(self, sent: bytes = b"") -> Stream:
        reader, writer = await asyncio.open_connection(HOST, self.number)
        writer.write(sent)
        await writer.drain()
        self.held.append((reader, writer))
        return reader, writer

    async def status(self, path: str) -> int:
        reader, _ = await self.connect(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        return int((await reader.read()).split()[1])


@contextlib.asynccontextmanager
async def serving(server: uvicorn.Server) -> AsyncIterator[Port]:
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.005)
    port = Port(server.servers[0].sockets[0].getsockname()[1])
    try:
        yield port
    finally:
        for _, writer in port.held:
            writer.close()
        server.should_exit = True
        server.force_exit = True
        await task


def play_agent(scenario: Callable[[Port, Probes], Awaitable[None]]) -> None:
    async def main() -> None:
        probes = Probes()
        async with serving(build_server(build_app(probes), HOST, 0)) as port:  # type: ignore[arg-type]
            await asyncio.wait_for(scenario(port, probes), 20)
            probes.empty.set()

    asyncio.run(main())


@pytest.mark.parametrize("sent", [b"", b"GET /live HTT", b"POST /role HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"])
def test_probes_and_drain_are_answered_whoever_holds_connections(sent: bytes):
    """64 idle ones turned every probe to 503, and preStop's /drain with them."""

    async def scenario(port: Port, probes: Probes) -> None:
        for _ in range(300):
            await port.connect(sent)
        assert [await port.status(path) for path in ("/live", "/ready", "/started")] == [200] * 3
        probes.empty.set()
        assert await port.status("/drain") == 200

    play_agent(scenario)


def test_probes_are_answered_when_all_others_wait_for_a_drain():
    async def scenario(port: Port, probes: Probes) -> None:
        for _ in range(admin.BOUNDS.most_of_peer + 5):
            await port.connect(b"GET /drain HTTP/1.1\r\nhost: x\r\n\r\n")
        for _ in range(3):
            assert await port.status("/live") == 200
        assert probes.drains > 0

    play_agent(scenario)


@pytest.mark.parametrize(
    ("sent", "stays"),
    [
        pytest.param(b"", False, id="silent"),
        pytest.param(b"GET /live HTT", False, id="half-a-head"),
        pytest.param(b"POST /role HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{", False, id="half-a-body"),
        pytest.param(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\nGET /li", False, id="half-a-second-head"),
        pytest.param(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n", True, id="kept-alive-between-two-probes"),
        pytest.param(b"GET /drain HTTP/1.1\r\nhost: x\r\n\r\n", True, id="waits-for-an-answer"),
    ],
)
def test_who_owes_a_request_too_long_is_let_go(monkeypatch: pytest.MonkeyPatch, sent: bytes, stays: bool):
    monkeypatch.setattr(admin, "BOUNDS", replace(admin.BOUNDS, receive_s=0.1))

    async def scenario(port: Port, _: Probes) -> None:
        reader, _ = await port.connect(sent)
        begun = time.monotonic()
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            await asyncio.wait_for(reader.read(), 0.5 if stays else 10)
        assert (time.monotonic() - begun > 0.45) is stays

    play_agent(scenario)


async def streams(scope: object, receive: object, send: Callable[[dict[str, object]], Awaitable[None]]) -> None:
    """An application that never comes to its end."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"first", "more_body": True})
    await asyncio.Event().wait()


def play_engine(bounds: Bounds, scenario: Callable[[Port], Awaitable[None]], app: Any = streams) -> None:
    async def main() -> None:
        config = uvicorn.Config(app, host=HOST, port=0, http=bounded(bounds), ws="none", lifespan="off", log_level="critical")
        async with serving(AdminServer(config)) as port:
            await asyncio.wait_for(scenario(port), 20)

    asyncio.run(main())


async def pours(scope: object, receive: object, send: Callable[[dict[str, object]], Awaitable[None]]) -> None:
    """An application that has more to say than any buffer holds."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(1_000):
        await send({"type": "http.response.body", "body": bytes(65_536), "more_body": True})
    await asyncio.Event().wait()


@pytest.mark.parametrize("reads", [False, True])
def test_who_takes_nothing_of_its_answer_is_let_go_and_who_is_slow_is_not(reads: bool):
    """Incident: a stream that nobody read was open for ever, and a drain waited for all of its time."""
    gone = asyncio.Event()

    async def told(scope: object, receive: object, send: Callable[[dict[str, object]], Awaitable[None]]) -> None:
        answering = asyncio.create_task(pours(scope, receive, send))
        while (await receive())["type"] != "http.disconnect":  # type: ignore[operator]
            pass
        answering.cancel()
        gone.set()

    async def scenario(port: Port) -> None:
        reader, _ = await port.connect(ASKED)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        if not reads:
            await asyncio.wait_for(gone.wait(), 10)
            return
        for _ in range(10):
            reader._transport.resume_reading()  # type: ignore[attr-defined]
            assert len(await reader.readexactly(500_000))
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(gone.wait(), 0.1)

    play_engine(Bounds(receive_s=60, most=4, most_of_peer=4, may_cut=False, stalled_s=0.3), scenario, told)


ASKED = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def test_an_engines_stream_is_never_cut_for_another_connection():
    async def scenario(port: Port) -> None:
        streams = [await port.connect(ASKED) for _ in range(3)]
        for reader, _ in streams:
            await reader.readuntil(b"first\r\n")
        idle, _ = await port.connect()
        late, _ = await port.connect(ASKED)  # the idle one goes for it
        assert b"first" in await late.readuntil(b"first\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert await idle.read() == b""
        refused, _ = await port.connect(ASKED)  # nobody is idle
        with contextlib.suppress(ConnectionResetError):
            assert await refused.read() == b""
        for reader, _ in [*streams, (late, None)]:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(100), 0.02)

    play_engine(Bounds(receive_s=60, most=4, most_of_peer=4, may_cut=False), scenario)


def test_the_agents_own_checks_are_not_counted():
    async def scenario(port: Port) -> None:
        for _ in range(4):
            reader, _ = await port.connect(ASKED)
            await reader.readuntil(b"first\r\n")

    play_engine(Bounds(receive_s=60, most=1, most_of_peer=1, may_cut=False, spared=frozenset({"127.0.0.1"})), scenario)


def test_the_engines_bounds():
    bounds = assemble.bounds_for("10.1.2.3")
    assert (bounds.may_cut, bounds.spared) == (False, {"10.1.2.3"})
    assert 0 < bounds.most <= min(assemble.MAX_CONNECTIONS, files_for_connections())


def told_in_one_piece(size: int) -> Any:
    async def app(scope: object, receive: object, send: Callable[[dict[str, object]], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(size)})

    return app


@pytest.mark.parametrize("size", [40_000, 4_000_000])
@pytest.mark.parametrize("closes", [False, True])
def test_the_rest_of_an_answer_that_nobody_takes_keeps_no_connection(monkeypatch: pytest.MonkeyPatch, size: int, closes: bool):
    """Less than the buffer's high mark was left in it: keep-alive's close() waited for ever for it to go."""
    made: list[Any] = []
    made_before = BoundedProtocol.connection_made

    def small(self: BoundedProtocol, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        made.append(transport)
        made_before(self, transport)

    monkeypatch.setattr(BoundedProtocol, "connection_made", small)

    async def scenario(port: Port) -> None:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect((HOST, port.number))
            client.sendall(ASKED[:-2] + (b"connection: close\r\n\r\n" if closes else b"\r\n"))
            await asyncio.wait_for(until(lambda: bool(made) and made[0]._sock is None), 5)

    play_engine(Bounds(receive_s=60, most=4, most_of_peer=4, may_cut=False, stalled_s=0.2), scenario, told_in_one_piece(size))


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - a transport has no event for it
        await asyncio.sleep(0.01)


TOO_LONG = b"POST %s HTTP/1.1\r\nhost: x\r\n%scontent-length: %d\r\n\r\n"


@pytest.mark.parametrize("more", [b"", b"connection: close\r\n"])
@pytest.mark.parametrize("path", [b"/role", b"/adapters"])
def test_a_body_that_is_too_long_by_its_head_is_refused_there(path: bytes, more: bytes):
    """Incident: it was read up to the bound, and what came behind it reset the connection, and the 413 with it."""

    async def scenario(port: Port, _: Probes) -> None:
        reader, writer = await port.connect(TOO_LONG % (path, more, 8_000_000))
        assert b" 413 " in await reader.readuntil(b"\r\n")  # nothing of the body was sent yet
        writer.write(bytes(8_000_000))
        await writer.drain()
        assert b"BodyTooLarge" in await reader.read()

    play_agent(scenario)


@pytest.mark.parametrize("more", [b"", b"connection: close\r\n"])
def test_a_client_that_sends_all_before_it_reads_sees_its_413(more: bytes):
    """The same over a body whose length nobody told."""

    async def scenario(port: Port, _: Probes) -> None:
        reader, writer = await port.connect(b"POST /role HTTP/1.1\r\nhost: x\r\n%stransfer-encoding: chunked\r\n\r\n" % more)
        for _ in range(100):
            writer.write(b"10000\r\n" + bytes(65_536) + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        assert b" 413 " in await reader.read()

    play_agent(scenario)


@pytest.mark.parametrize("bound", ["LINGER_S", "LINGER_BYTES"])
def test_nobody_is_heard_for_nothing_for_ever(monkeypatch: pytest.MonkeyPatch, bound: str):
    monkeypatch.setattr(connections, bound, 0.1 if bound == "LINGER_S" else 1_000_000)

    async def scenario(port: Port, _: Probes) -> None:
        reader, writer = await port.connect(TOO_LONG % (b"/role", b"", 10**15))
        assert b" 413 " in await reader.readuntil(b"\r\n")
        with pytest.raises(ConnectionError):  # noqa: PT012 - whichever of them is the one
            while True:
                writer.write(bytes(65_536 if bound == "LINGER_BYTES" else 1))
                await writer.drain()
                await asyncio.sleep(0.01 if bound == "LINGER_S" else 0)

    play_agent(scenario)


def test_whoever_sends_what_is_no_http_does_not_fill_the_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """A line for each: by anybody who reached the port, and of the engine's lines as many were dropped."""
    monkeypatch.setattr(connections._FEW, "total", 0)

    async def go() -> None:
        async with serving(build_server(build_app(Probes()), HOST, 0)) as port:
            for _ in range(20):
                reader, _ = await port.connect(b"\x00no HTTP\r\n\r\n")
                assert (await reader.read()).startswith(b"HTTP/1.1 400")
            assert await port.status("/live") == 200

    asyncio.run(go())
    told = [line.partition(":")[2].strip() for line in capsys.readouterr().err.splitlines() if "Invalid HTTP" in line]
    assert told == [f"Invalid HTTP request received. ({count} so far)" for count in (1, 2, 4, 8, 16)]


BODY = b'{"role": "decode"}'
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
CHUNKED, LENGTH = b"transfer-encoding: chunked\r\n", b"content-length: %d\r\n" % len(BODY)


async def echoes(scope: Any, receive: Any, send: Callable[[dict[str, object]], Awaitable[None]]) -> None:
    """Tells the path and the body that came."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": scope["path"].encode() + b"?" + scope["query_string"] + b" " + body})


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        pytest.param(b"POST /role HTTP/1.1\r\nhost: x\r\n" + LENGTH, BODY, b"200", id="length"),
        pytest.param(b"POST /role HTTP/1.1\r\nhost: x\r\n" + CHUNKED, CHUNKS, b"200", id="chunked"),
        pytest.param(b"POST /role HTTP/1.0\r\n" + LENGTH, BODY, b"200", id="length-in-1.0"),
        pytest.param(b"POST /role HTTP/1.1\r\nhost: x\r\n" + LENGTH + CHUNKED, CHUNKS, b"400", id="length-then-chunked"),
        pytest.param(b"POST /role HTTP/1.1\r\nhost: x\r\n" + CHUNKED + LENGTH, CHUNKS, b"400", id="chunked-then-length"),
        pytest.param(b"POST /role HTTP/1.1\r\nhost: x\r\n" + CHUNKED + b"content-length: 0\r\n", CHUNKS, b"400", id="length-0"),
        pytest.param(b"POST /role HTTP/1.0\r\n" + CHUNKED, CHUNKS, b"400", id="chunked-in-1.0"),
    ],
)
def test_a_body_with_two_ends_is_refused(head: bytes, body: bytes, status: bytes):
    """What a proxy takes for the next request would be this one's body, or the other way round (RFC 9112, 6.1 and 11.2)."""

    async def scenario(port: Port) -> None:
        reader, _ = await port.connect(head + b"\r\n" + body)
        told = await reader.read()
        assert told.split()[1] == status
        assert (BODY in told) is (status == b"200")
        assert told.count(b"HTTP/1.1 ") == 1

    play_engine(Bounds(receive_s=60, most=4, most_of_peer=4, may_cut=False), scenario, echoes)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://x/v1/models?a=1", b"/v1/models?a=1"),
        (b"HTTPS://other:8000/v1/models", b"/v1/models?"),
        (b"http://x", b"/?"),
        (b"http://x?a=http://y/z", b"/?a=http://y/z"),
        (b"/http://x/y", b"/http://x/y?"),
        (b"*", b"*?"),
    ],
)
def test_a_target_may_be_a_whole_url(target: bytes, path: bytes):
    """As proxies are asked; servers must take it, too (RFC 9112, 3.2.2). It was 404."""

    async def scenario(port: Port) -> None:
        reader, _ = await port.connect(b"GET " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"\r\n" + path + b" \r\n" in (await reader.read())

    play_engine(Bounds(receive_s=60, most=4, most_of_peer=4, may_cut=False), scenario, echoes)


@pytest.mark.parametrize(
    ("sent", "then", "status"),
    [
        pytest.param(b"GET /live HTTP/1.1\r\nhost: x\r\n" + CHUNKED + b"\r\nzz\r\n", b"", 400, id="before-the-answer"),
        pytest.param(b"GET /live HTTP/1.1\r\nhost: x\r\n" + CHUNKED + b"\r\n", b"zz\r\n", 200, id="behind-the-answer"),
        pytest.param(b"GET /drain HTTP/1.1\r\nhost: x\r\n" + CHUNKED + b"\r\nzz\r\n", b"", 400, id="while-it-is-worked-at"),
        pytest.param(b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", b"", 200, id="upgrade"),
    ],
)
def test_bodies_that_are_no_http_fill_no_log(
    sent: bytes, then: bytes, status: int, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    """Incident: 27 to 39 lines of traceback for each, by anybody who reached the port: the application answered over the 400, or
    the 400 was said over its answer. Clients that ask for HTTP/2 on the way (Java's) made two lines with every request."""

    async def go() -> None:
        probes = Probes()
        async with serving(build_server(build_app(probes), HOST, 0)) as port:  # type: ignore[arg-type]
            for _ in range(3):
                reader, writer = await port.connect(sent)
                assert int((await reader.readuntil(b"\r\n\r\n")).split()[1]) == status
                writer.write(then)
                if then:
                    await asyncio.wait_for(reader.read(), 5)
                writer.close()
            probes.empty.set()
            assert await port.status("/live") == 200

    asyncio.run(go())
    told = [*capsys.readouterr().err.splitlines(), *(record.getMessage() for record in caplog.records)]
    assert [line for line in told if "Invalid HTTP" not in line] == []
