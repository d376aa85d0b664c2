"""Which tasks of the process are kopf's, and whether they do anything.

kopf takes every task for its own that began after it did: when it ends (for good, or because a watch failed and it is to be
started again) it waits five seconds for them and cancels the rest, with that whoever reconciles and leads. What it is told to
ignore is asked for at that moment, so that it can be a rule instead of a list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import kopf
from kopf._cogs.structs.references import Insights

from fleet_operator.cluster.interface import CRDS, NotFoundError

FOLDER = str(Path(kopf.__file__).parent)


class NotKopfs(Collection[asyncio.Task[Any]]):
    """Tasks of this loop whose coroutine is written elsewhere."""

    def __contains__(self, task: object) -> bool:
        code = getattr(task.get_coro(), "cr_code", None) if isinstance(task, asyncio.Task) else None
        return code is None or not code.co_filename.startswith(FOLDER)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return (task for task in asyncio.all_tasks() if task in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


async def watching(insights: Insights) -> None:
    """For ever, while kopf watches something; NotFoundError when the API server that it asked does not know what to watch (one of
    several may learn of a CRD later than the others). kopf only says so then, and waits."""
    await insights.ready_resources.wait()
    if not insights.watched_resources:
        raise NotFoundError(f"the API server does not know InferenceFleets yet: {CRDS}")
    await asyncio.Event().wait()


async def clear_up(roots: Collection[asyncio.Task[Any]]) -> None:
    """Wait for the end of kopf's root tasks and cancel what they leave: there is always some (whoever waits for the flag to stop,
    a request that is tried again), and kopf waits five seconds for it. None of it holds anything: handlers only feed a cache."""
    await asyncio.wait(roots)
    others = NotKopfs()
    for task in asyncio.all_tasks():
        if task not in others:
            task.cancel()
