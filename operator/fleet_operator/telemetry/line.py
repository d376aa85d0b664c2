"""Connections that somebody else may end while a thread waits on them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading


class Line:
    """The connections of one question; `hang_up` ends them from any thread, those not yet made, too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._over = False
        self.reached = False
        """There was a connection: whoever waits on it ends soon after `hang_up`."""

    def keep(self, opened: socket.socket) -> None:
        """Remember a connection, by a handle of its own: TLS takes the first one over."""
        with self._lock:
            self.reached = True
            self._sockets.append(socket.socket(fileno=os.dup(opened.fileno())))
            if self._over:
                self._close()

    def hang_up(self) -> None:
        """Whoever reads from these connections gets an error. May be called again."""
        with self._lock:
            self._over = True
            self._close()

    def _close(self) -> None:
        for kept in self._sockets:
            with contextlib.suppress(OSError):  # the server has left already
                kept.shutdown(socket.SHUT_RDWR)
            kept.close()
        self._sockets.clear()
