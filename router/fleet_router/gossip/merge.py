"""What all other routers have said, added up. Pure: messages and the time come in.

Levels (requests in flight) are sums over the routers that were heard lately: a row that nobody repeats for ROW_S counts no
more, so that a router which died leaves nothing behind. Counters only grow at their sender (quotas may be given back): what is
new of them is taken once, whatever was lost on the way; what was used while a sender could not be heard for ROW_S is not made up
for. Messages of a sender count in rising order; an older one, or the same again, is nothing.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Final, Generic, TypeVar

import msgspec

from fleet_router.gossip.message import Hint, Load, Message, Refused, Use

ROW_S: Final = 3.0
FORGET_S: Final = 90.0
"""A sender that was silent so long is forgotten. Above the time in which a datagram could be played again."""
SETTLE_MS: Final = 15_000
"""Who is met when it is older than this has a past: its counters are taken from here on. Its rows all come within this time: ten
thousand tenants' where a hundred and fifty processes hear of them."""
NUMBERS_PER_MS: Final = 2
NUMBERS_AHEAD: Final = 10_000
"""Datagrams that a sender may have numbered in a time, nearly twice what it sends at most: a number far above would make all that
it says from then on an older one."""
MOST_PEERS: Final = 256
MOST_KNOWN: Final = 16_384
"""Rows of one sender; a fleet may have ten thousand tenants."""


class WorkerLoad(msgspec.Struct):
    """What others have at one worker now, and what came since the last look."""

    inflight: int = 0
    pending: int = 0
    prefills: int = 0
    tokens: int = 0


class TenantUse(msgspec.Struct):
    """The same for one tenant."""

    inflight: int = 0
    requests: int = 0
    tokens: int = 0


Row = TypeVar("Row", Load, Use)


