"""Connections above the bound. Probes come on new connections: a router with as many clients as it may have was not ready, then
killed as one that hangs, and all of its streams with it. So a few more are asked what they want: who probes is answered, others
are told that there are too many connections. One that says nothing gives way to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from fleet_router.closing import Lingering, close
from fleet_router.config import HttpBounds
from fleet_router.errors import RequestError, error_json

SPARES_MOST: Final = 64
HEAD_MOST_BYTES: Final = 4_096
PROBES: Final = (b"GET /health ", b"GET /ready ", b"HEAD /health ", b"HEAD /ready ")
TOO_MANY: Final = RequestError(503, "too many connections", code="connections")
WORDS: Final = {200: b"OK", 503: b"Service Unavailable"}

Plain = Callable[[bytes], tuple[int, bytes, bytes]]
"""Path → status, content type, body."""


class Spares:
    """Of one process. `answers`: its answers by status."""

    def __init__(self, answers: dict[int, int]) -> None:
        self.answers = answers
        self._open: dict[Spare, None] = {}
        """Oldest first."""

    def __len__(self) -> int:
        return len(self._open)

    def take(self, transport: asyncio.Transport, there: int, bounds: HttpBounds, plain: Plain, *, admin: bool) -> bool:
        """It is one of these from now on, because so many connections are there; False: it is not. On the port for probes and
        scrapes (`admin`) some more may be there."""
        if there < bounds.connections + (SPARES_MOST if admin else 0):
            return False
        if len(self._open) >= SPARES_MOST:
            next(iter(self._open)).end()
        one = Spare(self, transport, plain, bounds)
        self._open[one] = None
        transport.set_protocol(one)
        return True

    def left(self, one: Spare) -> None:
        """It is over."""
        self._open.pop(one, None)


class Spare(asyncio.Protocol):
    """One of them: its head is read, up to its end or until it is seen to be no probe's, and answered once."""

    def __init__(self, spares: Spares, transport: asyncio.Transport, plain: Plain, bounds: HttpBounds) -> None:
        self._spares, self._transport, self._plain, self._bounds = spares, transport, plain, bounds
        self._head = b""
        self._lingering: Lingering | None = None
        self._loop = asyncio.get_running_loop()
        self._late = self._loop.call_later(bounds.header_deadline_s, self.end)

    def data_received(self, data: bytes) -> None:
        """Of the head, or of what nobody reads any more."""
        if self._lingering is not None:
            self._lingering.read(len(data))
            return
        self._head += data
        at, probe = self._head.find(b"\r\n\r\n"), self._may_probe()
        if probe and at < 0 and len(self._head) <= HEAD_MOST_BYTES:
            return
        if probe and at >= 0:
            status, kind, body = self._plain(self._head.split(b" ", 2)[1])
        else:
            status, kind, body = TOO_MANY.status, b"application/json", error_json(TOO_MANY, "")
        self._answer(status, kind, body)

    def connection_lost(self, _exc: Exception | None) -> None:
        """It is over."""
        self._late.cancel()
        self._spares.left(self)

    def end(self) -> None:
        """It has had its time."""
        self._late.cancel()
        self._spares.left(self)
        self._transport.close()

    def _may_probe(self) -> bool:
        return any(self._head.startswith(probe) or probe.startswith(self._head) for probe in PROBES)

    def _answer(self, status: int, kind: bytes, body: bytes) -> None:
        self._spares.answers[status] += 1
        head = b"HTTP/1.1 %d %b\r\ncontent-length: %d\r\nconnection: close\r\n" % (
            status,
            WORDS.get(status, b"Status"),
            len(body),
        )
        head += b"retry-after: 1\r\n" * (status == 503) + b"content-type: " + kind + b"\r\n\r\n"
        self._transport.write(head + (b"" if self._head.startswith(b"HEAD ") else body))
        self._late.cancel()
        self._late = self._loop.call_later(self._bounds.linger_s, self.end)
        self._lingering = close(self._transport, self._bounds, self._loop.time(), more=True)
