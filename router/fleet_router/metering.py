"""Tokens of an answer: kept where its usage stands, or counted by its events, whatever comes first."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Final

from fleet_router.admission.usage import (
    EITHER,
    EVENT,
    SHORT_BYTES,
    SPLIT_BYTES,
    TAIL_BYTES,
    TOLD,
    TOLD_LAST,
    cut_in_two,
    tells_usage,
    usage_in,
    usage_of,
    used_tokens,
    with_usage,
)
from fleet_router.ending import without_usage
from fleet_router.request import asked_tokens

if TYPE_CHECKING:
    from fleet_router.admission.gate import Ticket
    from fleet_router.ask import Ask
    from fleet_router.desk import Desk
    from fleet_router.dialect.translation import Translation

SOUND_END: Final = b"}\n\n\r\n"
"""Of nearly every read of a stream."""
LAST_ENDS: Final[tuple[bytes, ...]] = (b"data: [DONE]\n\n\r\n", b"\r\n0\r\n\r\n", b"data: [DONE]\r\n\r\n\r\n")
SOUND_ENDS: Final = (SOUND_END, *LAST_ENDS)


class Metering(ABC):  # noqa: B024 - what is abstract of an answer comes in its heirs
    """One answer, as far as it is paid for."""

    __slots__ = ("_ask", "_before", "_events", "_hides", "_metered", "_runaway", "_tail", "_ticket", "_told", "_translation")

    def __init__(self, desk: Desk, ask: Ask, ticket: Ticket, translation: Translation | None) -> None:
        self._metered = desk.tenants_needed
        self._hides = False
        """The stream tells its usage, for which its client did not ask."""
        if ask.stream and self._metered:
            ask, self._hides = self._usage_asked(ask)
        self._ask = ask
        """What is asked of workers."""
        self._ticket = ticket
        self._translation = translation
        self._runaway = desk.detector(ticket, ask) if ask.stream else None
        self._told: tuple[int, int] | None = None
        """Tokens (input, output) of an answer in one piece, or of a stream that tells them to us alone, once they were seen."""
        self._events = 0
        self._before = self._tail = b""
        """The last two reads of the answer, a short one together with the next: its usage and [DONE] stand there."""

    @staticmethod
    def _usage_asked(ask: Ask) -> tuple[Ask, bool]:
        """The stream as it is asked for, and whether its usage is for us alone."""
        return with_usage(ask)

    def _without_usage(self, data: bytes, *, whole: bool) -> bytes:
        """What the client asked for; the rest is what we asked for. `whole`: no event is cut in two by these chunks."""
        at = max(0, len(data) - TAIL_BYTES)  # behind it comes [DONE] and no more
        told = data.find(EITHER, at) >= 0 and (data.find(TOLD, at) >= 0 or data.find(TOLD_LAST, at) >= 0)
        if not told and (whole or not (cut_in_two(data) and tells_usage(data[at:]))):
            return data  # `in` raises and catches an error first
        shown, used = without_usage(data)
        self._told = used or self._told
        return shown

    def _count_tokens(self, data: bytes, sound: bool) -> None:
        """Keep where the usage stands, and count events where nobody else does. An answer in one piece may tell it anywhere."""
        if not data:
            return
        if self._ask.stream:
            if self._metered and (self._runaway is None or not sound):
                self._events += data.count(EVENT)
            if len(self._tail) > SHORT_BYTES:
                self._before = self._tail
            elif self._tail:
                data = self._tail + data
        elif self._metered:
            joined = self._before + data
            self._told, self._before = usage_in(joined) or self._told, joined[-SPLIT_BYTES:]
        self._tail = data

    def _used(self) -> tuple[int, int]:
        """Tokens (input, output) of the answer; its events are counted once: by the detector of loops, where that finds any."""
        told = self._told if self._translation is None else self._translation.used
        if told is None and not self._ask.stream:
            told = usage_in(self._tail)
        if told is not None:
            return told
        events = 0 if self._runaway is None else self._runaway.events
        if not events:
            missed = self._runaway is not None and self._tail.endswith(SOUND_ENDS)
            events = self._events + (self._tail.count(EVENT) if missed else 0)
        return used_tokens(self._before, self._tail, events, self._ticket.charged)

    def _written(self, most: int) -> int:
        """Tokens of an answer in one piece, as it tells them in its last 4 KiB; 0 where it does not, or says that it wrote more
        than it was asked for (`most`, where the client set no limit)."""
        told = self._told if self._translation is None else self._translation.used
        told = told or usage_of(self._tail)
        return 0 if told is None or told[1] > (asked_tokens(self._ask) or most) else told[1]
