"""What a client has of a stream, kept while it runs so that another worker can carry it on; bounded per stream and in all.

Only whole events go out meanwhile: half of one could not be taken back. Engines write one event per chunk, so that a read nearly
always ends with an event and is handed on as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Final

from fleet_router.admission.usage import BETWEEN
from fleet_router.request import is_object

CHUNK_END: Final = b"\n\n\r\n"
"""The end of a chunk that ends with an event. Inside JSON a line break is escaped."""
CRLF_END: Final = b"\r\n\r\n\r\n"
"""The same of a server whose events end with CRLF."""
CRLF_SOUND_ENDS: Final[tuple[bytes, ...]] = (b"}" + CRLF_END, b"]" + CRLF_END)
"""Of reads of a stream whose lines end with CRLF: a line break alone may be half of an event's end."""
CHUNK_ENDS: Final[tuple[bytes, ...]] = (CHUNK_END, CRLF_END)
ENDS: Final[tuple[bytes, ...]] = (CHUNK_END, b"\r\n0\r\n\r\n", CRLF_END)
"""Ends of a read after which something else may follow."""
_ODD_END: Final = b"\r\n\n\r\n"
_ODD_ENDS: Final[tuple[bytes, ...]] = (_ODD_END, CRLF_END)
"""Those that the line of a chunk's size may be a part of."""
_SIZED: Final = re.compile(rb"(?:\A|(.)\r\n)([0-9a-fA-F]{1,8})(?:;[^\r\n]*)?\r\n(\r?\n)\r\n\Z", re.DOTALL)
_SIZED_BYTES: Final = 96
_BLANKS: Final = (b"\n\n", b"\r\n\r\n")
"""Ends of events. A server may have one for what its engine writes, and the other for its own pings."""
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"
STREAM_MOST_BYTES: Final = 1024 * 1024
ROOM_BYTES: Final = 32 * 1024 * 1024
READS_MOST: Final = 64
"""So many are put together: each takes some 50 bytes beside its own, and a worker may send very small ones."""
STEP_BYTES: Final = 16 * 1024
"""Room is taken in steps of so much."""


def ends(data: bytes, until: int) -> bool:
    """So many of these bytes, which end with one of ENDS, are an event's end. The line breaks may as well be those of a chunk's
    size and of what it begins with: of an event whose end is in a chunk of its own."""
    if not data.endswith(_ODD_ENDS, 0, until):
        return True
    found = _SIZED.search(data, max(0, until - _SIZED_BYTES), until)
    return found is None or (int(found[2], 16) == len(found[3]) and found[1] in (None, b"\n"))


def ends_whole(data: bytes) -> bool:
    """A read that ends with an event, or with the body. Nearly all end as engines write it: that is seen without the rest."""
    if data.endswith(CHUNK_END) and not data.endswith(_ODD_END):
        return True
    return data.endswith(ENDS) and ends(data, len(data))


def events_end(data: bytes, until: int) -> int:
    """Where the last chunk before `until` ends that ends with an event; 0: there is none."""
    return max(_last_end(data, until, end) for end in CHUNK_ENDS)


def _last_end(data: bytes, until: int, end: bytes) -> int:
    while (at := data.rfind(end, 0, until)) >= 0:
        if ends(data, at + len(end)):
            return at + len(end)
        until = at + len(end) - 1
    return 0


def ends_a_line(read: bytes) -> bool:
    """It ends with a chunk that ends with a line and a line break alone, CRLF both: a comment, a name. A chunk's size, behind
    which a line break alone may stand, has no colon."""
    until = len(read) - len(CRLF_END)
    return read.endswith(CRLF_END) and read.find(b":", max(0, read.rfind(b"\n", 0, until)), until) >= 0


def last_is_sound(read: bytes) -> bool:
    """The last event of a read that ends with one of CHUNK_ENDS is a JSON object, or no `data:` of it is seen here."""
    return _last_is_sound(read) or _last_is_sound(BETWEEN.sub(b"", read))


