"""A worker that says [DONE] in the middle of its answer: half of it went to clients as a whole one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet_router.dialect.chat import goes_on
from fleet_router.ending import framed, unframed
from fleet_router.expected import breaks_off, says_an_end
from tests.fleet_router.rig import CONFIG, Rig, run

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
WORDS = ["one ", "two ", "three ", "four "]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "short"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}


def event(text: str = "", finish: str | None = None, *, chat: bool = True, **more: Any) -> bytes:
    said = {"delta": {"content": text, **more}} if chat else {"text": text, **more}
    choices = [{"index": 0, **said, "logprobs": None, "finish_reason": finish}]
    return b"data: " + json.dumps({"id": "c", "created": 1, "choices": choices}, separators=(",", ":")).encode() + b"\n\n"


USAGE = b'data: {"id":"c","created":1,"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":4}}\n\n'


def answered(words: int, *, chat: bool, usage: bool = False, ends: bool = False) -> list[bytes]:
    """So many words; one that `ends` says so."""
    made = [event(word, chat=chat) for word in WORDS[:words]]
    return [*made, *([event("", "stop", chat=chat)] if ends else []), *([USAGE] if usage else []), DONE]


def says(parts: list[bytes], reads: str) -> Any:
    """A behaviour: all of it in one packet, or [DONE] in one of its own, or the body's end as well."""

    async def behave(_: Any, writer: asyncio.StreamWriter) -> bool:
        first, last = [*map(framed, parts[:-1])], framed(parts[-1])
        packets = {
            "one": [HEAD + b"".join(first) + last + END],
            "done with the end": [HEAD, *first, last + END],
            "done with the last": [HEAD, *first[:-1], b"".join([*first[-1:], last]), END],
            "each": [HEAD, *first, last, END],
        }[reads]
        for packet in packets:
            writer.write(packet)
            await writer.drain()
            await asyncio.sleep(0.01)
        return True

    return behave


READS = ["one", "done with the end", "done with the last", "each"]
ROUND_ROBIN = msgspec.structs.replace(CONFIG, policy="roundRobin", resume="replay")


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("path", ASKED)
def test_half_an_answer_is_not_told_as_a_whole_one(path: str, reads: str, greedy: bool):
    chat = path != "/v1/completions"

    async def go(rig: Rig) -> None:
        rig.context.ends.said = True
        rig.decode[0].behave = says(answered(2, chat=chat, usage=greedy), reads)
        rig.decode[1].behave = says(answered(4, chat=chat, ends=True), "each")
        seen = []
        for _ in range(4):
            body = {"model": "m", "stream": True, **ASKED[path], **({"temperature": 0} if greedy else {})}
            status, got = await rig.post(body, path)
            told = unframed(got).replace(b'"error":null', b"")
            assert status == 200
            assert got.endswith(END)
            assert (b"four" in told) is not (b'"error"' in told or b"response.failed" in told), told
            ends = {"/v1/messages": b"message_stop", "/v1/responses": b"response.completed"}.get(path, DONE)
            assert (ends in told) is (b"four" in told), told
            seen.append(b"four" in told)
        assert all(seen) if greedy or (reads == "one" and path not in ("/v1/messages", "/v1/responses")) else not all(seen)
        assert any(seen)
        assert rig.context.metrics.retries > 0 or not greedy

    run(go, prefill=0, decode=2, config=ROUND_ROBIN)


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_half_an_answer_is_none_either_where_events_end_with_crlf(path: str, reads: str):
    """Incident: where [DONE] came before the end of the body, it was told."""
    chat = path != "/v1/completions"

    async def go(rig: Rig) -> None:
        rig.context.ends.said = True
        rig.decode[0].behave = says([part.replace(b"\n", b"\r\n") for part in answered(2, chat=chat)], reads)
        _, got = await rig.post({"model": "m", "stream": True, **ASKED[path]}, path)
        assert (b'"error"' in got, DONE in got.replace(b"\r\n", b"\n")) == (True, False), got

    run(go, prefill=0)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("reads", ["one", "done with the end", "each"])
