"""`decide: cost` learns from answers that come as a whole, as far as they tell how many tokens they have."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet_router.admission.usage import TAIL_BYTES
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import CONFIG, Rig, answer_of, ask, http, run

BY_COST = msgspec.structs.replace(CONFIG, decide="cost")
USAGE = {"prompt_tokens": 500, "total_tokens": 507, "completion_tokens": 7}
PRIOR = 128.0
TOOK_S = 0.02
"""Longer than any engine takes for seven tokens: of an answer that came sooner nothing is learnt, and a compiled router with a
worker beside it sometimes was as quick."""


async def answer_in_pieces(writer: asyncio.StreamWriter, body: dict[str, Any], cut: int) -> None:
    raw = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw[:cut])
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.write(raw[cut:])


def learns(config: Any, body: dict[str, Any], said: dict[str, Any], cut: int = 0, path: str = "/v1/completions") -> bool:
    """Whether the length of answers was learnt from such ones."""
    found: list[bool] = []

    async def test(rig: Rig) -> None:
        async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            if cut:
                await answer_in_pieces(writer, said, cut)
            else:
                await asyncio.sleep(TOOK_S)
                answer(writer, 200, said)
            return True

        rig.decode[0].behave = behave
        for _ in range(3):
            status, _ = await rig.post(body, path)
            assert status == 200
        (group,) = rig.context.table.routing.groups.values()
        found.append(group.output.value != PRIOR)
        assert rig.context.table.by_role["decode"][0].pending == 0

    run(test, prefill=0, config=config)
    return found[0]


CHOICE = {"text": "hello", "index": 0, "finish_reason": "stop"}
TOLD = {"choices": [CHOICE], "usage": USAGE}
CHAT = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}], "usage": USAGE}
MESSAGES = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x" * 900}]}


@pytest.mark.parametrize(
    ("config", "body", "said", "cut", "path", "learnt"),
    [
        pytest.param(BY_COST, ask(), TOLD, 0, "/v1/completions", True, id="one piece"),
        pytest.param(BY_COST, ask(), TOLD, 30, "/v1/completions", True, id="two pieces"),
        pytest.param(BY_COST, MESSAGES, CHAT, 0, "/v1/messages", True, id="another dialect"),
        pytest.param(BY_COST, ask(n=2), TOLD, 0, "/v1/completions", False, id="several answers side by side"),
        pytest.param(BY_COST, ask(best_of=2), TOLD, 0, "/v1/completions", False, id="or of which one is told"),
        pytest.param(BY_COST, ask(), {"choices": [CHOICE]}, 0, "/v1/completions", False, id="no usage"),
        pytest.param(BY_COST, ask(), TOLD | {"usage": None}, 0, "/v1/completions", False, id="none that is one"),
        pytest.param(
            BY_COST, ask(), {**TOLD, "more": "x" * TAIL_BYTES}, 0, "/v1/completions", False, id="far from the end: not looked for"
        ),
        pytest.param(
            BY_COST, ask(), {"choices": [{**CHOICE, "text": '"usage": {"completion_tokens": 9}'}]}, 0, "/v1/completions", False,
            id="what the model says is no usage",
        ),
        pytest.param(CONFIG, ask(), TOLD, 0, "/v1/completions", False, id="a threshold decides"),
    ],
)  # fmt: skip
def test_what_is_learnt_of_whole_answers(
    config: Any, body: dict[str, Any], said: dict[str, Any], cut: int, path: str, learnt: bool
):
    assert learns(config, body, said, cut, path) is learnt


def test_an_answer_that_waited_for_its_client_teaches_nothing():
    """Who does not read the answer before this one keeps us from reading: the worker was not slow."""

    async def test(rig: Rig) -> None:
        async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            await asyncio.sleep(0.1)
            answer(writer, 200, TOLD)
            return True

        rig.decode[0].behave = behave
        (group,) = rig.context.table.routing.groups.values()
        reader, writer, connection = await rig.connect()
        writer.write(http(ask()))
        await asyncio.sleep(0.05)
        flow = connection.flow
        assert flow is not None
        flow.pause()
        flow.resume()
        assert (await answer_of(reader))[0] == 200
        assert group.output.value == PRIOR
        writer.write(http(ask()))
        assert (await answer_of(reader))[0] == 200
        assert group.output.value != PRIOR

    run(test, prefill=0, config=BY_COST)
