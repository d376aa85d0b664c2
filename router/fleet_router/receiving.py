"""What has come and cannot be answered yet, of all connections of this process: bodies in part, and bytes behind a request that
is being answered. Nobody was asked for a key yet, or it was another request's, so that each kind has a bound for all together.
Small ones are always taken, lest whoever sends many large ones slowly keep others out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

FREE_BYTES: Final = 65_536
"""One that is no longer is never refused for what others hold."""
RECEIVING: Final = ("fleet_router_receiving_bytes", "fleet_router_receiving_refused_total")
UNREAD: Final = ("fleet_router_unread_bytes", "fleet_router_unread_refused_total")
WAITING_BYTES: Final = 65_536
"""Above this nothing more is read from a client whose request is running."""
HIGH_WATER_BYTES: Final = 65_536
"""Of answers that their client has not taken: above this no more are made for it, and its worker waits."""
TURN_MOST: Final = 64
"""Requests of a connection that are answered at once: a packet may have 9,000, and those of others would wait for 75 ms."""
NO_ROOM: Final = "too many long requests are being received at the moment"
NO_ROOM_TO_WAIT: Final = "too much waits at the moment behind requests that are being answered"
PIECE_BYTES: Final = 256
WAITING_SHARE: Final = 4
"""Of what bodies in part may have, a quarter may wait unread: it is nobody's yet, and must not keep bodies out."""
PIECES_FEW: Final = 64
"""So many are kept apart, however small."""


def fewer(pieces: list[bytes], size: int) -> list[bytes]:
    """Of a body of `size` bytes. A piece takes some 50 bytes beside its own, which nobody counts: small ones are put together, so
    seldom that for each that comes no more than PIECE_BYTES are copied."""
    small = len(pieces) > PIECES_FEW and len(pieces) * PIECE_BYTES > size
    return [b"".join(pieces)] if small else pieces


class Receiving:
    """How many bytes they have together."""

    __slots__ = ("_names", "bytes", "refused")

    def __init__(self, names: tuple[str, str] = RECEIVING) -> None:
        self._names = names
        """Of its metrics: bytes, and requests that were refused."""
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
        held, refused = self._names
        yield f"# TYPE {held} gauge"
        yield f"{held} {self.bytes}"
        yield f"# TYPE {refused} counter"
        yield f"{refused} {self.refused}"


class Waiting:
    """Bytes of one connection that nobody has read: a request is being answered, or the client does not take its answers."""

    __slots__ = ("_data", "_receiving")

    def __init__(self, receiving: Receiving) -> None:
        self._data = bytearray()
        self._receiving = receiving

    def __len__(self) -> int:
        return len(self._data)

    def add(self, data: bytes, most_bytes: int) -> bool:
        """Behind those that are there. False when there is no room for them: none is kept. `most_bytes`: of bodies in part."""
        before = len(self._data)
        if self._receiving.room(before, before + len(data), most_bytes // WAITING_SHARE):
            self._data += data
            return True
        self._data = bytearray()
        return False

    def put_back(self, data: bytes) -> None:
        """What was taken and could not be read yet: there is room for it."""
        self._data += data
        self._receiving.bytes += len(data)

    def take(self) -> bytes:
        """All of them; they count no longer."""
        data, self._data = bytes(self._data), bytearray()
        self._receiving.bytes -= len(data)
        return data
