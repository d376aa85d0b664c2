"""A stream that broke, carried on by another worker as if nothing had happened, or not at all.

Only requests whose tokens are determined (greedy or seeded, one choice, no field that we do not know) are carried on, and those
of which the client has the head alone, which engines may send long before the first token: these begin anew. The other worker
begins somewhat earlier than where the first one stopped; what it says again must be what the client has, text and token ids, and
is left out. One difference and the stream ends with an error: a wrong token is worse than none. So it is where all others have
other weights, whose difference may come later.

Two ways: `prefill` begins with the prompt and the tokens sent, less the last few; it needs the ids in the stream and an engine
whose draws depend on seed and position alone. `replay` begins from nothing with the same request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from fleet_router.ask import Ask
from fleet_router.dialect.chat import BOM, DONE, UNENDED, Ends, goes_on, payload_of
from fleet_router.expected import NO_CHOICE
from fleet_router.request import is_object
from fleet_wire.unreadable import UNREADABLE

OWN_HISTORY: Final[Mapping[str, tuple[object, ...]]] = {
    "stop": ([], ""), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
}  # fmt: skip
"""Fields that look at the answer so far, and values that do not: sent tokens in the prompt would not count for them."""
OVERLAP_TOKENS: Final = 8
"""So many tokens at least are said again and compared."""
_NULL: Final = msgspec.Raw(b"null")
_SILENT_DELTA: Final = frozenset({"role", "content"})


class DiffersError(Exception):
    """The other worker does not say what the first one said."""


@dataclass(slots=True)
class Said:
    """What a client has of a stream."""

    text: str = ""
    ids: list[int] | None = field(default_factory=list)
    """None: some event with text had none."""
    begun: bool = True
    """It has an event at least."""
    id: object = None
    created: object = 0
    finish: object = None
    usage: bool = False
    """The event that says what was used has come."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(tokens, characters) after each event that had text and ids."""


def said_of(events: bytes) -> Said | None:
    """Of whole events, read as the client reads them: one that we passed over would be said to it again. None when something is
    among them that cannot be compared."""
    said = Said(begun=False)
    for event in events.removeprefix(BOM).replace(b"\r\n", b"\n").split(b"\n\n"):
        if (payload := payload_of(event)) in (b"", DONE):
            continue
        try:
            found = msgspec.json.decode(payload)
            choice = found["choices"][0] if found["choices"] else None
            said.begun, said.id, said.created = True, found.get("id"), found.get("created")
            said.usage = said.usage or (choice is None and bool(found.get("usage")))
            text, ids = ("", []) if choice is None else _step(choice)
        except (*UNREADABLE, KeyError, TypeError, AttributeError, DiffersError):
            return None
        said.text += text
        if ids and said.ids is not None:
            said.ids += ids
            if text:
                said.steps.append((len(said.ids), len(said.text)))
        elif text and not ids:
            said.ids = None
        said.finish = choice.get("finish_reason") or said.finish if choice is not None else said.finish
    return said


def _step(choice: dict[str, Any]) -> tuple[str, list[int]]:
    """Text and token ids of one choice of a chunk."""
    delta = choice.get("delta")
    if delta is None:
        text = choice["text"]
    else:
        if any(value for name, value in delta.items() if name not in _SILENT_DELTA):
            raise DiffersError("the stream holds more than text")
        text = delta.get("content")
    if choice.get("logprobs"):
        raise DiffersError("the stream holds probabilities")
    return text or "", choice.get("token_ids") or []


@dataclass(frozen=True, slots=True)
class Start:
    """Where the other worker begins: after so many tokens and characters of the answer. 0: from nothing."""

    tokens: int = 0
    characters: int = 0


def start_of(ask: Ask, said: Said) -> Start:
    """As late as can be compared; from nothing when the request's own rules look back, or its limit is not known."""
    fields = ask.fields
    looks_back = any(
        raw != _NULL and msgspec.json.decode(raw) not in OWN_HISTORY[name]
        for name in OWN_HISTORY
        if (raw := fields.get(name, _NULL)) != _NULL
    )
    if looks_back or said.ids is None or said.finish is not None or not limit_of(fields):
        return Start()
    most = len(said.ids) - OVERLAP_TOKENS
    found = [step for step in said.steps if step[0] <= most]
    return Start(*found[-1]) if found else Start()


def limit_of(fields: Mapping[str, msgspec.Raw]) -> int:
    """Output tokens at most, as engines read it; 0: the client gave no limit."""
    for name in ("max_completion_tokens", "max_tokens"):
        raw = fields.get(name, _NULL)
        if raw != _NULL:
            return msgspec.json.decode(raw, type=int)
    return 0


