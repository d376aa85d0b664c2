"""Errors inside a stream whose head said 200. Incident: vLLM's EngineDeadError went to clients as the end of a good answer, with
[DONE], and its worker was asked again and again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet_router.ending import framed, unframed
from fleet_router.explain.shown import shown
from fleet_router.health.absent import Absent
from fleet_router.health.inband import error_in
from fleet_router.health.resume import said_of
from tests.fleet_router.chat_worker import says
from tests.fleet_router.fake_worker import FakeWorker
from tests.fleet_router.health.test_resume import GREEDY, events, generator, tokens, word
from tests.fleet_router.rig import CONFIG, Rig, http, run, until

SAID = json.dumps({"error": {"message": "EngineCore died.", "type": "InternalServerError", "param": None, "code": 500}}).encode()
SHAPES = {
    "vllm": b"data: " + SAID + b"\n\n",
    "compact": b'data: {"error":{"message":"EngineCore died.","code":500}}\n\n',
    "text": b'data: {"error": "EngineCore died."}\n\n',
    "object": b'data: {"object": "error", "message": "EngineCore died.", "code": 500}\n\n',
    "event": b"event: error\ndata: " + SAID + b"\n\n",
    "name": b'event: error\ndata: {"message": "EngineCore died.", "code": 500}\n\n',
    "name and text": b"id: 1\nevent:error\ndata: EngineCore died.\n\n",
    "name alone": b"event: error\n\n",
    "no words": b"event: error\ndata:\n\n",
    "given up": b'data: {"choices":[{"index":0,"delta":{"content":""},"text":"","finish_reason":"abort"}]}\n\n',
    "spaced": b'data: {"id": "c", "choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "abort"}]}\n\n',
}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
ALL = "".join(map(word, tokens([5, 6, 7], 40)))
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": GREEDY,
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "stream": True},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "stream": True},
    "/v1/responses": {"model": "m", "input": "hi", "max_output_tokens": 40, "stream": True},
}


def reads(body: dict[str, Any], error: bytes, after: int, cut: str) -> list[bytes]:
    """A stream that tells of an error after so many tokens, as it comes."""
    made = events(tokens([5, 6, 7], 40)[:after], chat="messages" in body, with_ids=False, finish=False)
    chunks = [framed(one) for one in [*made, error, DONE]]
    if cut == "one chunk":
        chunks = [framed(b"".join([*made, error, DONE]))]
    whole = b"".join([HEAD, *chunks, b"0\r\n\r\n"])
    if cut == "pieces":
        return [whole[at : at + 23] for at in range(0, len(whole), 23)]
    return [HEAD, *chunks, b"0\r\n\r\n"] if cut == "by chunk" else [whole]


def dies(rig: Rig, error: bytes, after: int, cut: str) -> list[FakeWorker]:
    """Who is asked first tells of an error, then all are sound. Returns who was."""
    found: list[FakeWorker] = []

    def behaviour(worker: FakeWorker) -> Any:
        async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            if found:
                return bool(await generator()(body, writer))
            found.append(worker)
            for read in reads(body, error, after, cut):
                writer.write(read)
                await writer.drain()
                await asyncio.sleep(0.001)
            return True

        return behave

    for worker in rig.decode:
        worker.behave = behaviour(worker)
    return found


def text_of(path: str, got: bytes) -> str:
    told = [json.loads(line[6:]) for line in unframed(got).split(b"\n") if line.startswith(b"data: {")]
    if path == "/v1/messages":
        return "".join(one["delta"]["text"] for one in told if one.get("type") == "content_block_delta")
    if path == "/v1/responses":
        return "".join(one["delta"] for one in told if one.get("type") == "response.output_text.delta")
    said = said_of(b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in told if not one.get("error")))
    assert said is not None
    return said.text


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("cut", ["by chunk", "one read", "one chunk", "pieces"])
@pytest.mark.parametrize("after", [0, 5])
def test_b7_a_determined_stream_goes_on_elsewhere(path: str, cut: str, after: int):
    async def go(rig: Rig) -> None:
        dies(rig, SHAPES["vllm"], after, cut)
        status, got = await rig.post({**BODIES[path], "temperature": 0}, path)
        assert (status, text_of(path, got)) == (200, ALL), got
        assert b"EngineCore" not in got
        assert got.endswith(b"0\r\n\r\n")
        metrics = rig.context.metrics
        assert metrics.resumed["done"] + metrics.retries >= 1
        assert metrics.of("t", "r").errors == 1
        assert metrics.streams_broken == 0

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("cut", ["by chunk", "one read", "pieces"])
def test_b7_any_other_stream_ends_with_an_error_and_no_done(path: str, cut: str):
    async def go(rig: Rig) -> None:
        (*_, first) = [dies(rig, SHAPES["vllm"], 5, cut)]
        status, got = await rig.post(BODIES[path] | {"temperature": 1}, path)
        assert (status, b"[DONE]" in got) == (200, False)
        assert b"the worker broke the stream off: EngineCore died." in got
        assert got.count(b"EngineCore") == 1
        assert got.endswith(b"0\r\n\r\n")
        assert text_of(path, got) == "".join(map(word, tokens([5, 6, 7], 40)[:5]))
        assert not any(kind in got for kind in (b"message_stop", b"response.completed"))
        worker = next(w for w in rig.context.table.by_role["decode"] if w.endpoint.http_port == first[0].port)
        assert (worker.breaker.failures, worker.pool._idle, rig.context.metrics.streams_broken) == (1, [], 1)
        (record,) = rig.context.recorder.troubled  # logs and spans show it: an engine's words may quote a prompt
        assert record.tries[-1].why == "the worker broke the stream off"

    run(go, prefill=0, decode=2)


def test_b7_the_record_of_one_that_waits_for_another_worker_does_not_quote_it():
    """It did, as the reason why it waited: logs and spans told a worker's own words."""

    async def go(rig: Rig) -> None:
        dies(rig, SHAPES["vllm"], 0, "one read")
        rig.context.table.absent = {"u": Absent("t", {}, rig.context.clock())}
        reader, writer, connection = await rig.connect()
        writer.write(http(GREEDY))
        await until(lambda: len(rig.context.holding) == 1)
        record = connection.flow.record  # type: ignore[union-attr]
        name = rig.context.table.by_role["decode"][0].endpoint.name
        assert record.tries[-1].reason == f"{name}: the worker broke the stream off; waits for one that was there"
        assert b"EngineCore" not in msgspec.json.encode(shown(record, 0.0))
        rig.sweep(later_s=20)
        assert b" 503 " in await reader.readline()

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, return_wait_s=10.0))


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_b7_however_an_engine_says_it(shape: str, path: str):
    """In another dialect an `object` that is an error was passed over: half an answer was told as a whole one."""

    async def go(rig: Rig) -> None:
        dies(rig, SHAPES[shape], 5, "by chunk")
        _, got = await rig.post({**BODIES[path], "temperature": 0}, path)
        ends = {"/v1/messages": b"event: message_stop", "/v1/responses": b"event: response.completed"}
        incomplete = got.count(b"event: response.incomplete")  # the limit ended it
        ended = got.count(ends.get(path, b"[DONE]")) + incomplete
        assert (text_of(path, got), b"EngineCore" in got, ended) == (ALL, False, 1)
        assert rig.context.metrics.resumed == {"done": 1}

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize("path", BODIES)
def test_an_error_that_is_null_is_none(path: str):
    """Other dialects took each chunk of such an engine for an error, and OpenAI's of one that writes a space before its null."""

    async def go(rig: Rig) -> None:
        async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            made = events(tokens([5, 6, 7], 40), chat=path != "/v1/completions", with_ids=False)
            writer.write(
                b"".join([HEAD, *(framed(one.replace(b'{"id"', b'{"error": null, "id"')) for one in made), b"0\r\n\r\n"])
            )
            return True

        rig.decode[0].behave = behave
        _, got = await rig.post({**BODIES[path], "temperature": 1}, path)
        assert text_of(path, got) == ALL

    run(go, prefill=0)


