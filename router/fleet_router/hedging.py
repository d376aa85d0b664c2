"""A prefill leg that is late is sent to a second worker, too, and whoever answers first is taken (`policy/hedge.py` says when).

The loser's connection is closed, which ends its work, and its KV is given back whatever became of it, by the request's name: by
a message that belongs to no request, so that no way out of this one can leave it behind.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING, Final, cast

from fleet_router.errors import NO_ROOM
from fleet_router.explain.record import Second
from fleet_router.health.panic import PANIC_BELOW, fit
from fleet_router.health.silence import Waits
from fleet_router.legs import NOT_FOUND, OK, DecodeLeg, PrefillLeg, refuses
from fleet_router.policy.candidate import Candidate
from fleet_router.policy.hedge import second, wait_s
from fleet_router.request import is_object, reference_of
from fleet_router.retrying import Retrying, head_of
from fleet_router.workers import Worker

if TYPE_CHECKING:
    from fleet_router.answerhead import KnownAnswer
    from fleet_router.config import HedgeBounds
    from fleet_router.flow import Flow
    from fleet_router.policy.chosen import Choice
    from fleet_router.policy.terms import Weighed
    from fleet_router.upstream import Upstream


NOT_JSON: Final = "prefill answered something that is not JSON"


class Hedge:
    """Of one attempt: who is waited for, and the second leg once it was sent."""

    __slots__ = (
        "connection", "decode", "first", "lacks", "leg", "paid", "patience_s", "ran", "sent_at", "timer", "weighed", "worker",
    )  # fmt: skip

    def __init__(self, first: Worker, decode: Worker, weighed: Weighed) -> None:
        self.first, self.decode, self.weighed = first, decode, weighed
        self.timer: asyncio.TimerHandle | None = None
        self.worker: Worker | None = None
        self.leg: HedgeLeg | None = None
        self.connection: Upstream | None = None
        self.sent_at = self.lacks = self.patience_s = 0.0
        """`lacks`: tokens that were taken from the budget for it; `patience_s`: how long it was to take at most."""
        self.paid = self.ran = False
        """They were, and are not given back; the worker may have begun: there may be KV of it."""


class HedgeLeg(PrefillLeg):
    """The second leg. Once the first one is over it is the only one, and a prefill leg like any other."""

    __slots__ = ("_hedging", "worker")

    def __init__(self, flow: Flow, worker: Worker, decode: Worker) -> None:
        super().__init__(flow, worker, decode)
        self._hedging, self.worker = flow, worker

    def on_whole(self, known: KnownAnswer, data: bytes, body_at: int) -> None:
        if self._hedging.hedges_by(self):
            self._hedging.hedge_answered(data[body_at:])
        else:
            super().on_whole(known, data, body_at)

    def on_end(self) -> None:
        if not self._hedging.hedges_by(self):
            super().on_end()
        elif self._status == OK:
            self._failed = not self._hedging.hedge_answered(bytes(self._answer))
        else:
            self._failed = self._hedging.hedge_refused(self._status, bytes(self._answer))

    def on_lost(self, reason: str) -> None:
        if self._hedging.hedges_by(self):
            self._hedging.hedge_lost(reason)
        else:
            super().on_lost(reason)


class Hedging(Retrying):
    """The second prefill leg of one request."""

    __slots__ = ()

    def _arm(self, bounds: HedgeBounds, prefill: Worker, decode: Worker, found: Choice) -> None:
        """The first leg is on its way: from when on it is late. Not of a request that was tried before or carries a stream on,
        nor of a session, whose KV is where it is."""
        offer, asked, trip = found.offer, found.ask, self._trip
        if offer is None or asked is None or trip is None or asked.session or self._again is not None:
            return
        if len(self.record.tries) > 1:
            return
        self._context.hedges.asked(bounds.share, offer.missing)
        weighed = next((one for one in reversed(asked.seen) if one.local is None and one.group == prefill.group), None)
        if weighed is None:
            return
        self._hedge = hedge = Hedge(prefill, decode, weighed)
        after_s = wait_s(trip.expected_s(self.sent_at), bounds.after, bounds.least_s)
        hedge.timer = asyncio.get_running_loop().call_later(after_s, self._late, hedge)

    def _late(self, hedge: Hedge) -> None:
        """The first leg has had its time."""
        if self._hedge is not hedge or self._leg_worker is not hedge.first:
            return
        try:
            found = self._second(hedge)
            if found is not None and self._context.hedges.take(found[1]):
                self._send_hedge(hedge, *found)
                return
            self._hedge = None
            if found is not None:
                self._context.metrics.hedges["refused"] += 1
        except Exception as error:
            self.fault(error)

    def _second(self, hedge: Hedge) -> tuple[Worker, float] | None:
        """Whom to ask, and how many tokens it lacks. Nobody while half of all are out: the rest is busy enough."""
        table, now, adapter, first = self._context.table, self._context.clock(), self._ask.adapter, hedge.first
        workers, version = table.by_role["prefill"], hedge.decode.endpoint.adapters.get(adapter)  # its KV is for that one
        if table.trouble.out and len(fit(workers, now)) < PANIC_BELOW * len(workers):
            return None

        def usable(one: Candidate) -> bool:
            return (
                isinstance(one, Worker) and table.workers.get(one.uid) is one and one.uid not in self._excluded
                and one.breaker.allows(now, one.own) and not table.pairs.blocks(one.uid, hedge.decode.uid, now)
                and one.group == hedge.decode.group and (not adapter or one.endpoint.adapters.get(adapter) == version is not None)
            )  # fmt: skip

        found = second(hedge.weighed, first, now, self.config.load_bound, usable)
        return (found[0], found[1]) if found is not None and isinstance(found[0], Worker) else None

    def _send_hedge(self, hedge: Hedge, worker: Worker, lacks: float) -> None:
        now, context = self._context.clock(), self._context
        hedge.worker, hedge.sent_at, hedge.lacks, hedge.paid = worker, now, lacks, True
        hedge.leg = leg = HedgeLeg(cast("Flow", self), worker, hedge.decode)
        worker.began()
        if self._trip is not None and (bounds := self.config.hedge) is not None:
            hedge.patience_s = wait_s(self._trip.hedged(worker, lacks, now), bounds.after, bounds.least_s)
        context.metrics.hedges["started"] += 1
        context.metrics.hedge_tokens += int(lacks)
        self.record.tries[-1].second = Second(worker, now)
        leg.path = self._path
        leg.body = body = self._named(self._prefill_body(worker), worker)
        head = head_of(leg.path, worker.pool.authority, self.record.leg_id, len(body), self.record.onward)
        payload = b"".join((head, body))

        def connected(connection: Upstream | None, why: str) -> None:
            try:
                self._hedge_connected(hedge, leg, payload, connection, why)
            except Exception as error:  # nobody waits for the task that connects: the client would until its deadline
                self.fault(error)

        worker.pool.take(connected)

    def _hedge_connected(self, hedge: Hedge, leg: HedgeLeg, payload: bytes, connection: Upstream | None, why: str) -> None:
        worker, mine = leg.worker, self._leg is leg
        if not mine and self._hedge is not hedge:
            self._costs_nothing(hedge)  # also when it was the only one at its end
            if connection is not None:
                worker.pool.put(connection)
        elif connection is None and not mine:
            self.hedge_failed(why, blamed=why != NO_ROOM, gone=why != NO_ROOM)
        elif connection is None:
            self._costs_nothing(hedge)
            self.end_leg()
            self._not_connected(leg, why)
        else:
            hedge.connection, hedge.ran = connection, True
            if mine:
                self._connection = connection
            connection.send(leg, payload, self._context.outbox)

    def _costs_nothing(self, hedge: Hedge) -> None:
        """Nothing was sent, or the worker never had it. Once."""
        if hedge.paid:
            hedge.paid = False
            self._context.hedges.give_back(hedge.lacks)

    def hedges_by(self, leg: HedgeLeg) -> bool:
        """It is the second of two legs that are under way."""
        return self._hedge is not None and self._hedge.leg is leg

    def second_leg(self) -> Waits | None:
        """See `Flow.leg`."""
        hedge = self._hedge
        if hedge is None or hedge.worker is None or self._paused:
            return None
        return Waits(hedge.worker.uid, hedge.sent_at, hedge.sent_at, second=True)

    def hedge_answered(self, body: bytes) -> bool:
        """It was faster: the first leg is given up, and this one is as if it had been that. False: nothing that can be used."""
        hedge = self._hedge
        if hedge is None or hedge.worker is None:
            return True
        hedge.connection = None  # the pool has it again
        if reference_of(body) is None and not is_object(body):
            self.hedge_failed(NOT_JSON)
            return False
        if not self._runs_on(hedge.first, self._connection, self.sent_at, 0.0, second=False):
            self._abandon_leg()
        self._excluded = self._excluded | {hedge.first.uid}  # see `_end_hedge`
        self.end_leg()
        self._becomes_first(hedge, hedge.worker)
        return self.prefilled(hedge.worker, hedge.decode, body)

    def hedge_refused(self, status: int, body: bytes) -> bool:
        """It answered something else than 200. True: that counts against its worker, as it does of a first leg."""
        hedge = self._hedge
        if hedge is None or hedge.worker is None:
            return False
        hedge.connection = None  # the pool has it again
        no_model = status == NOT_FOUND and self.names_no_model(body)
        if no_model and not self._ask.adapter:
            hedge.worker.put_out(self._context.clock())
        blamed = not self._ask.adapter if no_model else not refuses(status)
        self.hedge_failed(f"prefill answered {status}", blamed=blamed)
        return blamed

    def hedge_lost(self, reason: str) -> None:
        """Its connection broke. The worker had closed one of the pool before it had the request: that is no failure of it."""
        hedge = self._hedge
        one = None if hedge is None else hedge.connection
        if hedge is not None:
            early = self._context.clock() - hedge.sent_at <= self.config.reused_close_s
            blamed = one is None or not one.used or one.got_bytes or not early
            if not blamed:
                self._costs_nothing(hedge)
            self.hedge_failed(reason, blamed=blamed)

    def _hedge_late(self, now: float) -> None:
        """The request's time is over."""
        hedge = self._hedge
        if hedge is not None:
            self.hedge_failed("no KV within the deadline", blamed=self._had_its_time(hedge.sent_at, now))

    def hedge_failed(self, why: str, *, blamed: bool = True, gone: bool = False) -> None:
        """Nothing came of it, if it was sent; the first leg is waited for as if it had not been. `blamed`: that counts against
        its worker; `gone`: which could not be connected to."""
        hedge = self._hedge
        if hedge is not None and hedge.worker is not None:
            if blamed:
                self.counts_against(hedge.worker, gone=gone)
            self._end_hedge("failed", why)

    def _goes_on_elsewhere(self) -> bool:
        """The first leg failed: the second one, if it was sent, is the only one now."""
        hedge = self._hedge
        if hedge is None or hedge.worker is None or self._leg_worker is not None:
            return False
        self._excluded = self._excluded | {hedge.first.uid}
        self._becomes_first(hedge, hedge.worker)
        return True

    def _becomes_first(self, hedge: Hedge, worker: Worker) -> None:
        self._hedge = None
        self._leg_worker, self._leg, self._connection, self.sent_at = worker, hedge.leg, hedge.connection, hedge.sent_at
        if self._trip is not None:
            self._trip.hedge_over(self._context.clock(), won=True)
        if (table := self._context.table).workers.get(worker.uid) is worker:  # see `Answering._taken`
            table.routing.index.add(self._keys, worker.uid)
        self._context.metrics.hedges["won"] += 1
        if (told := self.record.tries[-1].second) is not None:
            told.outcome = "won"

    def _trip_over(self, at: float = 0.0) -> None:
        """See `Answering`: nobody is waited for any more."""
        if self._hedge is not None:
            self._end_hedge("cut")
        super()._trip_over(at)

    def _end_hedge(self, outcome: str, why: str = "") -> None:
        """It is given up. `outcome`: lost (the first one answered), failed (`why`), cut (the attempt is over). Not asked again
        for this request: what tells it to give the KV back may come later than another leg of the same name, and would end
        that one."""
        hedge, self._hedge = self._hedge, None
        if hedge is None:
            return
        if hedge.timer is not None:
            hedge.timer.cancel()
        if hedge.worker is None:
            return
        overtaken, patience_s = outcome == "lost", hedge.patience_s
        runs_on = overtaken and self._runs_on(hedge.worker, hedge.connection, hedge.sent_at, patience_s, second=True)
        if hedge.connection is not None and not runs_on:
            hedge.connection.abort()
        hedge.worker.ended()
        if hedge.ran and not runs_on:
            self.give_back(hedge.worker)
        elif not hedge.ran:
            self._costs_nothing(hedge)
        self._excluded = self._excluded | {hedge.worker.uid}
        if self._trip is not None:
            self._trip.hedge_over(self._context.clock(), won=False)
        self._context.metrics.hedges[outcome] += 1
        if (told := self.record.tries[-1].second) is not None:
            told.outcome, told.why = outcome, why

    def _runs_on(self, worker: Worker, connection: Upstream | None, sent_at: float, patience_s: float, *, second: bool) -> bool:
        """A leg was overtaken that was to take `patience_s` at most. True: it is not cut, see `overtaken`. Where a client did not
        read, its answer may be there; of one that has begun to answer there is nothing to find out."""
        now, running = self._context.clock(), self._context.overtaken
        if connection is None or connection.got_bytes or self._stalled_at or self._trip is None:
            return False
        on_trial = not worker.breaker.closed
        if not worker.races.lost_one(sent_at, now, patience_s, worker.heard_at, on_trial=on_trial) or not running.has_room(
            worker
        ):
            return False
        expected = self._trip.overtaken(second=second)
        if expected is None:
            return False
        self._barred = self._barred | {worker.uid}
        running.take(worker, connection, sent_at, expected, self._release_of(worker, self._by_name()))
        return True

    @abstractmethod
    def prefilled(self, prefill: Worker, decode: Worker, body: bytes) -> bool:
        """A prefill leg answered 200; False: with nothing that can be used."""

    @abstractmethod
    def fault(self, error: Exception) -> None:
        """A bug of ours."""

    @abstractmethod
    def _not_connected(self, leg: PrefillLeg | DecodeLeg, why: str) -> None:
        """A leg that is over had no connection."""

    @abstractmethod
    def names_no_model(self, body: bytes) -> bool:
        """A 404 that says that there is no such model."""

    @abstractmethod
    def _named(self, body: bytes | memoryview, worker: Worker) -> bytes | memoryview:
        """The model under the name that this worker serves it by."""
