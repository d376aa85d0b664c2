"""Reads of one stream that come thick and fast are put together, as network cards do with packets.

What a read costs, and above all the write that follows it (it wakes the client), is the same for one event as for fifty. An
engine makes a token every few milliseconds: nothing of that waits here. Events that had piled up somewhere come in hundreds
within a millisecond, and who gets one of them a millisecond later gets the next ones with it.
"""

from __future__ import annotations

from typing import Final

FLOOD_S: Final = 0.001
"""Reads no further apart are a flood. After so long a timer fetches what waits: how late the loop is comes to that."""
FEW: Final = 4
"""So many are handed on at once however fast they come: a role, a first token, the tokens of one speculative step."""
MOST_BYTES: Final = 16_384
"""So much waits for no more."""
LAST_CHUNK: Final = b"0\r\n\r\n"
"""Nothing comes behind it that it could wait for."""


class Flood:
    """Of one connection: what was read and nobody was told of yet."""

    __slots__ = ("_at", "_fast", "_waiting", "armed", "bytes")

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        self.bytes = self._fast = 0
        """How long it is; reads in a row that came fast."""
        self._at = 0.0
        """When something was handed on last."""
        self.armed = False
        """Somebody will come for it."""

    def holds(self, data: bytes, now: float) -> bool:
        """Whether this read waits for others, kept here. False: it is to be handed on, behind those that wait (`take`)."""
        if now - self._at >= FLOOD_S and not self.bytes:
            self._at, self._fast = now, 0
            return False
        self._fast += 1
        if self._fast <= FEW or self.bytes + len(data) >= MOST_BYTES or data.endswith(LAST_CHUNK):
            self._at = now
            return False
        self._waiting.append(data)
        self.bytes += len(data)
        return True

    def take(self, now: float, data: bytes = b"") -> bytes:
        """All that waits, and `data` behind it."""
        waiting, self._waiting, self.bytes, self._at = self._waiting, [], 0, now
        waiting.append(data)
        return b"".join(waiting)

    def forget(self) -> None:
        """The answer is nobody's any more, or another one comes."""
        self._waiting, self.bytes, self._fast, self._at = [], 0, 0, 0.0