@pytest.mark.parametrize("path", ASKED)
def test_done_alone_is_no_answer(path: str, reads: str, end: bytes):
    """Incident: where it came before the end of the body a client had an answer of nothing, and nobody else was asked."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says([DONE.replace(b"\n", end)], reads)
        rig.decode[1].behave = says(answered(4, chat=path != "/v1/completions", ends=True), "each")
        for _ in range(2):
            status, got = await rig.post({"model": "m", "stream": True, **ASKED[path]}, path)
            assert (status, b"four" in got, got.count(b"[DONE]") <= 1) == (200, True, True), got
        assert rig.context.metrics.retries == 1

    run(go, prefill=0, decode=2, config=ROUND_ROBIN)


CUTS = {"head": 3, "word": 12, "blank": 16, "chunk": -2}
"""Where [DONE], with its framing, is cut in two reads; it has 21 or 23 bytes."""


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("words", [0, 2])
def test_a_done_in_two_reads_is_none_either(words: int, cut: str, end: bytes):
    """Incident: half an answer, or none, passed for a whole one where the packet ended in the middle of [DONE]."""

    async def go(rig: Rig) -> None:
        async def behave(_: Any, writer: asyncio.StreamWriter) -> bool:
            *first, last = [framed(part.replace(b"\n", end)) for part in answered(words, chat=False)]
            for packet in (HEAD + b"".join(first) + last[: CUTS[cut]], last[CUTS[cut] :], END):
                writer.write(packet)
                await writer.drain()
                await asyncio.sleep(0.01)
            return True

        rig.context.ends.said = True
        rig.decode[0].behave = behave
        rig.decode[1].behave = says(answered(4, chat=False, ends=True), "each")
        for temperature in (0, 0, 1, 1):  # both workers, twice
            body = {"model": "m", "stream": True, "prompt": "short", "temperature": temperature}
            status, got = await rig.post(body)
            assert (status, DONE in got.replace(b"\r\n", b"\n")) == (200, b"four" in got), got
        assert rig.context.metrics.of("t", "r").errors >= 2

    run(go, prefill=0, decode=2, config=ROUND_ROBIN)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_who_carries_a_stream_on_is_judged_alike(path: str):
    chat = path != "/v1/completions"

    async def go(rig: Rig) -> None:
        rig.context.ends.said = True
        for worker, words in zip(rig.decode, (2, 3), strict=True):
            worker.behave = says(answered(words, chat=chat), "each")
        _, got = await rig.post({"model": "m", "stream": True, **ASKED[path], "temperature": 0}, path)
        assert b'"error"' in got
        assert DONE not in got

    run(go, prefill=0, decode=2, config=ROUND_ROBIN)


@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("path", ASKED)
def test_whole_answers_go_on_as_they_are(path: str, reads: str, more: dict[str, Any]):
    chat = path != "/v1/completions"

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(answered(4, chat=chat, usage=bool(more), ends=True), reads)
        more_of_path = {} if path in ("/v1/messages", "/v1/responses") else more
        status, got = await rig.post({"model": "m", "stream": True, **ASKED[path], **more_of_path}, path)
        assert status == 200
        assert b"four" in got
        assert b'"code":"502"' not in got
        assert b"event: error" not in got
        assert rig.context.metrics.retries == rig.context.metrics.streams_broken == 0

    run(go, prefill=0)


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("path", ASKED)
def test_who_never_says_an_end_is_believed_until_somebody_does(path: str, reads: str):
    """Stand-ins for engines end their streams with [DONE] alone."""
    chat = path != "/v1/completions"

    async def go(rig: Rig) -> None:
        body = {"model": "m", "stream": True, **ASKED[path], "temperature": 0}
        for ends, sound in ((False, True), (True, True), (False, False)):
            rig.decode[0].behave = says(answered(4, chat=chat, ends=ends), reads)
            status, got = await rig.post(body, path)
            failed = status != 200 or b'"error":{' in got or b"event: error" in got or b"response.failed" in got
            assert failed is not sound, got
            assert b"four" in got or failed

    run(go, prefill=0)


def test_where_functions_may_be_called_a_missing_end_says_nothing():
    """older vLLM."""

    async def go(rig: Rig) -> None:
        rig.context.ends.said = True
        rig.decode[0].behave = says(answered(2, chat=True), "each")
        for path, tool in (
            ("/v1/chat/completions", {"type": "function", "function": FUNCTION}),
            ("/v1/messages", {"name": "weather", "input_schema": {"type": "object"}}),
        ):
            _, got = await rig.post({"model": "m", "stream": True, **ASKED[path], "tools": [tool]}, path)
            assert b"two" in got
            assert b'"error"' not in got.replace(b'"error":null', b"")

    run(go, prefill=0)


TWO_CHOICES = b'data: {"choices":[{"index":0,"text":"b","finish_reason":null},{"index":1,"finish_reason":"stop"}]}\n\n'
HIDDEN = event("", hidden_states=[0.5])


@pytest.mark.parametrize(
    ("parts", "broken"),
    [
        ([event("a"), DONE], True),
        ([event("a"), USAGE, DONE], True),
        ([event("a", chat=False), DONE], True),
        ([event("a"), b": ping\n\n", DONE], True),
        ([event("a", "stop"), DONE], False),
        ([event("a"), event("", "abort"), USAGE, DONE], False),
        ([event("a").replace(b":null}", b": null}"), event("", "stop").replace(b'reason":"', b'reason": "'), DONE], False),
        ([event("", "stop"), HIDDEN, DONE], False),
        ([event("a", "stop").replace(b'"stop"', b'""'), DONE], False),
        ([b'data: {"choices":[{"text":"a"}]}\n\n', DONE], False),
        ([event("a"), b'data: {"choices":[{"text":\n\n', DONE], False),
        ([event("a"), b'data: {"error":{"message":"x"}}\n\n', DONE], False),
        ([USAGE, DONE], False),
        ([DONE], False),
        ([], False),
        ([event('{"finish_reason":"stop"}'), DONE], True),
        ([event("a"), TWO_CHOICES, DONE], False),
    ],
)  # fmt: skip
def test_only_who_says_more_text_and_no_end_breaks_off(parts: list[bytes], broken: bool):
    framings = [map(framed, parts), parts, [framed(part.replace(b"\n", b"\r\n")) for part in parts]]
    for one in framings:
        ending = b"".join(one) + END
        assert (not says_an_end(ending) and breaks_off(ending)) is broken


@pytest.mark.parametrize(
    "payload", [b"", b"1", b"[]", b"{}", b'{"choices":1}', b'{"choices":[1]}', b'{"choices":[{"delta":1}]}', b"{"]
)
def test_what_is_no_choice_goes_on_nowhere(payload: bytes):
    assert goes_on(payload) is False
