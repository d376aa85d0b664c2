"""Who runs, who waits, who is turned away.

A request holds one slot from its admission to its end, whatever its legs do meanwhile. A tier has as many slots as its serving
decode workers run at once (engine.maxBatch each); all tiers together are the router's. Requests that still run on workers which
left (draining) hold none. Without slots to count, because the fleet has no worker or an older operator says nothing of batches,
nobody waits here.

Classes go by strict priority, with a guard against starvation: a class that was passed over STARVED times is next. Within a class
tenants share by weight, see `fair`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from fleet_router.admission.bound import BUDGET_SHARE, RateMeter, queue_bound, retry_after_s
from fleet_router.admission.fair import FairQueue, last_of
from fleet_router.admission.lanes import Lane
from fleet_router.admission.quota import Account
from fleet_router.admission.refused import Full
from fleet_router.config import SloClass

STARVED: Final = 8
QUEUE_BYTES: Final = 256 * 1024 * 1024
"""Bodies of all requests that wait."""

State = Literal["waiting", "running", "free", "done"]
"""free: it runs, and needs no slot."""


class Ticket:
    """One admitted request. What only matters to one that waits is set when it does."""

    __slots__ = (
        "at", "charged", "cost", "deadline", "holder", "lane", "size", "state", "tenant", "waiting", "weight",
    )  # fmt: skip

    cost: float
    """Its tokens over its tenant's weight."""
    weight: float
    tenant: str
    holder: Account
    size: int
    """Bytes that it holds: its fields and its prompt."""
    deadline: float
    """When waiting is over: what is left of the budget is for the prefill."""

    def __init__(self, lane: Lane, charged: int, at: float) -> None:
        self.lane, self.at = lane, at
        """Whose it is, and when it came."""
        self.charged = charged
        """Tokens that its tenant's quota was charged."""
        self.state: State = "running"
        self.waiting = False

    def waits(self, work: int, size: int, now: float, budget_s: float) -> None:
        """Everything that the queue goes by."""
        self.holder, self.tenant, self.weight = self.lane.account, self.lane.account.name, self.lane.weight
        self.cost, self.size = work / self.weight, size
        self.deadline = now + BUDGET_SHARE * budget_s
        self.state, self.waiting = "waiting", True


