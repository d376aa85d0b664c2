"""A router with fake workers on real sockets, in one event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fleet_router.config import HttpBounds, RouterConfig
from fleet_router.follow.documents import Documents
from fleet_router.process import Router, Settings
from fleet_router.server import ClientConnection
from fleet_wire.endpoints import Endpoint, Endpoints
from tests.fleet_router.fake_worker import FakeWorker

BOUNDS = HttpBounds(body_bytes=20_000)
CONFIG = RouterConfig(fleet="f", served_name="m", min_uncached_tokens=64, bounds=BOUNDS, return_wait_s=0.0)
"""Where nobody can answer it is told at once; `test_returning` is about those that wait."""
LONG = "x" * 2000


class Rig:
    """A router with fake workers, in this loop."""

    def __init__(self, prefill: list[FakeWorker], decode: list[FakeWorker], config: RouterConfig) -> None:
        self.prefill, self.decode = prefill, decode
        self.router = Router(Settings("dir:/none", "127.0.0.1", 0))
        self.context = self.router._context
        self.connections: set[ClientConnection] = self.router._connections
        self.writers: list[asyncio.StreamWriter] = []
        self.apply(prefill, decode, config)

    def apply(self, prefill: list[FakeWorker], decode: list[FakeWorker], config: RouterConfig = CONFIG) -> None:
        rows = [("prefill", w) for w in prefill] + [("decode", w) for w in decode]
        found = tuple(
            Endpoint(
                name=f"{role}-{w.port}", uid=f"u{w.port}", address="127.0.0.1", http_port=w.port, agent_port=1, role=role,
                tier=w.tier, revision="r", compat=f"c-{w.tier}",
            )
            for role, w in rows
        )  # fmt: skip
        self.router.apply(Documents(config, Endpoints(fleet="f", namespace="n", workers=found)))

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(
            lambda: ClientConnection(self.context, self.connections, self.router.plain), "127.0.0.1", 0
        )
        self.port = self.server.sockets[0].getsockname()[1]

    async def raw(self, data: bytes, timeout_s: float = 5.0) -> bytes:
        """Everything that the router answers until it closes or falls silent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        out = b""
        try:
            async with asyncio.timeout(timeout_s):
                while piece := await reader.read(65536):
                    out += piece
        except (TimeoutError, ConnectionError):
            pass
        writer.close()
        return out

    async def post(self, body: Any, path: str = "/v1/completions") -> tuple[int, bytes]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
        got = await self.raw(head + raw)
        first, _, rest = got.partition(b"\r\n\r\n")
        return int(first.split(b" ")[1]), rest

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, ClientConnection]:
        """A client and the router's side of its connection."""
        before = set(self.connections)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        await until(lambda: len(self.connections - before) == 1)
        (connection,) = self.connections - before
        return reader, writer, connection

    def sweep(self, later_s: float = 0.0) -> None:
        for connection in list(self.connections):
            connection.sweep(self.context.clock() + later_s)

    def idle(self) -> bool:
        return all(worker.inflight == 0 for worker in self.context.table.workers.values())


def run(test: Callable[[Rig], Awaitable[None]], prefill: int = 1, decode: int = 1, config: RouterConfig = CONFIG) -> None:
    async def go() -> None:
        workers = [await FakeWorker().start() for _ in range(prefill + decode)]
        rig = Rig(workers[:prefill], workers[prefill:], config)
        await rig.start()
        try:
            await test(rig)
            await until(rig.idle)
        finally:
            rig.server.close()
            for writer in rig.writers:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for writer in rig.writers), return_exceptions=True)
            for worker in rig.context.table.workers.values():
                worker.pool.retire()
            for fake in workers:
                await fake.stop()
            await asyncio.sleep(0.02)

    asyncio.run(go())


async def until(check: Callable[[], bool], deadline_s: float = 3.0) -> None:
    end = time.monotonic() + deadline_s
    while not check():
        assert time.monotonic() < end, "not within the deadline"
        await asyncio.sleep(0.005)


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": LONG, **more}


def http(body: Any, *headers: str, path: str = "/v1/completions", method: str = "POST") -> bytes:
    """One request."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: h", *headers, f"content-length: {len(raw)}", "", ""]
    return "\r\n".join(lines).encode() + raw


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of the next answer, which has a length; 1xx are passed over."""
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        status, headers = int(first.split(" ")[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        if status >= 200:
            return status, headers, await reader.readexactly(int(headers["content-length"]))
