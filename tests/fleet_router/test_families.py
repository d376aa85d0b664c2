"""IPv4 and IPv6: a router is reached by both, and speaks to others by both, whatever family its pod's first address has."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from fleet_router.__main__ import arguments
from fleet_router.gossip.link import GossipSettings, Link
from fleet_router.gossip.share import Share
from fleet_router.port import Port
from tests.fleet_router.rig import until

ADDRESSES = Path("/proc/net/if_inet6")
HAS_IPV6 = ADDRESSES.exists() and f"{1:032x}" in ADDRESSES.read_text()
pytestmark = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no ::1")
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
Run = Callable[[Coroutine[Any, Any, None]], None]


@LOOPS
@pytest.mark.parametrize("api_server", [None, "10.96.0.1", "fd00:10:96::1", "api.shoot.example.com"])
@pytest.mark.parametrize("asked", ["127.0.0.1", "::1"])
def test_a_router_is_reached_by_both_families(run: Run, api_server: str | None, asked: str, monkeypatch: pytest.MonkeyPatch):
    """It listened on that of the API server's address alone. Where that is a name and pods have IPv6 addresses no probe reached
    it, and no fleet became Ready; by the second family of a Service with both nobody was answered."""
    for name, value in (("FLEET_BIND_HOST", None), ("KUBERNETES_SERVICE_HOST", api_server)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    async def go() -> None:
        port = Port(arguments(["--follow", "dir:/x"]).host, 0, asyncio.Protocol)
        await port.open(None)
        try:
            _, writer = await asyncio.open_connection(asked, port.addresses[0][1])
            writer.close()
        finally:
            await port.close()

    run(go())


def free_udp() -> int:
    """A port that nobody has."""
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as found:
        found.bind(("::", 0))
        return int(found.getsockname()[1])


@LOOPS
@pytest.mark.parametrize("other", ["127.0.0.1", "::1"])
def test_routers_gossip_by_both_families(run: Run, other: str, tmp_path: Path):
    """One on all addresses and one on one of either family: who was on IPv6 never found one that is on IPv4."""
    key = tmp_path / "key"
    key.write_text("k" * 32)

    async def go() -> None:
        wide, narrow, clock = free_udp(), free_udp(), asyncio.get_running_loop().time
        settings = GossipSettings(key, "::", wide, ((other, narrow),)), GossipSettings(key, other, narrow, ((other, wide),))
        links = [Link(one, Share(number, 0.0), clock, lambda **_: None) for number, one in enumerate(settings, 1)]
        running = [asyncio.create_task(link.run()) for link in links]
        try:
            await until(lambda: all(link._share.peers for link in links) or any(task.done() for task in running))
            assert not any(task.done() for task in running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    run(go())
