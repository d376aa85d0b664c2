"""Streams whose last event is not followed by what ends one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fleet_router.chat_worker import TEXT, events, says
from tests.fleet_router.dialect.test_odd_answers import ASKED, told
from tests.fleet_router.rig import Rig, http, run


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


ERROR = b'data: {"error":{"message":"boom","type":"server_error","code":500}}\n\n'


def breaks_off_twice(*, told: int) -> Any:
    """A worker that tells of an error and, in the same read, goes on with what is no HTTP."""

    async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        said = b"".join(events(TEXT)[:told]) + ERROR
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.write(b"%x\r\n%b\r\nno chunk" % (len(said), said))
        return True

    return behave


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_that_breaks_off_twice_in_one_read_ends_once(path: str):
    """Its client got a second end, and what stood before that was its connection's next answer."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = breaks_off_twice(told=2)
        got = await rig.raw(http({**ASKED[path], "stream": True}, path=path), timeout_s=0.3)
        assert (got.count(b"boom"), got.count(b"\r\n0\r\n\r\n"), got.endswith(b"\r\n0\r\n\r\n")) == (1, 1, True)
        assert (rig.context.metrics.of("t", "r").errors, rig.context.metrics.streams_broken) == (1, 1)

    run(go, prefill=0)


@pytest.mark.parametrize("path", ASKED)
def test_and_is_carried_on_by_one_worker(path: str):
    """The leg of the worker that carried it on was ended with the one that broke."""

    async def go(rig: Rig) -> None:
        async def early(_: Any, writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = says(TEXT)
            return await breaks_off_twice(told=2)({"stream": True}, writer)

        for worker in rig.decode:
            worker.behave = early
        status, body = await rig.post({**ASKED[path], "stream": True, "temperature": 0}, path)
        last = b"event: message_stop" if path == "/v1/messages" else b"event: response.completed"
        assert (status, body.count(last), b"boom" in body, rig.context.metrics.resumed) == (200, 1, False, {"done": 1})
        assert (rig.context.metrics.of("t", "r").errors, rig.context.metrics.retries) == (1, 1)

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize("path", ASKED)
def test_one_that_is_ended_too_early_by_half_of_an_event_is_carried_on_by_one_worker(path: str):
    """[DONE] in the middle of an answer is found out at its end, where no blank line is behind it."""

    async def go(rig: Rig) -> None:
        async def early(_: Any, writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = says(TEXT)
            said = b"".join(events(TEXT, end=False)) + b"data: [DONE]"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(said), said))
            return True

        rig.context.ends.said = True
        for worker in rig.decode:
            worker.behave = early
        _, body = await rig.post({**ASKED[path], "stream": True, "temperature": 0}, path)
        last = b"event: message_stop" if path == "/v1/messages" else b"event: response.completed"
        assert (body.count(last), rig.context.metrics.resumed) == (1, {"done": 1})
        assert (rig.context.metrics.of("t", "r").errors, rig.context.metrics.retries) == (1, 1)

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize("path", ASKED)
def test_an_event_behind_the_last_one_costs_none_of_those_before_it(path: str):
    """Its client got an empty stream, ended as if it were whole."""

    async def go(rig: Rig) -> None:
        async def behave(_: Any, writer: asyncio.StreamWriter) -> bool:
            said = b"".join(events(TEXT)) + b"data: bye\n\n"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(b"%x\r\n%b\r\n" % (len(said), said))
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(b"0\r\n\r\n")
            return True

        status, body = await told(rig, path, behave, stream=True)
        last = b"event: message_stop" if path == "/v1/messages" else b"event: response.completed"
        assert (status, body.count(last), b"Hel" in body) == (200, 1, True)

    run(go, prefill=0)