def continued(ask: Ask, said: Said, start: Start, prompt: list[int]) -> Ask:
    """The request for the rest: a completion of prompt and tokens sent."""
    fields = {
        name: value for name, value in ask.fields.items() if name not in ("messages", "max_completion_tokens", "min_tokens")
    }
    ids = prompt + (said.ids or [])[: start.tokens]
    least = ask.fields.get("min_tokens", _NULL)
    if least != _NULL:
        fields["min_tokens"] = msgspec.Raw(b"%d" % max(0, msgspec.json.decode(least, type=int) - start.tokens))
    fields["prompt"] = msgspec.Raw(msgspec.json.encode(ids))
    fields["max_tokens"] = msgspec.Raw(b"%d" % (limit_of(ask.fields) - start.tokens))
    return Ask(fields, bytes(fields["prompt"]), True, None, False, ask.adapter)


class Again:
    """Compares what the other worker says with what the client has, and hands on what is new."""

    def __init__(self, said: Said, start: Start, *, as_chat: bool, ends: Ends | None = None) -> None:
        self._ends = ends if ends is not None else Ends()
        self._said, self._start, self._as_chat = said, start, as_chat
        self._text = said.text[start.characters :]
        self._ids = None if said.ids is None else said.ids[start.tokens :]
        self._first = start.tokens > 0
        self._last = b""
        """The other worker's last event with a choice in it."""
        self._spoken = False
        """It has said something to a client that had nothing."""
        self.done = False
        """[DONE] has come."""

    def feed(self, payload: bytes) -> bytes:
        """One event of the other worker; what the client gets of it. DiffersError."""
        if payload == b"[DONE]":
            self._must_be_at_an_end()
            self.done = True
            return b"data: [DONE]\n\n"
        if not self._said.begun:
            return self._as_it_is(payload)
        try:
            found = msgspec.json.decode(payload)
            if choices := found["choices"]:
                self._last = payload
            self._shift(found)
            new = self._new(choices[0]) if choices else bool(found.get("usage")) and not self._said.usage
        except (*UNREADABLE, KeyError, TypeError, AttributeError) as error:
            raise DiffersError(f"the other worker's event cannot be read: {error!r}") from error
        if not new:
            return b""
        found |= {"id": self._said.id, "created": self._said.created}
        if self._as_chat:
            found["object"] = "chat.completion.chunk"
        found.pop("prompt_token_ids", None)
        return b"data: " + msgspec.json.encode(found) + b"\n\n"

    def _as_it_is(self, payload: bytes) -> bytes:
        """Of a client that has nothing yet, not even an id: this is its stream from the beginning."""
        if not is_object(payload):
            raise DiffersError("the worker's event is not JSON")
        self._spoken = True
        if not any(payload.find(mark) >= 0 for mark in NO_CHOICE):
            self._last = payload
        return b"data: %b\n\n" % payload.replace(b"\n", b"\ndata: ")

    def _must_be_at_an_end(self) -> None:
        if not (self._said.begun or self._spoken):
            raise DiffersError("the worker's answer is empty")
        self._must_be_through()
        if self._ends.said and goes_on(self._last):
            raise DiffersError(UNENDED)

    def _must_be_through(self) -> None:
        if self._text or self._ids:
            raise DiffersError("the other worker ends earlier")

    def _shift(self, found: dict[str, Any]) -> None:
        """What was used, as if one worker had said all: at the end, or in each event."""
        usage, skipped = found.get("usage"), self._start.tokens
        if usage and skipped:
            usage["prompt_tokens"] -= skipped
            usage["completion_tokens"] += skipped
            details = usage.get("prompt_tokens_details") or {}
            if details.get("cached_tokens"):  # what was sent is in its cache, too, where the same was asked before
                details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])

    def _new(self, choice: dict[str, Any]) -> bool:
        """Leave out of `choice` what the client has; False when nothing is left."""
        text, ids = _step(choice)
        text, ids = self._unsaid(text), self._unsent(ids)
        finish = choice.get("finish_reason")
        if finish is not None:
            self._must_be_through()
            if self._said.finish not in (None, finish):
                raise DiffersError("the other worker ends for another reason")
        if choice.get("token_ids") is not None:
            choice["token_ids"] = ids
        if self._as_chat:
            choice.pop("text")
            choice["delta"] = {"content": text}
        elif "delta" in choice:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        return bool(text or ids or (finish is not None and self._said.finish is None))

    def _unsaid(self, text: str) -> str:
        if self._first and text and self._text:
            self._first = False
            if self._text[0] == " " and text[0] != " ":  # tokenizers that mark words leave out the space of a text's first one
                self._text = self._text[1:]
        shared = min(len(text), len(self._text))
        if text[:shared] != self._text[:shared]:
            raise DiffersError("the other worker's text differs")
        self._text = self._text[shared:]
        return text[shared:]

    def _unsent(self, ids: list[int]) -> list[int]:
        if not self._ids or not ids:
            return ids
        shared = min(len(ids), len(self._ids))
        if ids[:shared] != self._ids[:shared]:
            raise DiffersError("the other worker's tokens differ")
        self._ids = self._ids[shared:]
        return ids[shared:]
