"""Whom a prompt goes to when a prefill worker fails: another one, the decode worker itself, then nobody (503, Retry-After)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet_router.health.budget import FIRST, FREE, LONG_BYTES, SHARE
from tests.fleet_router.fake_worker import FakeWorker, answer
from tests.fleet_router.rig import LONG, Rig, answer_of, ask, http, run


def fails(order: list[FakeWorker], worker: FakeWorker) -> None:
    async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        order.append(worker)
        answer(writer, 500, {"error": {"message": "out of order"}})
        return True

    worker.behave = behave


async def asked(rig: Rig) -> tuple[int, dict[str, str]]:
    reader, writer, _ = await rig.connect()
    writer.write(http(ask()))
    status, headers, _ = await answer_of(reader)
    return status, headers


def test_another_prefill_worker_then_the_decode_worker_then_nobody():
    async def test(rig: Rig) -> None:
        order: list[FakeWorker] = []
        for worker in rig.prefill:
            fails(order, worker)
        assert (await asked(rig))[0] == 200
        assert len(order) == 2
        assert order[0] is not order[1], "a third one is not asked"
        (body,) = rig.decode[0].seen
        assert "kv_transfer_params" not in body
        assert rig.context.metrics.retries == 2
        assert rig.context.budget.saved_bytes == pytest.approx(FIRST * LONG_BYTES - (2 - SHARE) * len(LONG), abs=10)
        rig.apply(rig.prefill, [])
        status, headers = await asked(rig)
        assert (status, headers["retry-after"]) == (503, "1")

    run(test, prefill=3)


@pytest.mark.parametrize("spent", ["retries", "bytes"])
def test_without_a_retry_left_nobody_else_is_asked(spent: str):
    """However few prompts there were: a long one costs as much as it is long."""

    async def test(rig: Rig) -> None:
        order: list[FakeWorker] = []
        for worker in rig.prefill:
            fails(order, worker)
        budget, now = rig.context.budget, rig.context.clock()
        budget.take(now)
        if spent == "retries":
            budget.saved = 0.0
        else:
            budget.saved, budget.saved_bytes = 10.0, -FREE * LONG_BYTES
        status, headers = await asked(rig)
        assert (status, headers["retry-after"], len(order)) == (503, "1", 1)
        assert rig.decode[0].seen == []

    run(test, prefill=2)
