"""Streams that a proxy cuts into other chunks, or whose events are written in another way: where an event ends, what is sound,
what another worker's count goes on from."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.ending import END, framed, whole_chunks
from fleet_router.health.resume import Again, said_of, start_of
from fleet_router.health.sent import Halves, Room, Sent, events_end, last_is_sound
from tests.fleet_router.health.test_resume import asked, events, tokens, word
from tests.fleet_router.rig import Rig, ask, http, run

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def says(reads: list[bytes]) -> Any:
    async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        for read in (HEAD, *reads):
            writer.write(read)
            await writer.drain()
            await asyncio.sleep(0.005)
        writer.close()
        return True

    return behave


@given(st.data(), st.booleans(), st.sampled_from([Sent, Halves]))
def test_what_goes_out_ends_with_a_chunk_and_with_an_event(data: st.DataObject, crlf: bool, kind: type[Sent]):
    """The line breaks of a chunk's size and those of an event's end in a chunk of its own were taken for the end of both: what we
    said next stood inside of a chunk."""
    said = b"".join(b"data: %b\n\n" % text for text in data.draw(st.lists(st.sampled_from([b"{}", b"[DONE]", b"7"]), max_size=9)))
    said = said.replace(b"\n", b"\r\n") if crlf else said
    sizes = st.sampled_from([1, 2, 3, 4, 7, 8, 30])
    raw, out = b"", b""
    while said:
        size = data.draw(sizes)
        raw, said = raw + framed(said[:size]), said[size:]
    sent, raw = kind(Room()), raw + END
    while raw:
        size = data.draw(sizes)
        out, raw = out + sent.whole(raw[:size]), raw[size:]
        contents, rest = whole_chunks(out)
        assert rest in (b"", END)
        assert contents.endswith((b"\n\n", b"\r\n\r\n")) or not contents
    assert (out + sent.rest()).endswith(END)


@pytest.mark.parametrize(
    ("chunks", "ends"),
    [
        ([b"data: 1\n\n"], True), ([b"data: 1\n", b"\n"], True), ([b"data: 1", b"\n\n"], True), ([b"data: 1", b"\n"], False),
        ([b"data: 1\r\n\r\n"], True), ([b"data: 1\r\n", b"\r\n"], True), ([b"data: 1", b"\r\n\r\n"], True),
        ([b"data: 1", b"\r\n"], False), ([b": ping - 00\r\n\r\n"], True),
    ],
)  # fmt: skip
def test_where_an_event_ends(chunks: list[bytes], ends: bool):
    read = b"".join(map(framed, chunks))
    assert events_end(read, len(read)) == (len(read) if ends else 0)
    assert bool(Halves(Room()).whole(read)) == ends


TEXT = b'data: {"choices":[{"text":"data: x"}]}'


@pytest.mark.parametrize(
    ("read", "sound"),
    [
        (framed(TEXT + b"\n\n"), True), (framed(TEXT + b"\r\n\r\n"), True), (framed(TEXT) + framed(b"\n\n"), True),
        (framed(TEXT + b"\n") + framed(b"\n"), True), (framed(TEXT) + framed(b"\r\n\r\n"), True),
        (framed(TEXT)[12:-2] + framed(b"\n\n"), True), (framed(TEXT + b"\r\n\r\n")[12:], True),
        (framed(TEXT[:9]) + framed(TEXT[9:] + b"\r\n\r\n"), True), (framed(b": ping\r\n\r\n"), True),
        (framed(TEXT + b"\n\n") + framed(b": ping\r\n\r\n"), True), (framed(TEXT + b"\n\n: ping\r\n\r\n"), True),
        (framed(TEXT + b"\r\n\r\n") + framed(b": ping\n\n"), True), (framed(TEXT + b"\r\n\r\n" + TEXT + b"\n\n"), True),
        (framed(TEXT + b"\n\n" + TEXT + b"\r\n\r\n"), True), (framed(TEXT + b"\n\n" + TEXT[:-3] + b"\r\n\r\n"), False),
        (framed(TEXT[:-1] + b"\n\n"), False), (framed(TEXT[:-1] + b"\r\n\r\n"), False),
        (framed(TEXT + b"\n\n" + TEXT[:-3] + b"\n\n"), False),
    ],
)  # fmt: skip
def test_which_event_is_sound(read: bytes, sound: bool):
    assert last_is_sound(read) is sound


@pytest.mark.parametrize("way", ["end apart", "crlf, end apart", "crlf, text that looks like an event", "pieces"])
def test_a_stream_that_is_cut_in_another_way_is_no_broken_one(way: str):
    """An event whose end came in a chunk of its own was no JSON, and its worker was to blame."""

    async def go(rig: Rig) -> None:
        event, end = TEXT, b"\r\n\r\n" if "crlf" in way else b"\n\n"
        one = [framed(event) + framed(end)]
        if way == "pieces":
            one = [framed(event)[:-2], b"\r\n" + framed(end)]
        elif "looks" in way:
            raw = framed(event + end)
            one = [raw[:-20], raw[-20:]]
        rig.decode[0].behave = says([*one * 3, framed(b"data: [DONE]" + end) + END])
        for seed in ({}, {"seed": 1}):
            _, got = await rig.post(ask(prompt="short", stream=True, **seed))
            contents, rest = whole_chunks(got)
            assert (rest, contents.count(TEXT), contents.count(b"[DONE]"), b"error" in contents) == (END, 3, 1, False)
        assert rig.context.metrics.of("t", "r").errors == 0

    run(go, prefill=0)


@pytest.mark.parametrize("last", [b"data: [DONE]\n\n", b"data:[DONE]\n\n", b"data:[DONE]\r\n\r\n"])
@pytest.mark.parametrize("apart", [False, True])
def test_no_error_stands_behind_the_last_event_however_it_is_written(last: bytes, apart: bool):
    async def go(rig: Rig) -> None:
        end = last[last.index(b"]") + 1 :]
        chunks = [last.removesuffix(end), end] if apart else [last]
        rig.decode[0].behave = says([framed(b"data: {}" + end), b"".join(map(framed, chunks))])
        _, got = await rig.post(ask(prompt="short", stream=True))
        contents, rest = whole_chunks(got)
        assert (rest, contents) == (END, b"data: {}" + end + last)
        assert rig.context.metrics.streams_broken == 0

    run(go, prefill=0)


@pytest.mark.parametrize("reads", [[END], [b"0", b"\r\n\r\n"], [b"0\r\n", b"\r\n"]], ids=["one", "two", "lines"])
def test_r9_an_empty_answer_is_no_whole_one_also_where_its_end_comes_in_pieces(reads: list[bytes]):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(reads)
        got = await rig.raw(http(ask(prompt="short")))
        assert got.startswith(b"HTTP/1.1 503")  # the head waited for its body
        assert END not in got
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]

    run(go, prefill=0)


def test_a_count_in_each_event_goes_on_where_it_was():
    """stream_options.continuous_usage_stats: the client's count of tokens began anew, and its prompt grew by what it had."""
    ids = tokens([5, 6, 7], 30)
    said = said_of(b"".join(events(ids[:20], finish=False)))
    assert said is not None
    start = start_of(asked(max_tokens=30), said)
    again = Again(said, start, as_chat=False)
    told = []
    for number, token in enumerate(ids[start.tokens :], 1):
        choice = {"index": 0, "text": word(token), "token_ids": [token], "finish_reason": None}
        usage = {"prompt_tokens": 3 + start.tokens, "completion_tokens": number, "total_tokens": 3 + start.tokens + number}
        new = again.feed(json.dumps({"id": "c-2", "choices": [choice], "usage": usage}).encode())
        told += [json.loads(new[6:])["usage"]] if new else []
    assert start.tokens > 0
    wanted = [{"prompt_tokens": 3, "completion_tokens": n, "total_tokens": 3 + n} for n in range(21, 31)]
    assert told == wanted
