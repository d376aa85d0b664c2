"""What a client is told when a tier's worker refuses its request: which tier that was, in every dialect. And one that refuses to
read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet_router.cascade.climb import Climb
from fleet_router.config import TierRule
from tests.fleet_router.cascade.ladder import CHAT, SMALL, TALK, Ladder, climbing, config
from tests.fleet_router.chat_worker import CALL, says
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import http, until

SAID = b'{"error":{"message":"temperature is 9","param":"temperature"}}'
ASKED: dict[str, dict[str, Any]] = {
    CHAT: TALK, "/v1/messages": {**TALK, "max_tokens": 9}, "/v1/responses": {"model": "m", "input": "x"},
}  # fmt: skip


def refusing(*, chunked: bool) -> Any:
    async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SAID), SAID) if chunked else SAID
        framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(SAID)
        writer.write(b"HTTP/1.1 400 X\r\ncontent-type: application/json\r\n" + framing + b"\r\n\r\n" + body)
        return True

    return behave


@pytest.mark.parametrize("path", list(ASKED))
@pytest.mark.parametrize(("headers", "tier"), [((), "small"), (("x-tier: large",), "large")], ids=["draft", "rule"])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_refusal_names_the_tier_that_refused(path: str, headers: tuple[str, ...], tier: str, chunked: bool, stream: bool):
    async def go(ladder: Ladder) -> None:
        for name in ladder.tiers:
            ladder.behave(name, refusing(chunked=chunked))
        found, named, body = await ladder.talk(path, headers, **ASKED[path], stream=stream)
        error = json.loads(body)["error"]
        assert (found, named, error["message"]) == (400, tier, "temperature is 9")
        assert error.get("param") == (None if path == "/v1/messages" else "temperature")
        assert {name: count for name, count in ladder.asked.items() if count} == {tier: 1}
        assert ladder.counted()['fleet_router_requests_total{code="400"}'] == 1

    climbing(go, config(tier_rules=(TierRule(tier="large", headers={"x-tier": "large"}),)))


def test_the_last_tier_is_not_read_for_a_client_that_does_not_read():
    """Incident: the client stopped while a draft was made; the next tier's answer was kept here whole, for however long."""

    async def go(ladder: Ladder) -> None:
        drafted = asyncio.Event()

        async def slow(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            await drafted.wait()
            return await says(SMALL, "length")(body, writer)

        ladder.behave("small", slow)
        reader, writer, connection = await ladder.rig.connect()
        writer.write(http({**TALK, "stream": True}, path=CHAT))
        await until(lambda: ladder.asked["small"] == 1)
        connection.pause_writing()
        drafted.set()
        await until(lambda: ladder.asked["large"] == 1)
        for _ in range(20):
            await asyncio.sleep(0.001)
        climb = connection.flow
        assert isinstance(climb, Climb)
        assert not climb.started
        connection.resume_writing()
        assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")

    climbing(go, config())


@pytest.mark.parametrize("leaves", [False, True], ids=["late", "leaves"])
def test_a_request_that_was_never_begun_is_no_draft(leaves: bool):
    """One that waited too long for a slot counted as a draft that the router's end had cut."""

    async def go(ladder: Ladder) -> None:
        over, desk = asyncio.Event(), ladder.rig.context.desk

        async def slow(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            await over.wait()
            return await says(SMALL)(body, writer)

        ladder.behave("small", slow)
        running = [asyncio.create_task(ladder.talk()) for _ in range(2)]  # a slot of each tier
        await until(lambda: ladder.asked["small"] == 2)
        reader, writer, connection = await ladder.rig.connect()
        writer.write(http(TALK, "x-slo-ttft-ms: 50", path=CHAT))
        await until(lambda: desk.gate.waiting == 1)
        if leaves:
            connection.connection_lost(None)
        await until(lambda: bool(desk.tick()) or not desk.gate.waiting)
        if not leaves:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        over.set()
        assert [found[:2] for found in await asyncio.gather(*running)] == [(200, "small")] * 2
        drafts = {name: count for name, count in ladder.counted().items() if name.startswith("fleet_router_drafts_total")}
        assert drafts == {'fleet_router_drafts_total{tier="small",outcome="kept"}': 2}

    climbing(go, config(worker_slots=1))


def test_a_draft_that_its_dialect_cannot_tell_is_the_next_tiers_turn():
    """Small models write calls that are no JSON: Anthropic's clients were told 502, and the large model was not asked."""

    async def go(ladder: Ladder) -> None:
        call = {**CALL, "function": {"name": "f", "arguments": '{"city": Bonn'}}

        async def calls(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            answer(writer, 200, {"choices": [{"message": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]})
            return True

        ladder.behave("small", calls)
        status, tier, body = await ladder.talk("/v1/messages", max_tokens=9, **TALK)
        assert (status, tier, json.loads(body)["content"][0]["text"]) == (200, "large", "large")
        assert ladder.counted()['fleet_router_drafts_total{tier="small",outcome="unreadable"}'] == 1
        assert ladder.asked == {"small": 1, "large": 1}

    climbing(go, config())
