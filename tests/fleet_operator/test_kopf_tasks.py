"""kopf that ends takes its own tasks with it, and none of ours."""

from __future__ import annotations

import asyncio

import kopf
import pytest
from kopf._cogs.aiokits import aiotasks

from fleet_operator.kopf_tasks import NotKopfs


async def fails() -> None:
    await asyncio.sleep(0)
    raise ConnectionError("a watch")


def test_tasks_that_began_after_kopf_go_on_when_it_ends():
    """e2e of 2026-11-22: after an ERROR event it waited five seconds and cancelled whoever led; the operator ended with 0."""

    async def go() -> bool:
        root = asyncio.create_task(fails())
        ours = asyncio.create_task(asyncio.Event().wait())
        with pytest.raises(ConnectionError):
            await kopf.run_tasks([root], ignored=NotKopfs())
        going = not ours.done()
        ours.cancel()
        return going

    started = asyncio.run(asyncio.wait_for(go(), 4))
    assert started


def test_a_task_is_kopfs_by_its_code():
    async def go() -> None:
        found = NotKopfs()
        ours = asyncio.create_task(fails())
        theirs = asyncio.create_task(aiotasks.guard(asyncio.sleep(0), name="x"))
        assert (ours in found, theirs in found, list(found).count(theirs), "text" in found) == (True, False, 0, True)
        assert len(found) == len(list(found)) == 2  # this one and ours
        await asyncio.gather(ours, theirs, return_exceptions=True)

    asyncio.run(go())
