"""What becomes of answers that break: streams inside and between events, events without an end, answers that are no JSON (R9)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from tests.fleet_router.fake_worker import answer, stream
from tests.fleet_router.rig import CONFIG, LONG, Rig, ask, run, until

EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
WHOLE = b"%x\r\n%b\r\n" % (len(EVENT), EVENT) * 3 + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@pytest.mark.parametrize("half", [b"", b'1f\r\ndata: {"choices"', b"1", b"1f\r\n"])
def test_a_stream_that_breaks_ends_with_an_error_event_and_no_done(half: bytes):
    """Also when it breaks inside an event: half of it goes to nobody."""

    async def go(rig: Rig) -> None:
        async def breaks(_: Any, writer: asyncio.StreamWriter) -> bool:
            await stream(writer, ["a", "b"], end=False)
            writer.write(half)
            await writer.drain()
            writer.close()
            return True

        rig.decode[0].behave = breaks
        _, body = await rig.post(ask(prompt="short", stream=True))
        assert b'"code":"bad_gateway"' in body
        assert b"[DONE]" not in body
        assert body.endswith(b"0\r\n\r\n")
        assert body.count(b'"choices"') == 2

    run(go)


@pytest.mark.parametrize("before", [0, 2], ids=["a-new-head", "a-head-that-came-before"])
def test_r9_an_answer_that_is_no_json_is_asked_for_elsewhere(before: int):
    """200, all of the bytes that were announced, and no end of the object."""

    async def go(rig: Rig) -> None:
        for _ in range(before):
            await rig.post(ask(prompt="short"))
        broken = b'{"choices": [{"text": "'

        async def breaks(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(broken) + broken)
            return True

        rig.decode[0].behave = breaks
        for i in range(6):
            status, body = await rig.post(ask(prompt=f"{i} short"))
            assert (status, json.loads(body)) == (200, {"choices": [{"text": "hello"}]})
        assert len(rig.decode[0].seen) >= 1
        rig.decode[1].behave = breaks
        status, body = await rig.post(ask(prompt="nobody says it"))
        assert (status, "error" in json.loads(body)) in {(502, True), (503, True)}

    run(go, prefill=0, decode=2, config=msgspec.structs.replace(CONFIG, policy="roundRobin"))


def test_r9_an_event_without_an_end_goes_to_nobody():
    """A stream that nobody can carry on ends with an error event and not with megabytes of nonsense."""

    async def go(rig: Rig) -> None:
        async def huge(_: Any, writer: asyncio.StreamWriter) -> bool:
            await stream(writer, ["a", "b"], end=False)
            writer.write(b"%x\r\n" % 10**8)
            for _ in range(10**8 // 65_536):
                writer.write(b"x" * 65_536)
                await writer.drain()
            return True

        rig.decode[0].behave = huge
        _, body = await rig.post(ask(prompt="short", stream=True))
        assert b"without an end" in body
        assert body.endswith(b"0\r\n\r\n")
        assert len(body) < 2_000

    run(go)


LARGE = b'data: {"choices":[{"text":"' + b"p" * 9 * 1024 * 1024 + b'"}]}\n\n'


@pytest.mark.parametrize(
    "more",
    [{"echo": True, "logprobs": 20}, {"return_token_ids": True}, {"prompt_logprobs": 0}, {"return_prompt_text": True}],
    ids=str,
)
@pytest.mark.parametrize("determined", [True, False])
def test_an_event_that_tells_the_prompt_again_is_as_long_as_that_takes(more: dict[str, Any], determined: bool):
    """Incident: with `echo` and `logprobs` the first event of a prompt of 10,000 tokens is 10 MB; at 2 MiB it was an event
    without an end, and its worker had failed: a few such requests put every worker out."""

    async def go(rig: Rig) -> None:
        async def tells(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n%b\r\n" % (len(LARGE), LARGE))
            await writer.drain()
            writer.write(WHOLE)
            return True

        rig.decode[0].behave = tells
        body = {**ask(prompt="p" * 10_000, stream=True, **more), **({"temperature": 0} if determined else {})}
        status, got = await rig.post(body)
        assert (status, len(got), got.endswith(WHOLE)) == (200, len(LARGE) + len(b"%x\r\n\r\n" % len(LARGE)) + len(WHOLE), True)
        assert rig.context.table.by_role["decode"][0].breaker.failures == 0

    run(go, prefill=0)


@pytest.mark.parametrize("more", [{}, {"echo": False, "return_token_ids": None}, {"echo": True}], ids=str)
def test_an_event_that_is_longer_than_its_prompt_can_make_it_has_no_end(more: dict[str, Any]):
    async def go(rig: Rig) -> None:
        async def tells(_: Any, writer: asyncio.StreamWriter) -> bool:
            await stream(writer, ["a"], end=False)
            writer.write(b"%x\r\n%b\r\n" % (len(LARGE), LARGE))
            return True

        rig.decode[0].behave = tells
        status, got = await rig.post(ask(prompt="short", stream=True, **more))
        assert (status, len(got) < 9 * 1024 * 1024, b"[DONE]" in got) == (200, True, False)
        assert rig.context.table.by_role["decode"][0].breaker.failures == 1

    run(go, prefill=0)


def test_an_event_that_comes_in_pieces_goes_out_whole():
    """What is held back is neither lost nor said twice, whatever the pieces are."""
    whole = WHOLE

    async def go(rig: Rig) -> None:
        for step in (1, 7, 40, 41, 42, 80):

            async def pieces(_: Any, writer: asyncio.StreamWriter, step: int = step) -> bool:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                for at in range(0, len(whole), step):
                    writer.write(whole[at : at + step])
                    await writer.drain()
                    await asyncio.sleep(0.001)
                return True

            rig.decode[0].behave = pieces
            assert (await rig.post(ask(prompt="short", stream=True)))[1] == whole

    run(go)


def test_a_long_answer_that_says_how_long_is_handed_on():
    """Incident: embeddings of 300 texts with 4,096 numbers each are 12 MB, and were broken off at 8 MiB, and their worker was
    blamed."""
    rows = [{"object": "embedding", "index": 0, "embedding": "A" * 40_000}] * 300

    async def go(rig: Rig) -> None:
        async def embeds(_: Any, writer: asyncio.StreamWriter) -> bool:
            answer(writer, 200, {"data": rows})
            return True

        rig.decode[0].behave = embeds
        status, body = await rig.post({"model": "m", "input": "a"}, "/v1/embeddings")
        assert (status, json.loads(body)["data"] == rows) == (200, True)
        assert rig.context.metrics.of("t", "r").errors == 0

    run(go, prefill=0)


@pytest.mark.parametrize("alone", [False, True], ids=["head-and-end", "head-alone"])
@pytest.mark.parametrize("body", [b"content-length: 0\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"])
@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({}, "/v1/completions"), ({"stream": True}, "/v1/completions"), ({"stream": True, "seed": 1}, "/v1/completions"),
        ({"input": "a"}, "/v1/embeddings"),
    ],
    ids=["whole", "streamed", "determined", "embeddings"],
)  # fmt: skip
def test_r9_an_empty_answer_is_asked_for_elsewhere(more: dict[str, Any], path: str, body: bytes, alone: bool):
    """Incident: a client got 200 and nothing."""
    head, _, rest = body.partition(b"\r\n\r\n")

    async def go(rig: Rig) -> None:
        async def empty(_: Any, writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = None
            writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
            if alone:
                await asyncio.sleep(0.02)
            writer.write(rest)
            return True

        for worker in rig.decode:
            worker.behave = empty
        status, got = await rig.post(ask(prompt="short", **more), path)
        assert status == 200
        assert b"hello" in got or b"[DONE]" in got
        assert rig.context.metrics.of("t", "r").errors == 1

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize(("status", "kind"), [(400, b"application/json"), (200, b"text/event-stream")])
def test_no_event_stands_in_a_body_that_has_no_chunks(status: int, kind: bytes):
    """Incident: a worker that died behind the head of a refusal. The error event, with its framing, was the body's first bytes,
    and all of it where the refusal was to be shorter."""

    async def go(rig: Rig) -> None:
        async def dies(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: 60\r\n\r\n" % (status, kind))
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.close()
            return True

        rig.decode[0].behave = dies
        told, body = await rig.post(ask(prompt="short", stream=True))
        assert (told, body) == (status, b"")
        assert rig.context.metrics.streams_broken == 1

    run(go, prefill=0)


def test_an_answer_is_counted_when_its_client_is_told_and_not_taken_back():
    """It was counted when its head came, and taken back when nothing followed: to Prometheus a counter that falls began anew, and
    all of it counted once more."""

    async def go(rig: Rig) -> None:
        counted = list[int]()

        async def half(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
            await writer.drain()
            await until(lambda: any(one.flow is not None and one.flow.started for one in rig.connections))
            counted.append(rig.context.metrics.requests[200])
            writer.close()
            return True

        assert (await rig.post(ask(prompt="short")))[0] == 200
        rig.decode[0].behave = half
        assert (await rig.post(ask(prompt="short")))[0] >= 500
        assert counted == [1]
        assert rig.context.metrics.requests[200] == 1

    run(go, prefill=0, decode=1)


def test_a_refusal_that_was_not_told_is_not_counted():
    """Incident: the counter of another status went down."""

    async def go(rig: Rig) -> None:
        async def broken(_: Any, writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = None
            writer.write(b"HTTP/1.1 422 X\r\ntransfer-encoding: chunked\r\n\r\nthis is no chunk\r\n")
            return True

        for worker in rig.decode:
            worker.behave = broken
        assert (await rig.post(ask(prompt="short")))[0] == 200
        assert {status: count for status, count in rig.context.metrics.requests.items() if count} == {200: 1}

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("code", [401, 403, 429])
def test_a_worker_that_refuses_us_is_not_quoted(code: int, prefill: bool, stream: bool):
    """The client's key and its share are the router's business: a worker that says 401 or 429 fails, and another one is asked."""

    async def go(rig: Rig) -> None:
        async def refuses(_: Any, writer: asyncio.StreamWriter) -> bool:
            answer(writer, code, {"error": {"message": "not you", "code": "invalid_api_key"}})
            return True

        first, second = rig.prefill if prefill else rig.decode
        first.behave = refuses
        for i in range(6):
            status, body = await rig.post(ask(prompt=f"{i}" + (LONG if prefill else " short"), stream=stream))
            assert (status, b"not you" in body) == (200, False)
        assert 1 <= len(first.seen) < 6  # it is left alone soon
        if not prefill:
            second.behave = refuses
            status, body = await rig.post(ask(prompt="nobody takes it", stream=stream))
            assert (status in {502, 503}, b"not you" in body) == (True, False)

    config = msgspec.structs.replace(CONFIG, policy="roundRobin")
    run(go, prefill=2 if prefill else 0, decode=1 if prefill else 2, config=config)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
NOT_TEXT = b'data: {"id":"c","choices":[{"index":0,"text":"\xff","delta":{"content":"\xff"}}]}\n\n'
DEEP = b'data: {"id":"c","choices":[{"index":0,"text":"a","x":' + b"[" * 5_000 + b"]" * 5_000 + b"}]}\n\n"
SAYS_ERROR = b'data: {"error": "\xff"}\n\n'


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
@pytest.mark.parametrize("event", [NOT_TEXT, DEEP, SAYS_ERROR], ids=["not-utf-8", "deep", "error-not-utf-8"])
def test_r9_what_no_decoder_takes_ends_a_stream_with_an_error(event: bytes, path: str):
    """Incident: the decoder's UnicodeDecodeError went through the connection's callback: the client waited for its deadline, and
    the sweep that found it there died of the same error, and the router with it."""

    async def go(rig: Rig) -> None:
        async def breaks(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(HEAD + b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.close()
            return True

        rig.decode[0].behave = breaks
        body = {"max_tokens": 4, "temperature": 0, "stream": True, "messages": [{"role": "user", "content": "x"}]}
        _, got = await rig.post(ask(**body, prompt="short") if path == "/v1/completions" else {"model": "m", **body}, path)
        assert b'"request_id":"' in got, got[-300:]  # an error of ours
        assert got.endswith(b"0\r\n\r\n") or got.startswith(b'{"')

    run(go, prefill=0)


@pytest.mark.parametrize("raw", [b'{"\xff": 1}', b'{"a":' + b"[" * 5_000 + b"]" * 5_000 + b"}"], ids=["not-utf-8", "deep"])
@pytest.mark.parametrize("prefill", [False, True])
def test_r9_nor_does_an_answer_of_it_leave_its_client_alone(raw: bytes, prefill: bool):
    async def go(rig: Rig) -> None:
        async def breaks(_: Any, writer: asyncio.StreamWriter) -> bool:
            head = b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % (len(raw) + 2) + raw + b" \n")
            return True

        (rig.prefill if prefill else rig.decode)[0].behave = breaks
        for _ in range(3):
            status, _ = await rig.post(ask(stream=False) if prefill else ask(prompt="short"))
            assert status in {200, 502, 503}

    run(go)


DEEP_LIST = b"[" * 5_000 + b"]" * 5_000


@pytest.mark.parametrize(
    ("said", "prefills"),
    [
        pytest.param(b'{"choices": [], "kv_transfer_params": {"lease_id": "\xff"}}', 1, id="a lease that is no UTF-8"),
        pytest.param(
            b'{"choices": %b, "kv_transfer_params": {"lease_id": "l"}}' % DEEP_LIST, 2, id="an answer that is nested deep"
        ),
        pytest.param(b'{"choices": [], "kv_transfer_params": {"a": %b}}' % DEEP_LIST, 2, id="a reference that is nested deep"),
        pytest.param(b'{"\xff": [], "b": 1}', 2, id="names that are no UTF-8"),
    ],
)
def test_a_prefill_answer_that_cannot_be_read_holds_nobody_up(said: bytes, prefills: int):
    """Its request waited until the deadline of the first token: the leg was over, and nothing went on."""

    async def go(rig: Rig) -> None:
        async def odd(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(said) + said)
            return True

        for worker in rig.prefill:
            worker.behave = odd
        status, body = await rig.post(ask(prompt=LONG))
        assert (status, json.loads(body)) == (200, {"choices": [{"text": "hello"}]})
        assert sum(len(worker.seen) for worker in rig.prefill) == prefills

    run(go, prefill=2)


@pytest.mark.parametrize("asks", [{}, {"stream": True}], ids=["whole", "stream"])
@pytest.mark.parametrize("fields", [b"", b"transfer-encoding: gzip\r\n"], ids=["no-length", "not-chunked"])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_answer_that_ends_where_its_connection_does_is_asked_for_elsewhere(asks: Any, fields: bytes, workers: int):
    """Incident: its head went to the client without a length, so that half of an answer looked whole, and an error event was
    framed as a chunk of what has no chunks."""

    async def go(rig: Rig) -> None:
        async def unframed(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + fields + b'\r\n{"half": "')
            await writer.drain()
            writer.close()
            return True

        rig.decode[0].behave = unframed
        for i in range(2 * workers):
            status, body = await rig.post(ask(prompt=f"{i} short", **asks))
            assert (status, b"half" in body) == (200 if workers > 1 else 503, False)
            assert workers > 1 or b"it does not say where its body ends" in body

    run(go, prefill=0, decode=workers, config=msgspec.structs.replace(CONFIG, policy="roundRobin"))
