"""Ends of connections that no client may meet as a reset: its answer, or its next request, would be lost without a word."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import msgspec
import pytest

from tests.fleet_router.fake_worker import stream
from tests.fleet_router.rig import CONFIG, Rig, answer_of, ask, http, run, until

SHORT = ask(prompt="short")
HALF = b'{"choices": [{"text": "hel'
BY_LENGTH, IN_CHUNKS = b"content-length: 2000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"


async def breaks(_: Any, writer: asyncio.StreamWriter) -> bool:
    await stream(writer, ["a", "b"], end=False)
    writer.close()
    return True


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_behind_a_stream_that_broke_the_next_request_of_its_connection_is_answered(path: str):
    """Incident: the error event ended the body as any whole answer ends, without `connection: close`, and the router closed: a
    client that sent its next request in that moment got a reset (httpx.ReadError) for one that had nothing to do with it."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    asked = {"/v1/completions": {"prompt": "short"}, "/v1/messages": chat}

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = breaks
        reader, writer, connection = await rig.connect()
        writer.write(http({"model": "m", "stream": True, **asked[path]}, path=path))
        got = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 3)
        assert b"connection: close" not in got.lower()
        assert b"error" in got
        rig.decode[0].behave = None
        for worker in rig.context.table.workers.values():
            worker.breaker.succeeded()
        writer.write(http(SHORT))
        assert (await asyncio.wait_for(answer_of(reader), 3))[0] == 200
        assert connection in rig.connections

    run(go, prefill=0)


def test_behind_a_stream_that_broke_the_connection_ends_where_its_head_said_so():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = breaks
        reader, writer, connection = await rig.connect()
        writer.write(http(ask(prompt="short", stream=True), "connection: close"))
        assert (await asyncio.wait_for(reader.read(), 3)).endswith(b"0\r\n\r\n")
        await until(lambda: connection not in rig.connections)

    run(go, prefill=0)


def test_a_client_that_keeps_connections_meets_no_reset_behind_streams_that_break():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = breaks
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            for _ in range(200):
                url = f"http://127.0.0.1:{rig.port}"
                async with client.stream("POST", f"{url}/v1/completions", json=ask(prompt="short", stream=True)) as got:
                    await got.aread()
                assert (await client.get(f"{url}/health")).status_code == 200

    run(go, prefill=0)


@pytest.mark.parametrize("draining", [False, True])
def test_a_request_that_came_while_the_loop_was_busy_is_answered_by_an_idle_connection(draining: bool):
    """Timers run before sockets are read: the sweep took for idle what had a request in its socket."""

    async def go(rig: Rig) -> None:
        talk = socket.create_connection(("127.0.0.1", rig.port))
        await until(lambda: len(rig.connections) == 1)
        talk.sendall(http(SHORT, "connection: close"))  # and the loop has not looked
        if draining:
            (connection,) = rig.connections
            connection.drain(rig.context.clock() + 9, 0.0)
        else:
            rig.sweep(76)
        talk.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=talk)
        rig.writers.append(writer)
        assert (await asyncio.wait_for(answer_of(reader), 3))[0] == 200

    run(go)


def test_a_request_that_meets_the_end_of_an_idle_connection_finds_an_end_and_no_reset():
    """Clients ask again behind an end without a byte, some of them not behind a reset."""

    async def go(rig: Rig) -> None:
        reader, writer, _ = await rig.connect()
        rig.sweep(76)
        await until(reader.at_eof)  # the client has not looked yet
        writer.write(http(SHORT))
        await writer.drain()
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(reader.read(), 3) == b""
        talk: socket.socket = writer.get_extra_info("socket")
        assert talk.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        assert not writer.is_closing()  # by a reset

    run(go)


