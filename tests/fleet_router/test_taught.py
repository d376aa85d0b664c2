"""What an answer that comes as a whole teaches goes by what its worker says of it: that is believed within bounds."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import CONFIG, Rig, ask, run

COST = msgspec.structs.replace(CONFIG, decide="cost", max_output_tokens=500)
SAID = {"id": "x", "object": "chat.completion", "model": "m"}
CHOICES = [{"index": 0, "finish_reason": "stop", "text": "hi", "message": {"role": "assistant", "content": "hi"}}]
MESSAGES = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "hello " * 300}]}
RESPONSES = {"model": "m", "max_output_tokens": 20, "input": "hello " * 300}


@pytest.mark.parametrize(
    ("path", "asked", "tokens", "believed"),
    [
        pytest.param("/v1/completions", ask(), 500, True, id="all that is allowed"),
        pytest.param("/v1/completions", ask(), 501, False, id="more than is allowed"),
        pytest.param("/v1/completions", ask(max_tokens=20), 20, True, id="all that was asked for"),
        pytest.param("/v1/completions", ask(max_tokens=20), 21, False, id="more than was asked for"),
        pytest.param("/v1/completions", ask(), 999_999_999, False, id="a lie"),
        pytest.param("/v1/completions", ask(), 0, False, id="none"),
        pytest.param("/v1/completions", ask(), -5, False, id="less than none"),
        pytest.param("/v1/completions", ask(n=2), 20, False, id="of two answers"),
        pytest.param("/v1/completions", ask(best_of=2), 20, False, id="of two, one of which is shown"),
        pytest.param("/v1/messages", MESSAGES, 20, True, id="another dialect"),
        pytest.param("/v1/messages", MESSAGES, 21, False, id="another dialect, more than was asked for"),
        pytest.param("/v1/responses", RESPONSES, 20, True, id="a third one"),
        pytest.param("/v1/responses", RESPONSES, 10**18, False, id="a third one, a lie"),
    ],
)
def test_what_a_worker_says_that_it_wrote(path: str, asked: dict[str, Any], tokens: int, believed: bool):
    async def writes(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(0.1)
        usage = {"prompt_tokens": 300, "total_tokens": 300 + tokens, "completion_tokens": tokens}
        answer(writer, 200, {**SAID, "choices": CHOICES, "usage": usage})
        return True

    async def test(rig: Rig) -> None:
        rig.decode[0].behave = writes
        [group] = rig.context.table.routing.groups.values()
        before = (group.output.value, group.pace_s)
        assert (await rig.post(asked, path))[0] == 200
        assert ((group.output.value, group.pace_s) != before) is believed

    run(test, prefill=0, config=COST)


def test_an_answer_at_the_second_attempt_is_told_by_its_own_time():
    """The first one is no part of it, nor is the retry's worker another's."""

    async def breaks(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        for worker in fakes:
            worker.behave = writes
        await asyncio.sleep(0.3)
        answer(writer, 500, {})
        return True

    async def writes(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(0.05)
        answer(writer, 200, {"choices": CHOICES, "usage": {"prompt_tokens": 3, "total_tokens": 14, "completion_tokens": 11}})
        return True

    fakes: list[Any] = []

    async def test(rig: Rig) -> None:
        fakes.extend(rig.decode)
        for worker in rig.decode:
            worker.behave = breaks
        [group] = rig.context.table.routing.groups.values()
        assert (await rig.post(ask(max_tokens=20)))[0] == 200
        assert 0.005 <= group.pace_s < 0.02

    run(test, prefill=0, decode=2, config=COST)
