"""What the planner answers: what is to be there, to go, and to be told. Frozen data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fleet_planner.roles import Role


@dataclass(frozen=True, slots=True)
class PoolWanted:
    """A WorkerPool that should exist with this size."""

    name: str
    tier: str
    role: Role
    revision: str
    replicas: int
    size: int
    """Workers that the whole role should have, all revisions together."""
    nodes: int = 1
    """Pods of one worker."""
    most: int | None = None
    """No worker is made beyond so many now, whatever `replicas` says."""
    wish: int | None = None
    """What `size` was before it was backed out of; None: it is all of it."""


@dataclass(frozen=True, slots=True)
class PodWanted:
    """A pod to create."""

    name: str
    pool: str
    tier: str
    role: Role
    revision: str
    ordinal: int
    member: int = 0


@dataclass(frozen=True, slots=True)
class PodGone:
    """A pod to delete."""

    name: str
    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class FlipWanted:
    """A worker to be told another role; `role` None: to be left in the one that it has."""

    name: str
    uid: str
    role: Role | None
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Relabel:
    """A worker whose new role is proven: its pod moves to the pool of that role. `again`: it is the pool that it was in."""

    name: str
    uid: str
    pool: str
    tier: str
    role: Role
    at: float
    took_s: float
    proof: str
    again: bool = False


TargetState = Literal["serving", "held", "draining", "absent"]


@dataclass(frozen=True, slots=True)
class Target:
    """A worker that the router is told of."""

    name: str
    uid: str
    address: str
    role: Role
    tier: str
    revision: str
    compat: str
    state: TargetState
    """held: ready, the ratio has no place for it now, what it runs goes on. absent: not ready now; its address may be empty."""
    adapters: tuple[tuple[str, str], ...] = ()
    """(name, digest) that it can answer for."""


@dataclass(frozen=True, slots=True)
class Split:
    """A share of a tier's requests that goes to one revision while it is judged."""

    tier: str
    revision: str
    percent: int


@dataclass(frozen=True, slots=True)
class ZeroTier:
    """A tier of which nothing serves because it is, or was, at zero: routers hold requests for it."""

    tier: str
    limited: bool = False
    """It cannot get the workers that it needs at this moment."""
