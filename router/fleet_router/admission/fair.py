"""The queue of one class: fair between tenants, earliest deadline first within a tenant.

Start-time fair queueing: a tenant's requests follow each other on its own line of virtual time, a request being as long as its
cost over the tenant's weight; served next is who is furthest behind. A tenant that comes back starts at the present virtual time:
it neither pays for others nor saves up. Every operation costs O(log n); what left the queue early is passed over.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

COMPACT_LEAST = 16
"""Entries that left early are kept up to this many, or up to the number of those that wait."""


class Waiter(Protocol):
    """What waits."""

    waiting: bool
    """False once it left."""

    @property
    def deadline(self) -> float: ...
    @property
    def cost(self) -> float:
        """Over the tenant's weight."""
        ...

    @property
    def weight(self) -> float: ...
    @property
    def tenant(self) -> str: ...


W = TypeVar("W", bound=Waiter)


class Backlog(Generic[W]):
    """One tenant's requests that wait."""

    __slots__ = ("finish", "heap", "live", "weight")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, W]] = []
        self.live = 0
        self.finish = 0.0
        """Virtual time at which its last request ended."""
        self.weight = 1.0

    def head(self) -> W | None:
        """The earliest deadline; what left is dropped on the way."""
        heap = self.heap
        while heap and not heap[0][2].waiting:
            heappop(heap)
        return heap[0][2] if heap else None

    @property
    def share(self) -> float:
        """How much of the queue it holds, by weight."""
        return self.live / self.weight


class FairQueue(Generic[W]):
    """All requests of a class that wait."""

    __slots__ = ("_number", "_order", "_virtual", "backlogs", "live")

    def __init__(self) -> None:
        self.backlogs: dict[str, Backlog[W]] = {}
        self._order: list[tuple[float, int, str]] = []
        """(virtual start, number, tenant) of every tenant with a backlog, once."""
        self._virtual = 0.0
        self._number = 0
        self.live = 0

    def push(self, waiter: W) -> None:
        """Wait."""
        self._number += 1
        backlog = self.backlogs.get(waiter.tenant)
        if backlog is None:
            backlog = self.backlogs[waiter.tenant] = Backlog()
            backlog.finish = self._virtual
            heappush(self._order, (self._virtual, self._number, waiter.tenant))
        backlog.weight = waiter.weight
        backlog.live += 1
        self.live += 1
        heappush(backlog.heap, (waiter.deadline, self._number, waiter))

    def pop(self) -> W | None:
        """Who is next; None when nobody waits."""
        while self._order:
            start, _, tenant = heappop(self._order)
            backlog = self.backlogs[tenant]
            waiter = backlog.head()
            if waiter is None:
                del self.backlogs[tenant]
                continue
            heappop(backlog.heap)
            backlog.live -= 1
            self.live -= 1
            self._virtual = max(self._virtual, start)
            backlog.finish = start + waiter.cost
            self._number += 1
            heappush(self._order, (backlog.finish, self._number, tenant))
            return waiter
        self._virtual = 0.0
        return None

    def left(self, waiter: W) -> None:
        """It has left early: its `waiting` is False."""
        backlog = self.backlogs[waiter.tenant]
        backlog.live -= 1
        self.live -= 1
        if len(backlog.heap) - backlog.live > max(COMPACT_LEAST, backlog.live):
            backlog.heap = [entry for entry in backlog.heap if entry[2].waiting]
            heapify(backlog.heap)

    def late(self, now: float) -> list[W]:
        """Those whose deadline has passed; they still have to be taken out."""
        found = []
        for backlog in self.backlogs.values():
            head = backlog.head()
            if head is not None and head.deadline <= now:
                found += [waiter for deadline, _, waiter in backlog.heap if deadline <= now and waiter.waiting]
        return found

    def fullest(self) -> Backlog[W] | None:
        """The tenant that holds most of the queue by weight."""
        return max((b for b in self.backlogs.values() if b.live), key=lambda b: b.share, default=None)


def last_of(backlog: Backlog[W]) -> W:
    """The one with the latest deadline of a backlog that is not empty."""
    return max(entry for entry in backlog.heap if entry[2].waiting)[2]
