"""One request in another dialect: the chat request that it becomes, and what turns the answer back."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from fleet_router.admission.runaway import FINISH, Why
from fleet_router.admission.usage import can_be
from fleet_router.allowed import with_allowed
from fleet_router.dialect.chat import DONE, UNENDED, Choice, Completion, Ends, Events, Usage, completion, goes_on, worker_error
from fleet_router.errors import RequestError, error_json
from fleet_router.fields import check_values, not_an_object
from fleet_router.health.inband import ABORT, GIVEN_UP, broke_off_with, words_of
from fleet_wire.unreadable import UNREADABLE

CHAT: Final = b"/v1/chat/completions"
BAD_REQUEST: Final = 400
PLACE: Final = re.compile(r"^messages\[\d+\]\.content\[\d+\]")
"""Of a content part, counted in the chat request: a dialect's client has sent other lists."""
ENDED: Final[dict[str, str]] = {
    "repetition": "repetition_detected: the answer repeated itself and was ended",
    "control_tokens": "control_tokens: the answer held control tokens as text and was ended",
}
"""Why an answer ended that neither its model nor a limit ended, by `finish_reason`."""
NAMED: Final = re.compile(r"^Object (contains unknown|missing required) field `(.*)`$", re.DOTALL)
NAME_TOLD: Final = 200
"""Characters of a field's name that a refusal says back: a client chose it."""
NULL: Final = msgspec.Raw(b"null")
MOST_ANSWER_BYTES: Final = 8 * 1024 * 1024
T = TypeVar("T")


