"""Who was told by a request's name to give its KV back is not asked for that request again: the message may come later than
another leg of that name, and end it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from fleet_router.ending import unframed
from fleet_router.health.resume import said_of
from tests.fleet_router.fake_worker import FakeWorker
from tests.fleet_router.health.test_resume import GREEDY, generator, tokens, word
from tests.fleet_router.rig import CONFIG, Rig, run, until
from tests.fleet_router.test_hedging import GARBAGE, RAW

PROMPT = list(range(100, 300))
"""Long enough for a prefill worker."""
ALWAYS = msgspec.structs.replace(CONFIG, min_uncached_tokens=0)
"""Also what was there before is prefilled by a prefill worker."""


@pytest.mark.parametrize("prefill", [1, 2])
def test_not_even_after_two_decode_workers_have_died(prefill: int):
    """A stream breaks, then the prefill leg of its rest answers nonsense, then that stream breaks: nobody is left but the first
    decode worker, which is asked again."""
    dies_after, breaks = [12, 6, None], [False, True]
    legs: list[FakeWorker] = []

    async def decodes(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        return await generator(dies_after=dies_after.pop(0))(body, writer)

    def prefills(worker: FakeWorker) -> Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[bool]]:
        async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            legs.append(worker)
            if broken := bool(breaks) and breaks.pop(0):
                writer.write(RAW[GARBAGE])
            return broken

        return behave

    async def go(rig: Rig) -> None:
        for worker in rig.decode:
            worker.behave = decodes
        for worker in rig.prefill:
            worker.behave = prefills(worker)
        _, got = await rig.post({**GREEDY, "prompt": PROMPT})
        said = said_of(unframed(got))
        assert said is not None, got
        assert said.text == "".join(map(word, tokens(PROMPT, 40)))
        assert (dies_after, breaks) == ([], [])
        told = legs[1]
        await until(lambda: len(told.released) >= 1)
        assert told not in legs[2:]
        assert rig.context.metrics.resumed == {"done": 1}

    run(go, prefill=prefill, decode=2, config=ALWAYS)
