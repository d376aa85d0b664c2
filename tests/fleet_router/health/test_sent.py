"""What is kept of a stream takes about as much memory as it has bytes, however small the reads are."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.ending import framed
from fleet_router.health.sent import READS_MOST, STEP_BYTES, STREAM_MOST_BYTES, Halves, Room, Sent

TINY = framed(b":\n\n")


@pytest.mark.parametrize("heard", [False, True], ids=["whole", "keep"])
def test_a_worker_that_sends_tiny_chunks_takes_no_more_than_the_room_says(heard: bool):
    room = Room()
    before, sent = room.left, Sent(room)
    for number in range(50_000):
        piece = TINY[:-2] + b"\r\n" if number % 2 else bytes(bytearray(TINY))  # no two are one object
        if heard:
            sent.keep(piece)
        else:
            assert sent.whole(piece) == piece
    took = sum(sys.getsizeof(piece) + 8 for piece in sent._kept)
    assert took < 1.25 * (before - room.left) + 100 * READS_MOST
    assert len(sent.kept()) == 50_000 * len(TINY)


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.booleans()), max_size=300))
def test_it_is_what_was_sent_less_what_was_taken_back(reads: list[tuple[bytes, bool]]):
    sent, client = Sent(Room()), b""
    for content, back in reads:
        piece = framed(content + b"\n\n")
        client += sent.whole(piece)
        if back:
            sent.take_back(3)
            client = client[:-3]
    assert (sent.kept(), sent._size) == (client, len(client))
    sent.keep_only(b"x")
    sent.keep(b"y")
    assert sent.kept() == b"xy"
    sent.forget()
    assert sent._room.left == Room().left


@pytest.mark.parametrize(
    ("reads", "room", "full"),
    [
        pytest.param([STEP_BYTES], STEP_BYTES, False, id="all of the room"),
        pytest.param([STEP_BYTES + 1], STEP_BYTES, True, id="a byte more than the room"),
        pytest.param([1], STEP_BYTES - 1, True, id="room is taken in steps"),
        pytest.param([STREAM_MOST_BYTES], 2 * STREAM_MOST_BYTES, False, id="all that one stream may keep"),
        pytest.param([STREAM_MOST_BYTES, 1], 2 * STREAM_MOST_BYTES, True, id="a byte more"),
    ],
)
def test_when_no_more_can_be_kept(reads: list[int], room: int, full: bool):
    """And room that comes free later brings nothing back: what was not kept is missing."""
    sent = Sent(Room(room))
    for size in reads:
        sent.keep(b"x" * size)
    assert sent.full is full
    sent._room.left += 10 * STREAM_MOST_BYTES
    sent.keep(b"x" * STEP_BYTES)
    assert sent.full or not full


@pytest.mark.parametrize("kind", [Sent, Halves])
def test_what_is_held_back_is_the_beginning_of_an_event(kind: type[Sent]):
    sent, whole = kind(Room()), framed(b"data: 1\n\n")
    assert (sent.whole(whole + b"9\r\nda"), sent.held) == (whole, b"9\r\nda")
    assert sent.rest() == b"9\r\nda"
    assert (sent.held, sent.rest()) == (b"", b"")
