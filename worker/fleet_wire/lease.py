"""KV leases, sans I/O: who may read which blocks until when. Every call takes `now` (seconds, any monotonic clock).

A lease is granted when a prefill leg ends, renewed while a reader is queued or reading, and ends exactly once: read (the
reader proved its copy), released (nobody will come) or expired. `lease_generation` separates two leases that ever held the
same blocks; `epoch` separates two lives of the owner. A reader's copy counts only when `confirm` says so AFTER the read.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

EndReason = Literal["read", "released", "expired"]
RefusalReason = Literal["unknown", "epoch", "generation", "expired"]


@dataclass(slots=True)
class Lease:
    """One open lease."""

    lease_id: str
    owner: str
    """Request id of the prefill leg."""
    blocks: tuple[int, ...]
    generation: int
    deadline: float


@dataclass(slots=True)
class LeaseTable:
    """All open leases of one engine. At most `capacity` at a time."""

    epoch: str
    duration_s: float
    capacity: int = 65_536
    _leases: dict[str, Lease] = field(default_factory=dict)
    _deadlines: list[tuple[float, str]] = field(default_factory=list)
    _generation: int = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def grant(self, owner: str, blocks: Sequence[int], now: float, seal: str = "") -> Lease:
        """Open a lease whose id ends with `seal`, its word on the KV (fleet_wire.blocks.sealed). OverflowError at capacity."""
        if len(self._leases) >= self.capacity:
            raise OverflowError(f"{self.capacity} leases are open")
        self._generation += 1
        name = f"{self.epoch}-{self._generation}" + (f".{seal}" if seal else "")
        lease = Lease(name, owner, tuple(blocks), self._generation, now + self.duration_s)
        self._leases[lease.lease_id] = lease
        heapq.heappush(self._deadlines, (lease.deadline, lease.lease_id))
        return lease

    def refusal(self, lease_id: str, epoch: str, generation: int, now: float) -> RefusalReason | None:
        """Why this reader may not read; None when it may."""
        if epoch != self.epoch:
            return "epoch"
        lease = self._leases.get(lease_id)
        if lease is None:
            return "unknown"
        if lease.generation != generation:
            return "generation"
        return "expired" if now >= lease.deadline else None

    def renew(self, lease_id: str, epoch: str, generation: int, now: float) -> RefusalReason | None:
        """Move the deadline to a full duration from now, unless refused."""
        refused = self.refusal(lease_id, epoch, generation, now)
        if refused is None:
            self._leases[lease_id].deadline = now + self.duration_s
        return refused

    def confirm(self, lease_id: str, epoch: str, generation: int, now: float) -> RefusalReason | Lease:
        """The reader has read everything: ends the lease as read, or says why the copy is worthless."""
        refused = self.refusal(lease_id, epoch, generation, now)
        return self._leases.pop(lease_id) if refused is None else refused

    def release(self, lease_id: str) -> Lease | None:
        """End a lease that nobody will read; None when it has ended already."""
        return self._leases.pop(lease_id, None)

    def expire(self, now: float) -> list[Lease]:
        """End every lease whose deadline has come. Renewals are in place: a stale heap entry is pushed again, never trusted."""
        ended: list[Lease] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            if lease.deadline <= now:
                ended.append(self._leases.pop(lease_id))
            else:
                heapq.heappush(self._deadlines, (lease.deadline, lease_id))
        return ended
