"""Clients that send and do not read: what they can make one router process hold, with and without a key."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import tracemalloc
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.config import HttpBounds
from fleet_router.inbound import AHEAD_BYTES, AHEAD_MOST, SLICE_BYTES, Inbound
from fleet_router.receiving import (
    FREE_BYTES,
    HIGH_WATER_BYTES,
    TURN_MOST,
    WAITING_BYTES,
    WAITING_SHARE,
    Receiving,
    Waiting,
)
from tests.fleet_router.admission.made import key_of, parsed
from tests.fleet_router.rig import CONFIG, Rig, answer_of, ask, http, run, until
from tests.fleet_router.test_connections import SHORT, Gate

KEY = f"authorization: Bearer {key_of('acme')}"
NOWHERE = b"GET /nope HTTP/1.1\r\nhost: h\r\n\r\n"
PACKET_BYTES = 256_000
"""What the loop reads at once."""
BOUNDS = HttpBounds()


def sent(body: bytes, chunk: int) -> bytes:
    """One request; `chunk`: bytes of each, 0 for a body that says how long it is."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\n"
    if not chunk:
        return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    pieces = [body[at : at + chunk] for at in range(0, len(body), chunk)]
    return (
        head
        + b"transfer-encoding: chunked\r\n\r\n"
        + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces)
        + b"0\r\n\r\n"
    )


def read_all(inbound: Inbound, packet: bytes) -> list[bytes]:
    """Bodies of a packet's requests, taken as the server takes them."""
    found, rest = list[bytes](), packet
    while rest:
        fed = len(rest)
        rest = inbound.feed(rest, BOUNDS)
        assert inbound.error is None
        assert len(inbound.requests) < AHEAD_MOST + SLICE_BYTES // len(NOWHERE)
        assert not rest or len(inbound.requests) >= AHEAD_MOST or (inbound.requests and fed - len(rest) >= AHEAD_BYTES)
        found += [b"".join(one.body) for one in inbound.requests]
        inbound.requests.clear()
    return found


SIZES = st.one_of(st.integers(0, 40), st.integers(0, 3 * SLICE_BYTES), st.just(40_000))


@given(
    st.lists(st.tuples(SIZES, st.sampled_from([0, 0, 1, 900, 5_000])), max_size=60),
    st.lists(st.integers(1, PACKET_BYTES), max_size=6),
)
def test_requests_are_the_same_however_they_are_packed_and_sliced(made: list[tuple[int, int]], cuts: list[int]):
    bodies = [bytes([65 + number % 26]) * size for number, (size, _) in enumerate(made)]
    stream = b"".join(sent(body, chunk) for body, (_, chunk) in zip(bodies, made, strict=True))
    inbound, found, at = Inbound(), list[bytes](), 0
    for cut in [*cuts, len(stream)]:
        found += read_all(inbound, stream[at : at + cut])
        at += cut
    assert found == bodies
    assert inbound.current is None


