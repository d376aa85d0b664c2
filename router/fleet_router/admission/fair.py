"""The queue of one class: fair between tenants, earliest deadline first within a tenant.

Served next is the tenant that holds fewest slots for its weight: slots are what requests wait for, and a tenant that floods holds
most of them, so that a request of anybody else goes before it. Among equals start-time fair queueing decides: a tenant's requests
follow each other on its own line of virtual time, a request being as long as its cost over the tenant's weight, and who is
furthest behind is next. A tenant that comes back starts at the present virtual time: it neither pays for others nor saves up.

Every operation costs O(log n); what left the queue early, and places in the order that are no longer true, are passed over.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final, Generic, Protocol, TypeVar

COMPACT_LEAST: Final = 16
"""Entries that left early are kept up to this many, or up to the number of those that wait."""


class Holder(Protocol):
    """A tenant."""

    @property
    def running(self) -> int:
        """Slots that it holds."""
        ...


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
    @property
    def holder(self) -> Holder: ...


W = TypeVar("W", bound=Waiter)


class Backlog(Generic[W]):
    """One tenant's requests that wait."""

    __slots__ = ("finish", "heap", "holder", "live", "place", "weight")

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.place = 0
        """Which of its entries in the order is true."""
        self.heap: list[tuple[float, int, W]] = []
        self.live = 0
        self.finish = 0.0
        """Virtual time at which its last request ended, or at which it came back."""
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
        self._order: list[tuple[float, float, int, str]] = []
        """(slots held by weight, virtual start, number, tenant) of every tenant with a backlog."""
        self._virtual = 0.0
        self._number = 0
        self.live = 0

    def push(self, waiter: W) -> None:
        """Wait."""
        self._number += 1
        backlog = self.backlogs.get(waiter.tenant)
        if backlog is None:
            backlog = self.backlogs[waiter.tenant] = Backlog(waiter.holder)
            backlog.finish = self._virtual
        backlog.holder, backlog.weight = waiter.holder, waiter.weight  # as they are now: a tenant may have gone and come back
        backlog.live += 1
        self.live += 1
        heappush(backlog.heap, (waiter.deadline, self._number, waiter))
        if backlog.live == 1:
            self._place(waiter.tenant, backlog)

    def changed(self, tenant: str) -> None:
        """It holds more or fewer slots than before."""
        backlog = self.backlogs.get(tenant)
        if backlog is not None and backlog.live:
            self._place(tenant, backlog)

    def _place(self, tenant: str, backlog: Backlog[W]) -> None:
        """Put it where it belongs now; its former place is not true any more."""
        self._number += 1
        backlog.place = self._number
        backlog.finish = max(backlog.finish, self._virtual)
        heappush(self._order, (backlog.holder.running / backlog.weight, backlog.finish, self._number, tenant))
        if len(self._order) > COMPACT_LEAST + 2 * len(self.backlogs):
            self._order = [entry for entry in self._order if self._true(entry)]
            heapify(self._order)

    def _true(self, entry: tuple[float, float, int, str]) -> bool:
        """It is where its tenant stands now."""
        backlog = self.backlogs.get(entry[3])
        return backlog is not None and backlog.place == entry[2]

    def pop(self) -> W | None:
        """Who is next; None when nobody waits."""
        while self._order:
            _, start, place, tenant = heappop(self._order)
            backlog = self.backlogs.get(tenant)
            if backlog is None or backlog.place != place:
                continue
            waiter = backlog.head()
            if waiter is None:
                continue
            heappop(backlog.heap)
            backlog.live -= 1
            self.live -= 1
            self._virtual = max(self._virtual, start)
            backlog.finish = start + waiter.cost
            if backlog.live:
                self._place(tenant, backlog)
            else:
                self._forget()
            return waiter
        return None

    def _forget(self) -> None:
        """Tenants without a backlog whose line of time lies behind: they would begin at the present in any case."""
        if not self.live:
            self.backlogs.clear()
            self._order.clear()
            self._virtual = 0.0
        elif len(self.backlogs) > COMPACT_LEAST:
            gone = [t for t, backlog in self.backlogs.items() if not backlog.live and backlog.finish <= self._virtual]
            for tenant in gone:
                del self.backlogs[tenant]

    def left(self, waiter: W) -> None:
        """It has left early: its `waiting` is False."""
        backlog = self.backlogs[waiter.tenant]
        backlog.live -= 1
        self.live -= 1
        if not self.live:
            self._forget()
        elif len(backlog.heap) - backlog.live > max(COMPACT_LEAST, backlog.live):
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