class Gate:
    """One router's slots and queues."""

    __slots__ = (
        "_meter",
        "_passed_over",
        "_queues",
        "per_slot",
        "running",
        "slots",
        "starts",
        "strays",
        "waiting",
        "waiting_bytes",
    )

    def __init__(self) -> None:
        self.slots = 0
        self.strays = 0
        """Running requests that hold no slot: their worker is leaving."""
        self.per_slot = 1
        self.running = 0
        self.waiting = 0
        self.waiting_bytes = 0
        self.starts = 0
        """Requests that began so far."""
        self._meter = RateMeter()
        self._queues: dict[str, tuple[SloClass, FairQueue[Ticket]]] = {}
        """By class name, highest priority first."""
        self._passed_over: dict[str, int] = {}

    # -- coming -----------------------------------------------------------------------------------------------------
    def start(self) -> bool:
        """A request that comes now runs now, unless it has to queue: True and it holds a slot."""
        if self.waiting or (self.slots and self.running - self.strays >= self.slots):
            return False
        self.running += 1
        self.starts += 1
        return True

    def queue(self, ticket: Ticket, now: float) -> Full | list[Ticket]:
        """A ticket that `waits` does so or is turned away; the list holds who was turned away for it."""
        pushed = self._make_room(ticket, now)
        if isinstance(pushed, Full):
            ticket.waiting, ticket.state = False, "done"
            return pushed
        ticket.lane.account.waiting += 1
        self._queue(ticket.lane.slo_class).push(ticket)
        self.waiting += 1
        self.waiting_bytes += ticket.size
        return pushed

    def free(self) -> bool:
        """Somebody may start."""
        return self.slots == 0 or self.running - self.strays < self.slots

    def _make_room(self, ticket: Ticket, now: float) -> Full | list[Ticket]:
        rate, mine = self._meter.per_s(self.starts, now), ticket.lane.slo_class
        bound = queue_bound(rate, mine.ttft_budget_s, self.slots, self.per_slot)
        ahead = sum(queue.live for other, queue in self._queues.values() if other.priority >= mine.priority)
        if ahead >= bound:
            return self._push_out(ticket, self._queue(mine), rate)
        if self.waiting >= self.per_slot * self.slots or self.waiting_bytes + ticket.size > QUEUE_BYTES:
            lowest = next((q for one, q in reversed(self._queues.values()) if q.live and one.priority < mine.priority), None)
            if lowest is None:
                return self._push_out(ticket, self._queue(mine), rate)
            fullest = lowest.fullest()
            return self._instead_of(last_of(fullest), ticket, rate) if fullest is not None else []
        return []

    def _push_out(self, ticket: Ticket, queue: FairQueue[Ticket], rate: float | None) -> Full | list[Ticket]:
        """Of a full class the tenant with most of the queue gives way; if that is the newcomer's, the newcomer does."""
        fullest, mine = queue.fullest(), queue.backlogs.get(ticket.tenant)
        after = ((mine.live if mine is not None else 0) + 1) / ticket.weight
        if fullest is not None and fullest.share > after:
            return self._instead_of(last_of(fullest), ticket, rate)
        alone = all(not other.live or other is mine for other in queue.backlogs.values())
        return Full("overloaded" if alone else "queue_share", retry_after_s(self.waiting, rate))

    def _instead_of(self, other: Ticket, ticket: Ticket, rate: float | None) -> Full | list[Ticket]:
        """The place of one that waits, unless it is too small for the newcomer's bytes."""
        if self.waiting_bytes - other.size + ticket.size > QUEUE_BYTES:
            return Full("overloaded", retry_after_s(self.waiting, rate))
        return [self._out(other)]

    def _out(self, ticket: Ticket) -> Ticket:
        """Take one out of the queue; it is the caller's to answer and to settle."""
        ticket.waiting, ticket.state = False, "done"
        ticket.lane.account.waiting -= 1
        self._queue(ticket.lane.slo_class).left(ticket)
        self.waiting -= 1
        self.waiting_bytes -= ticket.size
        return ticket

    # -- going ------------------------------------------------------------------------------------------------------
    def leave(self, ticket: Ticket) -> bool:
        """The request ended, wherever it was; False when it had ended before."""
        if ticket.state == "running":
            ticket.state = "done"
            self.running -= 1
            if self.waiting:
                self._holds_other(ticket)
        elif ticket.state == "free":
            ticket.state = "done"
        elif ticket.state == "waiting":
            self._out(ticket)
        else:
            return False
        return True

    def _holds_other(self, ticket: Ticket) -> None:
        """The ticket's tenant holds another number of slots than before."""
        for _, queue in self._queues.values():
            queue.changed(ticket.lane.account.name)

    def next(self) -> Ticket | None:
        """Who starts now; None when there is no slot or nobody waits. Ask `late` first: deadlines are not looked at here."""
        while self.waiting and self.free():
            name = self._next_class()
            ticket = self._queues[name][1].pop()
            if ticket is None:
                return None
            self.waiting -= 1
            self.waiting_bytes -= ticket.size
            ticket.lane.account.waiting -= 1
            ticket.waiting, ticket.state = False, "running"
            self.running += 1
            self.starts += 1
            self._holds_other(ticket)
            return ticket
        return None

    def sample(self, now: float) -> None:
        """Called some times a second: how many requests begin per second."""
        self._meter.sample(self.starts, now)

    def late(self, now: float) -> list[Ticket]:
        """Those that waited too long, out of the queue."""
        if not self.waiting:
            return []
        return [self._out(ticket) for _, queue in self._queues.values() if queue.live for ticket in queue.late(now)]

    def _next_class(self) -> str:
        """The highest priority that waits, or the one that was passed over too often; counts who is passed over."""
        waiting = [name for name, (_, queue) in self._queues.items() if queue.live]
        passed = self._passed_over
        chosen = max(waiting, key=lambda name: passed[name])
        if passed[chosen] < STARVED:
            chosen = waiting[0]
        for name in waiting:
            passed[name] += 1
        passed[chosen] = 0
        return chosen

    # -- what is known ----------------------------------------------------------------------------------------------
    def follow(self, slots: int, per_slot: int, classes: Iterable[SloClass]) -> None:
        """New sizes and classes. A class that is gone keeps its queue until it is empty; its requests have its old priority."""
        self.slots, self.per_slot = slots, per_slot
        fresh = {one.name: one for one in classes}
        kept = {name: (fresh.get(name, one), queue) for name, (one, queue) in self._queues.items() if name in fresh or queue.live}
        for name, one in fresh.items():
            kept.setdefault(name, (one, FairQueue()))
        self._order(kept)

    def _order(self, queues: dict[str, tuple[SloClass, FairQueue[Ticket]]]) -> None:
        self._queues = dict(sorted(queues.items(), key=lambda row: (-row[1][0].priority, row[0])))
        self._passed_over = {name: self._passed_over.get(name, 0) for name in self._queues}

    def _queue(self, slo_class: SloClass) -> FairQueue[Ticket]:
        found = self._queues.get(slo_class.name)
        if found is None:
            self._order({**self._queues, slo_class.name: (slo_class, FairQueue())})
            found = self._queues[slo_class.name]
        return found[1]

    def retry_after_s(self, now: float) -> int:
        """Whole seconds until what waits now will have left."""
        return retry_after_s(self.waiting, self._meter.per_s(self.starts, now))

    def bound(self, slo_class: SloClass, now: float) -> int:
        """Requests of this class and above that may wait."""
        return queue_bound(self._meter.per_s(self.starts, now), slo_class.ttft_budget_s, self.slots, self.per_slot)

    def lengths(self) -> dict[str, int]:
        """Requests that wait, by class."""
        return {name: queue.live for name, (_, queue) in self._queues.items()}