def _last_is_sound(read: bytes) -> bool:
    told = read.removesuffix(CHUNK_END if read.endswith(CHUNK_END) else CRLF_END)
    begins = max([found + len(end) for end in _BLANKS if (found := told.rfind(end)) >= 0], default=0)
    event = told[begins:]
    at = 0 if begins and event.startswith(_DATA) else event.rfind(b"\n" + _DATA) + 1
    if not event.startswith(_DATA, at) or (not at and not begins):
        return True  # what looks so may be text of a model
    payload = event[at + len(_DATA) :]
    return payload == _DONE or is_object(payload)


@dataclass
class Room:
    """What all streams of a process may keep together."""

    left: int = ROOM_BYTES


class Sent:
    """Of one stream. Reads are kept with their framing."""

    __slots__ = ("_joined", "_kept", "_rest", "_room", "_size", "_taken", "full", "version")
    carries: ClassVar[bool] = True
    """Another worker can go on with it."""
    event_most_bytes: ClassVar[int] = STREAM_MOST_BYTES // 2
    """An event without an end at that size is none: it goes to nobody."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._kept: list[bytes] = []
        self._joined = 0
        """So many of them are put together from several reads each."""
        self._size = self._taken = 0
        self._rest = b""
        self.full = False
        """It can be kept no longer."""
        self.version = ""
        """Of the adapter that says it; empty without one."""

    def whole(self, data: bytes) -> bytes:
        """One more read; what may go out: up to the end of its last event."""
        if self._rest or not ends_whole(data):
            data = self._up_to_an_end(self._rest + data)
        self.keep(data)
        return data

    def take_back(self, size: int, instead: bytes = b"") -> None:
        """So much of the end of the last read did not go out after all, but this `instead`."""
        if size and self._kept:
            last = self._kept.pop()
            self._kept.append(last[: len(last) - size] + instead)
            self._size += len(instead) - size

    def keep(self, data: bytes) -> None:
        """One more read whose framing is gone, and of which something else goes out."""
        self._kept.append(data)
        self._size += len(data)
        if len(self._kept) - self._joined >= READS_MOST:
            self._kept[self._joined :] = [b"".join(self._kept[self._joined :])]
            self._joined += 1
        if self._size > self._taken:
            self._take()

    def keep_only(self, data: bytes) -> None:
        """This is what the client has, and no more."""
        self._kept, self._size, self._joined, self._rest = [data], len(data), 0, b""

    def _up_to_an_end(self, data: bytes) -> bytes:
        at = len(data) if ends_whole(data) else events_end(data, len(data))
        self._rest = data[at:]
        return data[:at]

    def _take(self) -> None:
        step = -(-(self._size - self._taken) // STEP_BYTES) * STEP_BYTES
        self._taken += step
        self._room.left -= step
        self.full = self.full or self._taken > STREAM_MOST_BYTES or self._room.left < 0

    @property
    def held(self) -> bytes:
        """What is held back."""
        return self._rest

    def rest(self) -> bytes:
        """What was held back, when no more comes."""
        found, self._rest = self._rest, b""
        return found

    def kept(self) -> bytes:
        """All that the client has. What was held back is dropped: its sender is gone."""
        self._rest = b""
        return b"".join(self._kept)

    def forget(self) -> None:
        """The stream is over."""
        self._room.left += self._taken
        self._kept, self._size, self._taken, self._joined = [], 0, 0, 0


class Halves(Sent):
    """Of a stream that nobody can carry on nothing is kept but the half of an event, until its rest is there: a client that has
    half of one could not be told what became of the stream."""

    __slots__ = ()
    carries: ClassVar[bool] = False
    event_most_bytes: ClassVar[int] = 2 * STREAM_MOST_BYTES

    def whole(self, data: bytes) -> bytes:
        """See `Sent`."""
        if not self._rest and ends_whole(data):
            return data
        return self._up_to_an_end(self._rest + data)
