"""An open-loop client: requests leave when their time has come, whatever became of those before."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from e2e.bench.routing_trace import Arrival

TOLD = re.compile(rb'"late_us":(\d+),"prefilled_by":(\d+),"worker":(\d+),"computed":(\d+),"waited_us":(\d+)')
STREAM_END = b"0\r\n\r\n"
HEAD_END = b"\r\n\r\n"
LONGEST_S = 120.0


@dataclass(frozen=True)
class Landed:
    """Where an answered request went; times are virtual."""

    due_s: float
    prefill: int
    """Who prefilled it: where nothing is handed over, who answered it."""
    worker: int
    tokens: int = 0
    computed: int = 0
    """Tokens of the prompt that had to be computed there."""
    waited_s: float = 0.0
    """For its turn there."""


@dataclass
class Seen:
    """What the clients saw, in virtual seconds."""

    ttft_s: list[float] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)
    """How late requests left."""
    landed: list[Landed] = field(default_factory=list)
    """In the order of `ttft_s`."""
    errors: list[str] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.got = bytearray()
        self.sent_at = self.due_s = 0.0
        self.tokens = 0
        self.first_at = 0.0
        self.running = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of asyncio's

    def send(self, one: Arrival) -> None:
        prompt = one.prompt.encode()
        body = b'{"model":"tiny","prompt":"%b","max_tokens":%d,"stream":true,"temperature":0}' % (prompt, one.output)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.got.clear()
        self.first_at, self.running = 0.0, True
        self.sent_at, self.due_s, self.tokens = time.perf_counter(), one.at_s, one.tokens
        self.transport.write(head % len(body) + body)

    def data_received(self, data: bytes) -> None:
        self.got += data
        if not self.first_at and b"data: " in self.got:
            self.first_at = time.perf_counter()
        if self.got.endswith(STREAM_END) or (b" 200 " not in self.got[:16] and HEAD_END in self.got):
            self._ended()

    def _ended(self) -> None:
        self.running = False
        told = TOLD.search(self.got)
        if b" 200 " not in self.got[:16] or told is None or b"[DONE]" not in self.got:
            self.load.ended(None, bytes(self.got[:300]).decode(errors="replace"))
            self.transport.close()
            return
        self.load.idle.append(self)
        late_us, prefill, worker, computed, waited_us = map(int, told.groups())
        self.load.seen.landed.append(Landed(self.due_s, prefill, worker, self.tokens, computed, waited_us / 1e6))
        self.load.ended(self.first_at - self.sent_at - late_us / 1e6)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.load.idle:
            self.load.idle.remove(self)
        if self.running:
            self.running = False
            self.load.ended(None, f"connection lost: {exc}")


class Load:
    """One run of a trace against one address."""

    def __init__(self, address: str, speed: float) -> None:
        self.host, _, port = address.rpartition(":")
        self.port, self.speed = int(port), speed
        self.idle: list[Connection] = []
        self.seen = Seen()
        self.left = 0
        self.done = asyncio.Event()

    def ended(self, ttft_s: float | None, error: str = "") -> None:
        """One request is over."""
        if ttft_s is None:
            self.seen.errors.append(error)
        else:
            self.seen.ttft_s.append(ttft_s * self.speed)
        self.left -= 1
        if self.left == 0:
            self.done.set()

    async def run(self, trace: Sequence[Arrival]) -> Seen:
        """All of them."""
        self.left, start, opening = len(trace), time.perf_counter(), set()
        for one in trace:
            due = start + one.at_s / self.speed
            if (wait_s := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            self.seen.lag_s.append(max(0.0, time.perf_counter() - due) * self.speed)
            if self.idle:
                self.idle.pop().send(one)
            else:
                task = asyncio.create_task(self._fresh(one))
                opening.add(task)
                task.add_done_callback(opening.discard)
        try:
            async with asyncio.timeout(LONGEST_S):
                await self.done.wait()
        except TimeoutError:
            self.seen.errors += ["no answer"] * self.left
        for connection in self.idle.copy():
            connection.transport.close()
        return self.seen

    async def _fresh(self, one: Arrival) -> None:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(self), self.host, self.port)
        except OSError as error:
            self.ended(None, f"cannot connect: {error}")
            return
        connection.send(one)
