"""Who listens to a worker's answer: the legs of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from fleet_router.answerhead import AnswerHead
from fleet_router.dialect.chat import Events
from fleet_router.ending import END, framed, unframed
from fleet_router.errors import RequestError
from fleet_router.expected import tells_bytes
from fleet_router.health.inband import GIVEN_UP, error_in, hinted, is_given_up
from fleet_router.health.resume import Again, DiffersError
from fleet_router.request import is_object, tokens_of
from fleet_router.upstream import CLOSED

if TYPE_CHECKING:
    from fleet_router.answerhead import KnownAnswer
    from fleet_router.dialect.translation import Translation
    from fleet_router.flow import Flow
    from fleet_router.workers import Worker

MAX_PREFILL_ANSWER_BYTES: Final = 8 * 1024 * 1024
OK: Final = 200
BLANK_LINE: Final = b"\n\n"
"""The end of an event."""
NOT_FOUND: Final = 404
NOT_IMPLEMENTED: Final = 501
"""The worker has no such thing (vLLM: /tokenize with tools): that refuses a request, and nothing is wrong with the worker."""
MAX_ERROR_BYTES: Final = 64 * 1024
NOT_THE_CLIENT: Final = frozenset({401, 403, 407, 408, 425, 429})
"""What a worker says of us or of itself: clients have their keys and limits here, and did nothing wrong."""
NO_HEAD: Final = AnswerHead([])
EVENT_STREAM: Final = AnswerHead([(b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")])


def refuses(status: int) -> bool:
    """It is the request that is told no, by whoever is asked."""
    return (400 <= status < 500 and status not in NOT_THE_CLIENT) or status == NOT_IMPLEMENTED


class PrefillLeg:
    """Collects the prefill answer."""

    __slots__ = ("_answer", "_decode", "_failed", "_flow", "_headers", "_status", "_worker", "added", "body", "path")
    takes_whole = True

    def __init__(self, flow: Flow, worker: Worker, decode: Worker) -> None:
        self._flow, self._worker, self._decode = flow, worker, decode
        self._status = 0
        self._failed = False
        """That was counted: what came behind the answer counts no more."""
        self._headers: list[tuple[bytes, bytes]] = []
        self._answer = bytearray()
        self.body: bytes | memoryview = b""
        self.added = self.path = b""
        """What is sent and where to, for a second time on a fresh connection. `added`: in place of the body's last brace."""

    def on_whole(self, known: KnownAnswer, data: bytes, body_at: int) -> None:
        self._flow.prefilled(self._worker, self._decode, data[body_at:])

    def on_head(self, status: int, head: AnswerHead) -> None:
        self._status, self._headers = status, head.fields

    def on_head_alone(self) -> None:
        """The client sees nothing of it."""

    def on_raw(self, data: bytes) -> None:
        """The framing does not matter here."""

    def on_body(self, data: bytes) -> None:
        if len(self._answer) < MAX_PREFILL_ANSWER_BYTES:
            self._answer += data

    def on_end(self) -> None:
        if self._status == OK:
            self._failed = not self._flow.prefilled(self._worker, self._decode, bytes(self._answer))
        elif self._status == NOT_FOUND and self._flow.names_no_model(bytes(self._answer)):
            self._failed = True
            self._flow.model_missing(self._worker)
        elif refuses(self._status) and not self._flow.started:
            self._flow.refuse_with(self._status, self._headers, bytes(self._answer))
        else:
            self._failed = True
            self._flow.end_leg()  # the rest of a stream may be refused, and somebody else may take it
            self._flow.leg_failed(self._worker, f"prefill answered {self._status}", blamed=not refuses(self._status))

    def on_surplus(self) -> None:
        if not self._failed:
            self._flow.counts_against(self._worker)

    def on_lost(self, reason: str) -> None:
        if not self._flow.resend(self._worker, self):
            self._flow.end_leg()
            self._flow.give_back(self._worker)
            self.failed(reason)

    def on_fault(self, error: Exception) -> None:
        self._flow.fault(error)

    def failed(self, why: str, *, gone: bool = False, blamed: bool = True) -> None:
        """It is over, and nothing came of it. `gone`: the worker could not be connected to; `blamed`: it counts against it."""
        self._flow.leg_failed(self._worker, why, gone=gone, blamed=blamed)


