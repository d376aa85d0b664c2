"""The time of a request is over while a leg runs: that counts against its worker only where the leg had time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from fleet_router.follow.documents import Documents
from fleet_router.health.patience import had_its_time
from fleet_router.workers import Worker
from fleet_wire.endpoints import Endpoints
from tests.fleet_router.fake_worker import FakeWorker, answer
from tests.fleet_router.health.test_resume import GREEDY, generator
from tests.fleet_router.rig import CONFIG, Rig, ask, run, until

FIRST_S = CONFIG.first_token_deadline_s
LATE_S, EARLY_S = FIRST_S - 0.05, 10.0
"""Of the time that a request has, what was gone when the leg was sent."""


@pytest.mark.parametrize(("sent_at", "found"), [(0.0, True), (30.0, True), (30.1, False), (59.95, False)])
def test_half_of_the_time_is_enough(sent_at: float, found: bool):
    assert had_its_time(sent_at, 60.0, 60.0) is found


class Late:
    """A clock that is set forward, and workers that hold what they are asked until they are told what to answer."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.later_s = rig, 0.0
        before = rig.context.clock
        rig.context.clock = lambda: before() + self.later_s
        self.asked: list[tuple[FakeWorker, asyncio.Future[int]]] = []
        for worker in [*rig.prefill, *rig.decode]:
            worker.behave = self.holds(worker)
        found = [msgspec.structs.replace(one.endpoint, revision=one.uid) for one in rig.context.table.workers.values()]
        rig.router.apply(Documents(CONFIG, Endpoints(fleet="f", namespace="n", workers=tuple(found))))

    def holds(self, worker: FakeWorker) -> Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[bool]]:
        async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self.asked.append((worker, told))
            while not told.done():
                await asyncio.sleep(0.005)
                if worker.is_left(writer):
                    return True
            if told.result() != 200:
                answer(writer, told.result(), {})
            return told.result() != 200

        return behave

    async def over(self, legs: int) -> Worker:
        """So many legs were sent; while the last one runs the request's time is over. Its worker."""
        await until(lambda: len(self.asked) == legs)
        await asyncio.sleep(0.02)
        self.later_s = FIRST_S + 0.5
        self.rig.sweep()
        return self.rig.context.table.workers[f"u{self.asked[-1][0].port}"]

    def refuse(self) -> None:
        """Whoever is asked and has not answered."""
        for _, told in self.asked:
            if not told.done():
                told.set_result(500)

    def errors(self, worker: Worker) -> tuple[int, int]:
        return worker.breaker.failures, self.rig.context.metrics.of("t", worker.uid).errors


@pytest.mark.parametrize(("gone_s", "blamed"), [(EARLY_S, True), (LATE_S, False)], ids=["in time", "at the end"])
@pytest.mark.parametrize("status", [200, 500], ids=["a decode leg behind a slow prefill", "a retried prefill leg"])
def test_a_leg_that_was_sent_at_the_end_is_not_to_blame(status: int, gone_s: float, blamed: bool):
    async def go(rig: Rig) -> None:
        late = Late(rig)
        posted = asyncio.ensure_future(rig.post(ask(stream=True)))
        await until(lambda: len(late.asked) == 1)
        late.later_s = gone_s
        late.asked[0][1].set_result(status)
        last = await late.over(2)
        assert last.role == ("decode" if status == 200 else "prefill")
        assert (await posted)[0] == 504
        assert late.errors(last) == (blamed, blamed)
        assert last.breaker.closed

    run(go, prefill=2, decode=1)


@pytest.mark.parametrize(("gone_s", "blamed"), [(EARLY_S, True), (LATE_S, False)], ids=["in time", "at the end"])
@pytest.mark.parametrize("stream", [True, False])
def test_nor_is_a_retried_decode_leg(stream: bool, gone_s: float, blamed: bool):
    async def go(rig: Rig) -> None:
        late = Late(rig)
        posted = asyncio.ensure_future(rig.post(ask(stream=stream)))
        await until(lambda: len(late.asked) == 1)
        late.later_s = gone_s
        late.asked[0][1].set_result(500)
        last = await late.over(2)
        if not stream:  # an answer that comes as a whole has a first token's time and more from when it is sent
            assert not posted.done()
            late.asked[1][1].set_result(200)
            assert (await posted)[0] == 200
            return
        assert (await posted)[0] == 504
        assert late.errors(last) == (blamed, blamed)

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize(("gone_s", "blamed"), [(EARLY_S, True), (LATE_S, False)], ids=["in time", "at the end"])
def test_nor_is_the_leg_that_carries_a_stream_on(gone_s: float, blamed: bool):
    """It counts from when the stream broke: the prompt is prefilled again first, and that took the time."""

    async def go(rig: Rig) -> None:
        late = Late(rig)
        holds = [worker.behave for worker in rig.decode]
        for worker in rig.prefill:
            worker.behave = None

        async def breaks(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            for worker, behave in zip(rig.decode, holds, strict=True):
                worker.behave = behave
            for worker in rig.prefill:
                worker.behave = late.holds(worker)
            return await generator(dies_after=12)(body, writer)

        for worker in rig.decode:
            worker.behave = breaks
        posted = asyncio.ensure_future(rig.post({**GREEDY, "prompt": list(range(100, 300))}))
        await until(lambda: len(late.asked) == 1)
        late.later_s = gone_s
        late.asked[0][1].set_result(200)
        last = await late.over(2)
        assert last.role == "decode"
        await until(lambda: len(late.asked) == 3)
        assert late.errors(last) == (blamed, blamed)
        await until(lambda: late.refuse() or posted.done())
        assert b"[DONE]" not in (await posted)[1]

    run(go, prefill=1, decode=3)
