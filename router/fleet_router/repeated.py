"""Heads that come again and again on a connection, the same but for the length of the body: they are compared, not parsed.

A head is learnt after the parser has read it, and only where nothing else than Content-Length says how long its body is. Equal
bytes around other digits are read by any parser in the same way, and a message is only recognised when its body ends with the
packet, so that nothing is left over that could be taken for something else.
"""

from __future__ import annotations

import re
from typing import Final

HEAD_END: Final = b"\r\n\r\n"
LINE_END: Final = b"\r\n"
LOWER: Final = b"\r\ncontent-length: "
USUAL: Final = b"\r\nContent-Length: "
LENGTH_DIGITS: Final = 8
HEAD_MOST_BYTES: Final = 8_192
"""Longer heads are parsed each time."""
LEARNT_MOST: Final = 4
LEARNT_AGAIN: Final = 16
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,%d})\r\n" % LENGTH_DIGITS, re.IGNORECASE)


class Repeated:
    """One head, around the digits of its length."""

    __slots__ = ("_at", "_digits", "_end", "_size", "_until", "after", "before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self.before, self.after = before, after
        self._at = len(before)
        self._until = len(before) + LENGTH_DIGITS + len(after)
        self._digits = self._end = self._size = 0
        """Of the message that was seen last: digits of its length, where they end, and where its head does."""

    def body_at(self, data: bytes) -> int:
        """Where the body begins when this is the same head with all of its body and no more; else 0."""
        if not data.startswith(self.before):
            return 0
        length = b"%d" % (len(data) - self._size)
        if len(length) == self._digits and data[self._at : self._size] == length + self.after:  # `startswith` at a place: 7 x
            return self._size
        return self._other_size(data)

    def _other_size(self, data: bytes) -> int:
        """The length may have more or fewer digits than the last one."""
        end = data.find(self.after, self._at, self._until)
        if end < 0:
            return 0
        digits = data[self._at : end]
        if not digits.isdigit() or len(data) - end - len(self.after) != int(digits):
            return 0
        self._digits, self._end, self._size = len(digits), end, end + len(self.after)
        return self._size

    def look_for(self, digits: int, end: int) -> None:
        """A message has so many digits of its length, which end there: it is likely to be known."""
        self._digits, self._end, self._size = digits, end, end + len(self.after)

    def length_of(self, data: bytes, body_at: int) -> bytes:
        """The digits, as `data` has them."""
        return data[self._at : body_at - len(self.after)]


def around_length(message: bytes) -> tuple[bytes, bytes] | None:
    """What stands before and after the digits of the length in a message's head; None for heads that are not to be learnt, as
    those with a line break that only some parsers take for one."""
    end = message.find(HEAD_END, 0, HEAD_MOST_BYTES) + len(HEAD_END)
    found = _LENGTH.search(message, 0, end - 2) if end > len(HEAD_END) else None
    if found is None or message.count(b"\n", 0, end) != message.count(b"\r\n", 0, end):
        return None
    return message[: found.start(1)], message[found.end(1) : end]


def usual_parts(message: bytes) -> tuple[bytes, bytes, bytes] | None:
    """(before, digits, after) as `around_length` has them, of a head that writes its length as most do; of other heads something
    that no learnt head is, or None. It looks for no more: whether such a head may be learnt was found out when it was, and the
    pattern takes three times as long."""
    end = message.find(HEAD_END, 0, HEAD_MOST_BYTES)
    head = message[: end + len(HEAD_END)]
    before, name, rest = head.partition(LOWER)
    if not name:
        before, name, rest = head.partition(USUAL)
    digits, line_end, behind = rest.partition(LINE_END)
    return (before + name, digits, line_end + behind) if end >= 0 and name else None


def worth_learning(misses: int) -> bool:
    """Whoever never sends the same head twice is seldom learnt from."""
    return misses <= LEARNT_MOST or misses % LEARNT_AGAIN == 0
