"""What is read of a chat completion: the answer's types, whole and streamed (OpenAI's schema, vLLM's `stop_reason` and
`reasoning`), and the scanner of a stream's events."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from fleet_router.errors import RequestError
from fleet_router.health.inband import WORDLESS
from fleet_wire.unreadable import UNREADABLE

MOST_EVENT_BYTES: Final = 1024 * 1024
DONE: Final = b"[DONE]"
UNENDED: Final = "the worker says [DONE] in the middle of its answer"
BOM: Final = b"\xef\xbb\xbf"
"""A byte order mark, which may stand before a stream's first event and is none of it."""
_NULL: Final = msgspec.Raw(b"null")
_NAMED_ERROR: Final = re.compile(rb"(?:^|\n)event: ?error(?:\n|$)")


class Function(msgspec.Struct, frozen=True):
    """A call, or a piece of one."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """In a stream `id` and the name come first, then pieces of the arguments under the same index."""

    index: int = 0
    id: str | None = None
    function: Function = Function()


class Message(msgspec.Struct, frozen=True):
    """A message, or what a chunk adds to it."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def thought(self) -> str:
        """Reasoning under either of its names."""
        return self.reasoning or self.reasoning_content or ""


class Choice(msgspec.Struct, frozen=True):
    """`message` when whole, `delta` when streamed."""

    message: Message = Message()
    delta: Message = Message()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """vLLM: the stop string or token that ended it."""


class Cached(msgspec.Struct, frozen=True):
    """Part of the prompt that was in a prefix cache."""

    cached_tokens: int | None = None


class Thought(msgspec.Struct, frozen=True):
    """Part of the answer that was reasoning."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Cached | None = None
    completion_tokens_details: Thought | None = None

    @property
    def thought(self) -> int:
        """Output tokens that were reasoning; 0 also when the engine does not say."""
        return (self.completion_tokens_details.reasoning_tokens or 0) if self.completion_tokens_details is not None else 0

    @property
    def cached(self) -> int:
        """Prompt tokens that came from a cache; 0 also when the engine does not say."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details is not None else 0


class Completion(msgspec.Struct, frozen=True):
    """A whole answer or one chunk."""

    choices: list[Choice] = []
    usage: Usage | None = None
    created: int = 0
    object: Any = None
    """"error": it is one, without another level."""
    error: msgspec.Raw = msgspec.Raw()

    @property
    def told_error(self) -> bool:
        """It tells of an error, in one of the ways of health/inband.py."""
        return (bool(self.error) and self.error != _NULL) or self.object == "error"

    @property
    def choice(self) -> Choice | None:
        """The first one: more are never asked for."""
        return self.choices[0] if self.choices else None


class _Refusal(msgspec.Struct, frozen=True):
    message: str = ""
    param: Any = None
    error: msgspec.Raw = msgspec.Raw(b"{}")


_REFUSAL: Final = msgspec.json.Decoder(_Refusal)
_COMPLETION: Final = msgspec.json.Decoder(Completion)


def completion(data: bytes) -> Completion:
    """RequestError 502 when a worker's answer is none."""
    try:
        return _COMPLETION.decode(data)
    except UNREADABLE as error:
        raise RequestError(502, f"the worker's answer is not a chat completion: {error}") from error


def worker_error(status: int, body: bytes, headers: str = "") -> RequestError:
    """What a worker said with a 4xx: OpenAI's error object, or vLLM's older one without the outer level. `headers`: of ours, for
    the answer."""
    inner = said = _Refusal()
    try:
        said = _REFUSAL.decode(body)
        inner = _REFUSAL.decode(said.error)
    except UNREADABLE:
        pass  # no such object: its first bytes are all that can be said
    message = inner.message or said.message or body[:500].decode(errors="replace")
    param = inner.param or said.param
    return RequestError(status, message, param=param if isinstance(param, str) else None, headers=headers)


class Ends:
    """Whether any worker ever said that an answer ends, by a `finish_reason`. Engines do; where nobody does (engines made at
    home, stand-ins of tests) nothing follows from its absence, and each of their streams would be broken off. One per router."""

    def __init__(self) -> None:
        self.said = False


def goes_on(payload: bytes) -> bool:
    """The last event of a stream that has a choice says more text, and in so many words that this is not its end. Of what an
    engine may say behind an end (usage, hidden states), and of one that never says whether it ends, nothing is known."""
    try:
        found = msgspec.json.decode(payload)
        return bool(found["choices"]) and all(_is_open(choice) for choice in found["choices"])
    except (*UNREADABLE, KeyError, TypeError, AttributeError):
        return False


def _is_open(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    said = choice.get("text") if delta is None else delta.get("content")
    return bool(said) and choice["finish_reason"] is None


class Events:
    """Payloads of a server-sent event stream (WHATWG HTML, 9.2), from pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""
        self._begun = False

    def feed(self, data: bytes) -> list[bytes]:
        """The `data:` of each event that is whole now; RequestError 502 for one beyond bounds."""
        data = self._rest + data
        if not self._begun:
            if len(data) < len(BOM) and BOM.startswith(data):
                self._rest = data
                return []
            self._begun, data = True, data.removeprefix(BOM)
        *whole, self._rest = data.replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > MOST_EVENT_BYTES:
            raise RequestError(502, f"the worker sent an event longer than {MOST_EVENT_BYTES} bytes")
        return [payload for event in whole if (payload := _told(event))]

    def says_done(self) -> bool:
        """What is not whole is [DONE], and lacks but the blank line behind it: at the end of a body that says no less."""
        return payload_of(self._rest.replace(b"\r\n", b"\n")) == DONE


def _told(event: bytes) -> bytes:
    """Its payload; of an event that only its name says to be an error, one that says so itself."""
    payload = payload_of(event)
    if event.find(b"event:") < 0 or _NAMED_ERROR.search(event) is None:
        return payload
    try:
        told = msgspec.json.decode(payload)
    except UNREADABLE:
        return msgspec.json.encode({"error": payload.decode(errors="replace") or WORDLESS})
    if isinstance(told, dict) and (told.get("error") or told.get("object") == "error"):
        return payload
    return msgspec.json.encode({"error": msgspec.Raw(payload)})


def payload_of(event: bytes) -> bytes:
    """What stands behind `data:` in one event whose lines end with a line feed; empty when it has none (a comment)."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
