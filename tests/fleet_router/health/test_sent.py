"""What is kept of a stream takes about as much memory as it has bytes, however small the reads are."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.ending import framed
from fleet_router.health.sent import READS_MOST, Room, Sent

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
    assert sent.kept() == client
    sent.keep_only(b"x")
    sent.keep(b"y")
    assert sent.kept() == b"xy"
    sent.forget()
    assert sent._room.left == Room().left
