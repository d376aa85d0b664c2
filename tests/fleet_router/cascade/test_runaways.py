"""A draft that runs away is none: the next tier is asked, in every dialect."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet_router.ending import framed
from tests.fleet_router.cascade.ladder import CHAT, TALK, Ladder, climbing, config
from tests.fleet_router.chat_worker import events
from tests.fleet_router.rig import until

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: TALK, "/v1/messages": {**TALK, "max_tokens": 999}, "/v1/responses": {"model": "m", "input": "x"},
}  # fmt: skip


@pytest.mark.parametrize("path", list(ASKED))
@pytest.mark.parametrize(("said", "pattern"), [("again", "repetition"), ("<|im_start|>{}", "control_tokens")])
def test_a_draft_that_runs_away_is_no_answer(path: str, said: str, pattern: str):
    """It was kept, with what the small model had said until then; /v1/messages called control tokens a stop sequence of the
    client's, and the usage 0."""

    async def go(ladder: Ladder) -> None:
        async def runs_away(_: Any, writer: asyncio.StreamWriter) -> bool:
            deltas = [{"content": said.format(number)} for number in range(600)]
            writer.write(HEAD + b"".join(map(framed, events(deltas, end=False))))
            await until(lambda: ladder["small"].is_left(writer))
            return True

        ladder.behave("small", runs_away)
        status, tier, body = await ladder.talk(path, **{**ASKED[path], "stream": True})
        assert (status, tier, b"ge" in body, said[:5].encode() in body) == (200, "large", True, False)
        found = ladder.counted()
        assert found['fleet_router_drafts_total{tier="small",outcome="failed"}'] == 1
        assert found[f'fleet_router_runaways_total{{pattern="{pattern}"}}'] == 1
        assert (found['fleet_router_requests_total{code="200"}'], found["fleet_router_streams_broken_total"]) == (1, 0)

    climbing(go, config(runaway=True))
