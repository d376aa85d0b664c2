"""Tokens: estimated, counted from the answer's last bytes, or by its events."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_router.admission.usage import (
    as_written,
    chunks_are_events,
    cut_anywhere,
    cut_in_two,
    estimated,
    estimated_of,
    only_text,
    tells_usage,
    usage_in,
    usage_of,
    used_tokens,
)
from fleet_router.config import RouterConfig
from fleet_router.request import parse_body

USAGE = {"prompt_tokens": 12, "total_tokens": 19, "completion_tokens": 7}


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        (b"[1,2,3]", 3), (b"[7]", 1), (b'"' + b"x" * 300 + b'"', 100), (b'""', 1), (b'[{"role":"user"}]', 5),
        (b"[[100200, 100300], [7, 8, 9]]", 5), (b"[[]]", 1),
    ],
)  # fmt: skip
def test_estimates(prompt: bytes, tokens: int):
    assert estimated(prompt) == tokens


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ({}, 10), ({"tools": [{"d": "x" * 2_990}]}, 1_010), ({"documents": [{"d": "x" * 2_990}]}, 1_010),
        ({"user": "x" * 3_000}, 10), ({"chat_template_kwargs": {"d": "x" * 289}, "documents": ["x" * 299]}, 210),
    ],
    ids=["nothing", "tools", "documents", "other", "both"],
)  # fmt: skip
def test_what_a_template_writes_beside_the_conversation_is_of_the_estimate(more: dict[str, Any], tokens: int):
    """It is all that is charged to who leaves before the engine has told: 256 KB of tools, computed to the first token, were the
    ten tokens of the question."""
    body = {"model": "m", "messages": [{"role": "user", "content": ""}], **more}
    raw = json.dumps(body, separators=(",", ":")).encode()
    assert estimated_of(parse_body(raw, True, RouterConfig(fleet="f", served_name="m"))) == tokens


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (b'"text"', True), (b'[{"role":"user","content":"x"}]', True), (b"[1,2,3]", False), (b"[7]", False), (b"[]", True),
        (b'[{"type":"image_url"}]', False), (b'[{"type":"input_audio"}]', False),
    ],
)  # fmt: skip
def test_what_is_only_text(prompt: bytes, expected: bool):
    assert only_text(prompt) is expected


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (b'"prompt_tokens":3', True), (b'"completion_tokens":3', True), (b'x"prompt_\r\n7\r\ntokens":3', True),
        (b'x"comple\r\n7;a=b\r\ntion_tokens":3', True), (b'{"text":"prompt tokens"}', False), (b"", False),
    ],
)  # fmt: skip
def test_a_read_that_may_tell_the_usage(read: bytes, expected: bool):
    assert tells_usage(read) is expected


def _framed(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)


WORD = b'data: {"choices":[{"text":" word"}]}\n\n'
LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE, "details": "x" * 300}).encode() + b"\n\n"


@given(st.integers(0, 40), st.integers(1, len(LAST) - 3), st.integers(0, 200), st.sampled_from([b"0\r\n\r\n", b""]))
def test_an_event_in_two_chunks_is_seen_wherever_it_is_cut_and_wherever_its_read_begins(
    before: int, cut: int, skip: int, end: bytes
):
    read = _framed(*[WORD] * before)[skip:] + _framed(LAST[:cut], LAST[cut:], b"data: [DONE]\n\n") + end
    assert cut_in_two(read)


@pytest.mark.parametrize("words", [1, 2, 5, 100])
def test_whole_events_in_chunks_of_their_own_are_not_looked_at_again(words: int):
    """Flooded streams were unframed at each read, which doubled what an event costs."""
    assert not cut_in_two(_framed(*[WORD] * words))
    assert not cut_in_two(_framed(*[WORD] * words, LAST, b"data: [DONE]\n\n"))


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 300_000}}
SOUND = {"type": "input_audio", "input_audio": {"data": "A" * 300_000, "format": "wav"}}


@pytest.mark.parametrize(
    ("content", "least", "most"),
    [
        ([PICTURE, {"type": "text", "text": "x" * 3_000}], 2_000, 2_200), ([PICTURE, PICTURE, SOUND], 3_000, 3_300),
        ("data: " + "x" * 3_000, 1_000, 1_100),
    ],
)  # fmt: skip
def test_a_picture_is_not_charged_by_its_bytes(content: Any, least: int, most: int):
    """One of 300 KB was 100,000 tokens: more than many tenants have in a minute, and so refused for ever."""
    for separators in ((",", ":"), (", ", ": ")):
        raw = json.dumps([{"role": "user", "content": content}], separators=separators).encode()
        assert least <= estimated(raw) <= most


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (json.dumps({"choices": [{"text": "x"}], "usage": USAGE}).encode(), (12, 7)),
        (json.dumps({"usage": {"completion_tokens": 7, "prompt_tokens": 12}}, indent=1).encode(), (12, 7)),
        (json.dumps({"usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 5}}, "kv": None}).encode(), (12, 7)),
        (json.dumps({"usage": {"prompt_tokens": 12}}).encode(), (12, 0)),
        (b'data: {"choices":[],"usage":' + json.dumps(USAGE).encode() + b"}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", (12, 7)),
        (b'{"usage":null}', None), (b"", None), (b'{"usage":{}}', None), (b'"usage"', None),
        (b'{"usage":{"prompt_tokens":"12"}}', None),
        (json.dumps({"text": json.dumps({"usage": USAGE})}).encode(), None),  # a model that talks about usage
    ],
)  # fmt: skip
def test_usage_is_found_in_the_last_bytes(tail: bytes, usage: tuple[int, int] | None):
    assert usage_of(tail) == usage


@given(st.text(max_size=200), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 400))
def test_usage_is_found_wherever_a_read_ends(text: str, prompt: int, output: int, cut: int):
    body = json.dumps({"choices": [{"text": text}], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}).encode()
    at = min(cut, len(body))
    assert used_tokens(body[:at], body[at:], 0, 1) == (prompt, output)


_WRITTEN = re.compile(
    rb'"usage":\{"prompt_tokens":(\d{1,9}),"total_tokens":\d{1,9},"completion_tokens":(\d{1,9})[,}]'
)  # fmt: skip
ODD_NUMBERS = [b"", b"0", b"007", b"999999999", b"1234567890", b"-1", b"1.5", b"\xb2"]
NUMBERS = st.one_of(st.integers(0, 10**9).map(lambda number: b"%d" % number), st.sampled_from(ODD_NUMBERS))
ENDS = st.sampled_from([b"}", b",", b"", b" ", b"}}"])


@settings(max_examples=400)
@given(st.tuples(NUMBERS, NUMBERS, NUMBERS), ENDS, st.integers(0, 90), st.booleans())
def test_usage_as_vllm_writes_it_is_read_as_its_pattern_says(
    numbers: tuple[bytes, bytes, bytes], end: bytes, cut: int, cuts: bool
):
    whole = b'"usage":{"prompt_tokens":%b,"total_tokens":%b,"completion_tokens":%b' % numbers + end
    tail = whole[: -cut or None] if cuts else whole
    usual = _WRITTEN.match(tail)
    expected = None if usual is None else (int(usual[1]), int(usual[2]))
    assert as_written(tail, 0) == expected
    assert as_written(b"{" + tail, 1) == expected
    assert expected is None or usage_in(b"{" + tail) == usage_of(b"{" + tail) == expected


@given(st.binary(max_size=300))
def test_any_bytes_are_usage_or_not(tail: bytes):
    found = usage_of(tail + b'"usage":{')
    assert found is None or min(found) >= 0


def test_a_stream_without_usage_is_counted_by_its_events():
    assert used_tokens(b"", b"data: [DONE]\n\n", 6, 40) == (40, 5)
    assert used_tokens(b"", b"", 0, 40) == (40, 0)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("extension", [b"", b";a=b"])
def test_usage_is_found_wherever_a_proxy_cuts_it_into_chunks(end: bytes, extension: bytes):
    """Cut inside a name of it a stream of 1,500 tokens was charged as one, cut before a number by the size of the chunk."""
    told = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + end
    for at in range(1, len(told)):
        pieces = [told[:at], told[at:], b"data: [DONE]" + end]
        chunks = [b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces] + [b"0\r\n\r\n"]
        assert used_tokens(b"", b"".join(chunks), 9, 9) == (12, 7)
        assert used_tokens(chunks[0], b"".join(chunks[1:]), 9, 9) == (12, 7)


def test_the_size_of_a_chunk_is_no_number_of_tokens():
    """Nor the first digits of a number: of a whole answer that comes in chunks."""
    body = json.dumps({"id": "c", "usage": USAGE, "choices": []}).encode()
    for at in range(1, len(body)):
        pieces = [body[:at], body[at:]]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        cut_name = body.index(b'"usage"') < at < body.index(b'"usage"') + 7
        assert usage_in(chunks) == (None if cut_name else (12, 7))


@pytest.mark.parametrize(
    ("read", "whole"),
    [
        (_framed(WORD), True),
        (_framed(WORD, WORD, b"data: [DONE]\n\n") + b"0\r\n\r\n", True),
        (_framed(WORD) + b"0\r\n\r\n" + _framed(WORD), False),
        (_framed(WORD)[:-1], False),
        (_framed(WORD)[1:], False),
        (_framed(WORD[:-1]), False),
        (_framed(WORD.replace(b"\n", b"\r\n")), False),
        (b"1\r\n\n\r\n", False),
        (b"00000002\r\n\n\n\r\n", True),
        (b"000000002\r\n\n\n\r\n", False),
        (b"2;a=b\r\n\n\n\r\n", False),
        (b"a" * 65_536, False),
        (b"\r\n", False),
        (b"", True),
    ],
)
def test_chunks_that_are_events(read: bytes, whole: bool):
    assert chunks_are_events(read) is whole


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_what_goes_from_size_to_size_is_told_as_by_counting(events: list[bytes], data: st.DataObject):
    """Wherever the walk says that all is whole, nothing is cut: what it saves is all that it changes."""
    stream = b"".join(event.replace(b"\r", b"").replace(b"\n", b" ") + b"\n\n" for event in events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    parts = [stream[a:b] for a, b in itertools.pairwise([0, *cuts, len(stream)]) if stream[a:b]]
    read = _framed(*parts)
    assert chunks_are_events(read) is all(part.endswith(b"\n\n") for part in parts)
    if len(parts) > 1:
        assert cut_anywhere(read) is not all(part.endswith(b"\n\n") for part in parts)
