"""One request end to end: choose, prefill leg, decode leg, one retry before the first byte, cancellation.

No task per request: the flow is a small state machine that legs and timers call. What is sent to the client goes through
`answering`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from fleet_router.ask import APART_BYTES
from fleet_router.config import renamed
from fleet_router.ending import CHAT_PATH
from fleet_router.errors import NO_ROOM, RequestError
from fleet_router.health.patience import budget_s, thinks_unseen
from fleet_router.health.resume import Said, Start
from fleet_router.health.silence import SILENT, Waits
from fleet_router.hedging import NOT_JSON, Hedging
from fleet_router.legs import DecodeLeg, PrefillLeg, ResumedLeg, TokenizeLeg, TranslatedLeg
from fleet_router.lengths import nearly_all
from fleet_router.outbox import Written
from fleet_router.policy.chosen import Choice
from fleet_router.request import decode_parts, is_object, lease_of, named, prompt_tokens_of, reference_of
from fleet_router.retrying import head_of
from fleet_router.upstream import Pool, Upstream
from fleet_router.workers import Worker

if TYPE_CHECKING:
    from fleet_router.knowledge import Counted

COMPLETIONS_PATH: Final = b"/v1/completions"
TOKENIZE_PATH: Final = b"/tokenize"
LATE: Final = "no token within the deadline"


def _payload(head: bytes, body: bytes | memoryview, added: bytes) -> Written:
    """One request as it is written. `added`: in place of the body's last brace."""
    if len(body) > APART_BYTES:
        return [head, memoryview(body)[:-1], added] if added else [head, body]
    return b"".join((head, memoryview(body)[:-1], added)) if added else b"".join((head, body))


