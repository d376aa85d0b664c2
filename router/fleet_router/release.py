"""Giving KV back that nobody will read: small requests that belong to nobody, bounded in time and number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fleet_router.answerhead import AnswerHead, KnownAnswer
    from fleet_router.metrics import Metrics
    from fleet_router.upstream import Pool, Upstream

RELEASE_S: Final = 5.0
"""A worker that has not answered by then is left to its leases, which run out by themselves."""
PER_WORKER_MOST: Final = 256
"""Under way at once: above it there is no use in telling that worker more."""
OK: Final = 200


class Release:
    """One. It depends on no request; a pooled connection that turns out to be closed is no reason to leave the KV pinned: once
    more on a fresh one. A worker that cannot be reached has its leases run out."""

    __slots__ = ("_again", "_connection", "_payload", "_status", "deadline", "outcome", "pool")
    takes_whole = False

    def __init__(self, pool: Pool, payload: bytes, deadline: float) -> None:
        self.pool, self._payload, self.deadline = pool, payload, deadline
        self._again, self._status = True, 0
        self._connection: Upstream | None = None
        self.outcome = ""
        """How it ended; empty: it is under way."""

    def send(self, *, fresh: bool = False) -> None:
        """On a connection of the pool."""
        self._connection = None
        self.pool.take(self._connected, fresh=fresh)

    def _connected(self, connection: Upstream | None, _: str) -> None:
        if connection is None:
            self._ends("unreachable")
        elif self.outcome:  # its time was over before the connection was there
            self.pool.put(connection)
        else:
            self._connection = connection
            connection.send(self, self._payload)

    def expire(self) -> None:
        """Its time is over: the connection is of no use to anybody."""
        self._ends("late")
        if self._connection is not None:
            self._connection.abort()

    def _ends(self, outcome: str) -> None:
        self.outcome = self.outcome or outcome

    def on_head(self, status: int, head: AnswerHead) -> None:
        self._status = status

    def on_whole(self, known: KnownAnswer, data: bytes, body_at: int) -> None: ...
    def on_head_alone(self) -> None: ...
    def on_raw(self, data: bytes) -> None: ...
    def on_body(self, data: bytes) -> None: ...

    def on_end(self) -> None:
        self._ends("done" if self._status == OK else "refused")

    def on_surplus(self) -> None: ...

    def on_fault(self, error: Exception) -> None:
        self._ends("lost")

    def on_lost(self, reason: str) -> None:
        """The connection broke before an answer."""
        if self._again:
            self._again = False
            self.send(fresh=True)
        else:
            self._ends("lost")


class Releases:
    """Those of a process. Swept twice a second, and when one more is asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._by_pool: dict[Pool, list[Release]] = {}

    def send(self, pool: Pool, payload: bytes, now: float) -> None:
        """Whatever becomes of the request, this is sent; unless its worker leaves too many unanswered."""
        running = [one for one in self._by_pool.get(pool, ()) if not self._is_over(one)]
        self._by_pool[pool] = running
        if len(running) >= PER_WORKER_MOST:
            self._metrics.releases["dropped"] += 1
            return
        one = Release(pool, payload, now + RELEASE_S)
        running.append(one)
        one.send()

    def sweep(self, now: float) -> None:
        """Ends those that are late, forgets those that are over."""
        for pool, found in list(self._by_pool.items()):
            for one in found:
                if now > one.deadline and not one.outcome:
                    one.expire()
            if left := [one for one in found if not self._is_over(one)]:
                self._by_pool[pool] = left
            else:
                del self._by_pool[pool]

    def _is_over(self, one: Release) -> bool:
        """Counted once: it is forgotten next."""
        if one.outcome:
            self._metrics.releases[one.outcome] += 1
        return bool(one.outcome)
