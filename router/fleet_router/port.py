"""The port: one listening socket, served through duplicates of it, so that certificates change while the kernel's queue of
clients stays and no connection notices."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any

from fleet_router.handshakes import Handshakes, Listener

BACKLOG = 4_096
HANDSHAKE_S = 10.0
LAST_HANDSHAKE_S = 2.0
"""Of those that came while we went."""
SHUTDOWN_S = 2.0
"""For a client's own end of TLS."""
EVERY = "::"
"""Every address of the machine, IPv4's as well: there ::ffff:10.0.0.1 is a client at 10.0.0.1."""


class Port:
    """`shared`: other processes listen on the same port; the kernel spreads connections over them. `room`: how many TLS
    handshakes may be under way now."""

    def __init__(
        self, host: str, port: int, factory: Callable[[], asyncio.BaseProtocol], *, shared: bool = False,
        room: Callable[[], int] = lambda: BACKLOG,
    ) -> None:  # fmt: skip
        self.host, self.port, self._factory, self._shared = host, port, factory, shared
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server | Listener] = []
        self._context: ssl.SSLContext | None = None
        self.handshakes = Handshakes(factory, room, HANDSHAKE_S, SHUTDOWN_S)

    async def open(self, context: ssl.SSLContext | None) -> None:
        """Bind and serve; OSError when the address is taken. `context` None: plain HTTP."""
        rows = await asyncio.get_running_loop().getaddrinfo(
            self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )  # fmt: skip
        try:
            for family, address in dict.fromkeys((row[0], row[4]) for row in rows):
                self._sockets.append(listening(family, address, shared=self._shared))
        except OSError:
            self._drop()
            raise
        await self.serve(context)

    async def serve(self, context: ssl.SSLContext | None) -> None:
        """From now on new connections are met with this; those that are there go on as they began. OSError: nothing has
        changed."""
        made: list[asyncio.Server | Listener] = []
        try:
            for one in self._sockets:
                made.append(await self._server(one.dup(), context))
        except OSError:
            for server in made:
                server.close()
            raise
        before, self._servers, self._context = self._servers, made, context
        for server in before:
            server.close()

    async def _server(self, opened: socket.socket, context: ssl.SSLContext | None) -> asyncio.Server | Listener:
        try:
            if context is not None:
                return Listener(opened, self.handshakes, context)
            return await asyncio.get_running_loop().create_server(self._factory, sock=opened, backlog=BACKLOG)
        except OSError:
            opened.close()
            raise

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each socket."""
        return [one.getsockname()[:2] for one in self._sockets]

    async def close(self) -> None:
        """Stop listening. Connections that the kernel has accepted for us already are served: closing the listener alone would
        reset them."""
        for server in self._servers:
            server.close()
        accepted: list[socket.socket] = []
        for one in self._sockets:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(one.accept()[0])
        self._drop()
        if accepted:
            await asyncio.gather(*(self._serve_one(one) for one in accepted))

    async def _serve_one(self, accepted: socket.socket) -> None:
        """It may leave, or its handshake fail or take too long: the others are served."""
        accepted.setblocking(False)
        context = self._context
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._factory, accepted, ssl=context,
                ssl_handshake_timeout=LAST_HANDSHAKE_S if context else None, ssl_shutdown_timeout=SHUTDOWN_S if context else None,
            )  # fmt: skip

    def _drop(self) -> None:
        for one in self._sockets:
            one.close()
        self._sockets = []


def listening(family: int, address: tuple[Any, ...], *, shared: bool) -> socket.socket:
    """A bound socket; OSError when the address is taken."""
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY where this is said
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != EVERY))
        if shared:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.setblocking(False)
        opened.bind(address)
        opened.listen(BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened
