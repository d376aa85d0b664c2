"""Ctrl-C once means drain, twice means kill."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fleet_cli.interrupts import ending

T = TypeVar("T")


class Stops:
    """What the user asked for so far; install inside a running event loop."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.kill = asyncio.Event()

    def install(self) -> None:
        """Take over the signals that end a command."""
        loop = asyncio.get_running_loop()
        for number in ending():
            loop.add_signal_handler(number, self.ask)

    def ask(self) -> None:
        """One more signal."""
        (self.kill if self.drain.is_set() else self.drain).set()


async def until(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when `stop` came first; `work` is cancelled and has ended when this returns."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        waiting.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
