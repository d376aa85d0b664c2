"""What the router sees of one answer while it hands it on: its events, its last bytes, and whether it runs away."""

from __future__ import annotations

from typing import Final

from fleet_router.admission.runaway import Runaway, Why
from fleet_router.admission.usage import usage_of

EVENT: Final = b"\ndata: "
"""Inside JSON a line break is escaped, so that text cannot look like an event."""
CHUNK_END: Final = b"\n\n\r\n"
"""A read that ends so ends a chunk after a whole event: the only place where something else may follow."""


class Watch:
    """One answer."""

    __slots__ = ("_before", "_events", "_runaway", "_tail", "_why")

    def __init__(self, runaway: Runaway | None) -> None:
        self._runaway = runaway
        self._events = 0
        self._before = self._tail = b""
        self._why: Why | None = None

    def saw(self, data: bytes) -> Why | None:
        """More bytes, with their transfer framing. Why the answer should end right behind them, if it should."""
        self._before, self._tail = self._tail, data
        self._events += data.count(EVENT)
        if self._runaway is None:
            return None
        self._why = self._why or self._runaway.saw(data)
        return self._why if self._why is not None and data.endswith(CHUNK_END) else None

    def used(self, estimated_input: int) -> tuple[int, int]:
        """(input, output) tokens: the engine's own count, else an estimate with a token per event ([DONE] is one, too)."""
        return usage_of(self._before + self._tail) or (estimated_input, max(0, self._events - 1))
