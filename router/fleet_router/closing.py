"""How a client's connection ends: whoever is refused while it still sends must be able to read why.

A socket that is closed with bytes unread, or that gets some afterwards, is reset, and the reset may reach a client before it has
read its answer, or while it writes and is not looking. So our half is closed first, and what comes is read and thrown away for a
while (RFC 9112, 9.6).
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from math import inf
from typing import Final

from fleet_router.config import HttpBounds

ASKED_EACH_S: Final = 5
TCP_CLOSE: Final = 7
"""TCP_INFO's first byte once the peer has answered with a reset."""
UNTOLD_LINGER_S: Final = 1.0
"""Of a connection without a request, whose client was not told that it ends: what is on its way is there by then."""
SENT_BYTES: Final = 4_096
"""With no more than these in the kernel it has room, so that a loop keeps nothing between TLS and the socket, of which nobody is
told. What the kernel has it sends, whatever becomes of the connection."""
SENDING_TIMES: Final = 6
"""Times as long at most, of one that goes on sending."""
NOTHING: Final = bytes(4)
NEVER: Final = -inf


class Lingering:
    """One connection whose last answer is written; it ends when its client closes, at the latest at the bounds. Who still sends
    has longer: a request that comes slowly is read to its end, as it was when it was not yet refused. So has, over TLS, who has
    not taken all of the answer: loops give the end of TLS seconds, and throw away what waits then (see `stalled_client_s`)."""

    __slots__ = ("_came", "_flushes", "_latest", "_left_bytes", "_linger_s", "_transport", "_until")

    def __init__(self, transport: asyncio.Transport, bounds: HttpBounds, now: float, linger_s: float) -> None:
        self._transport, self._left_bytes, self._linger_s = transport, bounds.linger_bytes, linger_s
        self._until, self._latest = now + linger_s, now + SENDING_TIMES * linger_s
        self._came, self._flushes = False, transport.can_write_eof()
        if self._flushes:  # TLS has no half here: its clients go by the answer's length and `connection: close`
            transport.write_eof()
        transport.resume_reading()

    def read(self, size_bytes: int) -> None:
        """So much came, and goes to nobody. Over TLS a loop that is told to close reads on until the other end has closed, too,
        for seconds: who has taken its answer and still sends is cut off."""
        self._came = True
        self._left_bytes -= size_bytes
        if self._left_bytes < 0 and not self._transport.is_closing():
            if self._flushes or untaken(self._transport):
                self._transport.close()
            else:
                self._transport.abort()

    def sweep(self, now: float) -> None:
        """Called twice a second."""
        if self._came:
            self._came, self._until = False, min(now + self._linger_s, self._latest)
        if now > self._until:
            self.end()

    def end(self) -> None:
        """Close it, unless some of the answer would be lost by that. TLS only once: asyncio forgets all of it at the second."""
        if self._flushes or (not self._transport.is_closing() and untaken(self._transport) <= SENT_BYTES):
            self._transport.close()


class Taking:
    """Whether a client takes some of what was written to it, however slowly: who reads all the time is not to be cut off because
    the answer is long, or because it works on each event before it reads the next one."""

    __slots__ = ("_at", "_left_bytes")

    def __init__(self) -> None:
        self._at = NEVER
        self._left_bytes = 0
        """When it was last looked."""

    def last(self, transport: asyncio.Transport | None, now: float) -> float:
        """When it was last seen to have taken some. Called twice a second."""
        before, self._left_bytes = self._left_bytes, untaken(transport)
        if self._left_bytes < before:
            self._at = now
        return self._at


def untaken(transport: asyncio.Transport | None) -> int:
    """Bytes that were written and are not at the client's host: ours, and the kernel's, which takes none of ours before a third
    of its own are gone, of megabytes where the client was quick once."""
    made = transport.get_extra_info("socket") if transport is not None else None
    try:
        kernels = 0 if made is None else int.from_bytes(fcntl.ioctl(made.fileno(), termios.TIOCOUTQ, NOTHING), sys.byteorder)
    except (OSError, ValueError):  # it is closed
        kernels = 0
    return kernels + (transport.get_write_buffer_size() if transport is not None else 0)


def close(
    transport: asyncio.Transport, bounds: HttpBounds, now: float, *, more: bool, idle: bool = False
) -> Lingering | None:  # fmt: skip
    """At once; `more`: the client may still send, so only when it was read for a while.

    `idle`: the client was not told, and may send a request at this moment. It finds the end of a connection on which it has read
    no byte of an answer, behind which clients ask again, also what is not idempotent; and not a reset. TLS has no half here: the
    sooner its client hears of the end the better.
    """
    if more and not idle:
        return Lingering(transport, bounds, now, bounds.linger_s)
    if idle and transport.can_write_eof():
        return Lingering(transport, bounds, now, min(UNTOLD_LINGER_S, bounds.linger_s))
    if transport.can_write_eof():
        transport.close()
        return None
    lingering = Lingering(transport, bounds, now, 0.0)
    asyncio.get_running_loop().call_soon(lingering.end)  # by then the loop has made the write that it put off
    return lingering


def unread(transport: asyncio.Transport | None) -> bool:
    """Something came that the loop has not told of yet: it was busy, and timers run before sockets are read."""
    made = transport.get_extra_info("socket") if transport is not None else None
    try:
        return made is not None and fcntl.ioctl(made.fileno(), termios.FIONREAD, NOTHING) != NOTHING
    except OSError:
        return False


def ask_if_there(transport: asyncio.Transport | None) -> None:
    """Of a client that closed its half and leaves later nobody is told. Its kernel says so when it is asked (keepalive, RFC 9293,
    3.8.4), with a reset, once it has forgotten the connection (Linux: a minute)."""
    made = transport.get_extra_info("socket") if transport is not None else None
    if made is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            made.setsockopt(socket.IPPROTO_TCP, option, ASKED_EACH_S)


def pause(transport: asyncio.Transport) -> None:
    """Nothing more is read for now, also not the end of a client that leaves: its kernel is asked for it."""
    transport.pause_reading()
    ask_if_there(transport)


def is_paused(transport: asyncio.Transport | None) -> bool:
    """Nothing more is read from it, whether what came waits or was refused: nobody tells that its client left."""
    return transport is not None and not transport.is_reading()


def reset_by_client(transport: asyncio.Transport | None) -> bool:
    """The client of a connection that is half closed, or not read, has sent a reset: it is gone."""
    made = transport.get_extra_info("socket") if transport is not None else None
    return made is not None and bool(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE)