class DecodeLeg:
    """Hands the decode answer on; a 5xx before the first byte is kept back and retried."""

    __slots__ = ("_answer", "_failed", "_flow", "_held", "_kept", "_worker", "added", "body", "path", "takes_whole")

    def __init__(self, flow: Flow, worker: Worker, *, whole: bool = False) -> None:
        """`whole`: an answer that comes in one piece is all that is expected."""
        self._flow, self._worker = flow, worker
        self.takes_whole = whole
        self._held = 0
        self._failed = False
        """That was counted: what came behind the answer counts no more."""
        self._kept = NO_HEAD
        """That of an answer that is kept back; without fields where `on_body` collects: no framing."""
        self._answer = bytearray()
        self.body: bytes | memoryview = b""
        self.added = self.path = b""
        """What is sent and where to, for a second time on a fresh connection. `added`: in place of the body's last brace."""

    def on_whole(self, known: KnownAnswer, data: bytes, body_at: int) -> None:
        """A 200 to be handed on."""
        (before, after), body, why = known.lines, data[body_at:], ""
        if not is_object(body) and not tells_bytes(before + after):
            why = "the worker's answer is not JSON"
        elif is_given_up(body):
            why = GIVEN_UP
        if why:
            self._flow.end_leg()
            self._flow.leg_failed(self._worker, why)
            return
        self._flow.whole(self._worker, (before, known.length_of(data, body_at), after), body)

    def _kept_back(self, status: int) -> bool:
        """An answer that the client need not see: another worker may have a better one. What leads elsewhere or has nothing to
        say (3xx, other 2xx) is none at all."""
        return status != OK and (status == NOT_FOUND or not refuses(status))

    def _is_odd(self, head: AnswerHead, *, stream: bool) -> bool:
        """A 200 that cannot be what was asked for is given up at once."""
        if why := head.odd(stream=stream):
            self._flow.odd(why)
        return bool(why)

    def on_head(self, status: int, head: AnswerHead) -> None:
        if self._kept_back(status):
            self._held, self._kept = status, head
            return
        if status == OK and self._is_odd(head, stream=not self.takes_whole):
            return
        if status != OK or self.takes_whole:  # the head of a stream says nothing of what follows: see `Carrying._first_bytes`
            self._worker.answers(self._flow.sent_at, self._flow.clock())
        self._flow.head(status, head)

    def on_head_alone(self) -> None:
        """Of an answer that comes as a whole the head is of no use alone."""
        if not (self._held or self.takes_whole):
            self._flow.send_head()

    def on_raw(self, data: bytes) -> None:
        if not self._held:
            if self.takes_whole:
                self._flow.in_one(data)
            else:
                self._flow.streamed(data)
        elif len(self._answer) < MAX_ERROR_BYTES:
            self._answer += data

    def _whole(self) -> bytes:
        """What was kept back, without its framing."""
        return unframed(bytes(self._answer)) if self._kept.in_chunks else bytes(self._answer)

    def on_body(self, data: bytes) -> None:
        """Nothing here depends on the framing."""

    def on_end(self) -> None:
        self._failed = True
        if not self._held and self._flow.said_nothing():
            self._flow.end_leg()
            self._flow.leg_failed(self._worker, "the worker's answer is empty")
        elif not self._held:
            self._failed = False
            self._flow.end()
        elif self._held == NOT_FOUND and self._flow.names_no_model(bytes(self._answer)):
            self._flow.model_missing(self._worker)
        elif self._held == NOT_FOUND:
            self._failed = False
            self._flow.refuse_with(NOT_FOUND, self._kept.fields, self._whole())
        elif b"KvTransferError" in self._answer:
            self._flow.transfer_failed(self._worker)
        else:
            self._flow.decode_failed(self._worker, f"decode answered {self._held}")

    def on_surplus(self) -> None:
        if not self._failed:
            self._flow.counts_against(self._worker)

    def on_lost(self, reason: str) -> None:
        if not self._flow.resend(self._worker, self):
            self._flow.end_leg()
            if reason.startswith(CLOSED):
                self._worker.lost(self._flow.clock())
            self.failed(reason)

    def on_fault(self, error: Exception) -> None:
        self._flow.fault(error)

    def failed(self, why: str, *, gone: bool = False, blamed: bool = True) -> None:
        """It is over, and nothing came of it. `gone`: the worker could not be connected to; `blamed`: it counts against it."""
        self._flow.leg_failed(self._worker, why, gone=gone, blamed=blamed)