def test_b7_an_engine_that_dies_every_time_is_put_out():
    async def go(rig: Rig) -> None:
        async def always(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            for read in reads(body, SHAPES["vllm"], 3, "by chunk"):
                writer.write(read)
                await writer.drain()
            return True

        for worker in rig.decode:
            worker.behave = always
        for _ in range(8):
            _, got = await rig.post({**GREEDY, "temperature": 1})
            assert b"[DONE]" not in got
        assert rig.context.table.trouble.ejections >= 1

    run(go, prefill=0, decode=2, config=msgspec.structs.replace(CONFIG, resume="off"))


def test_b7_a_resumed_stream_may_break_in_the_same_way():
    async def go(rig: Rig) -> None:
        left = [12, 6]

        async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            if not left:
                return bool(await generator()(body, writer))
            for read in reads(body, SHAPES["vllm"], left.pop(0), "by chunk"):
                writer.write(read)
                await writer.drain()
            return True

        for worker in rig.decode:
            worker.behave = behave
        _, got = await rig.post(GREEDY)
        assert (text_of("", got), rig.context.metrics.resumed) == (ALL, {"done": 1})

    run(go, prefill=0, decode=3)


def test_what_is_the_clients_fault_is_the_clients_to_read():
    """Else one bad request would put every worker out."""

    async def go(rig: Rig) -> None:
        error = b'data: {"error": {"message": "no such token", "type": "BadRequestError", "code": 400}}\n\n'
        dies(rig, error, 3, "by chunk")
        _, got = await rig.post(GREEDY)
        assert (b"no such token" in got, rig.context.metrics.retries) == (True, 0)
        assert all(worker.breaker.failures == 0 for worker in rig.context.table.by_role["decode"])

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize(
    "data",
    [
        b'data: {"choices":[{"text":"error"}]}\n\n',
        b'data: {"choices":[{"text":"\\ndata: {\\"error\\": {}}"}]}\n\n',
        b'data: {"error":null,"choices":[]}\n\n',
        b'data: {"error" : null, "choices": []}\n\n',
        b'data: {"id":"error","choices":[]}\n\n',
        b"event: errands\ndata: {}\n\n",
    ],
)
def test_text_about_errors_is_no_error(data: bytes):
    assert error_in(b"20\r\n" + data + b"\r\n") is None


@pytest.mark.parametrize("temperature", [0, 1], ids=["determined", "not"])
@pytest.mark.parametrize("at", [8, 10, 12])
@pytest.mark.parametrize("together", [True, False], ids=["with-others", "alone"])
def test_a_word_that_a_chunks_border_cuts(at: int, together: bool, temperature: int):
    """Half of an answer ended as a whole one."""

    async def go(rig: Rig) -> None:
        asked = 0

        async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            nonlocal asked
            asked += 1
            if asked > 1:
                return bool(await generator()(body, writer))
            *first, last = events(tokens([5, 6, 7], 40)[:5], with_ids=False, finish=False)
            error = SHAPES["vllm"]
            halves = [framed(error[:at]), framed(error[at:]) + framed(DONE) + b"0\r\n\r\n"]
            sent = [HEAD, *map(framed, first), framed(last) + halves[0], halves[1]]
            for read in sent if together else [*sent[:-2], framed(last), *halves]:
                writer.write(read)
                await writer.drain()
                await asyncio.sleep(0.005)
            return True

        for worker in rig.decode:
            worker.behave = behave
        _, got = await rig.post({**GREEDY, "temperature": temperature})
        text = unframed(got)
        if temperature:
            assert b"the worker broke the stream off: EngineCore died." in text
            assert (b"[DONE]" in text, text.count(b"EngineCore")) == (False, 1)
        else:
            said = said_of(text)
            assert said is not None
            assert (said.text, b"EngineCore" in text, text.endswith(DONE)) == (ALL, False, True)
        assert got.endswith(b"0\r\n\r\n")
        assert rig.context.metrics.of("t", "r").errors == 1

    run(go, prefill=0, decode=2)


def cut_ways(error: bytes, at: int) -> dict[str, list[bytes]]:
    """A stream that tells of an error in two chunks, and how it may be read."""
    event = events(tokens([5, 6, 7], 40)[:1], with_ids=False, finish=False)[0]
    before, halves, end = framed(event), [framed(error[:at]), framed(error[at:])], framed(DONE) + b"0\r\n\r\n"
    glued = framed(event + error[:at]) + framed(error[at:] + DONE) + b"0\r\n\r\n"
    whole = framed(error)
    return {
        "one read": [HEAD, b"".join([before, *halves, end])],
        "with its head": [b"".join([HEAD, before, *halves, end])],
        "glued to others": [HEAD, glued],
        "two reads": [HEAD, before, halves[0], halves[1] + end],
        "first, one read": [HEAD, b"".join([*halves, end])],
        "first, two reads": [HEAD, halves[0], halves[1] + end],
        "first, one chunk, two reads": [HEAD, whole[: at + 4], whole[at + 4 :] + end],
    }


async def what_is_told(rig: Rig, reads: list[bytes]) -> bytes:
    """The body that a client gets of a stream that comes in these reads."""
    reader, writer, connection = await rig.connect()
    writer.write(http(GREEDY | {"temperature": 1}, "connection: close"))
    await until(lambda: connection.flow is not None and connection.flow._connection is not None)  # type: ignore[union-attr]
    upstream = connection.flow._connection  # type: ignore[union-attr]
    assert upstream is not None
    leg = upstream._leg
    for data in reads:
        if upstream._leg is leg:
            upstream.data_received(data)
    async with asyncio.timeout(2):
        got = await reader.read(-1)
    for worker in rig.context.table.by_role["decode"]:
        worker.breaker.succeeded()
    return got.partition(b"\r\n\r\n")[2]


async def hangs(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    await asyncio.sleep(30)
    return True


@pytest.mark.parametrize("way", list(cut_ways(b"", 0)))
@pytest.mark.parametrize("code", [500, 400])
def test_a_border_of_chunks_anywhere_in_an_error(code: int, way: str):
    """In one read with the border it went to the client, [DONE] and all, as the end of a good answer; and where half of it could
    be seen, what was the client's fault was asked of others, who were put out for it."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = hangs
        for shape in ("vllm", "name", "object"):
            error = SHAPES[shape].replace(b"500", str(code).encode())
            for at in range(3, len(error), 5):
                got = await what_is_told(rig, cut_ways(error, at)[way])
                text = unframed(got) or got
                told = b"the worker broke the stream off: EngineCore died." in text
                assert (told, b"[DONE]" in text) == ((True, False) if code == 500 else (False, True)), (shape, at, got)
        assert rig.context.metrics.retries == 0

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, resume="off"))


@pytest.mark.parametrize("error", [b"event: error\ndata:\n\n", b'event: error\ndata: ""\n\n', b"event: error\n\n"])
@pytest.mark.parametrize("first", [True, False])
def test_an_error_without_words_is_one(error: bytes, first: bool):
    """Nobody was told of it, nor of the end of the body: the client waited for that for as long as it liked."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = hangs
        before = [] if first else [framed(events([1], with_ids=False, finish=False)[0])]
        got = await what_is_told(rig, [HEAD, *before, framed(error) + framed(DONE) + b"0\r\n\r\n"])
        assert b"the worker broke the stream off: an error without words" in got
        assert b"[DONE]" not in got
        assert rig.context.metrics.of("t", "r").errors == 1

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, resume="off"))


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("also", [0, 1])
def test_an_answer_that_its_engine_gave_up_is_asked_of_another(path: str, chunked: bool, also: int):
    """vLLM that is told to end gives up what runs, and what still comes: half an answer, or an empty one, was told as a whole
    one; in /v1/messages with `end_turn`, in /v1/responses as `completed`."""

    async def go(rig: Rig) -> None:
        choice = {"index": 0, "text": "half", "message": {"role": "assistant", "content": "half"}, "finish_reason": "abort"}
        said = json.dumps({"id": "c", "choices": [choice], "usage": None}).encode()
        framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(said)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%b\r\n\r\n" % framing

        async def gives_up(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            left.append(1)
            if len(left) > also:
                for worker in rig.decode:
                    worker.behave = says([{"content": "whole"}]) if "completions" not in path or "chat" in path else None
            for at in range(0, len(said), 23):
                writer.write((head if at == 0 else b"") + (framed(said[at : at + 23]) if chunked else said[at : at + 23]))
                await writer.drain()
            writer.write(b"0\r\n\r\n" if chunked else b"")
            return True

        left = list[int]()
        for worker in rig.decode:
            worker.behave = gives_up
        status, got = await rig.post({**BODIES[path], "stream": False}, path)
        assert (status, b"half" in got) == ((502, False) if also else (200, False))
        assert (b"the engine gave the answer up" in got) == bool(also)
        (record,) = rig.context.recorder.records()
        assert shown(record, 0.0)["status"] == status, "what the log says is what the client was told"
        assert rig.context.metrics.of("t", "r").errors == 1 + also

    run(go, prefill=0, decode=2)
