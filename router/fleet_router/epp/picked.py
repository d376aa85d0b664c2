"""A request that a gateway proxies: admission, decision, prefill leg, records and learning are those of `Flow`; the decode leg is
not sent but told to the gateway, with the body to send there.

So prefill and decode are apart behind any data plane that speaks ext_proc, without a sidecar in the workers' pods: the prefill
leg is ours, and what the gateway sends to the decode worker has the reference to the KV in it.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from fleet_router.admission.gate import Ticket
from fleet_router.admission.usage import EVENT
from fleet_router.ask import Ask, Hints
from fleet_router.config import RouterConfig
from fleet_router.context import Client, Context
from fleet_router.dialect.chat import worker_error
from fleet_router.errors import RequestError
from fleet_router.flow import Flow
from fleet_router.legs import NOT_IMPLEMENTED, NOT_THE_CLIENT, OK
from fleet_router.request import decode_body
from fleet_router.upstream import NOTHING_TOLD
from fleet_router.workers import Worker
from fleet_wire.address import authority

FAILED = 500
IMPATIENT = 504
"""No engine says so: a gateway does when its own time for a request is over (Envoy's is 15 s unless its route says otherwise)."""
FULL = "let no more through"
"""It has as many under way as it may."""
OWN = "asked nobody"
WAITED_NO_LONGER = "the gateway waited no longer: it answered"
FALLBACKS = 2
"""Workers besides the chosen one that a gateway may try when it cannot be reached."""


class Gateway(Client, Protocol):
    """The gateway's side of one request."""

    def picked(self, workers: list[Worker], body: bytes) -> None:
        """Send this body to the first of these that can be reached."""
        ...


class Picked(Flow):
    """One request behind a gateway."""

    __slots__ = ("_collected", "_gateway", "_left_with", "_subset", "lane")

    def __init__(
        self,
        context: Context,
        gateway: Gateway,
        path: bytes,
        ask: Ask,
        ticket: Ticket,
        hints: Hints,
        subset: frozenset[str] | None,
    ) -> None:
        super().__init__(context, gateway, path, ask, ticket, None, hints.decoded_apart())  # its pool is of decode workers
        self._gateway = gateway
        self._runaway = None  # a gateway's stream cannot be ended by us with an event of ours
        self.lane = ticket.lane
        self._subset = subset
        self._collected = False
        self._left_with = 0

    def begin(self) -> None:
        """Whoever has joined while it waited may be outside of the gateway's subset."""
        if (subset := self._subset) is not None:
            decodes = self._context.table.by_role["decode"]
            self._barred |= {worker.uid for worker in decodes if address_of(worker) not in subset}
            self._excluded |= self._barred
        super().begin()

    @staticmethod
    def _with_ids(ask: Ask, config: RouterConfig) -> Ask:
        """Nothing is asked for that only we need: a gateway's stream cannot be carried on by us."""
        return ask

    @staticmethod
    def _usage_asked(ask: Ask) -> tuple[Ask, bool]:
        """The same: nothing of a gateway's stream can be kept from its client."""
        return ask, False

    def _count_tokens(self, data: bytes, sound: bool) -> None:
        """A gateway's pieces have no framing, and are cut anywhere: the line break before an event is in the one before, if in
        any."""
        if self._ask.stream and self._metered:
            self._events += ((self._tail[1 - len(EVENT) :] or EVENT[:1]) + data).count(EVENT) - data.count(EVENT)
        super()._count_tokens(data, sound)

    def _has_an_end(self) -> bool:
        """The gateway sees to it."""
        return not self._ask.stream

    def _send_decode(self, worker: Worker, reference: bytes | None, now: float) -> None:
        self._waits_for(now)
        worker.began()
        self._leg_worker = worker
        self.sent_at = now
        body = bytes(self._named(decode_body(self._ask, reference), worker))
        self._gateway.picked([worker, *self._fallbacks(worker)], body)

    def _fallbacks(self, worker: Worker) -> list[Worker]:
        """Workers to which the same KV could go, and the same body, the idlest first."""
        table, now, adapter, at = self._context.table, self._context.clock(), self._ask.adapter, worker.endpoint
        found = [
            other for other in table.candidates(now, self._excluded)["decode"]
            if other is not worker and other.group == worker.group
            and other.endpoint.adapters.get(adapter) == at.adapters.get(adapter) and other.endpoint.model == at.model
        ]  # fmt: skip
        return sorted(found, key=lambda other: other.inflight)[:FALLBACKS]

    def collects(self) -> None:
        """The gateway shows the answer's body when it has all of it: that tells nothing of a first token."""
        self._collected = True
        if self._streams:
            self._streams = False
            self._trip_over()

    def served(self, address: str, status: int, unasked: str = "") -> None:
        """The answer begins; `address`: who answers, empty when nobody says so. `unasked`: why it is none of a worker."""
        worker, now = self._leg_worker, self._context.clock()
        if worker is not None and address and address_of(worker) != address:
            other = next((one for one in self._context.table.by_role["decode"] if address_of(one) == address), None)
            if other is not None:
                self._blame(worker, f"the gateway could not reach it: {other.endpoint.name} answered", gone=True)
                worker.ended()
                other.began()
                worker = self._leg_worker = other
        if not unasked and ((status < FAILED and status not in NOT_THE_CLIENT) or status == NOT_IMPLEMENTED):
            if worker is not None:
                worker.answers(self.sent_at, now)
            self._begin_told(status)
            if self._streams and status == OK:
                self._taken(worker)
            return
        if worker is not None:
            self._is_told(worker, status, unasked)
        self._begin_told(status)
        self.end_leg()  # the end of such an answer forgives its worker nothing
        self._outcome = "failed"

    def _is_told(self, worker: Worker, status: int, unasked: str) -> None:
        """An answer that is no worker's refusal."""
        now, late = self._context.clock(), self.deadline == inf  # which counted against it
        if unasked:
            self._blame(worker, f"the gateway {unasked}: it answered {status}", blamed=False)
        elif status == IMPATIENT:
            self._blame(worker, f"{WAITED_NO_LONGER} {status}", blamed=not late and self._had_time(worker, now))
        else:
            if self._giver is not None and status >= FAILED:
                self._context.table.transfer_failed(self._giver, worker, now)
            self._blame(worker, f"decode answered {status}", blamed=not late)

    def _had_time(self, worker: Worker, now: float) -> bool:
        """All of it for a whole answer, of which nothing is heard before; for a first token as much as anywhere."""
        if self._comes_whole():
            return not self._has_more_time(now)
        silent = worker.heard_at < self.sent_at and now - self.sent_at > self.config.silent_s
        return silent or self._had_its_time(self.sent_at, now)

    def _begin_told(self, status: int) -> None:
        """The gateway's client has the head."""
        self.head(status, NOTHING_TOLD)
        self.send_head()

    def _says_something(self, now: float) -> None:
        """Its head said it: of the body a gateway may show us nothing."""

    def refuse_with(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Of a leg of our own: no answer of it is the gateway's, which waits to be told what to do."""
        self._release_lease()
        self._outcome, self.record.status = "refused", status
        self._count(status)
        self._over()
        self._gateway.refuse(worker_error(status, body, self.told_with_refusals()))

    def _unheard(self) -> bool:
        """The gateway hands the answer on as fast as its client reads, or collects it: silence may be none of the worker's."""
        return self.started and (self._collected or not self._first)

    def _comes_whole(self) -> bool:
        """Silence is a reason to ask the worker whether it is there, and no more."""
        return self._unheard() or super()._comes_whole()

    def left(self, status: int) -> None:
        """Nobody waits for a decision any more: the gateway has answered so; 0: its client left."""
        self._left_with = status
        self.cancel()

    def _why_left(self) -> str:
        """Of a worker that breaks before its answer's head a gateway tells. Later it ends its call, whoever ended the stream."""
        if self._left_with:
            return f"{WAITED_NO_LONGER} {self._left_with}"
        return "the gateway ended it early: the client left, or the worker broke off" if self.started else super()._why_left()

    def expire(self, now: float) -> None:
        """The gateway has its own bounds for who does not read, and for who waits; what comes later is counted as well."""
        worker = self._leg_worker
        if self._unheard():
            self.deadline = inf
        elif worker is None or self._leg is not None:
            super().expire(now)
        elif not self._has_more_time(now):
            self._is_late(worker, now, whole=self._comes_whole())
            self.deadline = inf

    def silent(self) -> None:
        """What the gateway was told cannot be taken back. Legs of our own can."""
        if self._leg is not None:
            super().silent()

    def _fault(self, why: str, *, blamed: bool = True) -> None:
        """The gateway's answer goes on as it is; we count no more of it. What a leg of our own says is nobody's yet."""
        if self._leg is not None:
            super()._fault(why, blamed=blamed)
            return
        if self._leg_worker is not None:
            self._blame(self._leg_worker, why, blamed=blamed)
        self._break(RequestError(502, why))


def address_of(worker: Worker) -> str:
    """As the Endpoint Picker protocol has it."""
    return authority(worker.endpoint.address, worker.endpoint.http_port)
