"""Anthropic's clients read an answer's name from `request-id`; whoever told it to an operator told None."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

from tests.fleet_router.cascade.ladder import Ladder, climbing, config
from tests.fleet_router.chat_worker import TEXT, says
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import LONG, Rig, http, run

TURNS: list[Any] = [{"role": "user", "content": LONG}]
MINE = {"x-request-id": "mine"}
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 8, "messages": TURNS, "extra_headers": MINE}


def claude(port: int) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(api_key="k", base_url=f"http://127.0.0.1:{port}", max_retries=0)


async def refuses(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    answer(writer, 400, {"error": {"message": "no", "type": "BadRequestError"}})
    return True


async def counts(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    answer(writer, 200, {"count": 7})
    return True


def test_an_answer_whole_and_streamed_and_a_count():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(TEXT)
        async with claude(rig.port) as client:
            assert (await client.messages.create(**ASKED))._request_id == "mine"
            async with client.messages.stream(**ASKED) as stream:
                assert stream.request_id == "mine"
            rig.decode[0].behave = counts
            counted = await client.messages.count_tokens(model="m", messages=TURNS, extra_headers=MINE)
            assert counted._request_id == "mine"

    run(go)


@pytest.mark.parametrize("wrong", [{"model": "other"}, {"max_tokens": 0}, {}], ids=["unknown", "refused", "by a worker"])
def test_a_refusal(wrong: dict[str, Any]):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = rig.prefill[0].behave = refuses
        async with claude(rig.port) as client:
            with pytest.raises(anthropic.APIStatusError) as told:
                await client.messages.create(**{**ASKED, **wrong})
        assert told.value.request_id == "mine"

    run(go)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_kept_draft(streamed: bool):
    async def go(ladder: Ladder) -> None:
        async with claude(ladder.rig.port) as client:
            if streamed:
                async with client.messages.stream(**ASKED) as stream:
                    assert stream.request_id == "mine"
            else:
                assert (await client.messages.create(**ASKED))._request_id == "mine"
        assert ladder.asked["small"] == 1

    climbing(go, config())


@pytest.mark.parametrize("streamed", [False, True])
def test_who_speaks_another_dialect_is_told_it_once(streamed: bool):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(TEXT)
        asked = {"model": "m", "input": "x", "stream": streamed}
        got = await rig.raw(http(asked, "connection: close", path="/v1/responses"))
        assert got.startswith(b"HTTP/1.1 200 ")
        assert got.lower().count(b"request-id: ") == 1

    run(go, prefill=0)
