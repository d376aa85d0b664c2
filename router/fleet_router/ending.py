"""The end of a stream that we end: its last event, and the framing of what we write ourselves."""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import Any, Final

import msgspec

from fleet_router.admission.runaway import FINISH, Why
from fleet_router.admission.usage import can_be
from fleet_router.dialect.chat import payload_of
from fleet_wire.unreadable import UNREADABLE

CHAT_PATH: Final = b"/v1/chat/completions"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
END: Final = b"0\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n"
"""Trailers may stand behind it (RFC 9112, 7.1.2)."""
_EVENT_END: Final = re.compile(rb"(\r?\n\r?\n)")


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class _TellsUsage(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None


def framed(data: bytes) -> bytes:
    """As a chunk of a body (RFC 9112, 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def unframed(data: bytes) -> bytes:
    """Contents of those chunks that are whole."""
    return whole_chunks(data)[0]


def whole_chunks(data: bytes) -> tuple[bytes, bytes]:
    """(contents of those chunks that are whole, what is behind them)."""
    out, at = [], 0
    while (line := data.find(b"\r\n", at)) >= 0:
        try:
            size = int(data[at:line].split(b";")[0], 16)
        except ValueError:
            break
        end = line + 2 + size
        if size <= 0 or end + 2 > len(data):
            break
        out.append(data[line + 2 : end])
        at = end + 2
    return b"".join(out), data[at:]


def opened(data: bytes) -> bytes:
    """Contents of all chunks, of the last one as far as it has come."""
    whole, rest = whole_chunks(data)
    return whole + rest.partition(b"\r\n")[2]


def without_usage(read: bytes) -> tuple[bytes, tuple[int, int] | None]:
    """A read of a stream without the event that only tells what was used, and that: (input, output) tokens. As it is where its
    framing is not understood."""
    contents, rest = whole_chunks(read)
    if rest and not rest.startswith(LAST_CHUNK):
        return read, None
    kept, told, found = [], None, False
    parts = _EVENT_END.split(contents)
    for event, end in zip_longest(parts[::2], parts[1::2], fillvalue=b""):
        if (usage := _usage_of(event)) is None:
            kept += [event, end]
        else:
            used = (usage.prompt_tokens, usage.completion_tokens)
            found, told = True, used if can_be(used) else told
    return (framed(b"".join(kept)) + rest, told) if found else (read, None)


def _usage_of(event: bytes) -> _Usage | None:
    try:
        found = msgspec.json.decode(payload_of(event.replace(b"\r\n", b"\n")), type=_TellsUsage)
    except UNREADABLE:
        return None
    return found.usage if found.choices == [] else None


def last_event(why: Why, chat: bool, request_id: str, model: str, choices: int = 1) -> bytes:
    """A choice without text, whose finish_reason says why, of each that was asked for, and [DONE]. Which of several had ended
    nobody knows: they end once more."""
    finish, stop = FINISH[why]
    kind = "chat.completion.chunk" if chat else "text_completion"
    said: dict[str, Any] = {"id": request_id, "object": kind, "created": 0, "model": model}
    out = []
    for index in range(choices):
        choice: dict[str, Any] = {"index": index, "delta": {}} if chat else {"index": index, "text": ""}
        choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": stop}
        out.append(b"data: " + msgspec.json.encode(said | {"choices": [choice]}) + b"\n\n")
    return b"".join(out) + b"data: [DONE]\n\n"
