"""`fleet-router`: the data plane as a process. Exit codes: 0 drained, 1 failed, 2 wrong arguments."""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
from pathlib import Path

from fleet_router.gossip.link import GossipSettings

GOSSIP_PORT = 8082
PEER = re.compile(r"^([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})$")
FOLLOW = re.compile(r"^(kube:[a-z0-9.-]+/[a-z0-9.-]+|dir:.+)$")


def arguments(argv: list[str]) -> argparse.Namespace:
    """Command line; the environment supplies what the operator sets per pod."""
    parser = argparse.ArgumentParser(prog="fleet-router", description="OpenAI-compatible router of one InferenceFleet")
    parser.add_argument("--follow", required=True, help="kube:NAMESPACE/CONFIGMAP or dir:PATH: where endpoints.json comes from")
    parser.add_argument("--host", default=os.environ.get("FLEET_BIND_HOST", "0.0.0.0"), help="address to listen on")
    parser.add_argument("--port", type=int, default=int(os.environ.get("FLEET_PORT", "8080")), help="port to listen on")
    parser.add_argument(
        "--tenants", type=Path, help="file with tenants and the hashes of their API keys; without it everybody may ask"
    )
    parser.add_argument(
        "--gossip-key",
        type=Path,
        help="file with the key that the fleet's routers share, one a line: the first signs, all are read",
    )
    parser.add_argument("--gossip-port", type=int, default=GOSSIP_PORT, help="UDP port of gossip")
    parser.add_argument(
        "--gossip-peers", type=peers, default=(), help="NAME:PORT,...: other routers, all addresses of a name; ours does no harm"
    )  # fmt: skip
    given = parser.parse_args(argv)
    if not FOLLOW.match(given.follow):
        parser.error(f"--follow {given.follow}: expected kube:NAMESPACE/NAME or dir:PATH")
    if given.gossip_peers and given.gossip_key is None:
        parser.error("--gossip-peers: --gossip-key is needed as well, or anybody could speak for a router")
    return given


def peers(text: str) -> tuple[tuple[str, int], ...]:
    """NAME:PORT,... as pairs; ArgumentTypeError for anything else."""
    found = []
    for one in text.split(","):
        matched = PEER.match(one)
        if matched is None or int(matched[2]) > 65_535:
            raise argparse.ArgumentTypeError(f"{one!r} is not NAME:PORT")
        found.append((matched[1].strip("[]"), int(matched[2])))
    return tuple(found)


def gossip_of(given: argparse.Namespace) -> GossipSettings | None:
    """None without a key: no gossip."""
    if given.gossip_key is None:
        return None
    return GossipSettings(given.gossip_key, given.host, given.gossip_port, given.gossip_peers)


GC_OBJECTS = (20_000, 20, 50)
"""Requests leave no cycles behind, only connections do: to look for them as often as Python does costs 4 % of the CPU."""


def main() -> int:
    """Serve until told to stop."""
    import uvloop

    from fleet_router.process import Router, Settings

    given = arguments(sys.argv[1:])
    gc.freeze()
    gc.set_threshold(*GC_OBJECTS)
    return uvloop.run(Router(Settings(given.follow, given.host, given.port, given.tenants, gossip_of(given))).run())


if __name__ == "__main__":
    sys.exit(main())
