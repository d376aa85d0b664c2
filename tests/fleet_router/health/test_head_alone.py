"""Engines that send a stream's head at once (vLLM: before the request has a place in a batch): it says nothing of what follows.

Incident: a worker that died behind its head, before any token, broke every stream that was sampled, and those that went on
elsewhere had no id and no role.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet_router.ending import framed, unframed
from fleet_router.health.breaker import FAILURES_MOST
from fleet_router.watching import watch
from tests.fleet_router.chat_worker import CALLS, TEXT, Behave, says
from tests.fleet_router.health.test_inband import SHAPES
from tests.fleet_router.rig import CONFIG, Rig, http, run, until

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHAT: dict[str, Any] = {"model": "m", "max_tokens": 40, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def first_dies(rig: Rig, then: Behave, last: bytes = b"") -> None:
    """Whoever is asked first sends its head alone, then `last`, and is gone; the others answer as `then` does."""
    asked = list[dict[str, Any]]()

    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if body.get("kv_transfer_params", {}).get("do_remote_decode"):
            return False
        asked.append(body)
        if len(asked) > 1:
            return await then(body, writer)
        writer.write(HEAD)
        await writer.drain()
        await until(lambda: any(one.flow is not None and one.flow.started for one in rig.connections))
        writer.write(last)
        await writer.drain()
        writer.close()
        return True

    for worker in rig.decode:
        worker.behave = behave


def told(got: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in unframed(got).split(b"\n") if line.startswith(b"data: {")]


@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("more", [{"temperature": 0}, {"temperature": 1}, {"tools": TOOLS}], ids=["greedy", "sampled", "tools"])
@pytest.mark.parametrize("last", [b"", framed(b'data: {"choic'), framed(SHAPES["vllm"])], ids=["dies", "half", "error"])
def test_a_stream_of_which_the_client_has_nothing_is_begun_anew(last: bytes, more: dict[str, Any], prefill: int):
    deltas = CALLS if "tools" in more else TEXT

    async def go(rig: Rig) -> None:
        first_dies(rig, says(deltas), last)
        status, got = await rig.post(
            CHAT | more | {"messages": [{"role": "user", "content": "x" * 2000}]}, "/v1/chat/completions"
        )
        found = told(got)
        assert (status, got.count(b"[DONE]"), [one["id"] for one in found]) == (200, 1, ["c"] * len(found)), got
        assert [one["choices"][0]["delta"] for one in found if one["choices"]] == [*deltas, {}]
        assert got.endswith(b"0\r\n\r\n")
        assert (rig.context.metrics.resumed, rig.context.metrics.streams_broken) == ({"done": 1}, 0)

    run(go, prefill=prefill, decode=2)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("last", [b"", framed(SHAPES["vllm"])], ids=["dies", "error"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_in_another_dialect_too(path: str, last: bytes, temperature: int):
    async def go(rig: Rig) -> None:
        first_dies(rig, says(TEXT), last)
        body: dict[str, Any] = {"model": "m", "stream": True, "temperature": temperature}
        body |= {"input": "hi"} if path == "/v1/responses" else {"max_tokens": 40, "messages": CHAT["messages"]}
        status, got = await rig.post(body, path)
        kinds = [one["type"] for one in told(got)]
        ends = {"/v1/messages": ("message_start", "message_stop"), "/v1/responses": ("response.created", "response.completed")}
        assert (status, kinds[0], kinds[-1]) == (200, *ends[path])
        assert "error" not in kinds
        assert rig.context.metrics.resumed == {"done": 1}

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize("ends", [False, True])
def test_what_began_anew_breaks_as_any_stream_does(ends: bool):
    """A sampled one whose next worker says something and dies cannot be carried on."""

    async def go(rig: Rig) -> None:
        first_dies(rig, says(TEXT, end=ends))
        status, got = await rig.post(CHAT | {"temperature": 1}, "/v1/chat/completions")
        assert (status, "error" in told(got)[-1], b"[DONE]" in got) == (200, not ends, ends)
        assert [one["choices"][0]["delta"] for one in told(got) if one.get("choices")][:3] == TEXT
        assert rig.context.metrics.streams_broken == (not ends)

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize("payload", [b"data: [DONE]\n\n", b"data: {nothing\n\n"], ids=["no event", "no JSON"])
def test_what_is_no_answer_is_none_behind_an_early_head_either(payload: bytes):
    async def go(rig: Rig) -> None:
        async def nothing(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            writer.write(HEAD + framed(payload) + b"0\r\n\r\n")
            return True

        first_dies(rig, nothing)
        status, got = await rig.post(CHAT | {"temperature": 1}, "/v1/chat/completions")
        assert (status, b"[DONE]" in got, "error" in told(got)[-1]) == (200, False, True), got

    run(go, prefill=0, decode=2)


def test_it_is_not_begun_anew_where_streams_are_not_to_be():
    async def go(rig: Rig) -> None:
        first_dies(rig, says(TEXT))
        status, got = await rig.post(CHAT | {"temperature": 1}, "/v1/chat/completions")
        assert (status, [list(one) for one in told(got)]) == (200, [["error"]])

    run(go, prefill=0, decode=2, config=msgspec.structs.replace(CONFIG, resume="off"))


def test_the_first_token_has_its_time_behind_a_head_too():
    """Incident: with a queue of half a minute at vLLM, whose first tokens have a whole one, every stream was cut and every worker
    put out."""

    async def go(rig: Rig) -> None:
        goes_on = asyncio.Event()

        rig.decode[0].behave = head_then_all(goes_on)
        reader, writer, connection = await rig.connect()
        writer.write(http(CHAT | {"temperature": 1}, path="/v1/chat/completions"))
        await until(lambda: connection.flow is not None and connection.flow.started)
        rig.sweep(rig.context.config.first_token_deadline_s - 5.0)
        goes_on.set()
        got = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 5.0)
        assert b"[DONE]" in got
        assert rig.context.table.by_role["decode"][0].breaker.failures == 0

    run(go, prefill=0, decode=1)


class Headless:
    """Writes what comes behind a head."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._begun = writer, False

    def write(self, data: bytes) -> None:
        if self._begun:
            self._writer.write(data)
        self._begun = True

    async def drain(self) -> None:
        await self._writer.drain()


