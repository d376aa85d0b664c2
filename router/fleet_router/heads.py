"""Heads of answers: a worker's header fields as the client gets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fleet_router.errors import PHRASES

HOP_HEADERS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"server", b"date", b"x-request-id"}
)
NAMES_MOST: Final = 256
_BEFORE: dict[bytes, bytes] = {}
"""What stands before a field's value, by its name as workers write it; empty for fields that end here."""


def status_line(status: int) -> bytes:
    """Up to where the request id follows."""
    return f"HTTP/1.1 {status} {PHRASES.get(status, 'Status')}\r\nx-request-id: ".encode()


STATUS_LINES: Final = {status: status_line(status) for status in PHRASES}


def add_kept(lines: list[bytes], headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Those that are handed on, each with its line break before it."""
    for name, value in headers:
        before = _BEFORE.get(name)
        if before is None:
            before = _before(name)
        if before:
            lines.append(before)
            lines.append(value)


def kept_lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The same, joined."""
    lines: list[bytes] = []
    add_kept(lines, headers)
    return b"".join(lines)


def _before(name: bytes) -> bytes:
    before = b"" if name.lower() in HOP_HEADERS else b"\r\n%b: " % name
    if len(_BEFORE) < NAMES_MOST:
        _BEFORE[name] = before
    return before
