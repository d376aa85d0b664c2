"""What the client gets of one request: head, bytes, the end, a refusal, an error event. And what is counted of it.

The legs (flow.py) call it; nothing here chooses or retries.
"""

from __future__ import annotations

from abc import abstractmethod
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from fleet_router.admission.gate import Ticket
from fleet_router.admission.quota import Outcome
from fleet_router.admission.runaway import CRLF_EVENT_END, EVENT_END, Why
from fleet_router.admission.usage import chunks_are_events, cut_anywhere
from fleet_router.answerhead import AnswerHead
from fleet_router.ask import Ask, Hints
from fleet_router.config import RouterConfig
from fleet_router.context import Client, Context
from fleet_router.dialect.translation import Translation
from fleet_router.ending import CHAT_PATH, END, framed, last_event, unframed
from fleet_router.errors import RequestError, remembered
from fleet_router.explain.record import Record
from fleet_router.explain.shown import header as decision_header
from fleet_router.heads import STATUS_LINES, status_line
from fleet_router.health.determined import determined
from fleet_router.health.inband import ABORTED_HINT, HINT, broke_off_with, error_in, hinted, whole_events
from fleet_router.health.patience import patient
from fleet_router.health.resume import Again
from fleet_router.health.sent import CHUNK_ENDS, CRLF_SOUND_ENDS, Halves, Sent, ends_a_line, events_end, last_is_sound
from fleet_router.hints import NO_HINTS
from fleet_router.lengths import told_again_bytes
from fleet_router.metering import LAST_ENDS, SOUND_END, Metering
from fleet_router.metrics import Served
from fleet_router.policy.trip import Trip
from fleet_router.request import choices_of, with_fields
from fleet_router.upstream import Upstream
from fleet_router.workers import Worker

if TYPE_CHECKING:
    from fleet_router.hedging import Hedge
    from fleet_router.knowledge import Counted

OK: Final = 200
OK_LINE: Final = STATUS_LINES[OK]
FRAMING: Final = {b"content-length", b"transfer-encoding"}
HEAD_END: Final = b"\r\n\r\n"
CLOSE: Final = b"\r\nconnection: close"
BIG_READ_BYTES: Final = 1_024
"""A read of so much is progress, too: of an answer that comes as a whole."""
HELD_MOST_BYTES: Final = 65_536
"""Of an answer that comes as a whole: a longer one goes out as it comes."""
UNENDED_MOST_BYTES: Final = 8 * 1024 * 1024
"""Longest event, and longest answer that comes as a whole and does not say how long it is."""

NOBODY: Final = Served()
"""Before a worker is chosen."""


