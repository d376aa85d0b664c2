"""Answers with a good status that are none: redirects, login pages, streams that just stop, lengths that count characters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from fleet_router.dialect.chat import Events
from fleet_router.expected import is_closed, says_something, unlike, without_bom
from tests.fleet_router.rig import CONFIG, Rig, answer_of, http, run

EVENT = b'data: {"choices":[{"index":0,"text":"a","delta":{"content":"a"}}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":"","delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
BOM = b"\xef\xbb\xbf"
ANSWER = json.dumps(
    {"choices": [{"text": "h\u00e9\u00e9", "index": 0, "message": {"role": "assistant", "content": "h\u00e9\u00e9"}}]},
    ensure_ascii=False,
)


def chunks(parts: Iterable[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def said(status: int, body: bytes, kind: str = "application/json", more: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {size}\r\n{more}\r\n".encode() + body


def in_chunks(*parts: bytes, kind: str = "text/event-stream", more: str = "") -> bytes:
    return f"HTTP/1.1 200 X\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n{more}\r\n".encode() + chunks(parts)


WHOLE = ANSWER.encode()
EITHER = {
    "300": said(300, b"{}"),
    "301": said(301, b"", more="location: http://x/\r\n"),
    "302 with a page": said(302, b"<html>moved</html>", "text/html", "location: /login\r\n"),
    "304": b"HTTP/1.1 304 X\r\n\r\n",
    "307": said(307, b"", more="location: /v2\r\n"),
    "an empty 200": said(200, b""),
    "201 with an answer": said(201, WHOLE),
    "an empty 202": said(202, b""),
    "204": b"HTTP/1.1 204 X\r\n\r\n",
    "an empty 205": said(205, b""),
    "206": said(206, WHOLE),
    "a page": said(200, b"<html>login</html>", "text/html"),
    "a page in chunks": in_chunks(b"<html>login</html>", kind="text/html; charset=utf-8"),
    "a page that ends like JSON": said(200, b"<script>{}</script>{}", "text/html"),
    "plain text": said(200, b"upgrade under way", "text/plain"),
    "plain text in chunks": in_chunks(b"upgrade", kind="text/plain"),
    "a stream by another name": in_chunks(EVENT, LAST, DONE, kind="text/plain"),
    "compressed": in_chunks(EVENT, LAST, DONE, more="content-encoding: gzip\r\n"),
}
STREAMED = EITHER | {
    "an answer in one piece": said(200, WHOLE),
    "an answer in chunks": in_chunks(WHOLE, kind="application/json"),
    "[DONE] alone": in_chunks(DONE),
    "a comment alone": in_chunks(b": hello\n\n"),
    "no [DONE]": in_chunks(EVENT, LAST),
    "no end at all": in_chunks(EVENT, EVENT),
    "cut by a length of characters": said(200, EVENT + LAST + DONE, "text/event-stream", length=len(EVENT + LAST)),
}
IN_ONE = EITHER | {
    "a stream": in_chunks(EVENT, LAST, DONE),
    "no JSON": said(200, b"not json}"),
    "no JSON in chunks": in_chunks(b"not json at all", kind="application/json"),
    "a list": said(200, b"[1]"),
    "cut by a length of characters": said(200, WHOLE, length=len(ANSWER)),
    "an object with a byte order mark": said(200, BOM + WHOLE),
}
ASKED = {
    "/v1/completions": {"model": "m", "prompt": "short"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "m", "input": "hi"},
}
TRANSLATED = {"/v1/messages", "/v1/responses"}
CASES = [(True, name) for name in STREAMED] + [(False, name) for name in IN_ONE]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(("stream", "odd"), CASES)
def test_what_is_no_answer_is_asked_for_elsewhere(path: str, stream: bool, odd: str):
    """Redirects, login pages, 204s and streams without an end went to clients as a success."""
    data = (STREAMED if stream else IN_ONE)[odd]

    async def go(rig: Rig) -> None:
        wrong = [0]

        async def odd_one(_: Any, writer: asyncio.StreamWriter) -> bool:
            wrong[0] += 1
            writer.write(data)
            await writer.drain()
            return True

        async def good(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(in_chunks(EVENT, LAST, DONE) if stream else said(200, WHOLE))
            return True

        rig.decode[0].behave, rig.decode[1].behave = odd_one, good
        for _ in range(4):
            status, body = await rig.post({**ASKED[path], "stream": stream}, path)
            if stream and path in TRANSLATED and odd.startswith(("no ", "cut ")) and b"error" in body:
                continue  # their clients have seen an event before it was known
            assert status == 200
            assert (b"\xc3\xa9" in body) is not stream
            assert b"error" not in body.replace(b'"error":null', b"")
            assert b"<html>" not in body
            if stream and path not in TRANSLATED:
                assert (EVENT in body, body.endswith(chunks([DONE]))) == (True, True)
        assert wrong[0] > 0
        assert all(worker.inflight == 0 for worker in rig.context.table.workers.values())

    run(go, prefill=0, decode=2, config=msgspec.structs.replace(CONFIG, policy="roundRobin"))


@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(LAST), LAST)], ids=["nothing", "a finish reason"])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_stream_that_ends_without_its_end_does_not_end_well(end: bytes, resumed: bool):
    """After a first event: another worker carries on what is determined, else the client is told; never a clean end."""

    async def go(rig: Rig) -> None:
        async def stops(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(in_chunks(EVENT).removesuffix(b"0\r\n\r\n"))
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(end)
            return True

        async def good(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(in_chunks(EVENT, EVENT, LAST, DONE))
            return True

        rig.decode[0].behave, rig.decode[1].behave = stops, good
        seen = []
        for _ in range(4):
            more = {"temperature": 0} if resumed else {"temperature": 1}
            status, body = await rig.post({**ASKED["/v1/completions"], "stream": True, **more})
            assert status == 200
            assert (b"[DONE]" in body) is not (b'"error"' in body)
            assert body.endswith(b"0\r\n\r\n")
            seen.append(b'"error"' in body)
        assert any(seen) is not resumed

    run(go, prefill=0, decode=2, config=msgspec.structs.replace(CONFIG, policy="roundRobin"))


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("parts", [(BOM + EVENT, LAST, DONE), (BOM, EVENT, LAST, DONE), (BOM + EVENT + LAST + DONE,)])
def test_a_byte_order_mark_costs_no_event(path: str, parts: tuple[bytes, ...]):
    """Of a translated stream the first event was lost, and clients that know of no such mark lost it of the others."""

    async def go(rig: Rig) -> None:
        async def marked(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(in_chunks(*parts))
            return True

        rig.decode[0].behave = marked
        status, body = await rig.post({**ASKED[path], "stream": True}, path)
        assert (status, BOM in body) == (200, False)
        assert b'"a"' in body

    run(go, prefill=0)


def test_embeddings_as_bytes_are_no_json_and_an_answer():
    """Also where their head came before."""

    async def go(rig: Rig) -> None:
        async def raw(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(said(200, b"\x00\x01", "application/octet-stream"))
            return True

        rig.decode[0].behave = raw
        for _ in range(4):
            reader, writer, _ = await rig.connect()
            writer.write(http({"model": "m", "input": "a", "encoding_format": "bytes_only"}, path="/v1/embeddings"))
            assert (await answer_of(reader))[::2] == (200, b"\x00\x01")
            writer.close()

    run(go, prefill=0)


@pytest.mark.parametrize(
    ("read", "left"),
    [
        (b"", b""),
        (b"3\r\n" + BOM + b"\r\n", b""),
        (b"5;x=y\r\n" + BOM + b"ab\r\n", b"2\r\nab\r\n"),
        (b"5\r\n" + BOM + b"a", b"2\r\na"),
        (b"2\r\nab\r\n", b"2\r\nab\r\n"),
        (b"5\r\nab" + BOM, b"5\r\nab" + BOM),
    ],
)
def test_a_mark_is_cut_out_of_its_chunk(read: bytes, left: bytes):
    assert without_bom(read) == left


@pytest.mark.parametrize("step", [1, 2, 3, 5, 100])
def test_a_mark_in_pieces_is_none_of_an_event(step: int):
    events, found = Events(), list[bytes]()
    whole = BOM + b"data: 1\n\n" + b"data: " + BOM + b"\n\n"
    for at in range(0, len(whole), step):
        found += events.feed(whole[at : at + step])
    assert found == [b"1", BOM]


@pytest.mark.parametrize(
    ("ending", "closed"),
    [
        (b"data: [DONE]\n\n", True),
        (b"x\n\ndata:[DONE]\r\n\r\n", True),
        (b"5\r\ndata:\r\n9\r\n [DONE]\n\n\r\n0\r\n\r\n", True),
        (b'data: {"text":"data: [DONE]"}\n\n', False),
        (b"", False),
    ],
)
def test_where_a_stream_says_that_it_ends(ending: bytes, closed: bool):
    assert is_closed(ending) is closed


@pytest.mark.parametrize(
    ("stream", "something"),
    [
        (b"e\r\ndata: [DONE]\n\n\r\n", False),
        (b": a\n\n", False),
        (b"data: {}\n\ndata: [DONE]\n\n", True),
        (BOM + b"data: {}\n\n", True),
    ],
)
def test_whether_a_stream_says_anything(stream: bytes, something: bool):
    assert says_something(stream) is something


@pytest.mark.parametrize(
    ("headers", "stream", "why"),
    [
        ([], True, ""),
        ([(b"Content-Type", b"text/event-stream; charset=utf-8")], True, ""),
        ([(b"content-type", b"TEXT/EVENT-STREAM")], True, ""),
        ([(b"content-type", b"application/json")], True, "the worker's stream is application/json"),
        ([(b"content-type", b"")], True, "the worker's stream is of no type"),
        ([(b"content-type", b"application/json")], False, ""),
        ([(b"content-type", b"application/octet-stream")], False, ""),
        ([(b"content-type", b"text/html")], False, "the worker's answer is text/html"),
        ([(b"content-type", b"text/\xff" + b"x" * 100)], False, "the worker's answer is text/\ufffd" + "x" * 58),
        ([(b"content-encoding", b"identity")], False, ""),
        ([(b"content-encoding", b"br")], False, "the worker's answer is compressed, and nobody asked for it"),
    ],
)  # fmt: skip
def test_which_heads_are_none_of_an_answer(headers: list[tuple[bytes, bytes]], stream: bool, why: str):
    assert unlike(headers, stream=stream) == why