def test_a_packet_full_of_requests_takes_little_more_than_its_bytes():
    """All were parsed: 8,000 requests held ten times their bytes while nobody read the answers."""
    inbound, packet = Inbound(), NOWHERE * (PACKET_BYTES // len(NOWHERE))
    tracemalloc.start()
    try:
        rest = inbound.feed(packet, BOUNDS)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(rest) > PACKET_BYTES - 2 * SLICE_BYTES
    assert held < len(packet) + 200_000, held


def test_a_long_body_is_parsed_in_two_pieces():
    """The slice with its head, and all that is left: a slice costs a call of the parser."""
    inbound = Inbound()
    assert inbound.feed(sent(b"x" * 200_000, 0) + NOWHERE, BOUNDS) == NOWHERE
    assert [len(one.body) for one in inbound.requests] == [2]


def test_waiting_bytes_are_counted_until_they_are_taken():
    receiving = Receiving()
    one, two = Waiting(receiving), Waiting(receiving)
    most = 3 * FREE_BYTES * WAITING_SHARE
    assert one.add(b"x" * 2 * FREE_BYTES, most)
    assert two.add(b"y" * FREE_BYTES, most)
    assert (receiving.bytes, len(one), bool(two)) == (3 * FREE_BYTES, 2 * FREE_BYTES, True)
    assert not two.add(b"y", most)
    assert (receiving.bytes, receiving.refused, len(two), bool(two)) == (2 * FREE_BYTES, 1, 0, False)
    assert one.take() == b"x" * 2 * FREE_BYTES
    assert (receiving.bytes, one.take()) == (0, b"")
    one.put_back(b"x" * 10)
    assert (receiving.bytes, len(one)) == (10, 10)


def test_a_client_without_a_key_that_reads_nothing_is_not_worked_for_and_not_waited_for():
    """1.2 MB each, counted by nobody, until the connection was idle for 75 s: 2.4 GB of 2,048 of them."""

    async def go(rig: Rig) -> None:
        rig.context.desk.tenants_needed = True
        _, writer, connection = await rig.connect()
        writer.write(NOWHERE * 200_000)
        await until(lambda: connection._unread, 20)
        for _ in range(50):
            await asyncio.sleep(0)
        transport: Any = connection._transport
        assert len(connection._inbound.requests) <= AHEAD_MOST + SLICE_BYTES // len(NOWHERE)
        assert transport.get_write_buffer_size() < HIGH_WATER_BYTES + 20_000
        assert 0 < len(connection._waiting) < WAITING_BYTES + PACKET_BYTES + SLICE_BYTES
        assert rig.context.unread.bytes == len(connection._waiting)
        assert rig.context.receiving.bytes == 0  # there is room for those who have a key
        rig.sweep(BOUNDS.stalled_client_s - 1)
        assert connection in rig.connections
        rig.sweep(BOUNDS.stalled_client_s + 1)
        await until(lambda: not rig.connections)
        assert rig.context.unread.bytes == 0

    run(go)


def test_a_client_that_reads_after_a_while_gets_every_answer():
    async def go(rig: Rig) -> None:
        many = 30_000
        reader, writer, connection = await rig.connect()
        writer.write(NOWHERE * many + http(SHORT))
        await until(lambda: connection._unread, 20)
        for _ in range(many):
            assert (await answer_of(reader))[0] == 404
        assert (await answer_of(reader))[0] == 200
        assert rig.context.unread.bytes == 0

    run(go)


NARROW = msgspec.structs.replace(CONFIG, bounds=HttpBounds(receiving_bytes=2 * FREE_BYTES * WAITING_SHARE))


def test_what_waits_behind_requests_that_run_has_a_bound_for_all_connections():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = gate = Gate()
        unread, clients = rig.context.unread, [await rig.connect() for _ in range(3)]
        for _, writer, _ in clients:
            writer.write(http(SHORT))
        await gate.started.wait()
        await until(lambda: all(connection.flow is not None for _, _, connection in clients))
        for number, (_, writer, connection) in enumerate(clients):
            writer.write(NOWHERE * ((FREE_BYTES if number < 2 else FREE_BYTES + 40_000) // len(NOWHERE)))
            await until(lambda connection=connection: len(connection._waiting) > FREE_BYTES - 100 or unread.refused > 0)
        await until(lambda: unread.refused == 1)
        assert unread.bytes == sum(len(connection._waiting) for _, _, connection in clients) <= 2 * FREE_BYTES
        gate.open.set()
        assert (await answer_of(clients[0][0]))[0] == 200
        assert (await answer_of(clients[0][0]))[0] == 404
        reader = clients[2][0]
        assert (await answer_of(reader))[0] == 200  # what ran is not touched
        status, headers, body = await answer_of(reader)
        assert (status, headers["connection"], json.loads(body)["error"]["code"]) == (503, "close", "receiving")
        await until(lambda: unread.bytes == 0)
        assert "fleet_router_unread_refused_total 1" in list(unread.lines())

    run(go, config=NARROW)


WIDE = msgspec.structs.replace(CONFIG, bounds=BOUNDS)
HALF = http(ask(prompt="x" * 100_000))[:90_000]


def with_tenants(rig: Rig) -> None:
    rig.context.desk.tenants_needed = True
    rig.context.desk.know(parsed(acme={}))


@pytest.mark.parametrize("packets", [1, 2, 30])
@pytest.mark.parametrize("header", [b"x-a: b", b"authorization: Bearer nobodys"], ids=["none", "unknown"])
def test_of_whom_nobody_knows_no_body_is_kept(header: bytes, packets: int):
    """64 connections without a key held the room of all bodies that come in part, and renewed it every 30 s."""

    async def go(rig: Rig) -> None:
        with_tenants(rig)
        reader, writer, connection = await rig.connect()
        half = HALF.replace(b"\r\n", b"\r\n%b\r\n" % header, 1)
        size = -(-len(half) // packets)
        for at in range(0, len(half), size):
            writer.write(half[at : at + size])
            await asyncio.sleep(0.001)
        status, headers, body = await answer_of(reader)
        assert (status, headers["connection"], json.loads(body)["error"]["code"]) == (401, "close", "invalid_api_key")
        assert headers["www-authenticate"] == "Bearer"
        assert (rig.context.receiving.bytes, rig.context.desk.refused_keys) == (0, 1)
        assert rig.context.metrics.requests[401] == 1
        assert not connection._request.body

    run(go, config=WIDE)


def test_a_body_with_a_key_is_read_however_it_comes():
    async def go(rig: Rig) -> None:
        with_tenants(rig)
        reader, writer, _ = await rig.connect()
        whole = http(ask(prompt="short"), KEY)
        for at in range(0, len(whole), 7):
            writer.write(whole[at : at + 7])
            await asyncio.sleep(0.001)
        assert (await answer_of(reader))[0] == 200

    run(go)


@pytest.mark.parametrize(("header", "said"), [(KEY, b"HTTP/1.1 100 Continue"), ("x-a: b", b"HTTP/1.1 401 Unauthorized")])
def test_who_asks_before_sending_is_told_at_once_whether_the_key_is_known(header: str, said: bytes):
    async def go(rig: Rig) -> None:
        with_tenants(rig)
        reader, writer, _ = await rig.connect()
        writer.write(http(ask(prompt="short"), header, "expect: 100-continue").partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 3)).strip() == said

    run(go)


def test_the_port_for_probes_reads_no_body():
    async def go(rig: Rig) -> None:
        reader, writer, connection = await rig.connect()
        connection._admin = True
        writer.write(HALF)
        status, headers, _ = await answer_of(reader)
        assert (status, headers["connection"], rig.context.receiving.bytes) == (404, "close", 0)

    run(go, config=WIDE)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nope"])
def test_of_a_body_that_nobody_looks_at_nothing_is_kept(path: str):
    """A GET may have one, which needs no key, and comes when it comes."""

    async def go(rig: Rig) -> None:
        reader, writer, connection = await rig.connect()
        whole = http(b"x" * 200_000, path=path, method="GET")
        writer.write(whole[:100_000])
        await until(lambda: connection._inbound.looked_at)
        writer.write(whole[100_000:190_000])
        await until(lambda: connection._inbound._body_bytes > 189_000)
        current = connection._inbound.current
        assert current is not None
        assert (current.body, rig.context.receiving.bytes) == ([], 0)
        writer.write(whole[190_000:] + http(SHORT))
        assert (await answer_of(reader))[0] == (404 if path == "/nope" else 200)
        assert (await answer_of(reader))[0] == 200
        assert rig.decode[0].seen[-1]["prompt"] == SHORT["prompt"]

    run(go, config=WIDE)


def test_a_body_that_nobody_looks_at_has_the_usual_bound():
    async def go(rig: Rig) -> None:
        reader, writer, _ = await rig.connect()
        writer.write(b"POST /nope HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(5):
            writer.write(b"100000\r\n%b\r\n" % bytes(0x100000))
        assert (await answer_of(reader))[0] == 413

    run(go, config=WIDE)


@pytest.mark.parametrize("size", [512, 513, 60_000])
def test_a_key_that_is_too_long_is_nobodys_and_not_kept(size: int):
    inbound = Inbound()
    inbound.feed(b"GET /v1/models HTTP/1.1\r\nhost: h\r\nx-api-key: %b\r\n\r\n" % (b"k" * size), BOUNDS)
    assert len(inbound.requests[0].key) == min(size, 513)
    inbound.feed(b"GET /v1/models HTTP/1.1\r\nhost: h\r\nx-slo-class: %b\r\n\r\n" % (b"k" * size), BOUNDS)
    assert len(inbound.requests[1].slo_class) == 254


def test_a_packet_full_of_requests_is_answered_in_turns():
    """9,000 requests of one packet were answered in one turn of the loop: everybody else waited for 75 ms."""

    async def go(rig: Rig) -> None:
        reader, writer, connection = await rig.connect()
        turns = list[int]()

        async def others() -> None:
            while True:
                turns.append(rig.context.metrics.requests[404])
                await asyncio.sleep(0)

        other = asyncio.ensure_future(others())
        connection.data_received(NOWHERE * 4_000 + http(SHORT))
        connection.data_received(NOWHERE)  # behind those that are not answered yet
        statuses = [(await answer_of(reader))[0] for _ in range(4_002)]
        other.cancel()
        assert statuses == [404] * 4_000 + [200, 404]
        steps = [after - before for before, after in pairwise(turns)]
        assert max(steps) <= 2 * TURN_MOST
        writer.close()

    run(go)


def test_a_client_that_is_gone_is_found_though_nothing_more_is_read_from_it():
    """It was killed behind a silent stream, and what it had sent stayed counted until the stream's end."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = gate = Gate()
        _, writer, connection = await rig.connect()
        writer.write(http(SHORT) + NOWHERE * 6_000)
        await gate.started.wait()
        await until(lambda: len(connection._waiting) > WAITING_BYTES)
        rig.sweep()
        assert connection in rig.connections
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await asyncio.sleep(0.05)
        rig.sweep()
        await until(lambda: not rig.connections)
        assert rig.context.unread.bytes == 0
        await until(rig.idle)

    run(go)
