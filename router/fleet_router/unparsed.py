"""Which field it is that makes a body no JSON, so that a refusal can name it: whoever decodes a body is told a byte at most.

Only what was refused already comes here, and no more of it than its beginning is looked at: 16 KiB take 4 ms at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from fleet_wire.unreadable import UNREADABLE

LOOK_BYTES: Final = 16_384
DEPTH_MOST: Final = 900
"""No decoder of ours comes through so many brackets."""
NAME_MOST: Final = 64
_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{},:]', re.S)
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_HALF: Final = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?=[^\\]|\\[^u])")
"""The first half of a character, which another thing than an escape follows."""
_PAIR: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALVES: Final = re.compile(rb"(\\u[dD][89a-fA-F][0-9a-fA-F]{2})(?:\\u[0-9a-fA-F]{4})?")
_HALF_BYTES: Final = 6
_VALUE: Final = msgspec.json.Decoder(msgspec.Raw)
_NAME: Final = msgspec.json.Decoder(str)


def guilty_field(body: bytes) -> str | None:
    """The first field of the object whose value cannot be read; None where that is not in its beginning, or no field's fault."""
    look = body[:LOOK_BYTES]
    for name, begin, end in _values(look):
        if end < 0 and len(look) < len(body):  # it may be whole
            return None
        if not _readable(look[begin : end if end >= 0 else None]):
            return name or None
    return None


def why(body: bytes, error: Exception) -> str:
    """What is wrong with it. Of half of a character (a client cut its text inside of one) decoders say that the data ends, or an
    escape, and where; a whole body does not seem to have any such end."""
    found = half(body, _BYTE.search(str(error)))
    return f"{found} is half of a character: a text was cut inside of one" if found else str(error)


def half(body: bytes, told: re.Match[str] | None) -> str:
    """The escape that ends at the byte that was `told`; where none was, in the last bytes. Empty: none does."""
    if told is None:
        found = _HALF.search(body[-4 * _HALF_BYTES :])
    else:
        before = body[max(0, int(told[1]) - 2 * _HALF_BYTES) : int(told[1])]
        found = None if _PAIR.fullmatch(before) else _HALVES.fullmatch(before[-_HALF_BYTES:]) or _HALVES.fullmatch(before)
    return found[1].decode() if found is not None else ""


def _values(look: bytes) -> Iterator[tuple[str, int, int]]:
    """Of each field its name, and where its value begins and ends; -1: not here. One that is too deep ends where it is."""
    name, begin, depth = "", -1, 0
    for token in _TOKEN.finditer(look):
        at, char = token.start(), token[0][:1]
        if char == b'"':
            name = name or _name(token[0]) if depth == 1 and begin < 0 else name
        elif char == b":":
            begin = token.end() if depth == 1 and begin < 0 else begin
        elif char in b"[{":
            depth += 1
            if depth > DEPTH_MOST:
                yield name, begin, at
                return
        else:
            if depth == 1 and begin >= 0:
                yield name, begin, at
                name, begin = "", -1
            depth -= char != b","
    if begin >= 0:
        yield name, begin, -1


def _name(raw: bytes) -> str:
    try:
        found = _NAME.decode(raw)
    except UNREADABLE:
        return ""
    return found if len(found) <= NAME_MOST else ""


def _readable(value: bytes) -> bool:
    try:
        value.decode()
        _VALUE.decode(value)
    except UNREADABLE:
        return False
    return True
