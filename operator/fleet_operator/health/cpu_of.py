"""CPU time of one of many coroutines that share a thread."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class CpuOf(Generic[T]):
    """`await CpuOf(work)` is `await work`; `cpu_s` then says how many seconds its own steps took of the thread's CPU:
    without what others did there while it waited, and without tasks that it made. A step costs two system calls more (0.5 us)."""

    def __init__(self, work: Awaitable[T], clock: Callable[[], float] = time.thread_time) -> None:
        self._work = work
        self._clock = clock
        self.cpu_s = 0.0

    def __await__(self) -> Generator[Any, Any, T]:
        """Step by step what the work itself would do (PEP 492)."""
        steps = self._work.__await__()
        step: Callable[[], Any] = partial(next, steps)
        while True:
            begun = self._clock()
            try:
                waits_for = step()
            except StopIteration as ended:
                result: T = ended.value
                return result
            finally:
                self.cpu_s += self._clock() - begun
            try:
                step = partial(steps.send, (yield waits_for))
            except BaseException as error:  # cancelled: the work decides what comes of it
                step = partial(steps.throw, error)
