"""Errors that an engine tells inside a stream whose head said 200: vLLM and SGLang send `data: {"error": {...}}` and then [DONE],
others `event: error`. Text of a model is escaped JSON, in which no line begins so.

And answers that an engine gives up: a vLLM that is told to end (SIGTERM, with requests that outlast the drain) ends each that
runs with finish_reason "abort" and [DONE], as if it were whole; or, where it kills its engine before that is told (both were seen
with 0.32), says nothing of them until its agent kills all of it."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from fleet_wire.unreadable import UNREADABLE

HINT: Final = b"error"
"""Without it there is none: one look at each read, and it says no to nearly all."""
ABORT: Final = "abort"
ABORTED_HINT: Final = b'"abort"'
"""The same of one that was given up; inside a text its quotes are escaped."""
ABORTED: Final = re.compile(rb'"finish_reason"\s*:\s*"abort"')
GIVEN_UP: Final = "the engine gave the answer up"
FOUND: Final = re.compile(
    rb'(?:^|\n)(?:event: ?error[\r\n]|data: ?\{(?:\s*(?:"error"\s*:(?!\s*null)|"object"\s*:\s*"error")'
    rb'|[^\r\n]*"finish_reason"\s*:\s*"abort"))'
)
PAYLOAD: Final = re.compile(rb"(?:^|\n)data: ?([^\r\n]*)")
EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
WORDS_MOST: Final = 500
HALF_MOST_BYTES: Final = 65_536
"""Of an error whose end is waited for."""
WORDLESS: Final = "an error without words"
DATA: Final = b"data:"
BROKE_OFF: Final = "the worker broke the stream off"


def hinted(data: bytes) -> bool:
    """There may be one."""
    return data.find(HINT) >= 0 or data.find(ABORTED_HINT) >= 0


def is_given_up(answer: bytes | bytearray) -> bool:
    """An answer that comes as a whole."""
    return answer.find(ABORTED_HINT) >= 0 and ABORTED.search(answer) is not None


def error_in(data: bytes) -> tuple[int, str] | None:
    """Where in these events an error begins, and the worker's words; None without one, or when it is the client's (4xx): that one
    is the client's to read."""
    found = FOUND.search(data)
    if found is None:
        return None
    line = PAYLOAD.search(data, found.start(), _event_end(data, found.start()))
    words = words_of(line[1]) if line is not None else ""
    return None if words is None else (found.start(), words or WORDLESS)


def _event_end(data: bytes, at: int) -> int:
    """Where the event ends that begins here, or behind this line break; where it has no end, that of the data."""
    return min([end for one in EVENT_ENDS if (end := data.find(one, at + 1)) >= 0], default=len(data))


def first_error(contents: bytes) -> str:
    """The words of an error before which nothing is told in a stream's first read; empty: there is none."""
    found = error_in(contents) if hinted(contents) else None
    return found[1] if found is not None and contents.find(DATA, 0, found[0]) < 0 else ""


def half_an_error(contents: bytes) -> bool:
    """A stream's first read ends in the middle of one: whose it is and what it says stands in the rest."""
    found = FOUND.search(contents) if hinted(contents) and len(contents) < HALF_MOST_BYTES else None
    if found is None or contents.find(DATA, 0, found.start()) >= 0:
        return False
    return _event_end(contents, found.start()) == len(contents)


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
    if error is told and told.get("choices"):
        return GIVEN_UP
    if not isinstance(error, dict):
        return str(error)[:WORDS_MOST]
    code = error.get("code")
    if isinstance(code, int) and 400 <= code < 500:
        return None
    return str(error.get("message") or error)[:WORDS_MOST]
