"""One request's way through the tiers: a draft of each, until one is good enough or the last tier is asked.

It is what the connection and the desk see of such a request, in place of a flow; the flow of the moment does the work. There is
one ticket and one record for all drafts: a request counts once, however many models it took.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from fleet_router.admission.gate import Ticket
from fleet_router.admission.quota import Outcome
from fleet_router.ask import Ask, Hints
from fleet_router.cascade.draft import Draft, Held
from fleet_router.cascade.judge import objection
from fleet_router.cascade.reading import answer_of, json_kinds_of, payloads_of, with_logprobs, without_logprobs
from fleet_router.config import Cascade, RouterConfig
from fleet_router.context import Client, Context
from fleet_router.dialect.translation import Translation
from fleet_router.ending import CHAT_PATH, END, framed, unframed
from fleet_router.errors import RequestError, remembered
from fleet_router.explain.record import Record
from fleet_router.flow import Flow
from fleet_router.heads import kept_lines
from fleet_router.policy.tiers import tier_of
from fleet_router.request import choices_of
from fleet_wire.unreadable import UNREADABLE

HEAD_END: Final = b"\r\n\r\n"
CHUNKED: Final = b"transfer-encoding: chunked"
LENGTH: Final = re.compile(rb"(?i)(content-length: *)\d+")
OK: Final = 200
REFUSED: Final = range(400, 500)


def tier_of_all(config: RouterConfig, cascade: Cascade, ask: Ask, tokens: float, hints: Hints) -> str:
    """The tier that alone may answer: a rule's, or the last one where a draft could not be judged; empty: drafts come first."""
    if config.tier_rules and (tier := tier_of(config.tier_rules, tokens, hints.headers)):
        return tier
    judged = not ask.alone and not ask.adapter and choices_of(ask) == 1 and not _tells_prompt(ask)
    return "" if judged else cascade.tiers[-1]


def _tells_prompt(ask: Ask) -> bool:
    """The answer's text begins with the prompt's, which would be judged with it: never empty, with phrases of the client."""
    return bytes(ask.fields.get("echo", b"null")) not in (b"null", b"false")


