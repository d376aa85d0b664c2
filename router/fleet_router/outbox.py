"""Writes of one turn of the event loop, made one behind the other at its end.

A write wakes whoever reads at the other end. Between requests that are worked on one by one he falls asleep again; when their
writes follow each other he is awake already: a quarter of the CPU time of a request, and shorter waits for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

Written = bytes | list[bytes | memoryview]
"""What is written at once: pieces that are not put together, where to copy them would cost more."""
MOST: Final = 16
"""So many wait at most, so that the first one does not wait for a whole crowd."""


class Outbox:
    """One per process and its loop. Who closes a transport flushes before; what was meant for one that is closed is dropped."""

    __slots__ = ("_loop", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[tuple[asyncio.WriteTransport, Written]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        """asyncio asks the kernel for the process id whenever somebody asks it for the running loop."""

    def write(self, transport: asyncio.WriteTransport, data: Written) -> None:
        """At the end of this turn, in the order of the calls."""
        waiting = self._waiting
        waiting.append((transport, data))
        if len(waiting) == 1:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self.flush)
        elif len(waiting) == MOST:
            self.flush()

    def later(self, wait_s: float, then: Callable[[], object]) -> None:
        """A write that waits for more to write."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._loop.call_later(wait_s, then)

    def flush(self) -> None:
        """Now."""
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if not transport.is_closing():
                write(transport, data)


def write(transport: asyncio.WriteTransport, data: Written) -> None:
    """Now."""
    if isinstance(data, bytes):
        transport.write(data)
    else:
        transport.writelines(data)
