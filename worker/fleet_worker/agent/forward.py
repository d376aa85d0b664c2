"""KV events of an engine that cannot bind to one address: vLLM 0.32 binds its publisher only to `*`, `::` or a local socket, and
connects to anything else. It publishes to a local socket; this passes everything on at the pod's own address.

The copying runs in libzmq without the GIL; a slow subscriber loses messages, never stalls the engine.

Its replay socket it binds wherever it is told, but without libzmq's IPv6: on such an address it died ("No such device"). It lies
on a local socket, too, and what is said there is the same as over TCP: bytes are passed on, each connection to one of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

import zmq

from fleet_wire.address import authority

SUBSCRIBER_QUEUE = 100_000
MAX_SUBSCRIPTION_BYTES = 1_024
"""All that a subscriber may say: whoever says more is disconnected."""
MOST_REPLAYS = 64
"""Connections at a time; a router has one per question."""
MAX_QUESTION_BYTES = 65_536
"""All that a connection may ask, in its life."""
PIECE_BYTES = 65_536
SILENT_S = 30.0
"""A connection on which nothing has moved for so long gives its place up: a router has its answer, or has given up, after five.
Of one whose node lost its power nobody would ever hear."""


class EventForwarder:
    """From the engine's socket `source` to subscribers at `host`:`port`. OSError when the address is taken."""

    def __init__(self, source: str, host: str, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._engine = self._context.socket(zmq.XSUB)
        self._subscribers = self._context.socket(zmq.XPUB)
        for socket in (self._engine, self._subscribers):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, SUBSCRIBER_QUEUE)
        self._subscribers.setsockopt(zmq.IPV6, ":" in host)
        self._subscribers.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
        try:
            self._subscribers.bind(f"tcp://{authority(host, port)}")
        except zmq.ZMQError as error:
            self._context.destroy()
            raise OSError(f"port {port} on {host} cannot be bound: {error.strerror}") from error
        self._engine.connect(source)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            zmq.proxy(self._engine, self._subscribers)
        except zmq.ContextTerminated:
            self._engine.close()
            self._subscribers.close()

    def close(self) -> None:
        """Stop and release the address."""
        self._context.term()
        self._thread.join(timeout=5)


class ReplayForwarder:
    """From `host`:`port` to the engine's local socket at `path`, whatever is said."""

    def __init__(self, path: str, host: str, port: int) -> None:
        self._path, self._host, self._port = path, host, port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen. OSError when the port is taken."""
        self._server = await asyncio.start_server(self._meet, self._host, self._port)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection. Without the engine, or a place, it is closed: libzmq tries again."""
        if (meeting := asyncio.current_task()) is None:
            return
        self._open.add(meeting)
        try:
            if len(self._open) <= MOST_REPLAYS:
                with contextlib.suppress(OSError):
                    await self._pass(reader, writer)
        finally:
            self._open.discard(meeting)
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one of both has nothing more to say, or both say nothing for too long."""
        from_engine, to_engine = await asyncio.open_unix_connection(self._path)
        moved = asyncio.Event()
        copies = _copy(reader, to_engine, moved, MAX_QUESTION_BYTES), _copy(from_engine, writer, moved)
        ways = {asyncio.create_task(copy) for copy in copies}
        moved.set()
        try:
            while moved.is_set():
                moved.clear()
                if (await asyncio.wait(ways, timeout=SILENT_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                    return
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            to_engine.close()

    async def close(self) -> None:
        """Release the address."""
        if self._server is not None:
            self._server.close()
        meetings = list(self._open)
        for meeting in meetings:
            meeting.cancel()
        await asyncio.gather(*meetings, return_exceptions=True)


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, moved: asyncio.Event, most: int | None = None
) -> None:
    """Until its end, or more than `most` bytes came."""
    copied = 0
    while piece := await reader.read(PIECE_BYTES):
        moved.set()
        copied += len(piece)
        if most is not None and copied > most:
            return
        writer.write(piece)
        await writer.drain()
