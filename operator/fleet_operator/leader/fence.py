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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from fleet_operator.cluster.interface import Cluster, ClusterError, Kind, Object, UnavailableError, WatchEvent

T = TypeVar("T")


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

    async def guard(self, write: Callable[[], Awaitable[T]]) -> T:
        """`write`, when it may begin, with no more time than the lease has; NotLeaderError, UnavailableError."""
        now = self.clock()
        if now >= self._writes_until:
            raise NotLeaderError("this process may have lost the lease: nothing is written")
        try:
            async with asyncio.timeout(self._lease_until - now):
                return await write()
        except TimeoutError as error:
            raise UnavailableError("no answer before the end of the lease") from error


class FencedCluster:
    """A `Cluster` whose writes pass a fence; reads are free."""

    def __init__(self, cluster: Cluster, fence: Fence) -> None:
        self._cluster = cluster
        self._fence = fence

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        """See `Cluster.get`."""
        return await self._cluster.get(kind, namespace, name)

    async def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        """See `Cluster.list`."""
        return await self._cluster.list(kind, namespace, labels)

    def watch(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> AsyncIterator[WatchEvent]:
        """See `Cluster.watch`."""
        return self._cluster.watch(kind, namespace, labels)

    async def apply(self, obj: Object) -> Object:
        """See `Cluster.apply`; NotLeaderError."""
        return await self._fence.guard(lambda: self._cluster.apply(obj))

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str | None = None, grace_s: int | None = None
    ) -> None:
        """See `Cluster.delete`; NotLeaderError."""
        await self._fence.guard(lambda: self._cluster.delete(kind, namespace, name, uid=uid, grace_s=grace_s))

    async def patch_status(self, kind: Kind, namespace: str | None, name: str, status: Object) -> Object:
        """See `Cluster.patch_status`; NotLeaderError."""
        return await self._fence.guard(lambda: self._cluster.patch_status(kind, namespace, name, status))

    async def close(self) -> None:
        """See `Cluster.close`."""
        await self._cluster.close()
