"""Heads of answers: a worker's header fields as the client gets them, and those of answers that are our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fleet_router.errors import PHRASES, RETRY_AFTER_S

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


def own_head(status: int, names: str, size_bytes: int, headers: str, kind: bytes, *, keep_alive: bool) -> bytes:
    """Of an answer that no worker gave. `names`: lines with the request's id; `headers`: more; each with its line break behind
    it; `kind`: its content type."""
    head = f"HTTP/1.1 {status} {PHRASES.get(status, 'Status')}\r\n{names}content-length: {size_bytes}\r\n{headers}"
    if status == 503 and "retry-after" not in headers:
        head += f"retry-after: {RETRY_AFTER_S}\r\n"
    if not keep_alive:
        head += "connection: close\r\n"
    return head.encode() + b"content-type: " + kind + b"\r\n\r\n"


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
