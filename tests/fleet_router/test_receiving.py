"""Bodies that have come in part have a bound together: whoever sends many slowly has shown no key yet."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.config import HttpBounds
from fleet_router.inbound import Inbound
from fleet_router.receiving import FREE_BYTES, PIECE_BYTES, PIECES_FEW, Receiving, fewer
from tests.fleet_router.rig import CONFIG, Rig, answer_of, ask, http, run, until

LARGE, MOST = 4 * FREE_BYTES, 10 * FREE_BYTES
BOUNDS = HttpBounds(body_bytes=LARGE, receiving_bytes=MOST)
WIDE = msgspec.structs.replace(CONFIG, bounds=BOUNDS, max_input_tokens=LARGE)


def head(size: int) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % size


def half(receiving: Receiving, size: int) -> Inbound:
    """A connection whose request has so much of its body."""
    inbound = Inbound(None, receiving)
    inbound.feed(head(LARGE), BOUNDS)
    inbound.feed(b"x" * size, BOUNDS)
    return inbound


@pytest.mark.parametrize(
    ("why", "there", "before", "now", "room"),
    [
        ("nothing else is there", 0, 0, MOST, True),
        ("one byte too many", 0, 0, MOST + 1, False),
        ("it grows beside others", MOST - 10, FREE_BYTES, FREE_BYTES + 11, False),
        ("as much as there is room for", MOST - 10, FREE_BYTES, FREE_BYTES + 10, True),
        ("a small one is always taken", 2 * MOST, 0, FREE_BYTES, True),
        ("it is over", 2 * MOST, LARGE, 0, True),
    ],
)
def test_room(why: str, there: int, before: int, now: int, room: bool):
    receiving = Receiving()
    receiving.bytes = there
    assert receiving.room(before, now, MOST) is room, why
    assert receiving.bytes == (there - before + now if room else there - before)
    assert receiving.refused == (0 if room else 1)


def test_the_one_that_grows_beyond_what_all_may_have_is_refused_and_nothing_of_it_is_kept():
    receiving = Receiving()
    others = [half(receiving, LARGE - 1) for _ in range(2)]
    last = half(receiving, FREE_BYTES)
    assert receiving.bytes == 2 * (LARGE - 1) + FREE_BYTES
    last.feed(b"x" * (FREE_BYTES + 3), BOUNDS)
    assert last.error is not None
    assert (last.error.status, last.error.code) == (503, "receiving")
    assert last.current is not None
    assert last.current.body == []
    assert receiving.bytes == 2 * (LARGE - 1)
    others[0].feed(b"x", BOUNDS)  # whole: it counts no longer here, admission has it
    assert len(others[0].requests) == 1
    assert receiving.bytes == LARGE - 1
    others[1].drop()
    last.drop()
    assert receiving.bytes == 0


@pytest.mark.parametrize(
    "wrong", [b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", head(100) + b"x" * 50]
)
def test_a_request_that_turns_out_wrong_holds_nothing(wrong: bytes):
    receiving = Receiving()
    inbound = Inbound(None, receiving)
    inbound.feed(wrong, BOUNDS)
    assert receiving.bytes > 0
    if b"chunked" in wrong:
        inbound.feed(b"no number\r\n", BOUNDS)
        assert inbound.error is not None
        assert inbound.current is not None
        assert inbound.current.body == []
    else:
        inbound.drop()
    assert receiving.bytes == 0


@pytest.mark.parametrize("piece", [1, 2, PIECE_BYTES - 1, PIECE_BYTES, 1_400], ids=str)
@pytest.mark.parametrize("packed", [True, False], ids=["chunks", "packets"])
def test_a_body_in_small_pieces_holds_little_more_than_is_counted(piece: int, packed: bool):
    """What a piece takes beside its bytes is not counted: 2,048 clients without a key, each with 16 KB in chunks of two bytes,
    held 940 MB, counted as 33, and none was refused."""
    receiving, size = Receiving(), 40_000
    chunk = b"%x\r\n%b\r\n" % (piece, b"x" * piece)
    inbound = Inbound(None, receiving)
    inbound.feed(head(LARGE).replace(b"content-length: %d" % LARGE, b"transfer-encoding: chunked"), BOUNDS)
    tracemalloc.start()
    try:
        for _ in range(1 if packed else size // piece):
            inbound.feed(chunk * (size // piece if packed else 1), BOUNDS)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert receiving.bytes == size // piece * piece
    assert held < 1.25 * size + 50 * PIECES_FEW, held


@pytest.mark.parametrize("size", [1, 100, PIECE_BYTES, PIECE_BYTES + 1])
def test_pieces_are_put_together_seldom(size: int):
    """Each time all of them are copied."""
    pieces, copied, all_bytes = list[bytes](), 0, 0
    for _ in range(20_000):
        pieces.append(b"x" * size)
        all_bytes += size
        before = len(pieces)
        pieces = fewer(pieces, all_bytes)
        copied += all_bytes if len(pieces) < before else 0
    assert sum(map(len, pieces)) == all_bytes
    assert copied <= 20_000 * PIECE_BYTES


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["head", "some", "much", "rest", "two", "drop"])), max_size=40))
def test_what_is_counted_is_what_is_kept(deeds: list[tuple[int, str]]):
    receiving = Receiving()
    connections = [Inbound(None, receiving) for _ in range(5)]
    for number, deed in deeds:
        inbound = connections[number]
        if deed == "drop":
            inbound.drop()
            connections[number] = Inbound(None, receiving)
        elif inbound.error is None:
            going = inbound.current is not None
            had = sum(map(len, inbound.current.body)) if inbound.current is not None else 0
            left = LARGE - had
            sent = {
                "head": b"" if going else head(LARGE), "some": b"x" * min(left, 1_000) * going,
                "much": b"x" * min(left, 3 * FREE_BYTES) * going, "rest": b"x" * left * going,
                "two": b"x" * left * going + head(LARGE) + b"y" * 10,
            }[deed]  # fmt: skip
            if sent:
                inbound.feed(sent, BOUNDS)
        kept = [sum(map(len, one.current.body)) for one in connections if one.current is not None]
        assert receiving.bytes == sum(kept)
        assert receiving.bytes <= MOST + FREE_BYTES * len(connections)


def test_clients_that_send_slowly_do_not_take_all_memory_and_others_are_served():
    async def go(rig: Rig) -> None:
        receiving = rig.context.receiving
        slow = [await rig.connect() for _ in range(4)]
        for _, writer, _ in slow:
            writer.write(head(LARGE) + b"x" * (LARGE - FREE_BYTES))
        answers = [asyncio.ensure_future(answer_of(reader)) for reader, _, _ in slow]
        refused, others = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        (status, _, body), *more = [one.result() for one in refused]
        assert (status, more) == (503, [])
        assert json.loads(body)["error"] | {"request_id": ""} == {
            "message": "too many long requests are being received at the moment", "type": "server_error", "param": None,
            "code": "receiving", "request_id": "", "retryable": True,
        }  # fmt: skip
        assert 2 * FREE_BYTES < receiving.bytes <= MOST
        reader, writer, _ = await rig.connect()
        small = http(ask(prompt="y" * 20_000))
        writer.write(small[:10_000])
        await until(lambda: receiving.bytes > 3 * (LARGE - FREE_BYTES))
        writer.write(small[10_000:])
        assert (await answer_of(reader))[0] == 200
        for number, (_, writer, _) in enumerate(slow):
            if number % 2:  # reset, without an end before
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        await until(lambda: receiving.bytes == 0)
        await asyncio.gather(*others, return_exceptions=True)
        assert "fleet_router_receiving_refused_total 1" in list(receiving.lines())

    run(go, config=WIDE)
