"""The endpoints document: what the operator publishes and every router of a fleet follows.

It travels as JSON in one ConfigMap per fleet (`<fleet>-router`): key `router.json` holds the RouterConfig,
key `endpoints.json` holds `Endpoints`. Addresses are pod IPs; ports are the same on every pod unless given.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["prefill", "decode"]
WorkerState = Literal["serving", "draining"]

ROUTER_CONFIG_KEY = "router.json"
ENDPOINTS_KEY = "endpoints.json"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker that may receive requests."""

    name: str
    """Pod name."""
    uid: str
    """Pod uid: a new pod on an old address is another worker."""
    address: str
    http_port: int
    agent_port: int
    role: Role
    tier: str
    revision: str
    compat: str
    """Compatibility hash: KV moves only between workers whose hashes are equal."""
    state: WorkerState = "serving"


class Endpoints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a router may route to, in stable (name) order so that equal content is equal bytes."""

    fleet: str
    namespace: str
    workers: tuple[Endpoint, ...] = ()


def encode(document: Endpoints) -> bytes:
    """Endpoints as JSON bytes; equal documents give equal bytes."""
    return msgspec.json.encode(document)


def decode(raw: bytes | str) -> Endpoints:
    """Parse; raises `msgspec.ValidationError` naming the field."""
    return msgspec.json.decode(raw, type=Endpoints)
