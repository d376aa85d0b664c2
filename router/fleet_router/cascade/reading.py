"""Reads an engine's answer to a chat or text completion, whole or streamed, and takes log-probabilities out of it that the client
did not ask for. Pure: bytes in, bytes out."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fleet_router.ask import Ask
from fleet_router.cascade.judge import ANY_JSON, Answer
from fleet_router.dialect.chat import DONE, Events, Message
from fleet_router.request import with_fields
from fleet_wire.unreadable import UNREADABLE

_FIELDS: Final = {True: (msgspec.Raw(b"true"), b',"logprobs":true}'), False: (msgspec.Raw(b"1"), b',"logprobs":1}')}
"""How log-probabilities are asked for: of chats, and of text completions."""


class _Format(msgspec.Struct):
    type: str = ""
    json_schema: Any = None


class _Told(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    """Of chats, and of text completions, where the first may be null."""

    content: list[_Told] | None = None
    token_logprobs: list[float | None] | None = None

    @property
    def values(self) -> list[float]:
        told = [one.logprob for one in self.content or ()] or self.token_logprobs or ()
        return [value for value in told if value is not None]


class _Choice(msgspec.Struct):
    message: Message | None = None
    delta: Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


_ANSWER: Final = msgspec.json.Decoder(_Answer)


def json_kinds_of(ask: Ask) -> frozenset[str] | None:
    """What the JSON that the client asked for may be at its top; None: it asked for none."""
    raw = ask.fields.get("response_format")
    if raw is None:
        return None
    try:
        found = msgspec.json.decode(raw, type=_Format)
    except UNREADABLE:
        return None  # the worker's to refuse
    if found.type == "json_object":
        return frozenset({"object"})
    return _kinds_of_schema(found.json_schema) if found.type == "json_schema" else None


def _kinds_of_schema(named: Any) -> frozenset[str]:
    """By the `type` at the schema's top; a schema that has none there, or that nobody could follow, says nothing."""
    schema = named.get("schema") if isinstance(named, dict) else None
    kinds = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kinds, str):
        kinds = [kinds]
    if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) and kind in ANY_JSON for kind in kinds):
        return ANY_JSON
    return frozenset(kinds)


def with_logprobs(ask: Ask, *, chat: bool) -> tuple[Ask, bool]:
    """The request with its tokens' log-probabilities asked for; whether that was us. `ask` stays as it is."""
    copy = ask.copy()
    raw = ask.fields.get("logprobs")
    if raw is not None and bytes(raw) not in (b"null", b"false"):
        return copy, False
    value, spliced = _FIELDS[chat]
    return with_fields(copy, {"logprobs": value}, spliced), True


def payloads_of(body: bytes, *, stream: bool) -> list[bytes]:
    """The JSON texts of an answer: one, or one per event."""
    return [part for part in Events().feed(body) if part != DONE] if stream else [body]


def answer_of(payloads: list[bytes]) -> Answer:
    """Its first choice, more are never asked for; msgspec.DecodeError for what is no answer."""
    found = Answer()
    texts: list[str] = []
    for payload in payloads:
        for choice in _ANSWER.decode(payload).choices:
            said = choice.message or choice.delta or Message()
            texts.append(said.content or choice.text or "")
            found.calls |= bool(said.tool_calls)
            found.finish_reason = choice.finish_reason or found.finish_reason
            found.logprobs += choice.logprobs.values if choice.logprobs is not None else []
    found.text = "".join(texts)
    return found


def without_logprobs(payloads: list[bytes], *, stream: bool) -> bytes:
    """The answer put together again, as if nobody had asked for log-probabilities. `answer_of` could read it."""
    said = [_bare(payload) for payload in payloads]
    if not stream:
        return said[0]
    return b"".join(b"data: %b\n\n" % payload for payload in said) + b"data: [DONE]\n\n"


def _bare(payload: bytes) -> bytes:
    found: dict[str, Any] = msgspec.json.decode(payload)
    for choice in found.get("choices") or ():
        if "logprobs" in choice:
            choice["logprobs"] = None
    return msgspec.json.encode(found)