class TranslatedLeg(DecodeLeg):
    """Reads the answer and hands it on in another dialect; on a connection that collects."""

    __slots__ = ("_came", "_out", "_refused", "_translation")

    def __init__(self, flow: Flow, worker: Worker, translation: Translation) -> None:
        super().__init__(flow, worker)
        self._translation = translation
        self._refused = 0
        self._out = b""
        self._came = False
        """Some of the body has: the end of one that is empty is no first byte."""

    def on_head(self, status: int, head: AnswerHead) -> None:
        if status != OK:
            self._held = status if self._kept_back(status) else 0
            self._refused = 0 if self._held else status
            return
        if self._is_odd(head, stream=self._translation.stream):
            return
        if self._translation.stream:
            named = self._translation.named
            self._flow.head(status, AnswerHead(EVENT_STREAM.fields + named) if named else EVENT_STREAM)
        else:
            self._worker.answers(self._flow.sent_at, self._flow.clock())

    def on_head_alone(self) -> None:
        if self._translation.stream and not self._held and not self._refused:
            self._flow.send_head()

    def on_body(self, data: bytes) -> None:
        if self._held or self._refused:
            if len(self._answer) < MAX_ERROR_BYTES:
                self._answer += data
            return
        self._came = True
        try:
            self._flow.hear(data)
            self._out += self._translation.feed(data)
        except RequestError as error:
            self._flow.cut(error)

    def on_raw(self, data: bytes) -> None:
        """After `on_body` of the same bytes."""
        if self._came and not self._held and not self._refused and not self._flow.done:
            shown, self._out = framed(self._out), b""
            if self._translation.stream:
                if self._translation.spoken or not self._translation.broke:  # an error alone is no first byte
                    self._flow.raw(data, shown)
                if self._translation.broke:
                    self._flow.broke_off(self._translation.broke)

    def on_end(self) -> None:
        if self._flow.done:
            return
        if self._held:
            super().on_end()
        elif self._refused:
            self._flow.refuse_with(self._refused, [], bytes(self._answer))
        else:
            if self._translation.says_done():
                self.on_body(BLANK_LINE)
                if self._hands_on_last():
                    return
            self._finish()

    def _hands_on_last(self) -> bool:
        """What was read and not handed on. Whether that ended this leg: the flow may have another one then."""
        broke = self._translation.broke
        self.on_raw(b"")
        return bool(broke) or self._flow.done

    def on_lost(self, reason: str) -> None:
        if self._out and self._hands_on_last():  # what came with it was no HTTP
            return
        super().on_lost(reason)

    def failed(self, why: str, *, gone: bool = False, blamed: bool = True) -> None:
        """See `DecodeLeg`."""
        if not self._translation.stream:
            self._translation.collected.clear()  # whoever is asked next answers from the beginning
        super().failed(why, gone=gone, blamed=blamed)

    def _finish(self) -> None:
        if self._translation.stream and not self._translation.complete:
            self._failed_at_its_end("the worker's stream ended early")
            return
        if not self._translation.stream and is_given_up(self._translation.collected):
            self._failed_at_its_end(GIVEN_UP)
            return
        try:
            rest = self._translation.end()
        except RequestError as error:
            if is_object(collected := bytes(self._translation.collected)):
                self._flow.cut(error)
            else:
                self._failed_at_its_end(f"the worker's answer is {'not JSON' if collected else 'empty'}")
            return
        if self._translation.stream:
            self._flow.raw(b"", framed(rest) + END)
        else:
            length = str(len(rest)).encode()
            fields = [(b"content-type", b"application/json"), (b"content-length", length), *self._translation.named]
            self._flow.head(200, AnswerHead(fields))
            self._flow.raw(bytes(self._translation.collected), rest)
        self._flow.end()

    def _failed_at_its_end(self, why: str) -> None:
        self._failed = True
        self._flow.end_leg()
        self.failed(why)