def parsed(body: bytes, kind: type[T]) -> T:
    """Typed request; RequestError 400 with the field's path."""
    check_values(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if (rest := _without_nulls(body)) is not None:
            return parsed(rest, kind)
        raise _invalid(error, kind) from error
    except UNREADABLE as error:
        raise not_an_object(body, error) from error


def _without_nulls(body: bytes) -> bytes | None:
    """Of a body that was not taken: null is what was not given, also of a field that is none of ours. None: it has no null."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return None
    said = {name: value for name, value in fields.items() if value != NULL}
    return msgspec.json.encode(said) if len(said) < len(fields) else None


def _invalid(error: msgspec.ValidationError, kind: type) -> RequestError:
    what, _, where = str(error).partition(" - at `$")
    field = where.rstrip("`").lstrip(".") or None
    if (named := NAMED.match(what)) is not None:
        name = f"{field}.{named[2]}" if field else named[2]
        wrong = "is required" if named[1].startswith("missing") else "is no field of this request"
        return RequestError(400, f"{name[:NAME_TOLD]} {wrong}", param=name[:NAME_TOLD])
    what = with_allowed(what, kind, field or "")
    return RequestError(400, f"{field}: {what}" if field else what, param=field)


def given(**fields: Any) -> dict[str, Any]:
    """Without those that are None: a worker must see what the client said and no more."""
    return {name: value for name, value in fields.items() if value is not None}


class Translation(ABC):
    """What every dialect has: a body for the worker, an answer that is collected, errors in its own shape."""

    names: ClassVar[dict[str, str]] = {}
    """Fields of the worker's request that have another name here, for error messages."""
    image: ClassVar[str] = "image_url"
    """Type of an image's content part."""
    path: ClassVar[bytes] = CHAT
    """Where it goes at a worker; another one than chat's is served by one worker alone."""
    stream: bool = False
    fields: dict[str, Any]
    """Of the request that a worker gets, until that is made."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.named: list[tuple[bytes, bytes]] = []
        """Header fields by which this dialect's clients know an answer, beside those of all."""
        self.ends = Ends()
        self.used: tuple[int, int] | None = None
        """Tokens (input, output), as soon as the worker has told them."""
        self.collected = bytearray()
        """A whole answer, as far as it came."""
        self.broke = ""
        """The worker's words, when its stream told of an error: nothing behind it is read."""
        self.spoken = self.complete = False
        """An event of a stream came, and [DONE] alone is no answer; the client has its last one."""

    def take_body(self) -> bytes:
        """The worker's request, once: the parsed form is let go, which is several times as large, is counted by nobody, and would
        wait for a worker with the request."""
        body = self._body()
        self.fields = {}
        return body

    def _body(self) -> bytes:
        return msgspec.json.encode(self.fields)

    def feed(self, data: bytes) -> bytes:
        """A piece of the worker's answer to what the client gets now; RequestError 502 when it cannot be read."""
        self.collected += data
        if len(self.collected) > MOST_ANSWER_BYTES:
            raise RequestError(502, f"the worker's answer is longer than {MOST_ANSWER_BYTES} bytes")
        return b""

    def forget_partial(self) -> None:
        """Half of an event came from a worker that is gone; another one sends it whole."""
        self.collected.clear()

    def cut_short(self, why: Why, used: tuple[int, int]) -> bytes:
        """We end the stream: its last events. `used`: tokens (input, output) as we counted them. Of a dialect without a word for
        it: an error."""
        return self.failed(RequestError(502, f"the stream was ended for {why} after {used[1]} tokens"))

    def says_done(self) -> bool:
        """The last event of the worker's stream is [DONE] and lacks the blank line behind it."""
        return False

    @abstractmethod
    def end(self) -> bytes:
        """What is still owed when the worker's answer is complete; RequestError 502 when that cannot be read."""

    def error_body(self, error: RequestError) -> bytes:
        """An answer that is an error."""
        return error_json(error, self.request_id)

    def failed(self, error: RequestError) -> bytes:
        """A stream breaks off: its last event."""
        return b"data: " + self.error_body(error) + b"\n\n"

    def renamed(self, error: RequestError) -> RequestError:
        """An error of the worker's request in this dialect's words."""
        if error.param is None:
            return error
        other = self.name_of(error.param)
        words = PLACE.sub("messages[].content[]", str(error)).replace("'image_url'", f"'{self.image}'")
        words = re.sub(rf"^{re.escape(error.param)}\b", other, words)
        return RequestError(error.status, words, code=error.code, param=other, headers=error.headers, reason=error.reason)

    def name_of(self, param: str) -> str:
        """A field of the worker's request as this dialect calls it."""
        return self.names.get(param, param)

    def refused(self, status: int, body: bytes, headers: str) -> RequestError:
        """A worker's 4xx in this dialect's words; `headers`: of ours, for the answer."""
        return self.renamed(worker_error(status, body, headers))


class ChatTranslation(Translation):
    """A dialect of chat; subclasses say how chunks and whole answers read."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self._events = Events()
        self._last = b""
        """The last event with a choice in it."""
        self._may_call = False
        """It has tools."""

    def _body(self) -> bytes:
        self._may_call = "tools" in self.fields
        options = {"stream_options": {"include_usage": True}} if self.stream else {}
        return msgspec.json.encode({**self.fields, "stream": self.stream, **options})

    def feed(self, data: bytes) -> bytes:
        """Events of a stream at once; a whole answer waits for its end."""
        if not self.stream:
            return super().feed(data)
        return b"".join(self._told(payload) for payload in self._events.feed(data))

    def says_done(self) -> bool:
        """See `Translation`."""
        return self._events.says_done()

    def forget_partial(self) -> None:
        """See `Translation`."""
        self._events, self.broke, self._last = Events(), "", b""

    def _told(self, payload: bytes) -> bytes:
        if self.complete or self.broke:
            return b""
        if payload == DONE:
            return self._done()
        chunk = completion(payload)
        if chunk.told_error:
            self.broke = words_of(payload) or ""
            if self.broke:
                return b""  # another worker may carry the stream on
            self.complete = True
            return self.failed(self.refused(BAD_REQUEST, payload, ""))
        if chunk.choice is not None and chunk.choice.finish_reason == ABORT:
            self.broke = GIVEN_UP
            return b""
        self.spoken = True
        self._know(chunk)
        if chunk.choices:
            self._last = payload
            if chunk.choices[0].finish_reason is not None:
                self.ends.said = True
        return self.chunk(chunk)

    def _done(self) -> bytes:
        """The worker says that this is all. In the middle of an answer it is not, and another worker may carry it on; where
        functions may be called older vLLM left out a last event in which its parser found nothing to say."""
        if self.ends.said and not self._may_call and goes_on(self._last):
            self.broke = UNENDED
            return b""
        self.complete = self.spoken
        return self.finished() if self.spoken else b""

    def cut_short(self, why: Why, used: tuple[int, int]) -> bytes:
        """See `Translation`. A finish_reason of its own, because `stop` would be an end that the model wished."""
        self.complete = True
        choice = Choice(finish_reason=FINISH[why][0] if why == "no_stop" else why, stop_reason=FINISH[why][1])
        usage = None if self.used is not None else Usage(prompt_tokens=used[0], completion_tokens=used[1])
        return self.chunk(Completion(choices=[choice], usage=usage)) + self.finished()

    def _know(self, answer: Completion) -> None:
        if (usage := answer.usage) is not None and can_be(used := (usage.prompt_tokens, usage.completion_tokens)):
            self.used = used

    def end(self) -> bytes:
        """The whole answer; for a stream without its end an error event."""
        if not self.stream:
            answer = completion(bytes(self.collected))
            self._know(answer)
            return self.whole(answer)
        why = broke_off_with(self.broke) if self.broke else "the worker's stream ended early"
        return b"" if self.complete else self.failed(RequestError(502, why))

    @abstractmethod
    def chunk(self, chunk: Completion) -> bytes:
        """One chunk of a stream."""

    @abstractmethod
    def finished(self) -> bytes:
        """The stream ended as it should."""

    @abstractmethod
    def whole(self, answer: Completion) -> bytes:
        """An answer in one piece."""


def event(name: str, payload: dict[str, Any]) -> bytes:
    """A named server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(payload))
