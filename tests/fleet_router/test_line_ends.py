"""Streams whose events end with CRLF, as they may (WHATWG HTML, 9.2): they move the deadline, break and go on like others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet_router.ending import framed, unframed
from fleet_router.health.resume import said_of
from tests.fleet_router.health.test_resume import GREEDY, events, generator, tokens, word
from tests.fleet_router.rig import CONFIG, Rig, run, until

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ALL = "".join(map(word, tokens([5, 6, 7], 40)))


def chunks(count: int, *, finish: bool) -> list[bytes]:
    made = events(tokens([5, 6, 7], 40)[:count], with_ids=False, finish=finish)
    return [framed(one.replace(b"\n", b"\r\n")) for one in made]


@pytest.mark.parametrize("temperature", [0, 1], ids=["determined", "not"])
def test_each_event_moves_the_deadline_and_goes_out_at_once(temperature: int):
    async def go(rig: Rig) -> None:
        more = asyncio.Event()

        async def slow(_: Any, writer: asyncio.StreamWriter) -> bool:
            first, *rest = chunks(5, finish=False)
            writer.write(HEAD + first)
            await more.wait()
            for chunk in rest:
                writer.write(chunk)
                await writer.drain()
                await asyncio.sleep(0.005)
            writer.write(framed(b"data: [DONE]\r\n\r\n"))
            await writer.drain()
            await asyncio.sleep(0.005)
            writer.write(b"0\r\n\r\n")
            return True

        rig.decode[0].behave = slow
        now = rig.context.clock()
        rig.context.clock = lambda: now
        posted = asyncio.create_task(rig.post({**GREEDY, "temperature": temperature}))
        await until(lambda: any(c.flow is not None and c.flow.started for c in rig.connections))
        (flow,) = [c.flow for c in rig.connections if c.flow is not None]
        now += 20.0
        more.set()
        await until(lambda: flow.last_byte_at == now)
        assert flow.deadline == now + CONFIG.inter_token_deadline_s
        assert flow._unended == 0
        status, got = await posted
        assert (status, got) == (200, b"".join(chunks(5, finish=False)) + framed(b"data: [DONE]\r\n\r\n") + b"0\r\n\r\n")

    run(go, prefill=0)


@pytest.mark.parametrize("temperature", [0, 1], ids=["determined", "not"])
@pytest.mark.parametrize("piece", [7, 1_000_000], ids=["in-pieces", "in-one"])
def test_a_stream_with_crlf_that_breaks(temperature: int, piece: int):
    async def go(rig: Rig) -> None:
        asked = 0

        async def dies(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            nonlocal asked
            asked += 1
            if asked > 1:
                return bool(await generator()(body, writer))
            said = b"".join(chunks(6, finish=False))[:-20]
            writer.write(HEAD)
            for at in range(0, len(said), piece):
                writer.write(said[at : at + piece])
                await writer.drain()
                await asyncio.sleep(0.001)
            writer.close()
            return True

        for worker in rig.decode:
            worker.behave = dies
        _, got = await rig.post({**GREEDY, "temperature": temperature})
        whole, _, error = unframed(got).partition(b'data: {"error"')
        said = said_of(whole)
        assert said is not None, got
        assert (said.text == ALL, bool(error)) == ((True, False) if temperature == 0 else (False, True)), got
        assert got.endswith(b"0\r\n\r\n")
        assert ALL.startswith(said.text)

    run(go, prefill=0, decode=2)


def test_a_byte_now_and_then_is_no_event():
    async def go(rig: Rig) -> None:
        more = asyncio.Event()

        async def drips(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(HEAD + chunks(1, finish=False)[0])
            await more.wait()
            for _ in range(3):
                writer.write(b"2\r\n\r\n\r\n")
                await writer.drain()
                await asyncio.sleep(0.005)
            writer.close()
            return True

        rig.decode[0].behave = drips
        now = rig.context.clock()
        rig.context.clock = lambda: now
        posted = asyncio.create_task(rig.post({**GREEDY, "temperature": 1}))
        await until(lambda: any(c.flow is not None and c.flow.started for c in rig.connections))
        (flow,) = [c.flow for c in rig.connections if c.flow is not None]
        before = flow.deadline
        now += 5.0
        more.set()
        await until(lambda: flow.last_byte_at == now)
        assert flow.deadline == before
        await posted

    run(go, prefill=0)


@pytest.mark.parametrize("lines", [b": keep-alive\r\n\r\n", b"event: ping\r\n\r\n", b":\r\n\r\n: a\r\n\r\n", b": keep-alive\n\n"])
@pytest.mark.parametrize("temperature", [0, 1], ids=["determined", "not"])
def test_a_comment_moves_the_deadline_whatever_its_line_ends(lines: bytes, temperature: int):
    """Those with CRLF did not: a worker that was busy, and said so, was cut off after the time between two tokens."""

    async def go(rig: Rig) -> None:
        more = asyncio.Event()

        async def busy(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(HEAD + chunks(1, finish=False)[0])
            await more.wait()
            writer.write(framed(lines))
            await writer.drain()
            await asyncio.sleep(0.005)
            writer.close()
            return True

        rig.decode[0].behave = busy
        now = rig.context.clock()
        rig.context.clock = lambda: now
        posted = asyncio.create_task(rig.post({**GREEDY, "temperature": temperature}))
        await until(lambda: any(c.flow is not None and c.flow.started for c in rig.connections))
        (flow,) = [c.flow for c in rig.connections if c.flow is not None]
        now += 5.0
        more.set()
        await until(lambda: flow.last_byte_at == now)
        assert flow.deadline == now + CONFIG.inter_token_deadline_s
        await posted

    run(go, prefill=0)


@pytest.mark.parametrize("temperature", [0, 1], ids=["determined", "not"])
def test_a_ping_may_have_other_line_ends_than_the_event_before_it(temperature: int):
    """Where both came in one read the stream broke off: its event was said to be no JSON."""

    async def go(rig: Rig) -> None:
        made = [framed(one) for one in events(tokens([5, 6, 7], 40)[:3], with_ids=False, finish=True)]
        ping = framed(b": ping - 2026-11-28\r\n\r\n")

        async def pings(_: Any, writer: asyncio.StreamWriter) -> bool:
            for one in (HEAD + made[0], made[1] + ping, *made[2:], b"0\r\n\r\n"):
                writer.write(one)
                await writer.drain()
                await asyncio.sleep(0.005)
            return True

        rig.decode[0].behave = pings
        status, got = await rig.post({**GREEDY, "temperature": temperature})
        assert (status, got) == (200, made[0] + made[1] + ping + b"".join(made[2:]) + b"0\r\n\r\n")

    run(go, prefill=0)
