"""Neither side of the router waits for acknowledgements: Nagle's delay is off on every connection, though nothing here says so.

asyncio and uvloop set TCP_NODELAY on what they accept and connect; a loop that did not would cost a first token 40 ms.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from fleet_router.port import Port
from fleet_router.upstream import Pool, Upstream


class Seen(asyncio.Protocol):
    """Tells its transport."""

    def __init__(self, seen: asyncio.Future[asyncio.BaseTransport]) -> None:
        self.seen = seen

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.seen.set_result(transport)


def delays(transport: asyncio.BaseTransport) -> bool:
    """Whether small writes may wait."""
    return not transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def both_sides() -> tuple[bool, bool]:
    """(of a connection that a port accepted, of one that a pool made)"""
    loop = asyncio.get_running_loop()
    accepted, made = loop.create_future(), loop.create_future()
    port = Port("127.0.0.1", 0, lambda: Seen(accepted))
    await port.open(None)
    host, number = port.addresses[0]
    Pool(host, number).take(lambda connection, why: made.set_result(connection or why))
    connection = await made
    assert isinstance(connection, Upstream)
    assert connection.transport is not None
    found = delays(await accepted), delays(connection.transport)
    connection.abort()
    await port.close()
    return found


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_small_writes_are_not_delayed(run: Callable[[Coroutine[Any, Any, tuple[bool, bool]]], tuple[bool, bool]]):
    assert run(both_sides()) == (False, False)