class _Rows(Generic[Row]):
    """Of one kind and one sender."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[Row, float]] = {}
        """Name → what was said last, and when; said longest ago first."""

    def take(self, name: int, row: Row, now: float) -> tuple[Row | None, bool]:
        """(what was said before, whether that is so long ago that counters are to be taken from here on)."""
        before = self.rows.get(name)
        if before is not None and now > before[1]:
            del self.rows[name]  # to the end
        if before is not None or len(self.rows) < MOST_KNOWN:
            self.rows[name] = (row, now)
        return (before[0], now - before[1] > ROW_S) if before is not None else (None, False)

    def stale(self, now: float) -> list[int]:
        """Rows that nobody repeated."""
        return [name for name, _ in takewhile(lambda row: now - row[1][1] > ROW_S, self.rows.items())]


class _Peer:
    def __init__(self, now: float, *, young: bool) -> None:
        self.met_at = self.heard_at = now
        self.young = young
        """Met when it began: its counters begin at 0."""
        self.number = 0
        self.loads: _Rows[Load] = _Rows()
        self.uses: _Rows[Use] = _Rows()

    def counts_from_zero(self, now: float) -> bool:
        """A row that was not seen before is new at its sender as well."""
        return self.young or (now - self.met_at) * 1000 > SETTLE_MS


class Peers:
    """All other routers. `workers` and `tenants` hold what changed since `taken`."""

    def __init__(self, sender: int) -> None:
        self._sender = sender
        self._peers: dict[int, _Peer] = {}
        self._loads: dict[int, WorkerLoad] = {}
        self._uses: dict[int, TenantUse] = {}
        self._changed: tuple[set[int], set[int]] = (set(), set())

    def __len__(self) -> int:
        return len(self._peers)

    def take(self, message: Message, now: float) -> tuple[Hint, ...]:
        """Merge; the hints, empty when the message is old or our own. Refused when there are too many senders, or its number is
        one that it cannot have come to."""
        if message.sender == self._sender:
            return ()
        peer = self._peers.get(message.sender)
        number, past_ms = (0, message.age_ms) if peer is None else (peer.number, int((now - peer.heard_at) * 1000))
        if message.number - number > NUMBERS_PER_MS * past_ms + NUMBERS_AHEAD:
            raise Refused("number")
        if peer is None:
            if len(self._peers) >= MOST_PEERS:
                raise Refused("peers")
            peer = self._peers[message.sender] = _Peer(now, young=message.age_ms <= SETTLE_MS)
        if message.number <= peer.number:
            return ()
        peer.number, peer.heard_at = message.number, now
        for load in message.loads:
            self._load(peer, load, now)
        for use in message.uses:
            self._use(peer, use, now)
        return message.hints

    def _load(self, peer: _Peer, row: Load, now: float) -> None:
        before, cut = peer.loads.take(row.worker, row, now)
        if row.worker not in peer.loads.rows:
            return
        if before is None:
            before, cut = Load(row.worker, 0, 0, 0, 0), not peer.counts_from_zero(now)
        if cut:
            before = msgspec.structs.replace(before, prefills=row.prefills, tokens=row.tokens)
        total = self._loads.setdefault(row.worker, WorkerLoad())
        total.inflight += row.inflight - before.inflight
        total.pending += row.pending - before.pending
        total.prefills += max(0, row.prefills - before.prefills)
        total.tokens += max(0, row.tokens - before.tokens)
        if row != before:
            self._changed[0].add(row.worker)

    def _use(self, peer: _Peer, row: Use, now: float) -> None:
        before, cut = peer.uses.take(row.tenant, row, now)
        if row.tenant not in peer.uses.rows:
            return
        if before is None:
            before, cut = Use(row.tenant, 0, 0, 0), not peer.counts_from_zero(now)
        if cut:
            before = msgspec.structs.replace(before, requests=row.requests, tokens=row.tokens)
        total = self._uses.setdefault(row.tenant, TenantUse())
        total.inflight += row.inflight - before.inflight
        total.requests += row.requests - before.requests
        total.tokens += row.tokens - before.tokens
        if row != before:
            self._changed[1].add(row.tenant)

    def expire(self, now: float) -> None:
        """Some times a second: who is silent has nothing in flight any more."""
        for sender, peer in list(self._peers.items()):
            for name in peer.loads.stale(now):
                load, said_at = peer.loads.rows[name]
                if load.inflight or load.pending:
                    self._load(peer, msgspec.structs.replace(load, inflight=0, pending=0), said_at)
            for name in peer.uses.stale(now):
                use, said_at = peer.uses.rows[name]
                if use.inflight:
                    self._use(peer, msgspec.structs.replace(use, inflight=0), said_at)
            _forget(peer.loads.rows, peer.heard_at)
            _forget(peer.uses.rows, peer.heard_at)
            if now - peer.heard_at > FORGET_S:
                del self._peers[sender]

    def changes(self) -> tuple[dict[int, WorkerLoad], dict[int, TenantUse]]:
        """(workers, tenants) that changed since the last call: levels as they are, counters as what is new of them."""
        workers, tenants = self._changed
        self._changed = (set(), set())
        return {name: _look(self._loads, name) for name in workers}, {name: _look(self._uses, name) for name in tenants}

    def load(self, worker: int) -> tuple[int, int]:
        """(in flight, pending) of all others at a worker that has just joined here."""
        found = self._loads.get(worker)
        return (found.inflight, found.pending) if found is not None else (0, 0)

    def use(self, tenant: int) -> int:
        """Requests in flight of all others of a tenant that has just become known here."""
        found = self._uses.get(tenant)
        return found.inflight if found is not None else 0


Total = TypeVar("Total", WorkerLoad, TenantUse)


def _look(totals: dict[int, Total], name: int) -> Total:
    """As it is; counters begin again, and who is at rest is not kept."""
    total = totals[name]
    if total.inflight == 0 and not (isinstance(total, WorkerLoad) and total.pending):
        return totals.pop(name)
    seen = msgspec.structs.replace(total)
    total.tokens = 0
    if isinstance(total, WorkerLoad):
        total.prefills = 0
    else:
        total.requests = 0
    return seen


def _forget(rows: dict[int, tuple[Row, float]], heard_at: float) -> None:
    """What their sender has not said for so long, though it spoke until `heard_at`: of one that is not heard nobody knows."""
    for name in [name for name, _ in takewhile(lambda row: heard_at - row[1][1] > FORGET_S, rows.items())]:
        del rows[name]
