"""The fence: no write leaves this process when it could have lost the lease, whatever stopped it meanwhile (SIGSTOP, swap, a
suspended machine).

Every write is checked against a deadline on a clock that goes on while the process or the machine sleeps, and is given no more
time than the lease has left. What remains is a process that stops between the check and its next system call, well under a
millisecond: the same as a request that the network delivers late. Deletes carry uids and names are fixed, so that such a write
repeats what is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fleet_operator.cluster.guarded import Send, Write
from fleet_operator.cluster.interface import ClusterError, UnavailableError


def boot_clock() -> float:
    """Seconds since boot, including the time that the machine slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class NotLeaderError(ClusterError):
    """This process does not hold the lease (any more): it must not write."""

    reason = "NotLeader"
    retry = False


class Fence:
    """Closed until `extend`, and again at the deadline."""

    def __init__(self, clock: Callable[[], float] = boot_clock) -> None:
        self.clock = clock
        self._writes_until = float("-inf")
        self._lease_until = float("-inf")

    def extend(self, writes_until: float, lease_until: float) -> None:
        """New writes may begin before `writes_until` and must end before `lease_until`; both on the fence's clock."""
        self._writes_until, self._lease_until = writes_until, lease_until

    def close(self) -> None:
        """Nothing may be written from now on."""
        self._writes_until = self._lease_until = float("-inf")

    @property
    def open_s(self) -> float:
        """For how long new writes may still begin; not positive: closed."""
        return self._writes_until - self.clock()

    async def guard(self, write: Write, send: Send) -> Any:
        """`send`, when it may begin, with no more time than the lease has; NotLeaderError, UnavailableError."""
        now = self.clock()
        if now >= self._writes_until:
            raise NotLeaderError(f"this process may have lost the lease: {write.kind.kind} {write.name} is not written")
        try:
            async with asyncio.timeout(self._lease_until - now):
                return await send()
        except TimeoutError as error:
            raise UnavailableError("no answer before the end of the lease") from error
