"""Legs that were overtaken and run on without their request, one per worker: is it slow, or does it swallow what it is sent?
(`health/races.py`). Their KV is nobody's, and given back when they end, however they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from fleet_router.health.races import swallows
from fleet_router.legs import OK, refuses
from fleet_router.policy.candidate import prefill_done

if TYPE_CHECKING:
    from fleet_router.answerhead import AnswerHead, KnownAnswer
    from fleet_router.context import Context
    from fleet_router.policy.terms import Prefilling
    from fleet_router.upstream import Upstream
    from fleet_router.workers import Worker

DUE_MOST_S: Final = 60.0
"""However long its queue is believed to be: a worker that nothing is heard of is not waited for longer."""


class RunsOn:
    """One. It hears what the leg would have heard."""

    __slots__ = ("_connection", "_context", "_expected", "_release", "_status", "due_at", "over", "sent_at", "worker")
    takes_whole = True

    def __init__(
        self, context: Context, worker: Worker, connection: Upstream, sent_at: float, expected: Prefilling, release: bytes
    ) -> None:
        """`expected`: of its prefill, from here on its own to end. `release`: what tells the worker to give its KV back."""
        self._context, self.worker, self._connection = context, worker, connection
        self.sent_at, self._expected, self._release = sent_at, expected, release
        self.due_at = min(expected.due + worker.late_s, sent_at + DUE_MOST_S)
        self._status, self.over = 0, False
        worker.began()
        connection.goes_to(self)

    def on_whole(self, known: KnownAnswer, data: bytes, body_at: int) -> None:
        self._status = OK
        self.on_end()

    def on_head(self, status: int, head: AnswerHead) -> None:
        self._status = status

    def on_head_alone(self) -> None: ...
    def on_raw(self, data: bytes) -> None: ...
    def on_body(self, data: bytes) -> None: ...
    def on_surplus(self) -> None: ...

    def on_end(self) -> None:
        """An answer: it is slow, and from now on known to be."""
        now = self._context.clock()
        if self._status == OK or refuses(self._status):
            self.worker.answers(self.sent_at, now)
            self.worker.breaker.succeeded()
        else:
            self.fails()
        self.ends(now, learn=self._status == OK)

    def on_lost(self, reason: str) -> None:
        """The connection broke."""
        self.fails()
        self.ends(self._context.clock())

    def on_fault(self, error: Exception) -> None:
        """A bug of ours."""
        self.ends(self._context.clock())

    def fails(self) -> None:
        """It counts against its worker as the leg of a request does."""
        self.worker.failed(self._context.clock())
        at = self.worker.endpoint
        self._context.metrics.of(at.tier, at.revision).errors += 1

    def ends(self, now: float, *, learn: bool = False) -> None:
        """Once. `learn`: its answer tells how fast the worker is."""
        if self.over:
            return
        self.over = True
        self._connection.abandon(self)
        self.worker.ended()
        prefill_done(self._expected, now, learn=learn)
        self._context.releases.send(self.worker.pool, self._release, now)


class Overtaken:
    """Those of a process."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._by_worker: dict[str, RunsOn] = {}

    def has_room(self, worker: Worker) -> bool:
        """None of this worker's runs on."""
        one = self._by_worker.get(worker.uid)
        return one is None or one.over

    def take(self, worker: Worker, connection: Upstream, sent_at: float, expected: Prefilling, release: bytes) -> None:
        """One more, where there is room."""
        self._context.metrics.hedges["watched"] += 1
        self._by_worker[worker.uid] = RunsOn(self._context, worker, connection, sent_at, expected, release)

    def look(self, workers: Mapping[str, Worker], now: float, silent_s: float) -> None:
        """Twice a second: puts out who swallows what it is sent. Of one that says something to anybody, or has left, no leg
        needs to run on."""
        for uid, one in list(self._by_worker.items()):
            if not one.over and workers.get(uid) is one.worker and swallows(
                one.sent_at, one.due_at, one.worker.heard_at, now, silent_s
            ):  # fmt: skip
                self._swallows(one, now)
            elif not one.over and workers.get(uid) is one.worker and one.worker.heard_at <= one.sent_at:
                continue
            one.ends(now)
            del self._by_worker[uid]

    def _swallows(self, one: RunsOn, now: float) -> None:
        self._context.metrics.hedges["swallowed"] += 1
        self._context.metrics.of(one.worker.endpoint.tier, one.worker.endpoint.revision).errors += 1
        if one.worker.breaker.allows(now, 0):
            one.worker.put_out(now)

    def stop(self, now: float) -> None:
        """The router goes."""
        for one in self._by_worker.values():
            one.ends(now)
        self._by_worker.clear()
