"""A worker that speaks the dialect in a few lines: for tests of the router only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

REFERENCE = {"do_remote_prefill": True, "remote_block_ids": [1], "lease_id": "lease-1"}


class FakeWorker:
    """Answers completions; `behave` may answer instead: it gets (body, writer) and returns True when it did."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.released: list[str] = []
        self.request_ids: list[str] = []
        self.headers: list[dict[str, str]] = []
        """Of each request, by lower-case name."""
        self.closed_early = 0
        self.readers: dict[asyncio.StreamWriter, asyncio.StreamReader] = {}
        self.behave: Callable[[dict[str, Any], asyncio.StreamWriter], Any] | None = None
        self._server: asyncio.Server | None = None
        self.port = 0
        self.tier = "t"
        self.hold_releases: asyncio.Event | None = None
        """/kv/release is answered once it is set."""

    async def start(self) -> FakeWorker:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    def asked(self) -> list[dict[str, str]]:
        """Headers of requests that have an id: the router's own questions (metrics) have none."""
        return [headers for headers in self.headers if "x-request-id" in headers]

    def is_left(self, writer: asyncio.StreamWriter) -> bool:
        """The other end closed this connection."""
        return self.readers[writer].at_eof() or writer.is_closing()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.readers[writer] = reader
        try:
            while True:
                await self._serve_one(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed_early += 1
        except RuntimeError:  # what uvloop makes of a write on a connection that was closed
            if not writer.is_closing():
                raise
            self.closed_early += 1
        finally:
            del self.readers[writer]
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = (line.partition(":") for line in head.decode().split("\r\n")[1:] if line)
        self.headers.append({name.lower(): value.strip() for name, _, value in lines})
        self.request_ids.append(self.headers[-1].get("x-request-id", ""))
        raw = await received(reader, self.headers[-1])
        if not raw:
            answer(writer, 404, {})
            return
        try:
            body = json.loads(raw)
        except ValueError:
            answer(writer, 400, {"error": {"message": "no JSON", "type": "BadRequestError"}})
            return
        if b"/kv/release" in head:
            self.released.append(body.get("lease_id") or body["request_id"])
            if self.hold_releases is not None:
                await self.hold_releases.wait()
            answer(writer, 200, {"released": True})
            return
        self.seen.append(body)
        if self.behave is not None and await self.behave(body, writer):
            return
        if body.get("kv_transfer_params", {}).get("do_remote_decode"):
            answer(writer, 200, {"choices": [], "kv_transfer_params": REFERENCE})
        elif body.get("stream"):
            await stream(writer, ["a", "b", "c"])
        else:
            answer(writer, 200, {"choices": [{"text": "hello"}]})
        await writer.drain()


async def received(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    """The body, whose length was said or that comes in chunks."""
    if "transfer-encoding" not in headers:
        return await reader.readexactly(int(headers.get("content-length", "0")))
    out = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        out += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return out


def answer(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    raw = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw)


async def stream(writer: asyncio.StreamWriter, parts: list[str], *, end: bool = True, gap_s: float = 0.0) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for part in parts:
        event = f'data: {{"choices":[{{"text":"{part}"}}]}}\n\n'.encode()
        writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
        await writer.drain()
        await asyncio.sleep(gap_s)
    if end:
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
