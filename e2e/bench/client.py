"""A closed-loop HTTP client for benchmarks: N connections, each sends its next request when the last answer is complete.

Answers are only kept while it runs, and looked at when all have come: streams end in bursts, and what the client did about the
end of one would stand in the next one's time to its first byte. Nor does it collect garbage in between.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

HEAD_END = b"\r\n\r\n"
STREAM_END = b"0\r\n\r\n"


def dechunked(body: bytes) -> bytes:
    """Without the chunks' frames: a router may put an event into two chunks. ValueError when the frames are wrong."""
    pieces, at = [], 0
    while True:
        line = body.index(b"\r\n", at)
        size = int(body[at:line], 16)
        at = line + 2 + size
        if body[at : at + 2] != b"\r\n":
            raise ValueError("a chunk without its end")
        if size == 0:
            return b"".join(pieces)
        pieces.append(body[line + 2 : at])
        at += 2


def wrong_stream(body: bytes, chunks: int) -> str:
    """What is wrong with a stream of so many events and [DONE]; empty when nothing is."""
    try:
        events = dechunked(body).count(b"data: ")
    except ValueError as error:
        return f"malformed chunks: {error}"
    return "" if events == chunks + 1 else f"{events} events, expected {chunks + 1}"


@dataclass
class Outcome:
    """What a run saw."""

    answers: int = 0
    errors: list[str] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    """Seconds from sending to the first byte of a stream's body."""
    ttft_kept_s: list[float] = field(default_factory=list)
    """Those of them whose connection had had an answer before: as clients with a pool of connections have it."""
    fastest_stream_s: float = float("inf")
    """Seconds from sending to the end of the quickest stream: how the worker was pacing it."""
    bodies: list[tuple[bytearray, int]] = field(default_factory=list)
    """Answers that nobody has looked at yet, and where the head of each ends."""

    def look(self, chunks: int | None) -> None:
        """Right status, and as many events as were asked for."""
        for got, head in self.bodies:
            self.answers += 1
            if b" 200 " not in got[:16]:
                self.errors.append(bytes(got[:300]).decode(errors="replace"))
            elif chunks is not None and (why := wrong_stream(bytes(got[head + 4 :]), chunks)):
                self.errors.append(why)
        self.bodies.clear()


class Connection(asyncio.Protocol):
    """One keep-alive connection. `chunks` None: whole answers; else streams of so many events."""

    def __init__(self, requests: Iterator[bytes], chunks: int | None, outcome: Outcome, done: asyncio.Future[None]) -> None:
        self.requests = requests
        self.chunks = chunks
        self.outcome = outcome
        self.done = done
        self.got = bytearray()
        self.sent_at = 0.0
        self.first_seen = False
        self.kept = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of asyncio's
        self.next()

    def next(self) -> None:
        request = next(self.requests, None)
        if request is None:
            self.transport.close()
            return
        self.got = bytearray()
        self.first_seen = False
        self.sent_at = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.got += data
        head = self.got.find(HEAD_END)
        if head < 0:
            return
        if self.chunks is not None and not self.first_seen and len(self.got) > head + 4:
            self.first_seen = True
            took_s = time.perf_counter() - self.sent_at
            self.outcome.ttft_s.append(took_s)
            if self.kept:
                self.outcome.ttft_kept_s.append(took_s)
        if self.is_complete(head):
            if self.chunks is not None:
                self.outcome.fastest_stream_s = min(self.outcome.fastest_stream_s, time.perf_counter() - self.sent_at)
            self.outcome.bodies.append((self.got, head))
            self.kept = True
            self.next()

    def is_complete(self, head: int) -> bool:
        """The whole answer is here."""
        if self.chunks is not None and b" 200 " in self.got[:head]:
            return self.got.endswith(STREAM_END)
        lower = bytes(self.got[:head]).lower()
        at = lower.find(b"content-length:")
        if at < 0:
            return self.got.endswith(STREAM_END)
        return len(self.got) >= head + 4 + int(lower[at + 15 :].split(b"\r\n")[0])

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.outcome.errors.append(f"connection lost: {exc}")
        if not self.done.done():
            self.done.set_result(None)


@contextmanager
def no_collection() -> Iterator[None]:
    """A collection of this process's objects takes milliseconds, and hits whichever proxy is driven."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def drive(address: str, requests: list[bytes], connections: int, chunks: int | None) -> Outcome:
    """Send all requests; ends when every connection has ended."""
    loop, outcome, left = asyncio.get_running_loop(), Outcome(), iter(requests)
    host, _, port = address.rpartition(":")
    ends = [loop.create_future() for _ in range(connections)]
    with no_collection():
        for done in ends:
            await loop.create_connection(lambda done=done: Connection(left, chunks, outcome, done), host, int(port))
        await asyncio.wait_for(asyncio.gather(*ends), 120)
    outcome.look(chunks)
    if outcome.answers != len(requests):
        outcome.errors.append(f"{len(requests)} requests, {outcome.answers} answers")
    return outcome
