"""Gossip's sockets."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from fleet_router.gossip.link import GossipSettings, Link
from fleet_router.gossip.share import Share
from tests.fleet_router.rig import until


@pytest.mark.parametrize("name", ["a..b", "x" * 64 + ".y"])
def test_a_peer_whose_name_is_none_ends_nothing(name: str, tmp_path: Path):
    """It ended the router: such a name is no error of DNS."""
    key = tmp_path / "key"
    key.write_text("k" * 32)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]

    async def go() -> None:
        settings = GossipSettings(key, "127.0.0.1", port, ((name, 1), ("127.0.0.1", 1)))
        link = Link(settings, Share(1, 0.0), asyncio.get_running_loop().time, lambda **_: None)
        running = asyncio.create_task(link.run())
        await until(lambda: bool(link.counts.sent) or running.done())
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(go())
