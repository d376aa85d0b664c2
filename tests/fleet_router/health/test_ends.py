"""Streams that end oddly: a client that leaves, a worker that dies behind its last word, a refusal in the middle of a stream."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet_router.ending import framed
from fleet_router.health.sent import ROOM_BYTES
from tests.fleet_router.health.test_resume import GREEDY, events, tokens, word
from tests.fleet_router.rig import Rig, http, run, until

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