def test_who_sends_its_next_request_while_the_router_goes_reads_its_answer_whole():
    """The answer says `connection: close`, which the client could not know when it sent the next request: closed with that one
    unread the connection was reset, and with it went what of the answer was still on its way."""
    large = b'{"choices": [{"text": "' + b"x" * 3_000_000 + b'"}]}'

    async def go(rig: Rig) -> None:
        async def answers(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(large) + large)
            return True

        rig.decode[0].behave = answers
        reader, writer, connection = await rig.connect()
        rig.context.draining = True
        writer.write(http(SHORT))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 3)
        assert b"connection: close" in head
        body = b""
        while len(body) < len(large):
            if connection._closed_at is not None:
                writer.write(http(SHORT))
            body += await asyncio.wait_for(reader.read(20_000), 3)
        assert json.loads(body) == json.loads(large)
        assert await asyncio.wait_for(reader.read(), 3) == b""

    run(go, prefill=0)


# -- answers that come as a whole ---------------------------------------------------------------------------------------
DIES: dict[str, tuple[bytes, ...]] = {
    "behind the head": (BY_LENGTH,), "behind the head of chunks": (IN_CHUNKS,), "in the body": (BY_LENGTH + HALF,),
    "in its second part": (BY_LENGTH, HALF, b"lo"), "in a chunk": (IN_CHUNKS + b"1a\r\n" + HALF,),
    "between chunks": (IN_CHUNKS, b"1a\r\n" + HALF + b"\r\n"),
}  # fmt: skip


def dies(*parts: bytes) -> Any:
    async def behave(_: Any, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()
        return True

    return behave


@pytest.mark.parametrize("parts", DIES.values(), ids=DIES)
def test_an_answer_that_comes_as_a_whole_is_asked_for_elsewhere_when_its_worker_dies_in_its_middle(parts: tuple[bytes, ...]):
    """Its head went out as it came, and the client had a connection that broke (engines write head and body apart)."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = dies(*parts)
        for number in range(2):
            assert await rig.post(ask(prompt="short", max_tokens=number + 1)) == (200, b'{"choices": [{"text": "hello"}]}')
        assert [len(worker.seen) for worker in rig.decode] == [1, 2]
        assert rig.context.metrics.requests == {200: 2}
        assert rig.context.metrics.streams_broken == 0

    run(go, prefill=0, decode=2, config=msgspec.structs.replace(CONFIG, policy="roundRobin"))


def test_when_nobody_else_is_there_its_client_is_told_so():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = dies(BY_LENGTH + HALF)
        status, body = await rig.post(ask(prompt="short"))
        assert (status, b"closed the connection" in body) == (503, True)

    run(go, prefill=0)


def test_a_long_answer_goes_out_as_it_comes_and_ends_short_of_its_length():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = dies(b"content-length: 300000\r\n\r\n" + HALF + b"x" * 100_000)
        got = await rig.raw(http(SHORT))
        assert got.startswith(b"HTTP/1.1 200")
        assert len(got) > 100_000
        assert rig.context.metrics.streams_broken == 1

    run(go, prefill=0)


def test_an_answer_in_parts_comes_whole_and_as_it_was():
    """Also one that is longer than what is held, and one whose parts are many."""

    async def go(rig: Rig) -> None:
        for size, parts in ((100, 1), (20_000, 50), (300_000, 7), (65_536, 2), (1_000, 900)):
            whole = json.dumps({"choices": [{"text": "x" * size}]}).encode()
            step = -(-len(whole) // parts)

            async def behave(_: Any, writer: asyncio.StreamWriter, whole: bytes = whole, step: int = step) -> bool:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(whole))
                for at in range(0, len(whole), step):
                    await writer.drain()
                    await asyncio.sleep(0)
                    writer.write(whole[at : at + step])
                return True

            rig.decode[0].behave = behave
            assert await rig.post(SHORT) == (200, whole)

    run(go, prefill=0)


def test_a_cut_answer_of_which_nobody_was_told_is_a_refusal():
    """The drain is over while half of it is here."""

    async def go(rig: Rig) -> None:
        began = asyncio.Event()

        async def half(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\n" + BY_LENGTH + HALF)
            began.set()
            return True

        rig.decode[0].behave = half
        reader, writer, connection = await rig.connect()
        writer.write(http(SHORT))
        await began.wait()
        await until(lambda: connection.flow is not None and connection.flow.started)
        connection.cut()
        status, _, body = await asyncio.wait_for(answer_of(reader), 3)
        assert (status, b"shutting_down" in body) == (503, True)

    run(go, prefill=0)
