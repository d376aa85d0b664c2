"""The endpoints document: what the operator publishes and every router of a fleet follows.

It travels as JSON in one ConfigMap per fleet (`<fleet>-router`): key `router.json` holds the RouterConfig,
key `endpoints.json` holds `Endpoints`. Addresses are pod IPs; ports are the same on every pod unless given.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["prefill", "decode"]
WorkerState = Literal["serving", "held", "draining"]
"""held: ready, but the ratio has no place for it; draining: it goes. Neither gets a new request, both finish what they run."""

ROUTER_CONFIG_KEY = "router.json"
ENDPOINTS_KEY = "endpoints.json"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
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
    events_port: int = 0
    """KV events (ZMQ PUB); 0: it publishes none."""
    replay_port: int = 0
    """Replay of KV events (ZMQ ROUTER); 0: none."""
    adapters: dict[str, str] = {}
    """Adapters that it can answer for: name → digest. KV moves only between equal digests."""
    model: str = ""
    """The name that it serves the model under, where that is not the fleet's: it is of the revision before a renaming."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """A canary: this share of a tier's requests goes to this revision, the rest to all others."""

    tier: str
    revision: str
    percent: int


class AtZero(msgspec.Struct, frozen=True, kw_only=True):
    """A tier of which nothing serves because it rests at zero or wakes from there: requests for it are held."""

    tier: str
    limited: bool = False
    """It cannot get the workers that it needs at this moment."""


class AbsentWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A decode worker that routers were told of and that is not ready for the moment: requests wait for it, for seconds."""

    uid: str
    tier: str
    adapters: dict[str, str] = {}
    """Adapters that it can answer for when it is back: name → digest."""


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a router may route to, in stable (name) order so that equal content is equal bytes.

    Unknown fields are passed over: a router that is older than its operator keeps working.
    """

    fleet: str
    namespace: str
    workers: tuple[Endpoint, ...] = ()
    splits: tuple[Split, ...] = ()
    at_zero: tuple[AtZero, ...] = ()
    routers: tuple[str, ...] = ()
    """Addresses of the fleet's router pods, for gossip; empty where they do not."""
    absent: tuple[AbsentWorker, ...] = ()
    """Who is left out of `workers` for the moment: a router that has just started knows of them from here alone. Not a `state`
    of a worker: routers of before would refuse the document."""


def encode(document: Endpoints) -> bytes:
    """Endpoints as JSON bytes; equal documents give equal bytes."""
    return msgspec.json.encode(document)


def decode(raw: bytes | str) -> Endpoints:
    """Parse; raises `msgspec.ValidationError` naming the field."""
    return msgspec.json.decode(raw, type=Endpoints)
