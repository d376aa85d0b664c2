"""A question to a worker beside the data path: one GET, and its answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def answer_to(address: str, port: int, path: str) -> AsyncIterator[asyncio.StreamReader]:
    """Of the answer, head included; OSError. Whoever asks bounds time and bytes."""
    reader, writer = await asyncio.open_connection(address, port)
    try:
        host = f"[{address}]" if ":" in address else address
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n".encode())
        yield reader
    finally:
        writer.close()