def head_then_all(goes_on: asyncio.Event) -> Behave:
    """A worker that gives its head at once, and the rest when it may."""

    async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD)
        await writer.drain()
        await goes_on.wait()
        return await says(TEXT)({"stream": True}, Headless(writer))  # type: ignore[arg-type]

    return behave


def test_a_head_alone_does_not_take_a_worker_back():
    """One whose engine hangs behind a server that does not: each trial put it back among the others."""

    async def go(rig: Rig) -> None:
        goes_on = asyncio.Event()

        rig.decode[0].behave = head_then_all(goes_on)
        (worker,) = rig.context.table.by_role["decode"]
        for _ in range(FAILURES_MOST):
            worker.failed(rig.context.clock() - 100.0)
        assert not worker.breaker.closed
        reader, writer, connection = await rig.connect()
        writer.write(http(CHAT, path="/v1/chat/completions"))
        await until(lambda: connection.flow is not None and connection.flow.started)
        assert not worker.breaker.closed
        goes_on.set()
        await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 5.0)
        assert worker.breaker.closed

    run(go, prefill=0, decode=1)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_who_gives_heads_and_nothing_else_is_silent(path: str):
    """A server whose engine hangs gave each request its head, and was heard of all the time."""

    async def go(rig: Rig) -> None:
        over, first, now = asyncio.Event(), rig.decode[0], rig.context.clock

        async def hangs(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            writer.write(HEAD)
            await writer.drain()
            await over.wait()
            return True

        first.behave, rig.decode[1].behave = hangs, says(TEXT)
        other = rig.context.table.by_role["decode"][1]
        other.put_out(now())
        posted = [asyncio.create_task(rig.post(CHAT | {"temperature": 1}, path)) for _ in range(2)]
        await until(lambda: sum(one.flow is not None and one.flow.started for one in rig.connections) == 2)
        other.answers(now(), now())
        assert other.breaker.closed
        watch(rig.context, rig.connections, now() + CONFIG.silent_s - 1)
        assert rig.context.table.trouble.ejections == 1
        watch(rig.context, rig.connections, now() + CONFIG.silent_s + 1)
        assert rig.context.table.trouble.ejections == 2
        for status, got in await asyncio.gather(*posted):
            assert (status, b"lo." in got, b"error" in got) == (200, True, False)
        over.set()

    run(go, prefill=0, decode=2)


def test_who_is_the_only_one_is_waited_for():
    async def go(rig: Rig) -> None:
        goes_on = asyncio.Event()

        rig.decode[0].behave = head_then_all(goes_on)
        posted = asyncio.create_task(rig.post(CHAT, "/v1/chat/completions"))
        await until(lambda: any(one.flow is not None and one.flow.started for one in rig.connections))
        watch(rig.context, rig.connections, rig.context.clock() + CONFIG.silent_s + 1)
        goes_on.set()
        status, got = await posted
        assert (status, b"[DONE]" in got, b"error" in got, rig.context.metrics.resumed) == (200, True, False, {})

    run(go, prefill=0, decode=1)
