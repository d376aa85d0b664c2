"""What a worker's 200 must be to be an answer: its type, its beginning, its end. Pure.

A proxy's login page, a gateway's notice of work, or a stream that just stops are no answers, whatever their status says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from fleet_router.admission.usage import BETWEEN
from fleet_router.dialect.chat import BOM, DONE, goes_on, payload_of
from fleet_router.ending import unframed
from fleet_router.request import is_object

TYPE: Final = b"content-type"
CODING: Final = b"content-encoding"
EVENTS: Final = b"text/event-stream"
TEXT: Final = b"text/"
BYTES: Final = b"application/octet-stream"
"""Of embeddings, where these are asked for as bytes."""
HEAD_END: Final = b"\r\n\r\n"
TOLD_MOST: Final = 64
END_BYTES: Final = 4_096
"""At the end of a stream, where [DONE] stands; comments may come behind it."""
LAST_EVENTS_BYTES: Final = 16_384
"""The same, where the last choice stands: behind it come usage and [DONE]."""
ENDED: Final = b'"finish_reason":"'
ENDED_SPACED: Final = b'"finish_reason": "'
"""As engines write it. Inside a text its quotes are escaped."""
NO_CHOICE: Final = (b'"choices":[]', b'"choices": []')
CLOSED: Final = b"\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
"""[DONE] in a chunk of its own, behind an event; what stands before it is no text that goes on in the next chunk."""
CLOSED_IN_ONE: Final = b"\n\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_DONE: Final = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\]")
_EVENT: Final = re.compile(rb"(?:\A|[\r\n]|\A\xef\xbb\xbf)data: ?(?!\[DONE\])[^\r\n ]")
_BOM_CHUNK: Final = re.compile(rb"([0-9a-fA-F]{1,8})(?:;[^\r\n]*)?\r\n\xef\xbb\xbf")


def unlike(headers: Sequence[tuple[bytes, bytes]], *, stream: bool) -> str:
    """Why this cannot be the head of what was asked for; empty: it can. Who names no type is judged by what comes."""
    for name, value in headers:
        lower = name.lower()
        if lower == TYPE:
            kind = value.partition(b";")[0].strip().lower()
            if (kind != EVENTS) if stream else kind.startswith(TEXT):
                told = kind[:TOLD_MOST].decode("ascii", "replace")
                return f"the worker's {'stream' if stream else 'answer'} is {told or 'of no type'}"
        elif lower == CODING and value.strip().lower() not in (b"", b"identity"):
            return "the worker's answer is compressed, and nobody asked for it"
    return ""


def without_bom(read: bytes) -> bytes:
    """The first read of a stream without the byte order mark before its first event: clients that do not know of it (WHATWG HTML,
    9.2.4) would take that event for no data."""
    found = _BOM_CHUNK.match(read) if BOM[0] in read else None
    if found is None:
        return read
    left = int(found[1], 16) - len(BOM)
    rest = read[found.end() :]
    if left <= 0:
        return rest.removeprefix(b"\r\n")
    return b"%x\r\n%b" % (left, rest)


def is_closed(ending: bytes) -> bool:
    """The end of a stream that says that it is one. As nearly all end it is seen at once: to look through all of it took a
    hundred thousand instructions, a quarter of a short stream's."""
    return ending.endswith(CLOSED) or ending.endswith(CLOSED_IN_ONE) or _DONE.search(BETWEEN.sub(b"", ending)) is not None


def says_an_end(ending: bytes) -> bool:
    """A choice has ended."""
    return ending.rfind(ENDED) >= 0 or ending.rfind(ENDED_SPACED) >= 0


def breaks_off(ending: bytes) -> bool:
    """The end of a stream in which nothing `says_an_end`: its last choice goes on. Engines end it with a `finish_reason`."""
    plain = BETWEEN.sub(b"", ending[-LAST_EVENTS_BYTES:]).replace(b"\r\n", b"\n")
    for event in reversed(plain.split(b"\n\n")):
        payload = payload_of(event)
        if payload not in (b"", DONE) and not any(payload.find(mark) >= 0 for mark in NO_CHOICE):
            return goes_on(payload)
    return False


def says_something(stream: bytes) -> bool:
    """All of a stream: it has an event besides [DONE]."""
    return _EVENT.search(BETWEEN.sub(b"", stream)) is not None


def is_answer(held: bytes, last: bytes, *, sized: bool) -> bool:
    """All of an answer that comes as a whole is one: `held` (head and body so far) and `last`. A length that counts characters
    ends in the middle of an object."""
    head, _, body = held.partition(HEAD_END)
    whole = body + last
    return is_object(whole if sized else unframed(whole)) or tells_bytes(head)


def tells_bytes(head: bytes) -> bool:
    """No JSON is to be expected behind these header lines."""
    return head.lower().find(BYTES) >= 0