class ResumedLeg(DecodeLeg):
    """Carries a stream on that broke on another worker: compares what the client has, hands on what is new."""

    __slots__ = ("_again", "_events")

    def __init__(self, flow: Flow, worker: Worker, again: Again) -> None:
        super().__init__(flow, worker)
        self._again, self._events = again, Events()

    def on_head(self, status: int, head: AnswerHead) -> None:
        """The client has its head."""
        if status != OK:
            self._held, self._kept = status, head
            return
        if self._is_odd(head, stream=True):
            return
        self._flow.resumed()

    def on_head_alone(self) -> None:
        """The client sees nothing of it."""

    def on_raw(self, data: bytes) -> None:
        """The framing is ours."""
        if self._held and len(self._answer) < MAX_ERROR_BYTES:
            self._answer += data

    def on_body(self, data: bytes) -> None:
        """Events."""
        if self._held or self._flow.done:
            return
        self._flow.heard_again()
        try:
            for payload in self._events.feed(data):
                if hinted(payload) and (found := error_in(b"data: " + payload)) is not None:
                    self._flow.broke_off(found[1])
                    return
                new = self._again.feed(payload)
                if new and not self._flow.more(new):
                    return  # what came in the same read is nobody's
        except (DiffersError, RequestError) as error:
            self._flow.cannot_resume(str(error))

    def on_end(self) -> None:
        if self._events.says_done():
            self.on_body(BLANK_LINE)
        if self._flow.done:
            return
        self._failed = not self._again.done
        if self._again.done:
            self._flow.carried()
        elif self._held == NOT_FOUND and self._flow.names_no_model(bytes(self._answer)):
            self._flow.model_missing(self._worker)
        elif b"KvTransferError" in self._answer:
            self._flow.transfer_failed(self._worker)
        elif refuses(self._held):  # somebody else may take it
            self._flow.end_leg()
            self._flow.leg_failed(self._worker, f"decode answered {self._held}", blamed=False)
        else:
            self._flow.decode_failed(self._worker, f"decode answered {self._held}" if self._held else "the stream ended early")


class TokenizeLeg(DecodeLeg):
    """Asks for the token ids of a prompt; `then` gets them, or nothing when there are none to be had."""

    __slots__ = ("_then",)

    def __init__(self, flow: Flow, worker: Worker, then: Callable[[list[int]], object]) -> None:
        super().__init__(flow, worker)
        self._then = then

    def on_head(self, status: int, head: AnswerHead) -> None:
        self._held = status

    def on_head_alone(self) -> None:
        """The client sees nothing of it."""

    def on_raw(self, data: bytes) -> None:
        """The framing does not matter."""

    def on_body(self, data: bytes) -> None:
        """As long as any prompt may be."""
        if len(self._answer) < MAX_PREFILL_ANSWER_BYTES:
            self._answer += data

    def on_end(self) -> None:
        self._flow.end_leg()
        self._then(tokens_of(bytes(self._answer)) if self._held == OK else [])

    def failed(self, why: str, *, gone: bool = False, blamed: bool = True) -> None:
        """Nothing was computed: it takes no retry, and the request goes on without the tokens."""
        self._flow.not_told(self._worker, why, gone=gone, blamed=blamed)
        self._then([])
