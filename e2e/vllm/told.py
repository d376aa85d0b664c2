"""The document from which a router learns of workers that no operator made."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fleet_wire.endpoints import ENDPOINTS_KEY, Endpoint, Endpoints, Role, encode


def tell(documents: Path, workers: Iterable[tuple[Role, str]]) -> None:
    """(role, address) of each, to the router that follows this folder."""
    told = tuple(
        Endpoint(
            name=ip, uid=f"uid-{ip}", address=ip, http_port=8000, agent_port=9000, role=role, tier="t", revision="r1",
            compat="suite",
        )
        for role, ip in workers
    )  # fmt: skip
    fresh = documents / ".fresh"
    fresh.write_bytes(encode(Endpoints(fleet="f", namespace="default", workers=told)))
    fresh.replace(documents / ENDPOINTS_KEY)
