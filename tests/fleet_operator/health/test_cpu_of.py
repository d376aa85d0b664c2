"""CPU time of one coroutine among many, by a clock that each step turns."""

from __future__ import annotations

import asyncio
import time

import pytest

from fleet_operator.cluster.guarded import Write
from fleet_operator.cluster.interface import POD
from fleet_operator.health.cpu_of import CpuOf
from fleet_operator.health.meters import Meters
from fleet_operator.health.pulse import Pulse


class Thread:
    """The CPU time of a thread: it goes on when somebody works."""

    def __init__(self) -> None:
        self.cpu_s = 0.0

    def __call__(self) -> float:
        return self.cpu_s

    def works(self, cpu_s: float) -> None:
        self.cpu_s += cpu_s


def test_what_others_do_while_it_waits_is_not_counted():
    thread = Thread()

    async def mine() -> str:
        thread.works(1.0)
        await asyncio.sleep(0)
        thread.works(2.0)
        await asyncio.sleep(0)
        thread.works(4.0)
        return "done"

    async def another() -> None:
        for _ in range(5):
            thread.works(100.0)
            await asyncio.sleep(0)

    async def scenario() -> None:
        taken = CpuOf(mine(), thread)
        assert (await asyncio.gather(taken, another()))[0] == "done"
        assert taken.cpu_s == 7.0

    asyncio.run(scenario())


def test_a_failure_comes_out_and_what_it_took_is_counted():
    thread = Thread()

    async def fails() -> None:
        thread.works(1.0)
        await asyncio.sleep(0)
        thread.works(2.0)
        raise ValueError("as it was")

    async def scenario() -> None:
        taken = CpuOf(fails(), thread)
        with pytest.raises(ValueError, match="as it was"):
            await taken
        assert taken.cpu_s == 3.0

    asyncio.run(scenario())


def test_who_is_cancelled_cleans_up_and_that_is_counted():
    thread, cleaned = Thread(), []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            thread.works(1.0)
            await asyncio.sleep(0)
            thread.works(2.0)
            cleaned.append(True)
            raise

    async def scenario() -> None:
        taken = CpuOf(waits(), thread)

        async def run() -> None:
            await taken

        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (taken.cpu_s, cleaned) == (3.0, [True])

    asyncio.run(scenario())


def test_timeouts_inside_end_what_they_guard_and_no_more():
    async def scenario() -> None:
        async def bounded() -> str:
            try:
                async with asyncio.timeout(0):
                    await asyncio.Event().wait()
            except TimeoutError:
                return "ended"
            return "went on"

        assert await CpuOf(bounded()) == "ended"

    asyncio.run(scenario())


def test_a_pass_and_the_writes_that_it_leaves_to_others_are_counted_once():
    made = Meters(Pulse())
    write = Write("apply", POD, "ml", "p")

    def burn(cpu_s: float) -> None:
        end = time.thread_time() + cpu_s
        while time.thread_time() < end:
            pass

    async def send() -> None:
        burn(0.02)

    async def passing() -> None:
        burn(0.02)
        await made.guard(write, send)  # a step of the pass itself
        async with asyncio.TaskGroup() as group:
            group.create_task(made.guard(write, send))

    def counted() -> float:
        lines = made.text().decode().splitlines()
        return float(next(line for line in lines if line.startswith("fleet_operator_reconcile_cpu_seconds_total")).split()[1])

    asyncio.run(made.weighed(passing()))
    assert counted() == pytest.approx(0.06, abs=0.009)
    asyncio.run(made.guard(write, send))  # a lease's, a certificate's
    assert counted() == pytest.approx(0.06, abs=0.009)
