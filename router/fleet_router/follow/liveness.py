"""Is a worker there at all? Asked only of one that has said nothing for a while to requests whose answers come as a whole: they
would not say anything before their end anyway."""

from __future__ import annotations

import asyncio

from fleet_wire.endpoints import Endpoint

TIMEOUT_S = 5.0
FAILED = b"5"


async def alive(endpoint: Endpoint, timeout_s: float = TIMEOUT_S) -> bool:
    """Its server takes a connection and answers GET /health with anything but a 5xx (vLLM: 503 when its engine has died)."""
    address, port = endpoint.address, endpoint.http_port
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                host = f"[{address}]" if ":" in address else address
                writer.write(f"GET /health HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n".encode())
                line = await reader.readuntil(b"\r\n")
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return False
    return line.startswith(b"HTTP/1.") and line[9:10] != FAILED
