"""One request end to end: choose, prefill leg, decode leg, one retry before the first byte, cancellation.

No task per request: the flow is a small state machine that legs and timers call. What is sent to the client goes through
`client`, see `Client`.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import msgspec

from fleet_router.admission.gate import Ticket
from fleet_router.admission.quota import Outcome
from fleet_router.admission.runaway import Why
from fleet_router.admission.usage import EVENT, used_tokens
from fleet_router.context import Client, Context
from fleet_router.dialect.translation import Translation
from fleet_router.ending import CHAT_PATH, END, framed, last_event
from fleet_router.errors import RequestError
from fleet_router.explain.shown import header as decision_header
from fleet_router.heads import STATUS_LINES, add_kept, status_line
from fleet_router.hints import NO_HINTS, Hints
from fleet_router.legs import DecodeLeg, Ignored, PrefillLeg, TranslatedLeg
from fleet_router.metrics import Served
from fleet_router.policy.choose import Choice
from fleet_router.policy.trip import Trip
from fleet_router.request import BYTES_PER_TOKEN, Ask, decode_body, lease_of, prefill_body, prompt_tokens_of, reference_of
from fleet_router.upstream import Upstream
from fleet_router.workers import Worker

if TYPE_CHECKING:
    from fleet_router.knowledge import Counted

OK = 200
FRAMING = {b"content-length", b"transfer-encoding"}
HEAD = b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\nx-request-id: %b\r\ncontent-length: %d\r\n%b\r\n"
RELEASE_PATH = b"/kv/release"
HEAD_END = b"\r\n\r\n"
CLOSE = b"\r\nconnection: close"


class Flow:
    """State of one request."""

    __slots__ = (
        "_ask", "_before", "_client", "_connection", "_context", "_counted", "_decode_failures", "_events", "_excluded",
        "_first", "_gaps", "_handed_over", "_head_bytes", "_held", "_keys", "_last", "_lease", "_leg_worker", "_local",
        "_metered", "_outcome", "_path", "_paused", "_prefill_failures", "_runaway", "_served", "_tail", "_ticket",
        "_translation", "_trip", "config", "deadline", "done", "hints", "last_byte_at", "record", "started", "started_at",
    )  # fmt: skip

    def __init__(
        self, context: Context, client: Client, path: bytes, ask: Ask, ticket: Ticket, translation: Translation | None = None,
        hints: Hints = NO_HINTS,
    ) -> None:  # fmt: skip
        self._context = context
        context.metrics.arrivals += 1
        self._client = client
        self._path = path
        self._ask = ask
        self._ticket = ticket
        self._runaway = context.desk.detector(ticket, ask)
        self._metered = context.desk.tenants_needed
        self._events = 0
        self._before = self._tail = b""
        """The last two reads of the answer: its usage stands there."""
        self._translation = translation
        self.config = context.config  # a reload does not change a running request
        self.record = context.recorder.open((client.request_id, client.leg_id), path, ask, ticket, hints.headers)
        self._excluded: frozenset[str] = frozenset()
        self._prefill_failures = self._decode_failures = 0
        self._local = ask.alone
        """The KV is not to come from a prefill worker, or not any more."""
        self._last = False
        """The answer's head says that the connection closes after it."""
        self._paused = False
        self._connection: Upstream | None = None
        self._leg_worker: Worker | None = None
        self._lease: tuple[Worker, str] | None = None
        self._keys: list[int] = []
        self._handed_over = ""
        """Tier of the decode leg when another worker prefilled the prompt."""
        self._served: Served | None = None
        self.hints = msgspec.structs.replace(hints, local=True) if ask.alone else hints
        self._trip: Trip | None = None
        """What was expected of the legs; None before the first and after the last."""
        self._counted: Counted | None = None
        """The prompt as blocks; None: not asked yet."""
        self._gaps = 0
        """Writes of the answer after the first."""
        self._first = True
        self._held = False
        """It waits for workers."""
        self._head_bytes = b""
        """The answer's head, waiting for the first bytes of its body: one write for both."""
        self._outcome: Outcome = "left"
        """How it ends if it ends now, unless we refuse it."""
        self.started = False
        """The first byte has gone to the client."""
        self.done = False
        self.started_at = context.clock()
        self.last_byte_at = self.started_at
        self.deadline = inf if ticket.waiting else self.started_at + self.config.first_token_deadline_s

    # -- legs -------------------------------------------------------------------------------------------------------
    def admitted(self) -> None:
        """The wait for a slot is over."""
        self.deadline = self._context.clock() + self.config.first_token_deadline_s
        self.begin()

    def begin(self) -> None:
        """Choose and send the first leg."""
        context = self._context
        self._trip_over()
        ask, now, seed, hints = self._ask, context.clock(), self._ticket.lane.seed, self.hints
        if context.knowledge is not None:
            if self._counted is None:
                self._counted = context.knowledge.count(ask, self._path == CHAT_PATH, self._was_counted, self._ticket.lane.salt)
                if self._counted is None:
                    return
            hints = context.knowledge.hints(self._counted, hints)
        found, keys = context.table.choose(ask.prompt, self.config, now, self._excluded, seed, ask.adapter, hints)
        if not isinstance(found, Choice):
            self.record.tried(now, 0.0, found, None, None)
            self._hold(found.reason, "adapter_not_loaded" if ask.adapter else "no_worker")
            return
        if self._held:
            self._held, self.started_at = False, now  # what it waited says nothing of the workers
            self.deadline = self.started_at + self.config.first_token_deadline_s
        if not self._ask.alone:
            self._trip = context.table.depart(found, now, ask.adapter, stream=ask.stream)
        decode = context.table.workers[found.decode]
        prefill = context.table.workers[found.prefill] if found.prefill is not None else None
        context.recorder.decided(self.record, now, found, prefill, decode)
        self._keys = [] if self._ask.alone else keys
        self._handed_over = ""
        self._served = context.metrics.of(decode.endpoint.tier, decode.endpoint.revision)
        self._served.requests += 1
        if prefill is None or found.prefill is None:
            context.metrics.local_prefills += not self._ask.alone
            self._send_decode(decode, None)
            return
        context.table.routing.index.add(keys, found.prefill)
        context.metrics.remote_prefills += 1
        context.metrics.prefill_tokens += int(len(self._ask.prompt) / BYTES_PER_TOKEN)
        self._send(prefill, prefill_body(self._ask), PrefillLeg(self, prefill, decode))

    def _was_counted(self, counted: Counted) -> None:
        """The prompt's tokens are known, or will not be."""
        if not self.done:
            self._counted = counted
            self.begin()

    def _hold(self, why: str, code: str) -> None:
        """Nobody can answer it now: it waits for workers, if any are to come."""
        holding, now = self._context.holding, self._context.clock()
        try:
            self.deadline = holding.hold(self, self._ask.size_bytes, (why, code), now, self.config.hold)
        except RequestError as error:
            self._refuse(error)
        else:
            self._held = True

    def _send_decode(self, worker: Worker, reference: bytes | None) -> None:
        translation = self._translation
        leg = DecodeLeg(self, worker) if translation is None else TranslatedLeg(self, worker, translation)
        self._send(worker, decode_body(self._ask, reference), leg)

    def _send(self, worker: Worker, body: bytes, leg: PrefillLeg | DecodeLeg, *, fresh: bool = False) -> None:
        payload = self._head(worker, self._path, len(body)) + body
        pool = worker.pool if self._translation is None else worker.reading()
        worker.began()
        self._leg_worker = worker

        def connected(connection: Upstream | None, why: str) -> None:
            if self.done:
                if connection is not None:
                    pool.put(connection)
                return
            if connection is None:
                self.end_leg()
                self.leg_failed(worker, why)
                return
            self._connection = connection
            connection.send(leg, payload)

        leg.body = body
        pool.take(connected, fresh=fresh)

    def resend(self, worker: Worker, leg: PrefillLeg | DecodeLeg) -> bool:
        """A pooled connection that the worker had closed meanwhile: once more on a fresh one. Not a retry: nothing ran."""
        connection = self._connection
        if connection is None or not connection.used or connection.got_bytes:
            return False
        self.end_leg()
        self._send(worker, leg.body, leg, fresh=True)
        return True

    def _head(self, worker: Worker, path: bytes, length: int) -> bytes:
        return HEAD % (path, worker.pool.authority, self._client.leg_id.encode(), length, self.record.onward)

    def end_leg(self) -> None:
        """A leg is over, however it ended."""
        if self._leg_worker is not None:
            self._leg_worker.ended()
            self._leg_worker = None
        self._connection = None

    def prefilled(self, prefill: Worker, decode: Worker, body: bytes) -> None:
        """The prefill leg answered 200."""
        self.end_leg()
        prefill.succeeded()
        now = self._context.clock()
        self.record.prefilled(now)
        if self._trip is not None:
            self._trip.prefilled(now)
        if self._counted is not None and self._context.knowledge is not None:
            self._context.knowledge.answered(prefill.uid, self._counted)
        if (tokens := prompt_tokens_of(body)) > 0:
            self._context.table.routing.bytes_per_token.observe(len(self._ask.prompt) / tokens)
        reference = reference_of(body)
        if reference is not None and (lease := lease_of(reference)) is not None:
            self._lease = (prefill, lease)
        self._handed_over = decode.endpoint.tier  # also without a reference: an engine that gives none is what must be noticed
        self._send_decode(decode, reference)

    def leg_failed(self, worker: Worker, why: str) -> None:
        """A leg broke before the first byte to the client: once more, elsewhere. Prefill that failed twice is done by the decode
        worker; decode that failed twice is 502."""
        self._blame(worker, why)
        self._release_lease()
        if self.started:
            self._break(why)
            return
        others = any(w.role == worker.role and uid != worker.uid for uid, w in self._context.table.workers.items())
        if worker.role == "prefill":
            self._prefill_failures += 1
            self._local = not others or self._prefill_failures > 1
            self.hints = msgspec.structs.replace(self.hints, local=self._local)
        else:
            self._decode_failures += 1
        if self._decode_failures > 1:
            self._refuse(RequestError(502, f"two workers failed; the last one was {worker.endpoint.name}: {why}"))
            return
        self._context.metrics.retries += 1
        if others or worker.role == "decode":
            self._excluded = self._excluded | {worker.uid}
        self.begin()

    def _blame(self, worker: Worker, why: str) -> None:
        """It failed: others are preferred for a while, and its revision's errors count."""
        now = self._context.clock()
        worker.failed(now)
        self.record.went_wrong(now, why)
        self._context.metrics.of(worker.endpoint.tier, worker.endpoint.revision).errors += 1

    def transfer_failed(self, worker: Worker) -> None:
        """Decode could not prove the KV: nothing is wrong with decoding there, so prefill again, locally."""
        self.end_leg()
        self._release_lease()
        self.record.went_wrong(self._context.clock(), "the KV transfer failed")
        self._context.metrics.of(worker.endpoint.tier, worker.endpoint.revision).errors += 1
        if self._local:
            self._refuse(RequestError(503, "the KV transfer failed twice", code="kv_transfer"))
            return
        self._local = True
        self.hints = msgspec.structs.replace(self.hints, local=True)
        self._context.metrics.retries += 1
        self.begin()

    @property
    def adapter(self) -> str:
        """Of the request; empty: the base model."""
        return self._ask.adapter

    def adapter_missing(self, worker: Worker) -> None:
        """It answers that it has no such model: it was told to unload it, or has begun anew, since we heard of it. Nothing is
        wrong with the worker; the others may have it."""
        self.end_leg()
        self._release_lease()
        self.record.went_wrong(self._context.clock(), "the worker has no such adapter")
        self._context.metrics.retries += 1
        self._excluded = self._excluded | {worker.uid}
        self.begin()

    # -- to the client ----------------------------------------------------------------------------------------------
    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The answer begins: from now on no retry."""
        now = self._context.clock()
        self.started = True
        self.last_byte_at = now
        self._context.metrics.requests[status] += 1
        self.record.status = status
        self._outcome = "answered" if status == OK else "refused"
        if status == OK:
            self._lease = None  # the decode worker has taken it
            if self._handed_over:
                self._context.metrics.handed_over[self._handed_over] += 1
        else:
            self._release_lease()
        if status == OK and self._leg_worker is not None and self._leg_worker.endpoint.uid in self._context.table.workers:
            self._context.table.routing.index.add(self._keys, self._leg_worker.endpoint.uid)  # now it holds the prompt's KV
            if self._counted is not None and self._context.knowledge is not None:
                self._context.knowledge.answered(self._leg_worker.uid, self._counted)
        self.deadline = now + self.config.inter_token_deadline_s
        lines = [STATUS_LINES.get(status) or status_line(status), self._client.request_id.encode()]
        add_kept(lines, headers)
        lines.append(self._ticket.lane.account.headers(int(now * 1e9)))
        if self.record.shown:
            lines.append(decision_header(self.record))
        if self._client.last_answer:
            self._last = True
            lines.append(CLOSE)
        lines.append(HEAD_END)
        self._head_bytes = b"".join(lines)

    def send_head(self) -> None:
        """The head goes out alone."""
        head, self._head_bytes = self._head_bytes, b""
        if head:
            self._client.write(head)

    def raw(self, data: bytes, shown: bytes | None = None) -> None:
        """Bytes of the answer, spliced; `shown`: what the client gets for them in its own dialect."""
        now = self._context.clock()
        if self._first:
            self._first = False
            self.record.first_at = now
            if self._trip is not None:
                self._trip.first_token(now)
            if self._served is not None:
                self._served.ttft.observe(now - self.started_at)
        elif self._served is not None:
            self._gaps += 1
            self._served.itl.observe(now - self.last_byte_at)
        self.last_byte_at = now
        self.deadline = now + self.config.inter_token_deadline_s
        told = data if shown is None else shown
        if self._head_bytes:
            head, self._head_bytes = self._head_bytes, b""
            told = head + told
        if told:
            self._client.write(told)
        if self._metered and data:
            self._before, self._tail = self._tail, data
            self._events += data.count(EVENT)
        if self._runaway is not None and (why := self._runaway.saw(data)) is not None:
            self._end_runaway(why)

    def _end_runaway(self, why: Why) -> None:
        """The stream is at the end of an event: ours is the last one. The worker sees a client that left, and stops."""
        self._context.desk.runaways[why] += 1
        if self._connection is not None:
            self._connection.abort()
        event = last_event(why, self._path == CHAT_PATH, self._client.request_id, self._ask.adapter or self.config.served_name)
        if self._translation is not None:
            event = self._translation.feed(event)
        self._client.write(framed(event) + END)
        self.end()

    def end(self) -> None:
        """The answer is complete."""
        self.send_head()  # an answer without a body
        if self._trip is not None:
            self._trip.ended(self.last_byte_at, self._gaps + 1)
            self._trip_over()
        self.end_leg()
        self.done = True
        self._leave(self._outcome)
        self._client.finish(last=self._last)

    def _trip_over(self) -> None:
        """This attempt waits in no queue any more."""
        if self._trip is not None:
            self._trip.over(self._context.clock())
            self._trip = None

    def _refuse(self, error: RequestError) -> None:
        self.record.error = error
        self._trip_over()
        self.end_leg()
        self.done = True
        self._leave("failed" if error.status >= 500 else "refused")
        self._context.metrics.requests[error.status] += 1
        self._client.refuse(error)

    def refuse_with(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """A worker's own refusal (4xx) goes to the client as it is."""
        self._release_lease()
        kept = [(name, value) for name, value in headers if name.lower() not in FRAMING]
        self.head(status, [*kept, (b"content-length", str(len(body)).encode())])
        self.send_head()
        self._client.write(body)
        self.end()

    def _break(self, why: str) -> None:
        self.send_head()
        self.record.error = RequestError(502, why)
        self._trip_over()
        self.end_leg()
        self.done = True
        self._leave(self._outcome)
        self._context.metrics.streams_broken += 1
        self._client.break_off(why, stream=self._ask.stream)

    # -- ends from outside ------------------------------------------------------------------------------------------
    def cancel(self) -> None:
        """The client left: both legs end now."""
        if self.done:
            return
        self.done = True
        self.record.went_wrong(self._context.clock(), "the client left")
        self._context.holding.drop(self, "left")
        self._context.metrics.client_left += 1
        self._abandon_leg()
        self._trip_over()
        self.end_leg()
        self._release_lease()
        self._leave("failed" if self._ticket.waiting or self._held else self._outcome)

    def _leave(self, outcome: Outcome) -> None:
        """Give the slot back and settle; once, whatever ended the request."""
        used = None
        if self._metered and outcome == "answered":
            used = used_tokens(self._before, self._tail, self._events, self._ticket.charged)
        self._context.recorder.close(self.record, outcome, self.last_byte_at, self._gaps + (not self._first))
        self._context.desk.leave(self._ticket, outcome, used)

    def expire(self) -> None:
        """The deadline for the next byte has passed: the worker's fault, unless the client takes nothing."""
        if self._paused:
            self.cancel()
            self._client.abort()
            return
        if (error := self._context.holding.expired(self)) is not None:
            self._refuse(error)
            return
        if self._leg_worker is not None:
            self._blame(self._leg_worker, "no token within the deadline")
        seconds = self.config.first_token_deadline_s
        self.cut(RequestError(504, "no token within the deadline" if self.started else f"no token within {seconds} s"))

    def cut(self, error: RequestError) -> None:
        """End it now; the client is told why."""
        self._abandon_leg()
        self._release_lease()
        if self.started:
            self._break(str(error))
        else:
            self._refuse(error)

    def _abandon_leg(self) -> None:
        """Close the leg's connection. A prefill leg may have ended already, with a lease that we shall never read of."""
        worker = self._leg_worker
        if self._connection is not None:
            self._connection.abort()
        if worker is not None and worker.role == "prefill":
            self._give_back(worker, b'{"request_id":"' + self._client.leg_id.encode() + b'"}')

    def pause(self) -> None:
        """The client is slower than the worker: nothing is read from it, so that its silence means nothing."""
        self._paused = True
        self.deadline = self._context.clock() + self.config.bounds.stalled_client_s
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """The client caught up."""
        self._paused = False
        self.deadline = self._context.clock() + self.config.inter_token_deadline_s
        if self._connection is not None:
            self._connection.resume()

    def _release_lease(self) -> None:
        """Nobody will read the KV: tell the prefill worker instead of letting the lease run out."""
        if self._lease is None:
            return
        (worker, lease), self._lease = self._lease, None
        self._give_back(worker, b'{"lease_id":"' + lease.encode() + b'"}')

    def _give_back(self, worker: Worker, body: bytes) -> None:
        payload = self._head(worker, RELEASE_PATH, len(body)) + body
        worker.pool.take(lambda connection, _: connection.send(Ignored(), payload) if connection is not None else None)
