"""The head of a worker's answer, and what follows from it: worked out once for all answers in a row with the same one. Streams of
one worker begin with the same bytes but for their date, and to look through them anew took 9,000 of a stream's 150,000
instructions before its first byte.
"""

from __future__ import annotations

from typing import Final

from fleet_router.expected import unlike
from fleet_router.heads import kept_lines
from fleet_router.repeated import Repeated

Fields = list[tuple[bytes, bytes]]
LENGTH: Final = b"content-length"
ENCODING: Final = b"transfer-encoding"
UNKNOWN: Final = -1


class AnswerHead:
    """Its header fields. `length`: bytes of the body, UNKNOWN where it does not say; `in_chunks`: the body comes in chunks;
    `is_framed`: it says where its body ends. ValueError: its length is no number."""

    __slots__ = ("_lines", "_odd", "_odd_stream", "fields", "in_chunks", "is_framed", "length")

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.length, self.is_framed, self.in_chunks = UNKNOWN, False, False
        self._lines: bytes | None = None
        self._odd: str | None = None
        self._odd_stream: str | None = None
        for name, value in fields:
            lower = name.lower()
            if lower == LENGTH:
                self.length, self.is_framed = int(value), True
            elif lower == ENCODING:
                coding = value.lower()
                self.in_chunks = self.in_chunks or coding.find(b"chunked") >= 0
                self.is_framed = self.is_framed or coding.endswith(b"chunked")

    @property
    def lines(self) -> bytes:
        """Those that are handed on, each with its line break before it."""
        if self._lines is None:
            self._lines = kept_lines(self.fields)
        return self._lines

    def odd(self, *, stream: bool) -> str:
        """Why this cannot be the head of what was asked for; empty: it can."""
        found = self._odd_stream if stream else self._odd
        if found is None:
            found = unlike(self.fields, stream=stream)
            if stream:
                self._odd_stream = found
            else:
                self._odd = found
        return found


class LastHead:
    """The one that a worker gave last, to compare with."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = AnswerHead([])

    def of(self, fields: Fields) -> AnswerHead:
        """The head with these fields, which are copied: behind a body in chunks others are added to a connection's list."""
        if self._last.fields != fields:
            self._last = AnswerHead(fields.copy())
        return self._last


class KnownAnswer(Repeated):
    """The head of a 200 that a worker gave before. `lines`: its header lines as a client gets them, around the length."""

    __slots__ = ("lines",)

    def __init__(self, around: tuple[bytes, bytes], headers: list[tuple[bytes, bytes]]) -> None:
        super().__init__(around[0], around[1])
        at = next(i for i, (name, _) in enumerate(headers) if name.lower() == LENGTH)
        self.lines = (kept_lines([*headers[:at], (headers[at][0], b"")]), kept_lines(headers[at + 1 :]))
