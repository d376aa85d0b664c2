"""Client connections over their life: several requests, closed halves, slow readers, and the router's own end."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import msgspec
import pytest

from fleet_router.inbound import Inbound
from fleet_router.port import Port
from fleet_router.receiving import WAITING_BYTES
from fleet_router.server import DRAIN_IDLE_S
from fleet_wire.endpoints import AtZero, Endpoints
from tests.fleet_router.fake_worker import answer, stream
from tests.fleet_router.rig import BOUNDS, CONFIG, Rig, answer_of, ask, http, run, until

SHORT = ask(prompt="short")
HEALTH = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"


class Gate:
    """A worker's behaviour: answers when opened."""

    def __init__(self) -> None:
        self.started, self.open = asyncio.Event(), asyncio.Event()

    async def __call__(self, body: Any, writer: asyncio.StreamWriter) -> bool:
        self.started.set()
        await self.open.wait()
        if body.get("stream"):
            await stream(writer, ["late"])
        else:
            answer(writer, 200, {"choices": [{"text": "late"}]})
        return True


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the router closes."""
    return await asyncio.wait_for(reader.read(), 3)


# -- several requests on one connection ---------------------------------------------------------------------------------
@pytest.mark.parametrize("pieces", ["one packet", "one by one", "cut anywhere"])
def test_requests_that_follow_each_other_are_answered_in_order(pieces: str):
    async def go(rig: Rig) -> None:
        reader, writer, _ = await rig.connect()
        sent = b"".join(http(ask(prompt=f"p{n}", max_tokens=n), f"x-request-id: r{n}") for n in (1, 2, 3)) + HEALTH
        size = {"one packet": len(sent), "one by one": len(sent) // 4, "cut anywhere": 7}[pieces]
        for at in range(0, len(sent), size):
            writer.write(sent[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
        got = [await answer_of(reader) for _ in range(4)]
        assert [(status, headers["x-request-id"]) for status, headers, _ in got[:3]] == [(200, "r1"), (200, "r2"), (200, "r3")]
        assert got[3][2] == b"ok\n"
        assert [body["max_tokens"] for body in rig.decode[0].seen] == [1, 2, 3]

    run(go)


def test_a_bad_request_behind_a_good_one_is_answered_after_it():
    async def go(rig: Rig) -> None:
        reader, writer, _ = await rig.connect()
        writer.write(http(SHORT) + b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n" + HEALTH)
        assert (await answer_of(reader))[0] == 200
        status, headers, body = await answer_of(reader)
        assert (status, headers["connection"], b"Host header" in body) == (400, "close", True)
        assert await closed(reader) == b""

    run(go)


def test_a_packet_full_of_requests_that_are_refused_at_once_does_not_recurse():
    async def go(rig: Rig) -> None:
        reader, writer, _ = await rig.connect()
        writer.write(http({"model": "m", "prompt": "a"}) * 1500)
        for _ in range(1500):
            assert (await answer_of(reader))[0] == 503

    run(go, prefill=1, decode=0)


def test_what_waits_behind_a_running_request_is_bounded():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = gate = Gate()
        reader, writer, connection = await rig.connect()
        writer.write(http(SHORT))
        await gate.started.wait()
        many = 40_000
        writer.write(HEALTH * many)
        await until(lambda: len(connection._waiting) > WAITING_BYTES)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(connection._waiting) < WAITING_BYTES + 600_000  # one more read
        gate.open.set()
        for _ in range(many + 1):
            assert (await answer_of(reader))[0] == 200

    run(go)


def test_answers_that_nobody_reads_are_not_made():
    async def go(rig: Rig) -> None:
        made = 0

        def plain(_: bytes) -> tuple[int, bytes, bytes]:
            nonlocal made
            made += 1
            return 200, b"text/plain", b"x" * 100_000

        reader, writer, connection = await rig.connect()
        connection._plain = plain
        writer.write(HEALTH * 2000)
        await until(lambda: connection._unread)
        for _ in range(200):
            await asyncio.sleep(0)
        assert made < 200
        for _ in range(2000):
            assert len((await answer_of(reader))[2]) == 100_000

    run(go)


def test_expect_is_answered_when_the_body_is_waited_for():
    async def go(rig: Rig) -> None:
        reader, writer, _ = await rig.connect()
        request = http(SHORT, "expect: 100-continue")
        head, _, body = request.partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body + request)
        assert (await answer_of(reader))[0] == 200
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")

    run(go)


@pytest.mark.parametrize(
    ("line", "status", "allow"),
    [
        ("HEAD /v1/completions", 405, "POST"),
        ("HEAD /nowhere", 404, None),
        ("HEAD /v1/models", 200, None),
        ("PUT /ready", 405, "GET, HEAD"),
    ],
)
def test_head_has_no_body_and_405_says_what_is_allowed(line: str, status: int, allow: str | None):
    async def go(rig: Rig) -> None:
        reader, writer, _ = await rig.connect()
        writer.write(f"{line} HTTP/1.1\r\nhost: h\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert [line.split(": ")[1].upper() for line in lines if line.startswith("allow:")] == ([allow] if allow else [])
        if line.startswith("HEAD"):
            writer.write(HEALTH)
            assert (await answer_of(reader))[2] == b"ok\n"

    run(go)


# -- half-closed ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_sends_no_more_gets_its_answers(streamed: bool):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = gate = Gate()
        reader, writer, connection = await rig.connect()
        writer.write(http({**SHORT, "stream": streamed}) + HEALTH)
        writer.write_eof()
        await gate.started.wait()
        await until(lambda: connection._half_closed)
        rig.sweep()
        gate.open.set()
        got = await closed(reader)
        assert (b"late" in got, got.endswith(b"ok\n")) == (True, True)

    run(go)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_has_begun_is_whole_for_a_client_that_sends_no_more(streamed: bool):
    async def go(rig: Rig) -> None:
        going, go_on = asyncio.Event(), asyncio.Event()

        async def slowly(_: Any, writer: asyncio.StreamWriter) -> bool:
            kind = b"text/event-stream" if streamed else b"application/json"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % kind)
            parts = [b'data: {"n":%d}\n\n' % n for n in range(3)] if streamed else [b'{"n":[0', b",1", b",2]}"]
            for part in parts:
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                going.set()
                await go_on.wait()
            writer.write(b"0\r\n\r\n")
            return True

        rig.decode[0].behave = slowly
        reader, writer, connection = await rig.connect()
        writer.write(http({**SHORT, "stream": streamed}))
        await going.wait()
        writer.write_eof()
        await until(lambda: connection._half_closed)
        rig.sweep()
        go_on.set()
        got = await closed(reader)
        assert got.count(b"HTTP/1.1 200 ") == 1
        assert (b"0" in got, b"1" in got, b"2" in got, got.endswith(b"\r\n0\r\n\r\n")) == (True, True, True, True)

    run(go)


WHOLE = http(SHORT)


@pytest.mark.parametrize(
    ("sent", "statuses", "kind"),
    [
        (b"GE", [400], "openai"),
        (HEALTH[:-2], [400], "openai"),
        (WHOLE[:-5], [400], "openai"),
        (b"POST /v1/messages HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{", [400], "anthropic"),
        (HEALTH + WHOLE[:-5], [200, 400], "openai"),
        (WHOLE + HEALTH[:-2], [200, 400], "openai"),
        (WHOLE, [200], ""),
        (HEALTH, [200], ""),
        (b"", [], ""),
    ],
    ids=["method", "head", "body", "chunks", "behind-a-short-one", "behind-one-that-runs", "whole", "short", "nothing"],
)
def test_half_a_request_is_told_that_it_ended_early(sent: bytes, statuses: list[int], kind: str):
    async def go(rig: Rig) -> None:
        reader, writer, _ = await rig.connect()
        writer.write(sent)
        writer.write_eof()
        for status in statuses:
            found, headers, body = await answer_of(reader)
            assert found == status
            if status == 400:
                error = json.loads(body)["error"]
                assert (headers["connection"], "ended early" in error["message"]) == ("close", True)
                assert error.get("reason") == ("ended_early" if kind == "openai" else None)
        assert await closed(reader) == b""

    run(go)


def test_what_a_client_sent_before_it_closed_its_half_is_answered_when_it_reads_on():
    async def go(rig: Rig) -> None:
        reader, writer, connection = await rig.connect()
        connection.pause_writing()
        writer.write(HEALTH + HEALTH[:-2])
        writer.write_eof()
        await until(lambda: connection._half_closed)
        rig.sweep()
        connection.resume_writing()
        assert [(await answer_of(reader))[0] for _ in range(2)] == [200, 400]
        assert await closed(reader) == b""

    run(go)


def test_a_half_closed_client_is_bounded_by_the_deadlines_of_any_request():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = gate = Gate()
        reader, writer, connection = await rig.connect()
        writer.write(http({**SHORT, "stream": True}))
        writer.write_eof()
        await gate.started.wait()
        await until(lambda: connection._half_closed)
        rig.sweep(CONFIG.first_token_deadline_s + 1)
        assert b" 504 " in await closed(reader)

    run(go)


# -- slow readers -----------------------------------------------------------------------------------------------------------
async def stalled(rig: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]:
    """A client whose buffers are full while its stream goes on."""
    loop = asyncio.get_running_loop()
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    await loop.sock_connect(made, ("127.0.0.1", rig.port))
    reader, writer = await asyncio.open_connection(sock=made, limit=1024)
    rig.writers.append(writer)
    await until(lambda: len(rig.connections) == 1)
    (connection,) = rig.connections
    writer.write(http({**SHORT, "stream": True}))
    await until(lambda: connection._unread, 20)
    return reader, writer, connection


async def endless(_: Any, writer: asyncio.StreamWriter) -> bool:
    await stream(writer, ["x" * 60_000] * 200)
    return True


def test_a_client_that_reads_late_is_no_fault_of_the_worker():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = endless
        reader, writer, connection = await stalled(rig)
        rig.sweep(CONFIG.inter_token_deadline_s + 1)
        assert connection.flow is not None  # the worker is not silent: we do not listen
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            got += await reader.read(1 << 20)
        assert b"[DONE]" in got
        assert [w.breaker.failures for w in rig.context.table.workers.values()] == [0, 0]

    run(go, config=msgspec.structs.replace(CONFIG, bounds=msgspec.structs.replace(BOUNDS, stalled_client_s=100.0)))


def test_a_client_that_never_reads_is_dropped_and_nobody_blamed():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = endless
        _, _, connection = await stalled(rig)
        rig.sweep(BOUNDS.stalled_client_s + 1)
        await until(lambda: connection not in rig.connections)
        assert [w.breaker.failures for w in rig.context.table.workers.values()] == [0, 0]
        assert rig.context.metrics.client_left == 1

    run(go)


@pytest.mark.parametrize("waits", ["for its answer", "for a slot", "for workers"])
def test_a_client_that_reads_late_shortens_no_deadline_of_its_next_request(waits: str):
    """Incident: the answer before was still being read when the next request began: it got the deadline of a stream's next token,
    and a whole answer, a place in the queue or the wait for workers ended with a 504 after 30 s."""

    async def go(rig: Rig) -> None:
        free = asyncio.Event()

        async def slow(_: Any, writer: asyncio.StreamWriter) -> bool:
            await free.wait()
            return False

        rig.decode[0].behave = slow
        if waits == "for workers":
            rig.context.holding.at_zero = (AtZero(tier="t"),)
            rig.context.table.update(Endpoints(fleet="f", namespace="n", workers=()))
        if waits == "for a slot":
            _, other, _ = await rig.connect()
            other.write(http(SHORT))
            await until(lambda: len(rig.decode[0].seen) == 1)
        reader, writer, connection = await rig.connect()
        writer.write(http({**SHORT, "max_tokens": 1000}))
        await until(lambda: connection.flow is not None)
        flow = connection.flow
        if waits == "for its answer":
            await until(lambda: len(rig.decode[0].seen) == 1)
        before = flow.deadline
        connection.pause_writing()
        assert flow.deadline <= rig.context.clock() + BOUNDS.stalled_client_s
        connection.resume_writing()
        assert flow.deadline == before or before <= flow.deadline < before + 1
        free.set()
        if waits == "for workers":
            rig.apply([], rig.decode, config)
        assert (await answer_of(reader))[0] == 200

    config = msgspec.structs.replace(CONFIG, worker_slots=1)
    run(go, prefill=0, config=config)


# -- drain ------------------------------------------------------------------------------------------------------------------
def test_a_draining_routers_answers_are_the_last_of_their_connections():
    async def go(rig: Rig) -> None:
        rig.context.draining = True
        for request in (http(SHORT), http({**SHORT, "model": "other"}), HEALTH, http({**SHORT, "n": 1}, path="/none")):
            reader, writer, _ = await rig.connect()
            writer.write(request + request)
            _, headers, _ = await answer_of(reader)
            assert headers["connection"] == "close"
            assert await closed(reader) == b""
            assert len(rig.decode[0].seen) == 1

    run(go)


def test_a_stream_in_a_drain_says_that_it_is_the_last():
    async def go(rig: Rig) -> None:
        rig.context.draining = True
        reader, writer, _ = await rig.connect()
        writer.write(http({**SHORT, "stream": True}))
        got = await closed(reader)
        assert (b"\r\nconnection: close\r\n" in got, got.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")) == (True, True)

    run(go)


def test_what_runs_or_is_half_received_when_a_drain_begins_is_answered():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = gate = Gate()
        half = http(SHORT)
        one, two = await rig.connect(), await rig.connect()
        one[1].write(half)
        await gate.started.wait()
        two[1].write(half[:-5])
        await until(lambda: two[2].begun_at is not None)
        since = rig.context.clock() - 10
        rig.context.draining = True
        rig.router.drain_step(since)
        gate.open.set()
        assert (await answer_of(one[0]))[0] == 200
        two[1].write(half[-5:])
        assert (await answer_of(two[0]))[0] == 200

    run(go)


def test_an_idle_connection_is_closed_when_no_request_can_be_on_its_way():
    async def go(rig: Rig) -> None:
        reader, _, connection = await rig.connect()
        rig.context.draining = True
        now = rig.context.clock()
        connection.idle_since = now - 30
        connection.drain(now + DRAIN_IDLE_S / 2, now)
        assert connection._closed_at is None
        connection.drain(now + DRAIN_IDLE_S * 1.1, now)
        assert await closed(reader) == b""

    run(go)


def test_who_is_still_there_when_the_drain_is_over_is_told():
    async def go(rig: Rig) -> None:
        async def begins(body: Any, writer: asyncio.StreamWriter) -> bool:
            if not body.get("stream"):
                return False
            await stream(writer, ["a"], end=False)
            return True

        gate = Gate()
        rig.prefill[0].behave, rig.decode[0].behave = gate, begins
        clients = [await rig.connect() for _ in range(3)]
        for (_, writer, _), request in zip(
            clients, (http(ask()), http({**SHORT, "stream": True}), http(SHORT)[:-3]), strict=True
        ):
            writer.write(request)
        await gate.started.wait()
        assert b'"a"' in await clients[1][0].readuntil(b"\n\n")
        await until(lambda: clients[2][2].begun_at is not None)
        rig.context.draining = True
        for connection in list(rig.connections):
            connection.cut()
        for reader in (clients[0][0], clients[2][0]):
            status, headers, body = await answer_of(reader)
            assert (status, headers["connection"], json.loads(body)["error"]["code"]) == (503, "close", "shutting_down")
        rest = await closed(clients[1][0])
        assert (b"shutting down" in rest, b"[DONE]" in rest) == (True, False)
        await until(lambda: rig.prefill[0].released == rig.prefill[0].request_ids[:1])
        gate.open.set()

    run(go)


def test_connections_that_the_kernel_took_before_the_listener_closed_are_served():
    async def go(rig: Rig) -> None:
        port = Port("127.0.0.1", 0, rig.router.connection)
        await port.open(None)
        (address,) = port.addresses
        clients = []
        for _ in range(20):  # nothing is accepted before the loop runs again
            client = socket.create_connection(address)
            client.sendall(HEALTH)
            client.setblocking(False)
            clients.append(client)
        await port.close()
        for client in clients:
            reader, writer = await asyncio.open_connection(sock=client)
            rig.writers.append(writer)
            assert (await answer_of(reader))[2] == b"ok\n"

    run(go)


@pytest.mark.parametrize("head", [b"GET /health HTTP/1.1\r\nhost: h\r\nx: ", b"GET /health HTTP/1.1\r\nx"])
def test_h1_a_field_that_does_not_end_is_not_kept_for_ever(head: bytes):
    """The parser tells of a field when it is whole: until then its bytes are counted as they come."""
    inbound = Inbound()
    inbound.feed(head, BOUNDS)
    pieces = 0
    while inbound.error is None:
        inbound.feed(b"a" * 10_000, BOUNDS)
        pieces += 1
    assert inbound.error.status == 431
    assert pieces * 10_000 <= BOUNDS.header_bytes + BOUNDS.url_bytes + 20_000