class Flow(Hedging):
    """One request: its legs."""

    __slots__ = ()

    # -- legs -------------------------------------------------------------------------------------------------------
    def admitted(self) -> None:
        """The wait for a slot is over."""
        self.deadline = self._context.clock() + self.config.first_token_deadline_s
        self.begin()

    def begin(self) -> None:
        """Choose and send the first leg."""
        context = self._context
        self._trip_over()
        self._mind_readers()
        ask, now, seed, hints = self._ask, context.clock(), self._ticket.lane.seed, self.hints
        if context.knowledge is not None:
            if self._counted is None:
                chat = self._path == CHAT_PATH and ask is self._asked
                self._counted = context.knowledge.count(ask, chat, self._was_counted, self._ticket.lane.salt)
                if self._counted is None:
                    return
            hints = context.knowledge.hints(self._counted, hints)
        if not self._measured and self._too_long(int(hints.tokens)):
            return
        found, keys = context.table.choose(ask.prompt, self.config, now, self._excluded, seed, ask.adapter, hints)
        if not isinstance(found, Choice) and context.table.trouble.out:
            found, keys = self._last_resort(now, hints)
        if not isinstance(found, Choice):
            self.record.tried(now, 0.0, found.reason, None, None)
            self._hold(found.reason, "adapter_not_loaded" if ask.adapter else "no_worker")
            return
        if self._held:
            self._waited(now)
        if not self._ask.alone:
            self._trip = context.table.depart(found, now, ask, self.config.decide, keys, context.knowledge is not None)
        decode = context.table.workers[found.decode]
        prefill = context.table.workers[found.prefill] if found.prefill is not None else None
        begun, now = now, context.clock()
        context.recorder.decided(self.record, begun, now, found, prefill, decode)
        self._keys = [] if self._ask.alone else keys
        self._handed_over, self._giver = "", None
        self._served = context.metrics.of(decode.endpoint.tier, decode.endpoint.revision)
        self._served.requests += 1
        if prefill is None or found.prefill is None:
            context.metrics.local_prefills += not self._ask.alone
            self._send_decode(decode, None, now)
            return
        context.table.routing.index.add(keys, found.prefill)
        context.metrics.remote_prefills += 1
        context.metrics.prefill_tokens += int(hints.tokens or context.table.tokens_of(self._ask.prompt))
        self._send_prefill(prefill, decode, found)

    def _send_prefill(self, prefill: Worker, decode: Worker, found: Choice) -> None:
        self._send(prefill, self._prefill_body(prefill), PrefillLeg(self, prefill, decode))
        if self.config.hedge is not None:
            self._arm(self.config.hedge, prefill, decode, found)

    def _was_counted(self, counted: Counted) -> None:
        """The prompt's tokens are known, or will not be."""
        if self.done:
            return
        self._counted = counted
        try:
            self.begin()
        except Exception as error:  # nobody waits for what counts them: the client would until its deadline
            self.fault(error)

    def _waits_for(self, now: float) -> None:
        """What a worker decodes is waited for: of an answer that comes as a whole longer yet, see `_until_whole`."""
        if not self._ask.stream:
            last, first = self.started_at + self.config.whole_answer_most_s, now + self.config.first_token_deadline_s
            self.deadline = min(first, last)

    def _until_whole(self) -> float:
        """When an answer that comes as a whole is to be there: it may take as long as its tokens; the first byte of a stream may
        not. Computed when the time of a first token has passed: most answers are there before."""
        worker, first_at = self._leg_worker, self.sent_at + self.config.first_token_deadline_s
        if worker is None or self._ask.stream or self.deadline > first_at:
            return self.deadline
        last = self.started_at + self.config.whole_answer_most_s
        return min(self.sent_at + budget_s(self._ask, self.config, worker, self.sent_at), last)

    def _has_more_time(self, now: float) -> bool:
        """The deadline is of a first token, and what is waited for is more."""
        if self._leg_worker is not None and self._comes_whole():
            self.deadline = self._until_whole()
        return now <= self.deadline

    def _send_decode(self, worker: Worker, reference: bytes | None, now: float) -> None:
        leg: DecodeLeg
        self._waits_for(now)
        if self._again is not None:
            leg = ResumedLeg(self, worker, self._again)
        elif self._translation is not None:
            leg = TranslatedLeg(self, worker, self._translation)
        else:
            leg = DecodeLeg(self, worker, whole=not self._ask.stream)
        leg.body, leg.added = decode_parts(self._ask, reference)
        self._send(worker, leg.body, leg, at=now)

    def _send(
        self, worker: Worker, body: bytes | memoryview, leg: PrefillLeg | DecodeLeg, *, fresh: bool = False, path: bytes = b"",
        at: float = 0.0,
    ) -> None:  # fmt: skip
        """`at`: what time it is, where somebody has looked."""
        path = path or (self._path if self._ask is self._asked else COMPLETIONS_PATH)
        reads = self._translation is not None or self._again is not None or path == TOKENIZE_PATH
        pool = worker.reading() if reads else worker.pool
        worker.began()
        self._leg_worker, self._leg, leg.path = worker, leg, path
        self.sent_at = at or self._context.clock()
        leg.body, added = (body := self._named(body, worker)), leg.added
        size = len(body) + len(added) - (1 if added else 0)
        payload = _payload(head_of(path, worker.pool.authority, self.record.leg_id, size, self.record.onward), body, added)
        connection = None if fresh else pool.idle()
        if connection is not None:
            self._put_on(connection, leg, payload)
        else:
            self._connect(pool, worker, leg, payload)

    def _named(self, body: bytes | memoryview, worker: Worker) -> bytes | memoryview:
        """The model under the name that this worker serves it by."""
        now, model = self._context.config, worker.endpoint.model
        if not model and self.config is not now:
            model = renamed(self.config, now)
        return named(body, model, self._ask.adapter) if model else body

    def _put_on(self, connection: Upstream, leg: PrefillLeg | DecodeLeg, payload: Written) -> None:
        """A client that does not read now is not read for: its answer waits at the worker, and not here."""
        self._connection = connection
        connection.send(leg, payload, self._context.outbox)
        if self._paused and not isinstance(leg, PrefillLeg):  # that one's answer is small, and we read it for ourselves
            connection.pause()

    def _connect(self, pool: Pool, worker: Worker, leg: PrefillLeg | DecodeLeg, payload: Written) -> None:
        """Send it on a new connection."""

        def connected(connection: Upstream | None, why: str) -> None:
            try:
                if self.done or self._leg is not leg:
                    if connection is not None:
                        pool.put(connection)
                elif connection is None:
                    self.end_leg()
                    self._not_connected(leg, why)
                else:
                    self._put_on(connection, leg, payload)
            except Exception as error:  # nobody waits for the task that connects: the client would until its deadline
                self.fault(error)

        pool.take(connected, fresh=True)

    def _not_connected(self, leg: PrefillLeg | DecodeLeg, why: str) -> None:
        """A leg that is over had no connection: for want of ours, or its worker is gone."""
        if why == NO_ROOM:
            self.cut(RequestError(503, why, code="connections"))
        else:
            leg.failed(why, gone=True)

    def resend(self, worker: Worker, leg: PrefillLeg | DecodeLeg) -> bool:
        """A pooled connection that the worker had closed while this was on its way: once more on a fresh one. Not a retry:
        nothing ran. One that it closes later has failed: it had the request."""
        connection, now = self._connection, self._context.clock()
        if connection is None or not connection.used or connection.got_bytes:
            return False
        if now - self.sent_at > self.config.reused_close_s:
            return False
        self._context.metrics.resends += 1
        self.end_leg()
        if self._giver is not None and self._lease is None and isinstance(leg, DecodeLeg) and not isinstance(leg, TokenizeLeg):
            self._prefill_locally()  # its KV is given to one reader, without proof of ours: who had this may have been the one
            self.begin()
            return True
        self._send(worker, leg.body, leg, fresh=True, path=leg.path)
        return True

    def end_leg(self) -> None:
        """A leg is over, however it ended."""
        if self._leg_worker is not None:
            self._leg_worker.ended()
            self._leg_worker = None
        self._connection = self._leg = None

    def prefilled(self, prefill: Worker, decode: Worker, body: bytes) -> bool:
        """The prefill leg answered 200; False: with nothing that can be used."""
        self.end_leg()
        reference = reference_of(body, ids=self._is_chat())
        if reference is None and not is_object(body):
            self.give_back(prefill)
            self.leg_failed(prefill, NOT_JSON)
            return False
        if self._hedge is not None:
            self._end_hedge("lost")
        self._goes_on_with(prefill, decode, reference, body)
        return True

    def _goes_on_with(self, prefill: Worker, decode: Worker, reference: bytes | None, body: bytes) -> None:
        """The prompt's KV is there, or its engine hands none over."""
        context, now = self._context, self._context.clock()
        prefill.answers(self.sent_at, now)
        prefill.breaker.succeeded()
        self.record.prefilled(now)
        if self._trip is not None:
            self._trip.prefilled(now)
        if self._counted is not None and context.knowledge is not None and context.table.workers.get(prefill.uid) is prefill:
            context.knowledge.answered(prefill.uid, self._counted)
        if (tokens := prompt_tokens_of(body)) > 0 and nearly_all(self._ask.fields, self._ask.prompt):
            context.table.measured(self._ask.prompt, tokens)
        if reference is not None and (lease := lease_of(reference)) is not None:
            self._lease = (prefill, lease)
        prefill.read_once = reference is not None and self._lease is None
        if self._ask is self._asked and not self._fits(tokens):
            return
        if prefill.read_once and self._several():
            self._prefill_locally()
            self.begin()
            return
        self._giver = prefill
        self._handed_over = decode.endpoint.tier  # also without a reference: an engine that gives none is what must be noticed
        self._send_decode(decode, reference, now)

    def leg_failed(self, worker: Worker, why: str, *, gone: bool = False, blamed: bool = True) -> None:
        """A leg broke. Before the first byte to the client: once more, elsewhere, if the budget has it. Prefill that failed twice
        is done by the decode worker; decode that failed twice is 502. `gone`: the worker could not be connected to; `blamed`: it
        counts against it."""
        self._blame(worker, why, gone=gone, blamed=blamed)
        if self._hedge is not None and self._goes_on_elsewhere():
            self._prefill_failures += 1
            return
        self._release_lease()
        if self.started and not self._nothing_told():
            if self._said_all():
                self._end_for()
            else:
                self._resume(worker, why)
            return
        prefill = worker.role == "prefill"
        self._prefill_failures += prefill
        self._decode_failures += not prefill and not gone
        self._unreached += not prefill and gone
        others = self._others(worker, even_out=gone)
        if prefill and (not others or self._prefill_failures > 1):
            self._prefill_locally()
        elif not prefill and ((not others and not self._context.holding.wakes(self.hints.tier)) or self._failed_often()):
            if not self._awaits(worker, why, gone=gone):
                self._refuse(self._failure(worker, why, gone=gone))
            return
        if not self._may_retry(free=gone):
            self._refuse(RequestError(503, f"{worker.endpoint.name}: {why}; no retry is left", code="no_retry_left"))
            return
        if others or not prefill:
            self._excluded = self._excluded | self._uid_of(worker)
        self.begin()

    def _nothing_told(self) -> bool:
        """A head came, or the beginning of an answer, and the client has not seen it: as if it had not come."""
        if not self._head_bytes:
            return False
        self._head_bytes, self.started, self._first, self._outcome = b"", False, True, "left"
        self._gaps, self._unended, self._before, self._tail, self._told = 0, 0, b"", b"", None
        self.record.status, self.record.first_at = 0, 0.0
        self._keep_no_more()
        if self._translation is not None:
            self._translation.forget_partial()
        return True

    def _count_prompt(self, said: Said, start: Start, why: str) -> None:
        """The prompt as token ids, from some worker; without them the whole answer is asked for again."""
        if not self._ask_ids(lambda ids: self._carry_on(said, start if ids else Start(), ids)):
            self._cannot_resume("refused", why)

    def _ask_ids(self, then: Callable[[list[int]], object]) -> bool:
        """False: there is nobody to ask. `then` gets none where there are none to be had."""
        found = self._pick(self._excluded)
        if isinstance(found, Choice):
            worker = self._context.table.workers[found.decode]
            self._send(worker, self._tokenize_body(), TokenizeLeg(self, worker, then), path=TOKENIZE_PATH)
        return isinstance(found, Choice)

    def not_told(self, worker: Worker, why: str, *, gone: bool, blamed: bool) -> None:
        """A worker did not tell a prompt's tokens. The rest of a stream has the time that it would have had."""
        self._blame(worker, why, gone=gone, blamed=blamed)
        if self.started:
            self.deadline = self._context.clock() + self.config.first_token_deadline_s

    def _fault(self, why: str, *, blamed: bool = True) -> None:
        leg = self._leg
        self._abandon_leg()
        self.end_leg()
        if isinstance(leg, (PrefillLeg, DecodeLeg)):
            leg.failed(why, blamed=blamed)

    def decode_failed(self, worker: Worker, why: str) -> None:
        """A 5xx of the decode leg. With KV from elsewhere the pair may be to blame: it is put out before the worker is."""
        self.end_leg()
        if self._giver is not None:
            self._context.table.transfer_failed(self._giver, worker, self._context.clock())
        self.leg_failed(worker, why)

    def transfer_failed(self, worker: Worker) -> None:
        """Decode could not prove the KV: nothing is wrong with decoding there, so prefill again, locally."""
        self.end_leg()
        self._release_lease()
        now = self._context.clock()
        if self._giver is not None:
            self._context.table.transfer_failed(self._giver, worker, now)
        self.record.went_wrong(now, "the KV transfer failed")
        self._context.metrics.of(worker.endpoint.tier, worker.endpoint.revision).errors += 1
        if self._local or not self._may_retry(free=False):
            self._refuse(RequestError(503, "the KV transfer failed", code="kv_transfer"))
            return
        self._prefill_locally()
        self.begin()

    def silent(self) -> None:
        """The worker of this leg says nothing to anybody: before the first byte, a head alone being none, somebody else is asked
        once."""
        worker, leg = self._leg_worker, self._leg
        if worker is None or self.done or self._moved or (self.started and not self.begins_anew()):
            return
        if worker.role == "decode" and not self._others(worker):
            return  # to wait on is all that is left
        self._moved = not isinstance(leg, TokenizeLeg) and self.second_leg() is None  # beside which nobody new is asked
        self._fault(SILENT)

    def leg(self) -> Waits | None:
        """The leg that is under way, for those who look for silent workers; None while the client is what is waited for."""
        worker = self._leg_worker
        if worker is None or self._paused:
            return None
        heard_at = self.sent_at if self._first else self.last_byte_at  # a head alone says nothing
        whole = self._comes_whole() or thinks_unseen(self._ask)
        return Waits(worker.uid, self.sent_at, max(heard_at, self.sent_at), whole)

    def sent_to(self, leg: Waits) -> Worker | None:
        """Who has this leg: another one may have the worker's uid meanwhile, at another place."""
        return self._leg_worker if self._hedge is None or not leg.second else self._hedge.worker

    def _comes_whole(self) -> bool:
        """Nothing is heard of this leg before its end, and its end is not near: a prefill's is. Prefill workers decode, too, when
        the others are full."""
        return not self._ask.stream and not isinstance(self._leg, (PrefillLeg, TokenizeLeg))

    def names_no_model(self, body: bytes) -> bool:
        """A 404 that says that there is no such model; under an adapter any 404 does."""
        return bool(self._ask.adapter) or b"NotFoundError" in body or b"model_not_found" in body

    def model_missing(self, worker: Worker) -> None:
        """It answers that it has no such model. An adapter: it was told to unload it, or has begun anew, since we heard of it.
        Nothing is wrong with the worker, and others may have it. The model itself: this is not the worker that it was."""
        self.end_leg()
        self._release_lease()
        if not self._ask.adapter:
            worker.put_out(self._context.clock())
            self.leg_failed(worker, f"it does not serve {self.config.served_name}")
            return
        self.record.went_wrong(self._context.clock(), "the worker has no such adapter")
        if self._hedge is not None and self._goes_on_elsewhere():
            return
        self._context.metrics.retries += 1
        self._excluded = self._excluded | self._uid_of(worker)
        self.begin()

    # -- ends from outside ------------------------------------------------------------------------------------------
    def cancel(self) -> None:
        """The client left: both legs end now."""
        if self.done:
            return
        self.done = True
        self.record.went_wrong(self._context.clock(), self._why_left())
        self._context.holding.drop(self, "left")
        self._context.metrics.client_left += 1
        self._abandon_leg()
        self._trip_over()
        self.end_leg()
        self._release_lease()
        self._keep_no_more()
        self._leave(self._outcome, begun=self.started or not (self._ticket.waiting or self._held))

    def _why_left(self) -> str:
        return "the client left"

    def expire(self, now: float) -> None:
        """The deadline for the next byte has passed: the worker's fault, unless the client takes nothing."""
        if self._paused:
            self.cancel()
            self._client.abort()
            return
        if (error := self._context.holding.expired(self)) is not None:
            self.cut(error)
            return
        if self.started and self._leg_worker is not None:
            said = self.last_byte_at >= self.sent_at
            self._fault(LATE, blamed=said or self._had_its_time(self.sent_at, now))
            return
        if self._has_more_time(now):
            return
        worker = self._leg_worker
        whole = worker is not None and self._comes_whole()
        if worker is not None:
            self._is_late(worker, now, whole=whole)
        if whole:
            told = f"no answer within {now - self.started_at:.0f} s: ask for fewer tokens (max_tokens), or with stream: true"
        else:
            told = f"no token within {self.config.first_token_deadline_s} s"
        self.cut(RequestError(504, told))

    def _is_late(self, worker: Worker, now: float, *, whole: bool) -> None:
        blamed = self._had_its_time(self.sent_at, now)
        if blamed and whole and worker.heard_at < self.sent_at:
            worker.put_out(now)  # in all that time it has said nothing to anybody
        self._blame(worker, LATE, blamed=blamed)
        self._hedge_late(now)

    def cut(self, error: RequestError) -> None:
        """End it now, if it is not over; the client is told why."""
        if self.done:
            return
        if self._held:
            self.record.went_wrong(self._context.clock(), str(error))  # it waited for workers, and in vain
        self._abandon_leg()
        self._release_lease()
        if not self._streams:
            self._nothing_told()
        self._refuse(error)

    def fault(self, error: Exception) -> None:
        """A bug of ours in what was done with a worker's answer: nobody else is asked, who would answer the same."""
        mine = self._client.leg_id == self.record.leg_id  # and not its connection's next request
        self._context.desk.faults.end(error, self._client.fail if mine else self.cut, self.record.request_id)

    def pause(self) -> None:
        """The client is slower than the worker: nothing is read from it, so that its silence means nothing."""
        now = self._context.clock()
        self._paused = True
        self._left_s, self._stalled_at = self.deadline - now, now + self.config.bounds.stalled_client_s
        self.deadline = self._stalled_at
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """The client caught up: what it waits for has as much time left as before. Nothing of this answer may have come yet; what
        it did not read was the one before."""
        now = self._context.clock()
        self._paused = False
        if self.deadline == self._stalled_at:
            self.deadline = now + self._left_s
        if self.started:
            self._goes_on_until(now)
        if self._connection is not None:
            self._connection.resume()
