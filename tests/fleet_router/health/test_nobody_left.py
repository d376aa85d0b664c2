"""Streams that break where nobody can carry them on now."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet_router.follow.documents import Documents
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.fake_worker import stream as stream_of
from tests.fleet_router.rig import CONFIG, Rig, ask, http, run, until
from tests.fleet_router.test_returning import document


async def says_a_word_and_dies(writer: asyncio.StreamWriter) -> bool:
    await stream_of(writer, ["a"], end=False, gap_s=0.01)
    writer.close()
    return True


@pytest.mark.parametrize("parts", [[], ["a"]])
def test_who_has_half_an_answer_does_not_wait_for_a_tier_to_wake(parts: list[str]):
    """Its client heard nothing for as long as a tier may take to wake. Who has a head alone waits as those without one do."""

    async def go(rig: Rig) -> None:
        only = rig.context.table.by_role["decode"][0].endpoint
        rig.router.apply(Documents(CONFIG, document(only, zero=("s",))))

        async def breaks(_: Any, writer: asyncio.StreamWriter) -> bool:
            await stream_of(writer, parts, end=False, gap_s=0.01)
            await asyncio.sleep(0.05)
            writer.close()
            return True

        rig.decode[0].behave = breaks
        reader, writer, _ = await rig.connect()
        writer.write(http(ask(prompt="p", stream=True, temperature=0)))
        if parts:
            assert b'"code":"no_worker"' in await reader.readuntil(b"0\r\n\r\n")
            assert (len(rig.context.holding), rig.context.metrics.resumed) == (0, {"refused": 1})
        else:
            await until(lambda: len(rig.context.holding) == 1)
            rig.apply(rig.prefill, rig.decode[1:])
            assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")
            assert rig.context.metrics.resumed == {"done": 1}

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize("status", [400, 429])
def test_a_worker_that_refuses_the_rest_of_a_stream_has_not_failed(status: int):
    """One that cannot take it (a revision with a shorter context, say) was blamed by each stream that a dead worker left behind,
    and put out for it. 429 is of the worker itself."""

    async def go(rig: Rig) -> None:
        asked: list[str] = []

        async def refuses(_: Any, writer: asyncio.StreamWriter) -> bool:
            asked.append("second")
            answer(writer, status, {"error": {"message": "too long", "type": "BadRequestError"}})
            return True

        async def breaks(_: Any, writer: asyncio.StreamWriter) -> bool:
            asked.append("first")
            for worker in rig.decode:
                worker.behave = refuses
            return await says_a_word_and_dies(writer)

        for worker in rig.decode:
            worker.behave = breaks
        _, got = await rig.post(ask(prompt="p", stream=True, temperature=0))
        assert (b'"error"' in got, b"[DONE]" in got, rig.context.metrics.resumed) == (True, False, {"refused": 1})
        blamed = sum(worker.breaker.failures for worker in rig.context.table.by_role["decode"])
        assert (asked[:2], blamed) == (["first", "second"], 1 if status == 400 else len(asked))

    run(go, prefill=0, decode=3)


def test_a_prefill_worker_that_refuses_the_rest_of_a_stream_has_not_failed_either():
    async def go(rig: Rig) -> None:
        async def refuses(_: Any, writer: asyncio.StreamWriter) -> bool:
            answer(writer, 400, {"error": {"message": "too long", "type": "BadRequestError"}})
            return True

        async def breaks(_: Any, writer: asyncio.StreamWriter) -> bool:
            rig.prefill[0].behave = refuses
            for worker in rig.decode:
                worker.behave = None
            return await says_a_word_and_dies(writer)

        for worker in rig.decode:
            worker.behave = breaks
        await rig.post(ask(stream=True, temperature=0))
        assert len(rig.prefill[0].seen) == 2
        (prefill,) = rig.context.table.by_role["prefill"]
        assert prefill.breaker.failures == 0

    run(go, prefill=1, decode=2)
