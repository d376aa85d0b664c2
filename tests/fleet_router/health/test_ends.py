"""Streams that end oddly: a client that leaves, a worker that dies behind its last word, a refusal in the middle of a stream."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from fleet_router.ending import framed, unframed
from fleet_router.health.resume import said_of
from fleet_router.health.sent import ROOM_BYTES
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.health.test_inband import BODIES, text_of
from tests.fleet_router.health.test_resume import GREEDY, PREFILLING, events, generator, tokens, word
from tests.fleet_router.rig import CONFIG, Rig, ask, http, run, until

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ALL = "".join(map(word, tokens([5, 6, 7], 40)))
DONE = framed(b"data: [DONE]\n\n")


async def leaves_at_done(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    """All of the answer but the end of its framing."""
    made = events(tokens([5, 6, 7], 40), chat="messages" in body, with_ids=False)
    writer.write(HEAD + b"".join(map(framed, made)))
    await writer.drain()
    writer.close()
    return True


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_room_for_streams_comes_back_when_their_clients_leave(path: str):
    """Incident: after 2,000 clients that left in the middle, no stream could be carried on any more."""

    async def go(rig: Rig) -> None:
        async def slow(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            writer.write(HEAD)
            for made in events(tokens([5, 6, 7], 400), chat="messages" in body, with_ids=False):
                writer.write(framed(made))
                await writer.drain()
                await asyncio.sleep(0.005)
            return True

        rig.decode[0].behave = slow
        body = {**GREEDY, "prompt": [5, 6, 7]} if path == "/v1/completions" else {
            "model": "m", "max_tokens": 40, "temperature": 0, "stream": True, "messages": [{"role": "user", "content": "hi"}]
        }  # fmt: skip
        reader, writer, _ = await rig.connect()
        writer.write(http(body, path=path))
        await reader.readuntil(b"w")
        await until(lambda: rig.context.room.left < ROOM_BYTES)
        writer.close()
        await until(rig.idle)
        assert rig.context.room.left == ROOM_BYTES

    run(go, prefill=0, decode=1)


@pytest.mark.parametrize(
    ("more", "dies_after"), [({}, 0), ({"temperature": 1}, 0), ({}, 5)], ids=["determined", "not determined", "carried on"]
)
def test_a_worker_that_dies_behind_done_has_said_all(more: dict[str, Any], dies_after: int):
    """Incident: the answer was told as broken, and one that was carried on got [DONE] and the body's end twice: the second time
    they stood before the next answer of the connection."""

    async def go(rig: Rig) -> None:
        async def first(asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = leaves_at_done
            return bool(await (generator(dies_after=dies_after) if dies_after else leaves_at_done)(asked, writer))

        for worker in rig.decode:
            worker.behave = first
        reader, writer, _ = await rig.connect()
        writer.write(http({**GREEDY, **more}))
        got = await reader.readuntil(b"0\r\n\r\n")
        for worker in rig.decode:
            worker.behave = None
        writer.write(http(ask(prompt="short"), "connection: close"))
        rest = await reader.read(-1)
        said = said_of(unframed(got.partition(b"\r\n\r\n")[2]))
        assert said is not None, got
        assert said.text == ALL
        assert got.count(b"[DONE]") == 1
        assert rest.startswith(b"HTTP/1.1 200"), rest
        assert b"hello" in rest

    run(go, prefill=0, decode=3)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_nothing_stands_behind_the_last_event_of_another_dialect(path: str):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = leaves_at_done
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40} if path == "/v1/messages" else {"input": "hi"}
        _, got = await rig.post({"model": "m", "stream": True, **body}, path)
        assert b"response.failed" not in got
        assert b"event: error" not in got
        assert unframed(got).rpartition(b"event: ")[2].startswith((b"message_stop", b"response.incomplete")), got
        assert got.endswith(b"0\r\n\r\n")

    run(go, prefill=0, decode=1)


def test_a_refusal_of_the_prefill_leg_is_no_part_of_a_stream_that_is_carried_on():
    """Incident: head and body of a worker's 400 stood in the middle of the stream."""

    async def go(rig: Rig) -> None:
        async def refuses(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            answer(writer, 400, {"error": {"message": "not this one"}})
            return True

        async def first(asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = generator()
            for worker in rig.prefill:
                worker.behave = refuses
            return bool(await generator(dies_after=20)(asked, writer))

        for worker in rig.decode:
            worker.behave = first
        _, got = await rig.post({**GREEDY, "prompt": list(range(5, 305))})
        assert b"HTTP/1.1" not in got, got
        said = said_of(unframed(got))
        assert said is not None, got
        assert said.text == "".join(map(word, tokens(list(range(5, 305)), 40)))

    run(go, prefill=2, decode=2, config=PREFILLING)


def test_a_loop_in_a_stream_that_is_carried_on_ends_it_once():
    """Incident: events that came in the same read went out behind the end, before the next answer of the connection."""
    event = b'data: {"id":"c-1","created":5,"choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'

    async def go(rig: Rig) -> None:
        async def loops(asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            writer.write(HEAD + framed(event * 700))
            await writer.drain()
            return True

        async def first(asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = loops
            writer.write(HEAD + framed(event) * 3)
            await writer.drain()
            writer.close()
            return True

        for worker in rig.decode:
            worker.behave = first
        reader, writer, _ = await rig.connect()
        writer.write(http({**GREEDY, "max_tokens": 3000}))
        got = await reader.readuntil(b"0\r\n\r\n")
        for worker in rig.decode:
            worker.behave = None
        writer.write(http(ask(prompt="short"), "connection: close"))
        rest = await reader.read(-1)
        assert got.count(b"repetition_detected") == 1
        assert rest.startswith(b"HTTP/1.1 200"), rest[:300]
        assert rest.count(b"HTTP/1.1") == 1

    run(go, prefill=0, decode=2, config=msgspec.structs.replace(CONFIG, runaway=True))


ERROR = framed(b'data: {"error": {"message": "x", "code": 500}}\n\n')
HALVES = [b"", b"99\r\nd", b"99\r\ndata:", b"99\r\ndata: ", b'99\r\ndata: {"id"', ERROR]


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("last", HALVES)
def test_a_stream_that_is_carried_on_twice_has_each_token_once(path: str, last: bytes):
    """Incident: half an event of the first worker, or its error, still counted as the client's when the second one died, and
    hid what stood behind it: the third worker said that again, and it went out."""

    async def go(rig: Rig) -> None:
        async def first(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = second
            made = events(tokens([5, 6, 7], 40)[:4], chat="messages" in body, with_ids=False, finish=False)
            writer.write(HEAD + b"".join(map(framed, made)) + last)
            await writer.drain()
            writer.close()
            return True

        async def second(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = generator()
            return await generator(dies_after=20)(body, writer)

        for worker in rig.decode:
            worker.behave = first
        _, got = await rig.post({**BODIES[path], "temperature": 0}, path)
        assert text_of(path, got) == ALL
        assert rig.context.metrics.resumed == {"done": 1}

    run(go, prefill=0, decode=3)
