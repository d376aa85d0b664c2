"""What waits parsed, what waits behind an error, and clients that read slowly but do read."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest

from fleet_router.config import HttpBounds
from fleet_router.inbound import SLICE_BYTES
from fleet_router.receiving import FREE_BYTES, WAITING_BYTES
from tests.fleet_router.fake_worker import stream
from tests.fleet_router.rig import CONFIG, Rig, answer_of, http, run, until
from tests.fleet_router.test_connections import HEALTH, SHORT, Gate

WIDE = msgspec.structs.replace(CONFIG, bounds=HttpBounds())
HASTY = msgspec.structs.replace(CONFIG, bounds=HttpBounds(stalled_client_s=0.6))


def test_bodies_of_whole_requests_that_wait_are_few_bytes_or_counted():
    """15 requests with 20 KB each were parsed behind one that ran: 300 KB of every connection that nobody counted."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = gate = Gate()
        many = 12
        reader, _, connection = await rig.connect()
        packet = http(SHORT) + http(b"x" * 20_000, path="/nope") * many
        connection.data_received(packet)  # one packet, as the loop reads 256 KB at once
        assert connection.flow is not None
        parsed = sum(len(piece) for request in connection._inbound.requests for piece in request.body)
        assert parsed <= FREE_BYTES + SLICE_BYTES
        assert rig.context.unread.bytes >= len(packet) - FREE_BYTES - 2 * SLICE_BYTES
        gate.open.set()
        assert (await answer_of(reader))[0] == 200
        assert [(await answer_of(reader))[0] for _ in range(many)] == [404] * many
        assert rig.context.unread.bytes == 0

    run(go, config=WIDE)


def test_who_sends_on_behind_an_error_is_not_read_for_ever():
    """While an answer before the error ran, everything that came was read and thrown away, however much."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = gate = Gate()
        reader, writer, connection = await rig.connect()
        writer.write(http(SHORT) + b"NONSENSE\r\n\r\n")
        await until(lambda: connection.flow is not None and connection._inbound.error is not None)
        transport: Any = connection._transport
        for _ in range(40):
            writer.write(b"x" * WAITING_BYTES)
            await asyncio.sleep(0.001)
        await until(lambda: not transport.is_reading())
        assert rig.context.unread.bytes == len(connection._waiting) > 0
        gate.open.set()
        assert (await answer_of(reader))[0] == 200
        assert (await answer_of(reader))[0] == 400
        await until(lambda: rig.context.unread.bytes == 0)

    run(go, config=WIDE)


def test_nothing_is_kept_of_what_comes_behind_the_last_request():
    """What waited was dropped only where nothing behind the last request was parsed: else it was held and counted as long as the
    connection lingered."""

    async def go(rig: Rig) -> None:
        _, _, connection = await rig.connect()
        rig.context.draining = True  # the next answer is the last one
        connection.data_received(HEALTH * 4_000)
        assert connection._closed_at is not None
        assert connection._lingering is not None
        assert (len(connection._waiting), rig.context.unread.bytes) == (0, 0)

    run(go, config=WIDE)


@pytest.mark.parametrize("more", [b"", b"connection: close\r\n"], ids=["keeps", "closes"])
def test_who_reads_slowly_but_does_read_gets_the_whole_answer(more: bytes):
    """It was aborted so long after its answer was written, although it took some of it all the time."""

    async def go(rig: Rig) -> None:
        size = 400_000
        rig.server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8_192)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8_192)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", rig.port))
            await until(lambda: bool(rig.connections))
            (connection,) = rig.connections
            connection._plain = lambda _path: (200, b"text/plain", b"x" * size)
            await loop.sock_sendall(client, HEALTH.replace(b"\r\n\r\n", b"\r\n" + more + b"\r\n"))
            got = b""
            while len(got) < size:
                await asyncio.sleep(0.02)
                piece = await loop.sock_recv(client, 4_096)
                assert piece, f"cut after {len(got)} bytes"
                got += piece
                rig.sweep()
        await until(lambda: not rig.connections)

    run(go, config=HASTY)


@pytest.mark.parametrize("reads_on", [True, False])
def test_who_reads_slowly_gets_the_whole_stream_while_its_worker_speaks(reads_on: bool):
    """Who took less than 48 KB in a minute was cut off in the middle: each event is worked on before the next one is read."""
    words = ["x" * 2_000] * 150

    async def go(rig: Rig) -> None:
        async def says_much(_: Any, writer: asyncio.StreamWriter) -> bool:
            await stream(writer, words)
            return True

        rig.decode[0].behave = says_much
        now = rig.context.clock()
        rig.context.clock = lambda: now
        rig.server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8_192)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8_192)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", rig.port))
            await loop.sock_sendall(client, http(SHORT | {"stream": True}))
            await until(lambda: any(one._unread for one in rig.connections))
            got = b""
            while b"[DONE]" not in got and (reads_on or rig.connections):
                now += 2.0
                if reads_on:
                    piece = await loop.sock_recv(client, 1_024)
                    assert piece, f"cut after {len(got)} bytes"
                    got += piece
                await asyncio.sleep(0.002)
                rig.sweep()
        assert got.count(b"x" * 2_000) == (len(words) if reads_on else 0)

    run(go, config=WIDE)


def test_who_reads_no_more_of_an_answer_is_not_waited_for():
    async def go(rig: Rig) -> None:
        _, writer, connection = await rig.connect()
        connection._plain = lambda _path: (200, b"text/plain", b"x" * 20_000_000)
        writer.transport.pause_reading()
        writer.write(HEALTH)
        await until(lambda: connection._unread)
        for _ in range(20):
            await asyncio.sleep(0.05)
            rig.sweep()
            if not rig.connections:
                return
        raise AssertionError("it was waited for")

    run(go, config=HASTY)