class Answering(Metering):
    """State of one request, and its client's side."""

    __slots__ = (
        "_again", "_asked", "_barred", "_client", "_connection", "_context", "_counted", "_decode_failures", "_due",
        "_excluded", "_first", "_gaps", "_giver", "_half", "_handed_over", "_head_bytes", "_heard", "_hedge", "_held", "_keys",
        "_last", "_lease", "_left_s", "_leg", "_leg_worker", "_local", "_measured", "_moved", "_outcome", "_path", "_paused",
        "_prefill_failures", "_resumes", "_sent", "_served", "_splits", "_stalled_at", "_streams", "_trip", "_unended",
        "_unreached", "config", "deadline", "done", "hints", "last_byte_at", "record", "sent_at", "started", "started_at",
    )  # fmt: skip

    def __init__(
        self, context: Context, client: Client, path: bytes, ask: Ask, ticket: Ticket, translation: Translation | None = None,
        hints: Hints = NO_HINTS, record: Record | None = None,
    ) -> None:  # fmt: skip
        """`record`: of a request that has come before, and whose answer this one is to be instead of another."""
        self._context = context
        self._client, self._path = client, path
        self.record = self._opened(ask, ticket, hints) if record is None else record
        super().__init__(context.desk, self._with_ids(ask, context.config) if ask.stream else ask, ticket, translation)
        self._last = self._paused = self._moved = self._measured = False
        """The answer's head says that the connection closes after it; the client does not read; a silent worker had it; whether
        its prompt is too long was looked at."""
        self._asked = self._ask
        """What the client asked: a stream that is carried on asks for its rest."""
        self._streams = ask.stream
        self._sent: Sent | None = None
        self._heard: Sent | None = None
        """What the client has of a stream that could be carried on; of one in another dialect what its worker said."""
        self._again: Again | None = None
        self._gaps = self._unended = self._resumes = self._prefill_failures = self._decode_failures = self._unreached = 0
        """Of the answer so far: writes after the first, bytes since the last whole event; and of its legs. Decode workers that
        were not reached have not failed."""
        self.config = patient(ask, context.config)  # a reload does not change a running request
        self._excluded = self._barred = frozenset[str]()
        """Whom the rest is not asked of; whom nothing may be: told to give its KV back, or not in the gateway's subset."""
        self._local = ask.alone
        """The KV is not to come from a prefill worker, or not any more."""
        self._connection: Upstream | None = None
        self._leg: object = None  # PrefillLeg or DecodeLeg
        self._leg_worker: Worker | None = None
        self._lease: tuple[Worker, str] | None = None
        self._keys: list[int] = []
        self._handed_over = ""
        self._giver: Worker | None = None
        """Tier of the decode leg when another worker prefilled the prompt, and that worker while the KV is its own."""
        self._served = NOBODY
        self.hints = hints.prefilled_locally() if ask.alone else hints
        self._hedge: Hedge | None = None
        self._trip: Trip | None = None
        """What was expected of the legs; None before the first and after the last."""
        self._counted: Counted | None = None
        """The prompt as blocks; None: not asked yet."""
        self._first, self._held = True, False
        """Nothing of the body has come; it waits for workers."""
        self._due: tuple[float, float] | None = None
        """Of one that waits, or waited, for a worker that comes back: until when it does, and when its first byte is due."""
        self._head_bytes = self._half = b""
        """The answer's head, waiting for the first bytes of its body: one write for both; half of an error that it began with."""
        self._outcome: Outcome = "left"
        """How it ends if it ends now, unless we refuse it."""
        self.started = self.done = self._splits = False
        """The first byte has gone to the client; it is over; events come in chunks and are handed on as they are."""
        self._left_s = self._stalled_at = 0.0
        """Of a client that does not read: what was left of the deadline, and the one that holds for it."""
        self.sent_at = self.started_at = self.last_byte_at = self.record.came_at if record is None else context.clock()
        self.deadline = inf if ticket.waiting else self.started_at + self.config.first_token_deadline_s

    def _opened(self, ask: Ask, ticket: Ticket, hints: Hints) -> Record:
        """The request has come: what is counted once, however many answers are made for it."""
        context, client = self._context, self._client
        context.metrics.arrivals += 1
        context.budget.asked(len(ask.prompt))
        return context.recorder.open((client.request_id, client.leg_id), self._path, ask, ticket, hints.headers)

    @staticmethod
    def _with_ids(ask: Ask, config: RouterConfig) -> Ask:
        """Token ids in the stream, where it can be carried on by them."""
        if config.resume != "prefill" or not determined(ask.fields):
            return ask
        return with_fields(ask, {"return_token_ids": msgspec.Raw(b"true")}, b',"return_token_ids":true}')

    def head(self, status: int, head: AnswerHead) -> None:
        """The answer begins: from now on no retry."""
        now = self._context.clock()
        self.started, self._half = True, b""
        self.last_byte_at = now
        self.record.status = status
        self._goes_on_until(now)
        if status == OK:
            self._outcome = "answered"
            if not self._streams:
                self._taken(self._leg_worker)
            self._keep_what_is_sent(head.in_chunks and self._ask.stream)
        else:
            self._outcome = "refused"
            self._release_lease()
        lines = [STATUS_LINES.get(status) or status_line(status), self.record.request_id.encode()]
        lines.append(head.lines)
        self._end_head(lines, now)
        self._head_bytes = b"".join(lines)

    def _add_told(self, lines: list[bytes], now: float) -> None:
        """What we tell of an answer, each with its line break before it."""
        lines.append(self._ticket.lane.account.headers(int(now * 1e9)))
        if self.hints.tier:
            lines.append(b"\r\nx-fleet-tier: " + self.hints.tier.encode())
        if self.record.shown:
            lines.append(decision_header(self.record))

    def told_with_refusals(self) -> str:
        """The same as an error has it: each with its line break behind it."""
        lines: list[bytes] = []
        self._add_told(lines, self._context.clock())
        told = b"".join(lines).removeprefix(b"\r\n").decode("latin-1")
        return told + "\r\n" if told else ""

    def _end_head(self, lines: list[bytes], now: float) -> None:
        """Header lines of our own."""
        self._add_told(lines, now)
        if self._client.last_answer:
            self._last = True
            lines.append(CLOSE)
        lines.append(HEAD_END)

    def whole(self, worker: Worker, kept: tuple[bytes, bytes, bytes], body: bytes) -> None:
        """An answer that came in one piece (200): what `head`, `raw` and `end` do, in one write. `kept`: its header lines."""
        now = self._context.clock()
        worker.answers(self.sent_at, now)
        self.started, self._outcome, self.last_byte_at = True, "answered", now
        self._count(OK)
        self.record.status = OK
        self._taken(self._leg_worker)
        self._first_bytes(now)
        self._tail = body
        lines = [OK_LINE, self.record.request_id.encode(), kept[0], kept[1], kept[2]]
        self._end_head(lines, now)
        lines.append(body)
        self._over(now)
        self._client.write(b"".join(lines))
        self._client.finish(last=self._last)

    def _taken(self, worker: Worker | None) -> None:
        """The decode worker answers: it has the KV, or will have it; its lease is nobody's when the first bytes are there."""
        context = self._context
        if self._handed_over:
            context.metrics.handed_over[self._handed_over] += 1
        if worker is None:
            return
        if self._giver is not None and context.table.pairs.breakers:
            context.table.transferred(self._giver, worker, self.sent_at)
        if context.table.workers.get(worker.uid) is worker:  # one of its uid may be at another place, with a cache of its own
            context.table.routing.index.add(self._keys, worker.uid)  # now it holds the prompt's KV
            if self._counted is not None and context.knowledge is not None:
                context.knowledge.answered(worker.uid, self._counted)

    def _keep_what_is_sent(self, in_chunks: bool) -> None:
        self._splits = in_chunks and self._translation is None
        if self.config.resume == "off" or not in_chunks or not determined(self._ask.fields):
            return
        if self._translation is None:
            self._sent = Sent(self._context.room)
        else:
            self._heard = Sent(self._context.room)

    def hear(self, data: bytes) -> None:
        """Bytes of a body, of which the client gets something else."""
        if self._heard is not None:
            self._heard.keep(data)
            if self._heard.full:
                self._keep_no_more()

    def send_head(self) -> None:
        """The head goes out alone."""
        head, self._head_bytes = self._head_bytes, b""
        if head:
            self._count(self.record.status)
            self._client.write(head)

    def raw(self, data: bytes, shown: bytes | None = None) -> None:
        """Bytes of the answer, spliced; `shown`: what the client gets for them in its own dialect."""
        now = self._context.clock()
        if self._first:
            self._first_bytes(now)
        else:
            self._more_bytes(now)
        self.last_byte_at = now
        if sound := data.endswith(SOUND_END):
            self.deadline, self._unended = now + self.config.inter_token_deadline_s, 0
        elif not (self._ends(data, now, shown) if (sound := data.endswith(LAST_ENDS)) else self._goes_on(data, now)):
            return
        elif not sound and self._splits and self._sent is None and self._begins_an_event(data):
            self._sent = Halves(self._context.room)
        size, broke = len(data), ""
        if self._sent is not None:
            data = self._sent.whole(data) if not self._sent.full else self._keep_no_more() + data
        whole = self._splits and chunks_are_events(data)
        if shown is None and self._splits and (len(data) > size or (not whole and cut_anywhere(data))):
            data, broke = self._up_to_a_cut_error(data)
        elif shown is None and (data.find(HINT) >= 0 or data.find(ABORTED_HINT) >= 0):  # `in` raises and catches an error first
            data, broke = self._up_to_an_error(data)
        self._tell((self._without_usage(data, whole=whole) if self._hides else data) if shown is None else shown)
        self._count_tokens(data, sound)
        if broke:
            self._fault(broke_off_with(broke))
        elif self._runaway is not None and (why := self._runaway.saw(data)) is not None:
            self._end_runaway(why)

    def _begins_an_event(self, data: bytes) -> bool:
        """Its end has not come: what the client has ends with a whole one, or with the one that ended in this read."""
        return not self._tail or data.find(EVENT_END) >= 0 or CRLF_EVENT_END in data or self._tail.endswith(CHUNK_ENDS)

    def _tell(self, data: bytes) -> None:
        """To the client; the head goes out with the first bytes. What comes as a whole waits for its end: its worker may die."""
        if self._head_bytes and data:
            data, self._head_bytes, one = self._head_bytes + data, b"", self._connection
            if not self._streams and one is not None and not one.ended and len(data) <= HELD_MOST_BYTES:
                self._head_bytes = data
                return
            self._count(self.record.status)
        if data:
            self._client.write(data)

    def _up_to_an_error(self, data: bytes) -> tuple[bytes, str]:
        """The chunks before one that tells of an error, of which nobody gets anything, and its words; all when there is none."""
        found = error_in(data)
        if found is None:
            return data, ""
        end = events_end(data, found[0] + 1) if self._splits else data.rfind(EVENT_END, 0, found[0] + 1) + len(EVENT_END)
        good = data[:end] if end >= len(EVENT_END) else b""
        if self._sent is not None:
            self._sent.take_back(len(data) - len(good))
        return good, found[1]

    def _up_to_a_cut_error(self, data: bytes) -> tuple[bytes, str]:
        """The same where borders of chunks, or of packets, may cut what tells an error or [DONE]."""
        contents = unframed(data)
        if not contents:  # it begins within a chunk
            return self._up_to_an_error(data)
        if (found := (error_in(contents) if hinted(contents) else None) or self._early_done(contents)) is None:
            return data, ""
        good = framed(whole_events(contents, found[0] + 1))
        if self._sent is not None:
            self._sent.take_back(len(data), good)
        return good, found[1]

    def _more_bytes(self, now: float) -> None:
        self._gaps += 1
        if self._streams:
            self._served.itl.observe(now - self.last_byte_at)

    def _first_bytes(self, now: float) -> None:
        self._first = False
        self._lease = None
        self.record.first_at = now
        if self.record.status != OK:
            return  # a refusal is no first token: tiers are sized and revisions judged by these
        if self._trip is not None:
            self._trip.first_token(now)
        if self._streams:  # the first bytes of any other answer are its last token, and no tier is to be sized by them
            self._served.ttft.observe(now - self.started_at)

    def _sound(self, data: bytes) -> bool:
        """Its last event is a JSON object by its looks: half of one goes to nobody as a whole. In other dialects it was read."""
        if not data.endswith(CHUNK_ENDS) or not self._ask.stream or self._translation is not None:
            return True
        if last_is_sound(data):
            return True
        self._fault("the worker's event is not JSON")
        return False

    def _ends(self, data: bytes, now: float, shown: bytes | None) -> bool:
        """A read that ends with [DONE], or with the body; False: it is at fault."""
        self.deadline, self._unended = now + self.config.inter_token_deadline_s, 0
        if (found := self._early_done(data) if shown is None else None) is not None:
            self._fault(found[1])
        return found is None

    def _goes_on(self, data: bytes, now: float) -> bool:
        """Bytes that do not end with an event: of a long one, or of a whole answer. A byte now and then is no progress."""
        if EVENT_END in data or data.endswith(CRLF_SOUND_ENDS) or CRLF_EVENT_END + b"data:" in data or ends_a_line(data):
            self.deadline, self._unended = now + self.config.inter_token_deadline_s, 0
            return self._sound(data)
        self._unended += len(data)
        if len(data) > BIG_READ_BYTES:
            self._goes_on_until(now)
        if self._unended <= (UNENDED_MOST_BYTES if self._sent is None else self._sent.event_most_bytes) or self._has_an_end():
            return True
        if self._unended <= told_again_bytes(self._ask.fields, len(self._ask.prompt)):
            if self._sent is not None:
                self._sent.full = True  # it goes out as it comes
            return True
        self._fault(f"the worker sent {self._unended} bytes without an end")
        return False

    def _has_an_end(self) -> bool:
        """However long it is, its head said so: embeddings of a few hundred texts are 12 MB."""
        return not self._ask.stream and self._connection is not None and self._connection.sized

    def _goes_on_until(self, now: float) -> None:
        """Something came. A head may come early: the first token, or all of them, are still to be made."""
        next_s = now + self.config.inter_token_deadline_s
        self.deadline = max(next_s, self._until_whole()) if self._first or not self._ask.stream else next_s

    def _keep_no_more(self) -> bytes:
        """The stream grew too long to be carried on; returns what was held back."""
        if self._heard is not None:
            self._heard.forget()
            self._heard = None
        sent, self._sent = self._sent, None
        if sent is None:
            return b""
        sent.forget()
        return sent.rest()

    @abstractmethod
    def _until_whole(self) -> float:
        """When an answer that comes as a whole is to be there."""

    @abstractmethod
    def _early_done(self, last: bytes) -> tuple[int, str] | None:
        """Where a read, or its contents, says [DONE] though that is no end, and why it is none."""

    @abstractmethod
    def _fault(self, why: str, *, blamed: bool = True) -> None:
        """The worker's answer is not to be gone on with. `blamed`: that counts against it."""

    def _end_runaway(self, why: Why) -> None:
        """The stream is at the end of an event: ours is the last one. The worker sees a client that left, and stops."""
        self._context.desk.runaways[why] += 1
        if self._connection is not None:
            self._connection.abort()
        if self._translation is not None:
            event = self._translation.cut_short(why, self._used())
        else:
            model = self._ask.adapter or self.config.served_name
            event = last_event(why, self._path == CHAT_PATH, self._client.request_id, model, choices_of(self._asked))
        self._keep_no_more()  # half of an event that came behind is nobody's
        self._client.write(framed(event) + END)
        self.end()

    def end(self) -> None:
        """The answer is complete."""
        if (rest := self._keep_no_more()) and self._again is None:
            self._tell(self._without_usage(rest, whole=False) if self._hides else rest)
            self._count_tokens(rest, sound=False)
        self.send_head()  # an answer without a body
        if self._trip is not None:
            self._trip.ended(self.last_byte_at, self._gaps + 1)
        self._over(self.last_byte_at)
        self._client.finish(last=self._last)

    def _over(self, at: float = 0.0) -> None:
        """The worker has answered, and nothing runs any more. `at`: what time it is, where somebody has looked."""
        if not self._streams and not self._asked.alone and self.record.status == OK:
            self._served.whole.observe(self.last_byte_at - self.started_at)
        if self._trip is not None:
            if self._trip.learns_whole and self.record.status == OK and self._leg_worker is not None and not self._stalled_at:
                self._trip.whole(self.last_byte_at, self._written(self.config.max_output_tokens), self._leg_worker)
            self._trip_over(at)
        if self._leg_worker is not None:
            self._leg_worker.breaker.succeeded()
        self.end_leg()
        self.done = True
        self._leave(self._outcome, at=at)

    def _trip_over(self, at: float = 0.0) -> None:
        """This attempt waits in no queue any more. `at`: as above."""
        if self._trip is not None:
            self._trip.over(at or self._context.clock())
            self._trip = None

    def _refuse(self, error: RequestError) -> None:
        if self.started:
            if self._again is not None:
                self._context.metrics.resumed["refused"] += 1
            self._break(error)
            return
        self.record.error = remembered(error)
        self._trip_over()
        self.end_leg()
        self.done = True
        self._leave("failed" if error.status >= 500 else "refused")
        self._count(error.status)
        self._client.refuse(error)

    def refuse_with(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """A worker's own refusal (4xx) goes to the client as it is, or in its own dialect."""
        self._release_lease()
        if self._translation is not None:
            error = self._translation.refused(status, body, self.told_with_refusals())
            self._outcome, self.record.status = "refused", status
            self._count(status)
            self._over()
            self._client.refuse(error)
            return
        kept = [(name, value) for name, value in headers if name.lower() not in FRAMING]
        self.head(status, AnswerHead([*kept, (b"content-length", str(len(body)).encode())]))
        self.send_head()
        self._client.write(body)
        self.end()

    def _break(self, error: RequestError) -> None:
        self.send_head()
        self.record.error = remembered(error)
        self._trip_over()
        self.end_leg()
        self.done = True
        self._leave(self._outcome)
        self._keep_no_more()
        self._count_broken()
        # inside a chunk, or in a body that has none, an error event would be taken for its contents
        whole = self._translation is not None or (self._splits and (not self._tail or self._tail.endswith(CHUNK_ENDS)))
        self._client.break_off(error, stream=self._ask.stream and whole, last=self._last)

    def _count(self, status: int) -> None:
        """The client is told so: from now on it is, for a counter never goes down."""
        self._context.metrics.requests[status] += 1

    def _count_broken(self) -> None:
        """Its answer broke off."""
        self._context.metrics.streams_broken += 1

    def _leave(self, outcome: Outcome, begun: bool = True, at: float = 0.0) -> None:
        """Give the slot back and settle; once, whatever ended the request. `begun`: it did not only wait; `at`: as above."""
        used = None
        if self._metered and outcome == "answered":
            used = self._used()
        now, writes = at or self._context.clock(), self._gaps + (not self._first)
        self._context.recorder.close(self.record, outcome, self.last_byte_at, writes, now)
        self._context.desk.leave(self._ticket, outcome, used, begun, now)

    @abstractmethod
    def end_leg(self) -> None:
        """A leg is over, however it ended."""

    @abstractmethod
    def _release_lease(self) -> None:
        """Nobody will read the KV."""
