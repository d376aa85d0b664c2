"""HTTP connections within bounds: a peer that is silent, speaks too slowly, or takes nothing of its answer keeps no connection,
and one that opens many keeps nobody else from being answered. uvicorn has neither; its limit_concurrency answers 503 to whoever
comes late, probes included."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import struct
import termios
from dataclasses import dataclass
from typing import Any

import h11
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from fleet_worker.heads import StrictConnection

STALLED_S = 75.0
"""Longer than a router waits for its own client (HttpBounds.stalled_client_s), of which it can tell more."""
LINGER_S, LINGER_BYTES = 10.0, 64 * 1024 * 1024
"""How long, and for how much, one is heard whose request was refused before its end: with a connection that is closed on what
was not read goes the refusal (RFC 9112, 9.6)."""
LAST = {"connection": "close"}
"""Of an answer before its request's end, and of one that no other request should follow: the rest of the body is nobody's."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one port."""

    receive_s: float
    """A request is here whole, head and body, so long after its connection, or its own first byte when others came before."""
    most: int
    most_of_peer: int
    may_cut: bool
    """When too many are open and none is idle: True ends the one that is open longest, False the one that came last."""
    spared: frozenset[str] = frozenset()
    """Addresses whose connections are neither counted nor ended for others."""
    stalled_s: float = STALLED_S
    """So long a peer may take no byte of its answer while our buffers for it are full."""


def files_for_connections() -> int:
    """Most connections that leave some of this process's files for everything else."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4


class Gate:
    """Who is connected to one port."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._peers: dict[str, dict[BoundedProtocol, None]] = {}
        self._open = 0

    def enter(self, connection: BoundedProtocol) -> BoundedProtocol | None:
        """Who has to go for it, if anybody: of its own peer when that one has its share, else of the peer that has most. Idle
        connections go first, the oldest of them."""
        if connection.peer in self.bounds.spared:
            return None
        own = self._peers.setdefault(connection.peer, {})
        own[connection] = None
        self._open += 1
        if len(own) > self.bounds.most_of_peer:
            return self._leaver(own, connection)
        if self._open > self.bounds.most:
            return self._leaver(max(self._peers.values(), key=len), connection)
        return None

    def _leaver(self, among: dict[BoundedProtocol, None], newest: BoundedProtocol) -> BoundedProtocol:
        others = [one for one in among if one is not newest]
        idle = next((one for one in others if not one.is_answering()), None)
        if idle is not None:
            return idle
        return others[0] if others and self.bounds.may_cut else newest

    def leave(self, connection: BoundedProtocol) -> None:
        """It is closed; once is enough."""
        own = self._peers.get(connection.peer, {})
        if connection in own:
            del own[connection]
            self._open -= 1
            if not own:
                del self._peers[connection.peer]


def is_too_long(request: Request, most: int) -> bool:
    """Its head says that its body is longer: nothing of that has to be read."""
    told = request.headers.get("content-length", "")
    return told.isdecimal() and int(told) > most


class _Lingering:
    """A transport whose close() asks its connection first."""

    def __init__(self, transport: asyncio.Transport, connection: BoundedProtocol) -> None:
        self._transport = transport
        self._connection = connection
        self.write = transport.write  # for every chunk of every answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Also while it lingers."""
        return self._connection.lingers or self._transport.is_closing()

    def close(self) -> None:
        """Now, or when the rest of the request is here."""
        if not self._connection.linger():
            self._transport.close()


