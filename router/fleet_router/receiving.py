"""Bodies that have come in part, of all connections of this process: nobody was asked for a key yet, so that together they need a
bound. Small ones are always taken, lest whoever sends many large ones slowly keep others out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

FREE_BYTES: Final = 65_536
"""One that is no longer is never refused for what others hold."""
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
