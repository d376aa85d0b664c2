"""Errors that an engine tells inside a stream whose head said 200: vLLM and SGLang send `data: {"error": {...}}` and then [DONE],
others `event: error`. Text of a model is escaped JSON, in which no line begins so."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from fleet_wire.unreadable import UNREADABLE

HINT: Final = b"error"
"""Without it there is none: one look at each read, and it says no to nearly all."""
FOUND: Final = re.compile(rb'(?:^|\n)(?:event: ?error[\r\n]|data: ?\{\s*(?:"error"\s*:\s*(?!null)|"object"\s*:\s*"error"))')
PAYLOAD: Final = re.compile(rb"(?:^|\n)data: ?([^\r\n]*)")
EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
WORDS_MOST: Final = 500
DATA: Final = b"data:"
BROKE_OFF: Final = "the worker broke the stream off"


def error_in(data: bytes) -> tuple[int, str] | None:
    """Where in these events an error begins, and the worker's words; None without one, or when it is the client's (4xx): that one
    is the client's to read."""
    found = FOUND.search(data)
    if found is None:
        return None
    line = PAYLOAD.search(data, found.start())
    words = words_of(line[1] if line is not None else b"")
    return None if words is None else (found.start(), words)


def first_error(read: bytes) -> str:
    """The words of an error before which nothing is told in a stream's first read; empty: there is none."""
    found = error_in(read) if read.find(HINT) >= 0 else None
    return found[1] if found is not None and read.find(DATA, 0, found[0]) < 0 else ""


def whole_events(contents: bytes, until: int) -> bytes:
    """Those that end before."""
    ends = [contents.rfind(end, 0, until) + len(end) for end in EVENT_ENDS if contents.rfind(end, 0, until) >= 0]
    return contents[: max(ends, default=0)]


def broke_off_with(words: str) -> str:
    """What the client is told."""
    return f"{BROKE_OFF}: {words}"


def for_the_record(why: str) -> str:
    """What logs, spans and records show of it: a worker's own words may quote a prompt."""
    return BROKE_OFF if why.startswith(BROKE_OFF) else why


def words_of(payload: bytes) -> str | None:
    """What an event's error says; None: it is about the request, as its code (4xx) says, or it is none."""
    try:
        told: Any = msgspec.json.decode(payload)
    except UNREADABLE:
        return payload[:WORDS_MOST].decode(errors="replace")
    if not isinstance(told, dict):
        return str(told)[:WORDS_MOST]
    error = told.get("error") or told
    if not isinstance(error, dict):
        return str(error)[:WORDS_MOST]
    code = error.get("code")
    if isinstance(code, int) and 400 <= code < 500:
        return None
    return str(error.get("message") or error)[:WORDS_MOST]