class BoundedProtocol(H11Protocol):
    """A connection that ends when its request does not come; `bounded` makes the class of a port."""

    gate: Gate
    peer = ""
    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _lingering: asyncio.TimerHandle | None = None
    _unheard = 0

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.conn = StrictConnection(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It counts from now on."""
        super().connection_made(_Lingering(transport, self))  # type: ignore[arg-type]
        self.peer = self.client[0] if self.client is not None else ""
        leaver = self.gate.enter(self)
        if leaver is not None:
            leaver.end()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """A part of a request, or of one that was refused."""
        if self.lingers:
            self._unheard += len(data)
            if self._unheard > LINGER_BYTES:
                self.end()
            return
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Whose request turns out to be none gets no other answer: its application hears that the client left. Behind an answer
        that has begun nothing can be said."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        """Never, and without uvicorn's two lines for each who asks: Java's client does with every request."""
        return False

    @property
    def lingers(self) -> bool:
        """The answer is out, and the rest of the request is heard for nothing."""
        return self._lingering is not None

    def linger(self) -> bool:
        """False: nothing is on its way any more, or it has been waited for."""
        if self.lingers or self.transport.is_closing() or self.conn.their_state not in (h11.SEND_BODY, h11.ERROR):
            return False
        self._lingering = self.loop.call_later(LINGER_S, self.end)
        self.transport.write_eof()
        self.transport.resume_reading()
        self._watch()
        return True

    def on_response_complete(self) -> None:
        """The next request may be here already."""
        super().on_response_complete()
        self._watch()
        if self.transport.get_write_buffer_size():  # too little to pause anything, and it may stay for ever
            self._look_again(self._untaken())

    def connection_lost(self, exc: Exception | None) -> None:
        """Gone."""
        self.gate.leave(self)
        for timer in (self._late, self._stalled, self._lingering):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Our buffer for the peer is full."""
        super().pause_writing()
        self._look_again(self._untaken())

    def resume_writing(self) -> None:
        """It took enough for more to be said. Behind an answer that was told to its end nothing comes: the rest is to go, too."""
        super().resume_writing()
        if self._stalled is not None and self.is_answering():
            self._stalled.cancel()

    def _look_again(self, left: int) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        self._stalled = self.loop.call_later(self.gate.bounds.stalled_s, self._is_taking, left)

    def _is_taking(self, before: int) -> None:
        """An answer that nobody takes would be open, and its worker not empty, for ever."""
        if not self.transport.get_write_buffer_size():
            return  # what the kernel has is its own to send, or to give up
        if (left := self._untaken()) < before:
            self._look_again(left)
        else:
            self.end()

    def _untaken(self) -> int:
        """Bytes that the peer's system has not taken: ours and the kernel's (tcp(7): SIOCOUTQ, which is TIOCOUTQ)."""
        queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int(struct.unpack("i", queued)[0])

    def is_answering(self) -> bool:
        """A request came, and its answer is not told to the end."""
        return self.cycle is not None and not self.cycle.response_complete

    def end(self) -> None:
        """Now, whatever is on its way; it counts no more."""
        self.gate.leave(self)
        self.transport.abort()

    def _watch(self) -> None:
        if self._is_owed() and not self.transport.is_closing():
            if self._late is None:
                self._late = self.loop.call_later(self.gate.bounds.receive_s, self.end)
        elif self._late is not None:
            self._late.cancel()
            self._late = None

    def _is_owed(self) -> bool:
        """A request, or the rest of one. Between two requests uvicorn's keep-alive timer runs."""
        state = self.conn.their_state
        return self.cycle is None or state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))


NO_HTTP = "Invalid HTTP request received."


class _FewOf(logging.Filter):
    """Of uvicorn's words on what is no HTTP only the 1st, 2nd, 4th, 8th... are written, as in transfer/faults.py."""

    total = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != NO_HTTP:
            return True
        self.total += 1
        record.msg = f"{NO_HTTP} ({self.total} so far)"
        return self.total & (self.total - 1) == 0


_FEW = _FewOf()


def bounded(bounds: Bounds) -> type[BoundedProtocol]:
    """For uvicorn.Config(http=...)."""
    logging.getLogger("uvicorn.error").addFilter(_FEW)  # the same one again is none more

    class OfOnePort(BoundedProtocol):
        gate = Gate(bounds)

    return OfOnePort