class Climb:
    """One request."""

    def __init__(
        self, context: Context, client: Client, path: bytes, ask: Ask, ticket: Ticket, translation: Translation | None,
        hints: Hints, cascade: Cascade,
    ) -> None:  # fmt: skip
        self._context, self._client, self._path, self._ask, self._ticket = context, client, path, ask, ticket
        self._translation, self._hints, self._cascade = translation, hints, cascade
        self._step = 0
        self._begun = self._asked_logprobs = self._over = self._moving = self._paused = False
        """It has a slot; log-probabilities are ours to take out; it ended; the next tier is being asked; the client does not
        read."""
        self._held: Held | None = None
        self._draft: Draft | None = None
        self.flow: Flow = self._flow_of_step(None)

    # -- the steps --------------------------------------------------------------------------------------------------
    def _flow_of_step(self, record: Record | None) -> Flow:
        """`record`: of the drafts before it."""
        cascade = self._cascade
        if self._context.drafts.bytes >= cascade.all_held_bytes:
            self._step = len(cascade.tiers) - 1
        hints = self._hints.of_tier(self._tier)
        if self._step == len(cascade.tiers) - 1:
            self._draft = self._held = None
            flow = Flow(self._context, self._client, self._path, self._ask, self._ticket, self._translation, hints, record)
            if self._paused:
                flow.pause()
            return flow
        if cascade.check.least_mean_logprob is None:
            ask = self._ask.copy()
        else:
            ask, self._asked_logprobs = with_logprobs(self._ask, chat=self._path == CHAT_PATH)
        self._held = Held(self, self._client, cascade.held_bytes)
        self._draft = draft = Draft(self._context, self._held, self._path, ask, self._ticket, hints, record)
        return draft

    def begin(self) -> None:
        """A slot is free, or one is not needed."""
        self._begun = True
        self.flow.begin()

    def admitted(self) -> None:
        """The wait for a slot is over."""
        self._begun = True
        self.flow.admitted()

    def grew(self, held: Held, more_bytes: int, *, over: bool) -> None:
        """A draft is longer now. It is not ended from below its own write."""
        if held is not self._held:
            return  # nobody holds it any more
        self._context.drafts.bytes += more_bytes
        if over and not self._moving:
            self._moving = True
            asyncio.get_running_loop().call_soon(self._too_long)

    def _too_long(self) -> None:
        draft = self._draft
        if draft is not None and not self._over and self._moving:
            self._moving = False
            draft.drop()
            self._climb("too_long")

    def drafted(self) -> None:
        """The draft is whole: it goes to the client, or the next tier is asked."""
        draft, held = self._draft, self._held
        too_long, self._moving = self._moving, False
        if draft is None or held is None or self._over:
            return
        head, _, body = b"".join(held.parts).partition(HEAD_END)
        if draft.record.status != OK:
            self._tell_refusal(draft, head, body, last=held.last)
            return
        plain = unframed(body) if CHUNKED in head.lower() else body
        told, why = self._judged(plain) if not too_long else (b"", "too_long")
        if why:
            self._climb(why)
        elif self._asked_logprobs or self._translation is not None:
            self._tell_anew(draft, head, told, last=held.last)
        else:
            self._tell(draft, head + HEAD_END + body, "kept", last=held.last)

    def _judged(self, plain: bytes) -> tuple[bytes, str]:
        """The answer without what is not the client's, and what is against it."""
        try:
            payloads = payloads_of(plain, stream=self._ask.stream)
            why = objection(answer_of(payloads), self._cascade.check, json_kinds=json_kinds_of(self._ask))
            if self._asked_logprobs and not why:
                plain = without_logprobs(payloads, stream=self._ask.stream)
        except (*UNREADABLE, RequestError):
            return b"", "unreadable"
        return plain, why

    def undrafted(self, error: RequestError) -> None:
        """There is no draft, or half of one. A client is told what it did wrong; for all else there is a next tier."""
        draft = self._draft
        self._moving = False
        if draft is None or self._over:
            return
        if error.status in REFUSED:
            self._end(draft, "refused", "refused")
            self._refuse(error if self._translation is None else self._translation.renamed(error))
            return
        self._climb("failed")

    def _climb(self, why: str) -> None:
        """The next tier's turn."""
        self._forget()
        told = f"the draft of tier {self._tier} is not what the client gets: {why}"
        self.record.draft_replaced(self._context.clock(), told)
        self._context.metrics.drafts[self._tier, why] += 1
        self._step += 1
        self.flow = self._flow_of_step(self.record)
        self.flow.begin()

    @property
    def _tier(self) -> str:
        return self._cascade.tiers[self._step]

    # -- what the client gets ------------------------------------------------------------------------------------------
    def _tell_refusal(self, draft: Draft, head: bytes, body: bytes, *, last: bool) -> None:
        """A worker's 4xx."""
        if self._translation is None:
            self._tell(draft, head + HEAD_END + body, "refused", last=last)
            return
        body = unframed(body) if CHUNKED in head.lower() else body
        error = self._translation.refused(draft.record.status, body, draft.told_with_refusals())
        self._end(draft, "refused", "refused")
        self._refuse(error)

    def _tell_anew(self, draft: Draft, head: bytes, plain: bytes, *, last: bool) -> None:
        """In the client's dialect, or without what it did not ask for."""
        translation = self._translation
        if translation is not None:
            try:
                told = translation.feed(plain)
                told += translation.end()
            except RequestError as error:
                if not self._ask.stream:  # of a stream it has begun to tell, and cannot begin anew
                    translation.collected.clear()
                    translation.used = None
                    self._climb("unreadable")
                    return
                self._end(draft, "failed", "failed")
                self._refuse(error)
                return
            head += kept_lines(translation.named)
        else:
            told = plain
        self._tell(draft, _whole(head, told), "kept", last=last)

    def _tell(self, draft: Draft, answer: bytes, outcome: str, *, last: bool) -> None:
        self._end(draft, "answered" if outcome == "kept" else "refused", outcome)
        self._context.metrics.requests[draft.record.status] += 1
        self._client.write(answer)
        self._client.finish(last=last)

    def _refuse(self, error: RequestError) -> None:
        self._context.metrics.requests[error.status] += 1
        self._client.refuse(error)

    def _end(self, draft: Draft, ended: Outcome, outcome: str) -> None:
        """The draft is the end of it: give the slot back. One that waited for a slot until then was none."""
        self._over = True
        self._forget()
        if self._begun:
            self._context.metrics.drafts[self._tier, outcome] += 1
        draft.close(ended)
        self._context.desk.leave(self._ticket, ended, draft.used)

    def _forget(self) -> None:
        """What is held is told or thrown away."""
        if self._held is not None:
            self._context.drafts.bytes -= self._held.size_bytes
            self._held = None

    # -- from outside ---------------------------------------------------------------------------------------------------
    @property
    def record(self) -> Record:
        """Of the request, whichever flow is at work."""
        return self.flow.record

    @property
    def deadline(self) -> float:
        """Of the flow of the moment."""
        return self.flow.deadline

    @property
    def started(self) -> bool:
        """The client has seen something."""
        return self._draft is None and self.flow.started

    def expire(self, now: float) -> None:
        """The deadline has passed; a draft's is the next tier's turn."""
        self.flow.expire(now)

    def pause(self) -> None:
        """The client is slow: drafts are made all the same, the last tier's answer is not."""
        self._paused = True
        if self._draft is None:
            self.flow.pause()

    def resume(self) -> None:
        """It caught up."""
        self._paused = False
        if self._draft is None:
            self.flow.resume()

    def cancel(self) -> None:
        """The client left."""
        draft = self._draft
        if draft is None:
            self.flow.cancel()
            return
        if self._over:
            return
        draft.drop()
        self._context.metrics.client_left += 1
        draft.record.went_wrong(self._context.clock(), "the client left")
        self._end(draft, "left", "left")

    def cut(self, error: RequestError) -> None:
        """End it now; the client is told why."""
        draft = self._draft
        if draft is None:
            self.flow.cut(error)
            return
        if self._over:
            return
        draft.drop()
        draft.record.error = remembered(error)
        self._end(draft, "failed" if error.status >= 500 else "refused", "cut")
        self._refuse(error)


def _whole(head: bytes, told: bytes) -> bytes:
    """The answer of a worker with another body, framed as its head says."""
    if CHUNKED in head.lower():
        return head + HEAD_END + framed(told) + END
    return LENGTH.sub(b"\\g<1>%d" % len(told), head) + HEAD_END + told


def flow_of(
    context: Context, client: Client, path: bytes, ask: Ask, ticket: Ticket, translation: Translation | None, hints: Hints,
) -> Flow | Climb:  # fmt: skip
    """What carries a request that has its ticket."""
    cascade = context.config.cascade
    if cascade is None:
        return Flow(context, client, path, ask, ticket, translation, hints)
    tier = tier_of_all(context.config, cascade, ask, context.table.tokens_of(ask.prompt), hints)
    if not tier:
        return Climb(context, client, path, ask, ticket, translation, hints, cascade)
    return Flow(context, client, path, ask, ticket, translation, hints.of_tier(tier))
