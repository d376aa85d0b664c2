"""Is a worker there at all? Asked only of one that has said nothing for a while to requests whose answers come as a whole: they
would not say anything before their end anyway."""

from __future__ import annotations

import asyncio

from fleet_router.errors import OURS
from fleet_router.follow.asking import answer_to
from fleet_wire.endpoints import Endpoint

TIMEOUT_S = 5.0
FAILED = b"5"


async def alive(endpoint: Endpoint, timeout_s: float = TIMEOUT_S) -> bool:
    """Its server takes a connection and answers GET /health with anything but a 5xx (vLLM: 503 when its engine has died). Where
    we cannot ask, nothing is known against it."""
    try:
        async with asyncio.timeout(timeout_s):
            async with answer_to(endpoint.address, endpoint.http_port, "/health") as reader:
                line = await reader.readuntil(b"\r\n")
    except OSError as error:  # TimeoutError is one
        return error.errno in OURS
    except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return False
    return line.startswith(b"HTTP/1.") and line[9:10] != FAILED
