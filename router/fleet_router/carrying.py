"""A stream that broke after its first byte: carried on by another worker, or ended with an error (health/resume.py says when)."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Final

import msgspec

from fleet_router.admission.runaway import EVENT_END
from fleet_router.admission.usage import BETWEEN, chunks_are_events
from fleet_router.answering import OK
from fleet_router.dialect.chat import DONE, UNENDED
from fleet_router.ending import CHAT_PATH, END, framed, opened, unframed
from fleet_router.errors import RequestError
from fleet_router.expected import END_BYTES, breaks_off, is_answer, is_closed, says_an_end, says_something, without_bom
from fleet_router.health.inband import GIVEN_UP, broke_off_with, error_in, first_error, half_an_error, is_given_up
from fleet_router.health.resume import Again, Said, Start, continued, said_of, start_of
from fleet_router.health.sent import CHUNK_END, CRLF_END
from fleet_router.measuring import Measuring
from fleet_router.policy.chosen import Choice

if TYPE_CHECKING:
    from fleet_router.workers import Worker

RESUMES_MOST: Final = 3
"""Of one stream."""
ANSWER_MOST_BYTES: Final = 1024 * 1024
"""Of an answer that comes as a whole and is held, or comes in one read: a longer one is looked at from its end alone."""
CALLS: Final = frozenset({"tools", "functions"})
EMPTY: Final = "the worker's answer is empty"
LAST_EVENTS: Final[tuple[bytes, ...]] = (DONE + CHUNK_END, DONE + CRLF_END)
"""Ends of a read behind which nothing but the end of the body comes."""
SAYS_DONE: Final[tuple[bytes, ...]] = (*LAST_EVENTS, DONE + b"\n\n", DONE + b"\r\n\r\n")
"""And of its contents."""


class Carrying(Measuring):
    """What is done after the first byte; the legs are the flow's."""

    __slots__ = ()

    def _resume(self, failed: Worker, why: str) -> None:
        """The stream broke: another worker carries it on, exactly, or the client is told."""
        said = self._said()
        self._trip_over()
        if said is None or self._resumes >= RESUMES_MOST or not self._may_retry(free=False):
            self._cannot_resume("refused", why)
            return
        self._resumes += 1
        self._excluded, self._counted = self._others_than(failed, said), None
        self._moved = self._moved and not said.begun  # who waits for a first byte is moved once
        self.deadline = self._context.clock() + self.config.first_token_deadline_s
        start = start_of(self._asked, said) if self.config.resume == "prefill" else Start()
        prompt = self._asked.prompt
        if start.tokens and prompt[:1] == b"[" and self._path != CHAT_PATH:
            self._carry_on(said, start, msgspec.json.decode(prompt, type=list[int]))
        elif start.tokens:
            self._count_prompt(said, start, why)
        else:
            self._carry_on(said, start, [])

    def _others_than(self, failed: Worker, said: Said) -> frozenset[str]:
        """Whom the rest is not asked of. Workers that failed before are asked again when nobody else is left: a container that
        started anew keeps its pod's uid. Not those that were told to give this request's KV back: that message goes by
        its name, and could come later than another leg of that name, and end it."""
        uid = self._uid_of(failed) | (self._unlike(failed) if said.begun else frozenset())
        tried = self._excluded | uid
        return tried if isinstance(self._pick(tried), Choice) else self._barred | uid

    def _unlike(self, failed: Worker) -> frozenset[str]:
        """Those of other weights, as there are while a fleet rolls out or an adapter is replaced, which is why KV would not fit.
        What they say again may be the same, and with what follows the answer would be half another model's."""
        kept = self._sent if self._sent is not None else self._heard
        adapter, version, fits = self._asked.adapter, "" if kept is None else kept.version, failed.endpoint.compat
        return frozenset(
            uid for uid, worker in self._context.table.workers.items()
            if worker.endpoint.compat != fits or (adapter and worker.endpoint.adapters.get(adapter) != version)
        )  # fmt: skip

    def begins_anew(self) -> bool:
        """The client has a stream's head, and no more: whoever answers it now may say anything."""
        if self.config.resume == "off" or self.record.status != OK or not self._streams:
            return False
        return (self._splits and not self._tail) if self._translation is None else not self._translation.spoken

    def _said(self) -> Said | None:
        """What the client has; None when it cannot be known."""
        if self.begins_anew():
            self._forget_half()
            return Said(begun=False)
        if self._sent is not None and self._sent.carries:
            return said_of(unframed(self._sent.kept()))
        if self._heard is None or self._translation is None:
            return None
        self._translation.forget_partial()
        heard = self._heard.kept().replace(b"\r\n", b"\n")
        if (found := error_in(heard)) is not None:
            heard = heard[: found[0] + 1]  # nobody was told of it, nor of what came behind it
        whole, end, _ = heard.rpartition(EVENT_END)
        self._heard.keep_only(whole + end)  # what the next worker says stands behind that, and not behind half an event
        return said_of(whole)

    def _forget_half(self) -> None:
        """Half of an event came that nobody was told of."""
        if self._sent is not None:
            self._sent.keep_only(b"")
        if self._heard is not None:
            self._heard.keep_only(b"")
        if self._translation is not None:
            self._translation.forget_partial()

    def _carry_on(self, said: Said, start: Start, prompt: list[int]) -> None:
        self._ask = continued(self._asked, said, start, prompt) if start.tokens else self._asked
        ends = self._context.ends if CALLS.isdisjoint(self._asked.fields) else None
        self._again = Again(said, start, as_chat=start.tokens > 0 and self._path == CHAT_PATH, ends=ends)
        self.begin()

    def resumed(self) -> None:
        """The other worker begins to answer: it has the KV when it says something."""
        if not self._first:
            self._taken(self._leg_worker)

    def heard_again(self) -> None:
        """It says something."""
        self._lease = None
        self._answers(self._context.clock())

    def _first_bytes(self, now: float) -> None:
        """See `Answering`. A head alone is no answer: servers give it whose engine hangs, and whose KV never comes."""
        if self._streams:
            self._says_something(now)
            if self._ask.adapter:
                self._note_version()
        super()._first_bytes(now)

    def _note_version(self) -> None:
        """The document may name a newer one of the same worker before the stream ends, which goes on under its own."""
        kept = self._sent if self._sent is not None else self._heard
        if kept is not None and self._leg_worker is not None:
            kept.version = self._leg_worker.endpoint.adapters.get(self._ask.adapter, "")

    def _says_something(self, now: float) -> None:
        self._answers(now)
        if self.record.status == OK:
            self._taken(self._leg_worker)

    def _answers(self, now: float) -> None:
        if self._leg_worker is not None:
            self._leg_worker.answers(self.sent_at, now)

    def cannot_resume(self, why: str) -> None:
        """What the other worker says is not what the first one said: nobody is to be believed."""
        self._abandon_leg()
        self._cannot_resume("differs", why)

    def _cannot_resume(self, outcome: str, why: str) -> None:
        self._context.metrics.resumed[outcome] += 1
        self._break(RequestError(502, why))

    def more(self, new: bytes) -> bool:
        """An event of the other worker, as far as it is new; False: the stream was ended behind it."""
        if self._translation is None:
            self.raw(framed(new))
        else:
            self.hear(new)
            self.raw(framed(new), framed(self._translation.feed(new)))
        return not self.done

    def carried(self) -> None:
        """The other worker has said all."""
        rest = b"" if self._translation is None else framed(self._translation.end())
        self.raw(b"", rest + END)
        self._context.metrics.resumed["done"] += 1
        self.end()

    def _said_all(self) -> bool:
        """The client has the stream's last event: only the end of the body is missing, which we can tell as well."""
        if self._translation is not None:
            return self._translation.complete
        return BETWEEN.sub(b"", self._tail).endswith(LAST_EVENTS)

    def said_nothing(self) -> bool:
        """A 200 without a body, or with one that holds nothing: no request that we take has such an answer."""
        return self.record.status == OK and not self._tail and not unframed(self._held_back())

    def _held_back(self) -> bytes:
        """Half of an event."""
        return self._sent.held if self._sent is not None else b""

    def streamed(self, data: bytes) -> None:
        """Bytes of a stream: its end goes to nobody when it is not said to be one."""
        one = self._connection
        if self._first:
            data = without_bom(self._half + data)
            if not data:
                return
            self._half, whole = b"", self._splits and chunks_are_events(data)
            contents = opened(data) if self._splits and not whole else data
            if not whole and half_an_error(contents) and (one is None or not one.ended):
                self._half = data
                return
            if words := first_error(contents):
                self.broke_off(words)
                return
            if data.endswith(LAST_EVENTS) and data.find(b"data: {") < 0 and not says_something(data):
                self._fault(EMPTY)  # the end of its body, behind which all of it is looked at, may come later
                return
        if one is not None and one.ended and self.record.status == OK and (why := self._unclosed(data)):
            self._fault(why)
        else:
            self.raw(data)

    def _unclosed(self, last: bytes) -> str:
        """Why a stream that ends with these bytes is none; empty: it is one."""
        ending = b"".join((self._before, self._tail, self._held_back(), last))
        if not is_closed(ending[-END_BYTES:]):
            return "the worker's stream ended early"
        if self._breaks_off(ending):
            return UNENDED
        return "" if not self._first or says_something(ending) else EMPTY

    def _early_done(self, last: bytes) -> tuple[int, str] | None:
        """See `Answering`. Of what is carried on `Again` knows."""
        if not last.endswith(SAYS_DONE) or self._again is not None:
            return None
        ending = b"".join((self._before, self._tail, self._held_back(), last))
        if self._breaks_off(ending):
            return last.rfind(b"data:"), UNENDED
        told = self._before or self._tail.find(b"{") >= 0 or says_something(ending)
        return None if told else (last.rfind(b"data:"), EMPTY)

    def _breaks_off(self, ending: bytes) -> bool:
        """Where functions may be called, older vLLM left out a last event in which its parser found nothing to say."""
        ends = self._context.ends
        if says_an_end(ending):
            ends.said = True
            return False
        return ends.said and CALLS.isdisjoint(self._asked.fields) and breaks_off(ending)

    def in_one(self, data: bytes) -> None:
        """Bytes of an answer that comes as a whole: of one that is none no client is told, while it is held."""
        one = self._connection
        if one is None or not one.ended or self._outcome != "answered":
            self.raw(data)
        elif not self._is_whole(data, sized=one.sized):
            self._fault("the worker's answer is not JSON")
        elif is_given_up(BETWEEN.sub(b"", self._head_bytes + self._tail + data)):
            self._fault(GIVEN_UP)
        else:
            self.raw(data)

    def _is_whole(self, last: bytes, *, sized: bool) -> bool:
        if self._head_bytes and len(self._head_bytes) + len(last) <= ANSWER_MOST_BYTES:
            return is_answer(self._head_bytes, last, sized=sized)
        return not sized or (self._tail + last).rstrip().endswith(b"}")

    def _end_for(self) -> None:
        """The worker died behind its last word: there is nothing to carry on, and no error to tell."""
        self._keep_no_more()  # half of the body's end
        self._client.write(END)
        self.end()

    def odd(self, why: str) -> None:
        """The worker's head says that no answer follows."""
        self._fault(why)

    def broke_off(self, words: str) -> None:
        """The worker told of an error inside its stream, in these words. Before anything else vLLM tells so of KV that it could
        not read: the pair may be to blame, as behind a 5xx, and its lease is still to be given back."""
        if self.done:
            return
        if self._first and self._giver is not None and self._leg_worker is not None:
            self._context.table.transfer_failed(self._giver, self._leg_worker, self._context.clock())
        self._fault(broke_off_with(words))

    @abstractmethod
    def _may_retry(self, *, free: bool) -> bool:
        """One more attempt; `free`: nothing ran in the one before."""

    @abstractmethod
    def _uid_of(self, worker: Worker) -> frozenset[str]:
        """Of one that failed, so that it is not asked again."""

    @abstractmethod
    def _count_prompt(self, said: Said, start: Start, why: str) -> None:
        """The prompt as token ids, from some worker; without them the whole answer is asked for again."""

    @abstractmethod
    def _abandon_leg(self) -> None:
        """Close the leg's connection."""
