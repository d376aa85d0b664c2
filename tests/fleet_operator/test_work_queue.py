"""The order of work: once per key, never twice at the same time, a rest that follows from the last pass."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fleet_operator.work_queue import REST_LEAST_S, REST_MOST_S, REST_SHARE, WorkQueue

A, B = ("ml", "a"), ("ml", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def play(scenario: Callable[[WorkQueue, Clock], Awaitable[None]]) -> None:
    async def run() -> None:
        clock = Clock()
        await scenario(WorkQueue(clock), clock)

    asyncio.run(run())


def test_many_events_are_one_pass_and_keys_come_in_order():
    async def scenario(queue: WorkQueue, clock: Clock) -> None:
        for key in (A, B, A, A, B):
            queue.add(key)
        assert [await queue.take(), await queue.take()] == [A, B]
        assert queue.take_any() is None

    play(scenario)


def test_what_changes_during_a_pass_is_looked_at_after_it_and_not_before():
    async def scenario(queue: WorkQueue, clock: Clock) -> None:
        queue.add(A)
        assert await queue.take() == A
        queue.add(A)
        assert queue.take_any() is None
        queue.done(A, 0.0)
        assert queue.take_any() == A
        queue.done(A, 0.0)
        assert queue.take_any() is None

    play(scenario)


def test_take_waits_for_a_key():
    async def scenario(queue: WorkQueue, clock: Clock) -> None:
        taking = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        assert not taking.done()
        queue.add(B)
        assert await taking == B

    play(scenario)


def test_the_rest_follows_from_the_length_of_the_pass():
    for took_s, rest_s in ((0.0, REST_LEAST_S), (0.2, 0.2 * REST_SHARE), (60.0, REST_MOST_S)):

        async def scenario(queue: WorkQueue, clock: Clock, took_s: float = took_s, rest_s: float = rest_s) -> None:
            loop = asyncio.get_running_loop()
            queue.add(A)
            await queue.take()
            queue.done(A, took_s)
            queue.add(A)
            left_s = next(iter(queue._resting.values())).when() - loop.time()
            assert rest_s - 0.04 < left_s <= rest_s, (took_s, left_s)
            clock.now += rest_s
            queue.add(B)  # never worked on: no rest
            assert await queue.take() == B
            assert queue.take_any() == A

        play(scenario)


def test_a_key_that_rested_long_enough_is_looked_at_at_once():
    async def scenario(queue: WorkQueue, clock: Clock) -> None:
        queue.add(A)
        await queue.take()
        queue.done(A, 10.0)
        clock.now += REST_MOST_S
        queue.add(A)
        assert await asyncio.wait_for(queue.take(), 0.01) == A

    play(scenario)


def test_a_fleet_that_is_gone_leaves_nothing():
    async def scenario(queue: WorkQueue, clock: Clock) -> None:
        queue.add(A)
        await queue.take()
        queue.done(A, 10.0)
        queue.forget(A)
        assert not (queue._rested_at)
        assert not (queue._busy)
        assert not (queue._ready)
        assert not (queue._resting)

    play(scenario)


def test_fleets_that_came_and_went_leave_nothing():
    """The end of a fleet is looked at, too, and that look left its rest behind for ever."""

    async def scenario(queue: WorkQueue, clock: Clock) -> None:
        for number in range(1_000):
            queue.add(("ml", f"run-{number}"))
            key = await queue.take()
            queue.forget(key)
            queue.done(key, 0.0)
            clock.now += 0.1
        assert len(queue._rested_at) < 20

    play(scenario)
