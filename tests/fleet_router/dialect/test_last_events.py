"""Streams whose last event is not followed by what ends one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fleet_router.chat_worker import TEXT, events, says
from tests.fleet_router.dialect.test_odd_answers import ASKED, told
from tests.fleet_router.rig import Rig, run


def says_done_and(behind: bytes) -> Any:
    """A worker whose streams end with [DONE] and this."""

    async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        said = b"".join(events(TEXT)).removesuffix(b"\n\n") + behind
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(said), said))
        return True

    return behave


@pytest.mark.parametrize("behind", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("path", ASKED)
def test_a_stream_is_whole_whose_done_has_no_blank_line_behind_it(path: str, behind: bytes):
    """It is one to clients of chat; those of other dialects had all of it and then an error, and the worker was blamed."""

    async def go(rig: Rig) -> None:
        status, body = await told(rig, path, says_done_and(behind), stream=True)
        last = b"event: message_stop" if path == "/v1/messages" else b"event: response.completed"
        assert (status, body.count(last), b"ended early" in body) == (200, 1, False)
        assert (rig.context.metrics.of("t", "r").errors, rig.context.metrics.streams_broken) == (0, 0)

    run(go, prefill=0)


def test_who_carries_a_stream_on_need_not_end_it_with_a_blank_line():
    """The client had all of it, and then an error."""

    async def go(rig: Rig) -> None:
        async def early(_: Any, writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = says_done_and(b"")
            return await says(TEXT[:2], end=False)({"stream": True}, writer)

        for worker in rig.decode:
            worker.behave = early
        _, body = await rig.post({**ASKED["/v1/messages"], "stream": True, "temperature": 0}, "/v1/messages")
        assert (body.count(b"event: message_stop"), rig.context.metrics.resumed) == (1, {"done": 1})

    run(go, prefill=0, decode=2)
