"""TLS handshakes under way: bounded, for they hold a socket each before there is a connection to count.

A client's handshake takes milliseconds. Where too many are under way the oldest gives way: it is the one that hardly ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable, Iterable

ACCEPTED_MOST = 64
"""Connections that are taken in one turn of the loop; others run in between."""
AGAIN_S = 1.0
"""When no file is left to accept one with: tried again."""
NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Handshakes:
    """Of one port. `room`: how many may be under way now; `timeout_s`: how long one may take, `shutdown_s`: its end."""

    def __init__(
        self, factory: Callable[[], asyncio.BaseProtocol], room: Callable[[], int], timeout_s: float, shutdown_s: float
    ) -> None:
        self._factory, self._room = factory, room
        self._timeout_s, self._shutdown_s = timeout_s, shutdown_s
        self._running: dict[asyncio.Task[None], socket.socket | None] = {}
        """Oldest first; with the sockets of those that have yet to begin."""
        self.dropped = 0
        """Those that gave way."""

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, accepted: socket.socket, context: ssl.SSLContext) -> None:
        """The oldest ones end where it is one too many."""
        running = self._running
        while running and len(running) >= self._room():
            oldest = next(iter(running))
            unmet = running.pop(oldest)
            oldest.cancel()
            if unmet is not None:
                unmet.close()
            self.dropped += 1
        task = asyncio.get_running_loop().create_task(self._shake(accepted, context))
        running[task] = accepted
        task.add_done_callback(lambda done: running.pop(done, None))

    def lines(self) -> Iterable[str]:
        """Prometheus text."""
        yield "# TYPE fleet_router_handshakes gauge"
        yield f"fleet_router_handshakes {len(self)}"
        yield "# TYPE fleet_router_handshakes_dropped_total counter"
        yield f"fleet_router_handshakes_dropped_total {self.dropped}"

    async def _shake(self, accepted: socket.socket, context: ssl.SSLContext) -> None:
        """It may leave, or its handshake fail or take too long."""
        if (mine := asyncio.current_task()) is not None:
            self._running[mine] = None
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._factory, accepted, ssl=context,
                ssl_handshake_timeout=self._timeout_s, ssl_shutdown_timeout=self._shutdown_s,
            )  # fmt: skip


class Listener:
    """Takes what comes to one listening socket, as a loop's own server does; the socket is its own."""

    def __init__(self, opened: socket.socket, handshakes: Handshakes, context: ssl.SSLContext) -> None:
        self._socket, self._handshakes, self._context = opened, handshakes, context
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        self._loop.add_reader(opened, self._accept)

    def close(self) -> None:
        """Whose handshake has begun goes on."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_MOST):
            try:
                accepted, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in NO_FILES:
                    raise
                self._loop.remove_reader(self._socket)
                self._again = self._loop.call_later(AGAIN_S, self._loop.add_reader, self._socket, self._accept)
                return
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._handshakes.begin(accepted, self._context)
