"""W3C trace context: whose trace a request is part of, and what is said to workers. Pure: random numbers are arguments.

A client's ids are taken over, its wish to be sampled within our rate. A header that is not what the standard allows is no header.
"""

from __future__ import annotations

import re
from typing import Final

PARENT: Final = b"traceparent"
STATE: Final = b"tracestate"
SHAPE: Final = re.compile(rb"^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\t\x20-\x7e\x80-\xff]*)?\Z")
STATE_SHAPE: Final = re.compile(rb"^[\x20-\x7e]+\Z")
SPANS: Final = 1 << 64
NOBODY: Final = "0" * 16


class Trace:
    """A request whose spans are wanted. Ids are lower-case hex as in the standard."""

    __slots__ = ("parent", "root", "state", "trace_id")

    def __init__(self, trace_id: str, parent: str, root: int, state: bytes = b"") -> None:
        self.trace_id = trace_id
        self.parent = parent
        """The client's span; empty: none."""
        self.root = root
        """Number of our first span; the others follow it."""
        self.state = state

    def span(self, number: int) -> str:
        """Id of one of our spans; 0 is the request's."""
        return f"{(self.root + number) % SPANS or 1:016x}"

    def to_leg(self, number: int) -> bytes:
        """Header lines for the worker of this leg."""
        return _lines(f"00-{self.trace_id}-{self.span(number)}-01".encode(), self.state)


def _lines(parent: bytes, state: bytes) -> bytes:
    return b"traceparent: %b\r\n" % parent + (b"tracestate: %b\r\n" % state if state else b"")


def read(parent: bytes, state: bytes) -> tuple[str, str, bool, bytes] | None:
    """(trace id, span id, sampled, state) of a client's headers; None when there are none that can be used."""
    found = SHAPE.match(parent)
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5]) or not found[2].strip(b"0"):
        return None
    if not found[3].strip(b"0"):
        return None
    kept = state if STATE_SHAPE.match(state) else b""
    return found[2].decode(), found[3].decode(), bool(int(found[4], 16) & 1), kept


def passed_on(parent: bytes, state: bytes) -> bytes:
    """Header lines for workers of a request that we make no spans of."""
    return _lines(parent, state if STATE_SHAPE.match(state) else b"")
