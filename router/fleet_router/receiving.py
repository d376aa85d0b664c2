"""What has come and cannot be answered yet, of all connections of this process: bodies in part, and bytes behind a request that
is being answered. Nobody was asked for a key yet, or it was another request's, so that together they need a bound. Small ones are
always taken, lest whoever sends many large ones slowly keep others out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

FREE_BYTES: Final = 65_536
"""One that is no longer is never refused for what others hold."""
NO_ROOM: Final = "too many long requests are being received at the moment"
PIECE_BYTES: Final = 256
PIECES_FEW: Final = 64
"""So many are kept apart, however small."""


def fewer(pieces: list[bytes], size: int) -> list[bytes]:
    """Of a body of `size` bytes. A piece takes some 50 bytes beside its own, which nobody counts: small ones are put together, so
    seldom that for each that comes no more than PIECE_BYTES are copied."""
    small = len(pieces) > PIECES_FEW and len(pieces) * PIECE_BYTES > size
    return [b"".join(pieces)] if small else pieces


class Receiving:
    """How many bytes they have together."""

    __slots__ = ("bytes", "refused")

    def __init__(self) -> None:
        self.bytes = 0
        self.refused = 0
        """Requests, for want of room."""

    def room(self, before: int, now: int, most_bytes: int) -> bool:
        """One that had `before` bytes has `now`. False when there is no room for it: it counts no longer."""
        self.bytes += now - before
        if now <= before or now <= FREE_BYTES or self.bytes <= most_bytes:
            return True
        self.bytes -= now
        self.refused += 1
        return False

    def lines(self) -> Iterator[str]:
        """Prometheus text."""
        yield "# TYPE fleet_router_receiving_bytes gauge"
        yield f"fleet_router_receiving_bytes {self.bytes}"
        yield "# TYPE fleet_router_receiving_refused_total counter"
        yield f"fleet_router_receiving_refused_total {self.refused}"


class Waiting:
    """Bytes of one connection that nobody has read: a request is being answered, or the client does not take its answers."""

    __slots__ = ("_data", "_receiving")

    def __init__(self, receiving: Receiving) -> None:
        self._data = bytearray()
        self._receiving = receiving

    def __len__(self) -> int:
        return len(self._data)

    def add(self, data: bytes, most_bytes: int) -> bool:
        """Behind those that are there. False when there is no room for them: none is kept."""
        before = len(self._data)
        if self._receiving.room(before, before + len(data), most_bytes):
            self._data += data
            return True
        self._data = bytearray()
        return False

    def take(self) -> bytes:
        """All of them; they count no longer."""
        data, self._data = bytes(self._data), bytearray()
        self._receiving.bytes -= len(data)
        return data
