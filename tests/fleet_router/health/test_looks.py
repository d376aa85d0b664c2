"""Quick looks at reads of a stream say what the thorough ones do, whatever comes."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet_router.admission.usage import BETWEEN, TAIL_BYTES, cut_in_two, usage_of, used_tokens
from fleet_router.expected import _DONE, is_closed, without_bom
from fleet_router.health.sent import ENDS, ends, ends_whole

PIECES = [
    b"data: [DONE]", b"data:[DONE]", b"[DONE]", b"\n\n", b"\n", b"\r\n", b"\r\n\r\n", b"e", b"e\r\n", b"0\r\n\r\n",
    b"\r\n0\r\n\r\n", b"\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", b"data: {}", b"f3;x=1\r\n", b"text", b"2\r\n",
    b"\n\n\r\n", b"\xef\xbb\xbf",
]  # fmt: skip
reads = st.lists(st.sampled_from(PIECES), max_size=9).map(b"".join)


@settings(max_examples=500)
@given(reads)
@example(b'data: {"text":"it ends with \r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n')
@example(b"data: {}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
@example(b"\n\r\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
def test_a_stream_is_closed(ending: bytes):
    assert is_closed(ending) == (_DONE.search(BETWEEN.sub(b"", ending)) is not None)


@settings(max_examples=500)
@given(reads)
@example(b"data: {}\r\n5\r\n\n\r\n")
@example(b"data: {}\n\r\n1\r\n\n\r\n")
def test_a_read_ends_whole(read: bytes):
    assert ends_whole(read) == (read.endswith(ENDS) and ends(read, len(read)))


def thoroughly(before: bytes, tail: bytes) -> tuple[int, int] | None:
    """As it was first: the last read, then both, without their framing."""
    found = usage_of(BETWEEN.sub(b"", tail[-TAIL_BYTES:]))
    if found is None and before and len(tail) < TAIL_BYTES:
        found = usage_of(BETWEEN.sub(b"", before[-TAIL_BYTES:] + tail))
    return found


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Events, some of which tell their usage, cut into chunks behind events or anywhere."""
    end = draw(st.sampled_from([b"\n\n", b"\n\n", b"\r\n\r\n", b"\n\r\n"]))
    events = []
    for _ in range(draw(st.integers(1, 5))):
        number = draw(st.integers(0, 3))
        usage = draw(st.sampled_from([None, {"prompt_tokens": 100 + number, "total_tokens": 200, "completion_tokens": number}]))
        said = {"choices": [{"text": "x" * draw(st.sampled_from([1, 50, 3_000]))}]}
        said |= draw(st.sampled_from([{}, {"usage": usage}]))
        events.append(b"data: " + json.dumps(said, separators=draw(st.sampled_from([(",", ":"), (", ", ": ")]))).encode() + end)
    events.append(b"data: [DONE]" + end)
    whole, at, chunks = b"".join(events), 0, []
    if draw(st.booleans()):
        chunks = events
    else:
        for cut in [*sorted(draw(st.sets(st.integers(1, len(whole) - 1), max_size=4))), len(whole)]:
            chunks.append(whole[at:cut])
            at = cut
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in chunks) + b"0\r\n\r\n"


@settings(max_examples=500, deadline=None)
@given(streams(), st.data())
def test_tokens_are_found_where_they_stand(stream: bytes, data: st.DataObject):
    at = data.draw(st.integers(0, len(stream)))
    before, tail = stream[:at], stream[at:]
    found = thoroughly(before, tail)
    assert used_tokens(before, tail, 3, 9) == (found or (9, 2))


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\n\n"])
@pytest.mark.parametrize("cut", [b"sage", b'pt_tokens"', b"345,", b'tion_tokens"', b'":7'])
@pytest.mark.parametrize("finish", [b"", b": bye"])
def test_the_last_usage_counts_wherever_it_is_cut(end: bytes, cut: bytes, finish: bytes):
    """Also where an earlier event tells other numbers, and lines end in two ways."""
    told = [{"prompt_tokens": 12_345, "total_tokens": 12_345 + n, "completion_tokens": n} for n in (3, 7)]
    events = [b"data: " + json.dumps({"usage": usage}, separators=(",", ":")).encode() + end for usage in told]
    said = b"data: {}" + end
    at = len(events[0]) + events[1].find(cut)
    whole = b"".join(events) + said + said + b"data: [DONE]" + end + (finish + end if finish else b"")
    stream = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in (said, whole[:at], whole[at:])) + b"0\r\n\r\n"
    assert used_tokens(b"", stream, 3, 9) == (12_345, 7)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\n\n"])
def test_a_name_that_is_cut_is_seen_however_lines_end(end: bytes):
    """What we asked for alone is not to be a client's."""
    other, whole = b"data: {}" + end, b'data: {"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1}}' + end
    at = whole.find(b"tokens")
    read = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in (other, whole[:at], whole[at:] + 5 * other))
    assert cut_in_two(read)
    assert cut_in_two(b"%x\r\n%b\r\n0\r\n\r\n" % (len(whole), whole)) is not end.endswith(b"\n\n")  # one that is not cut


def test_framing_takes_no_room_where_the_usage_is_looked_for():
    """Comments, each in a chunk of its own: their framing is more than they are."""
    usage = {"prompt_tokens": 12, "total_tokens": 19, "completion_tokens": 7}
    told = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    comments = b"4\r\n: \n\n\r\n" * 250
    assert len(2 * comments) > TAIL_BYTES
    assert used_tokens(b"%x\r\n%b\r\n" % (len(told), told) + comments, comments, 3, 9) == (12, 7)


@pytest.mark.parametrize(
    ("read", "without"),
    [
        (b"9\r\n\xef\xbb\xbfdata:\n\r\n", b"6\r\ndata:\n\r\n"),
        (b"6\r\ndata:\n\r\n", b"6\r\ndata:\n\r\n"),
        (b"9\r\ndata:\xef\xbb\xbf\n\r\n", b"9\r\ndata:\xef\xbb\xbf\n\r\n"),
    ],
)
def test_a_byte_order_mark_is_taken_away_where_it_begins_a_stream(read: bytes, without: bytes):
    assert without_bom(read) == without
