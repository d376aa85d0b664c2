"""Coroutines that live and end together."""

from __future__ import annotations

import asyncio

import pytest

from fleet_operator.together import until_first_ends


async def for_ever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("ended")


def test_the_first_error_is_the_error_and_the_others_have_ended():
    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    async def scenario() -> list[str]:
        ended: list[str] = []
        with pytest.raises(ValueError, match="first"):
            await until_first_ends(for_ever(ended), fails())
        return ended

    assert asyncio.run(scenario()) == ["ended"]


def test_whoever_is_cancelled_from_outside_ends_all_without_an_error():
    """As kopf does it on SIGTERM: the process must end with 0, not with a traceback."""

    async def scenario() -> list[str]:
        ended: list[str] = []
        own = {asyncio.current_task()}
        together = asyncio.create_task(until_first_ends(for_ever(ended), for_ever(ended)))
        own.add(together)
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - own:
            task.cancel()
        await together
        return ended

    assert asyncio.run(scenario()) == ["ended", "ended"]


def test_cancelling_the_whole_cancels_every_part():
    async def scenario() -> list[str]:
        ended: list[str] = []
        together = asyncio.create_task(until_first_ends(for_ever(ended)))
        await asyncio.sleep(0)
        together.cancel()
        with pytest.raises(asyncio.CancelledError):
            await together
        return ended

    assert asyncio.run(scenario()) == ["ended"]
