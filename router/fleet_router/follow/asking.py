"""A question to a worker beside the data path: one GET or POST, and its answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from fleet_router.ending import unframed
from fleet_router.upstream import STRANGER
from fleet_wire.address import authority

STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})\b")
LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d{1,12})\r\n", re.I)
CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: *chunked\r\n", re.I)


@asynccontextmanager
async def answer_to(address: str, port: int, path: str) -> AsyncIterator[asyncio.StreamReader]:
    """Of the answer, head included; OSError. Whoever asks bounds time and bytes."""
    reader, writer = await asyncio.open_connection(address, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {authority(address, port)}\r\nconnection: close\r\n\r\n".encode())
        yield reader
    finally:
        writer.close()


async def posted(
    address: str, port: int, path: str, request_id: str, body: bytes, most_bytes: int, proven: Callable[[], Awaitable[bool]]
) -> tuple[int, bytes]:
    """(status, body) of the answer to a POST of JSON; OSError, and ValueError or IncompleteReadError for what is no answer or is
    longer than that. `proven` is asked once there is a connection: who is not meant gets nothing (ConnectionRefusedError).
    Whoever asks bounds the time."""
    reader, writer = await asyncio.open_connection(address, port)
    try:
        if not await proven():
            raise ConnectionRefusedError(STRANGER)
        head = f"POST {path} HTTP/1.1\r\nhost: {authority(address, port)}\r\ncontent-type: application/json\r\n"
        told = f"x-request-id: {request_id}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write((head + told).encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = LENGTH.search(answer)
        found = b"" if length is None else await reader.readexactly(min(int(length[1]), most_bytes))
        while length is None and (piece := await reader.read(65_536)):
            found += piece
            if len(found) > most_bytes:
                raise ValueError(f"an answer of more than {most_bytes} bytes")
    finally:
        writer.close()
    if (status := STATUS.match(answer)) is None:
        raise ValueError("no HTTP answer")
    return int(status[1]), unframed(found) if length is None and CHUNKED.search(answer) else found
