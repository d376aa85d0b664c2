"""What follows from a worker's head is worked out once for answers in a row with the same one, and anew for each other."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from fleet_router import expected
from fleet_router.answerhead import UNKNOWN, AnswerHead, LastHead
from fleet_router.heads import kept_lines
from fleet_router.upstream import Pool, Upstream
from tests.fleet_router.test_framing import Heard, Wire

Fields = list[tuple[bytes, bytes]]
EVENTS: Fields = [(b"content-type", b"text/event-stream"), (b"Transfer-Encoding", b"Chunked")]
WHOLE: Fields = [(b"content-type", b"application/json"), (b"Content-Length", b"2")]
PAGE: Fields = [(b"content-type", b"text/html"), (b"content-length", b"7")]
ZIPPED: Fields = [(b"content-encoding", b"gzip"), (b"transfer-encoding", b"gzip, chunked")]
ODDLY_FRAMED: Fields = [(b"transfer-encoding", b"chunked, gzip")]
NOTHING: Fields = []


@pytest.mark.parametrize(
    ("fields", "length", "is_framed", "in_chunks"),
    [
        (EVENTS, UNKNOWN, True, True),
        (WHOLE, 2, True, False),
        (PAGE, 7, True, False),
        (ZIPPED, UNKNOWN, True, True),
        (ODDLY_FRAMED, UNKNOWN, False, True),
        (NOTHING, UNKNOWN, False, False),
    ],
)
def test_what_a_head_says_of_the_body(fields: Fields, length: int, is_framed: bool, in_chunks: bool):
    head = AnswerHead(fields)
    assert (head.length, head.is_framed, head.in_chunks) == (length, is_framed, in_chunks)


def test_heads_in_any_order_say_what_each_says_alone():
    last = LastHead()
    for fields in [one for pair in product((EVENTS, WHOLE, PAGE, ZIPPED, NOTHING), repeat=2) for one in pair]:
        for stream in (True, False, True):
            head = last.of(fields.copy())
            assert head.odd(stream=stream) == expected.unlike(fields, stream=stream)
            assert (head.lines, head.fields) == (kept_lines(fields), fields)


def test_the_same_head_is_the_same_object_and_another_is_not():
    last = LastHead()
    first = last.of(EVENTS.copy())
    assert last.of(EVENTS.copy()) is first
    assert last.of([*EVENTS, (b"date", b"a second later")]) is not first


def stream_of(connection: Any, leg: Heard, more: bytes = b"", trailers: bytes = b"") -> None:
    connection.send(leg, b"")
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n" + more
    connection.data_received(head + b"\r\n9\r\ndata: a\n\n\r\n")
    connection.data_received(b"0\r\n" + trailers + b"\r\n")


def test_trailers_are_no_part_of_the_head_that_is_remembered():
    """httptools tells of them as of header fields, behind the head's own."""
    pool = Pool("127.0.0.1", 1)
    connection = Upstream(pool)
    connection.connection_made(Wire())  # type: ignore[arg-type]
    heads: list[AnswerHead] = []

    class Keeps(Heard):
        def on_head(self, status: int, head: AnswerHead) -> None:
            heads.append(head)

    stream_of(connection, Keeps(), trailers=b"content-encoding: gzip\r\n")
    stream_of(connection, Keeps())
    stream_of(connection, Keeps(), more=b"content-encoding: gzip\r\n")
    assert heads[0] is heads[1] is not heads[2]
    assert [head.odd(stream=True) != "" for head in heads] == [False, False, True]
    assert len(heads[0].fields) == 2
