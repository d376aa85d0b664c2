"""The election as arithmetic: the lease as this process saw it, its own clock and its name give what to do next. No I/O.

Nobody's clock but ours is used: a lease is over when *we* saw no change of it for its whole duration. What the holder wrote as
its renewal time is for people.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

Object = dict[str, Any]
RELEASED_S = 1
"""The duration of a lease that was given back; no holder may have one so short."""
SOMEBODY = "somebody unknown"


@dataclass(frozen=True, slots=True)
class Terms:
    """How long things take; seconds. ValueError when no lease could be kept on these terms."""

    lease_s: int = 15
    """A holder that shows no sign of life for this long may be replaced."""
    renew_s: float = 10.0
    """A holder that could not renew for this long stops writing: so much earlier that a write under way ends before the lease."""
    retry_s: float = 2.0
    """Between two attempts."""

    def __post_init__(self) -> None:
        if not 2 <= self.lease_s <= 600:
            raise ValueError("the lease must last between 2 and 600 seconds")
        if not self.retry_s * 2 <= self.renew_s <= self.lease_s * 0.9:
            raise ValueError("the renew deadline must be at most 0.9 of the lease and leave room for two attempts")
        if self.retry_s < 0.1:
            raise ValueError("attempts must be at least 0.1 seconds apart")


@dataclass(frozen=True, slots=True)
class Lease:
    """What the API server holds."""

    holder: str
    """Empty: nobody, it was given back."""
    lease_s: int
    transitions: int
    acquired_at: str
    version: str
    """resourceVersion: changes with every renewal."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The lease, and since when (our clock) it has looked like this."""

    lease: Lease
    since: float


@dataclass(frozen=True, slots=True)
class Step:
    """What to do: take or renew the lease as `sight` showed it, or look again."""

    deed: Literal["take", "renew", "wait"]
    reason: str


def parse_lease(obj: Object) -> Lease:
    """From a coordination.k8s.io/v1 Lease; what is absent or absurd counts as nobody's and over."""
    spec = obj.get("spec") or {}
    seconds, transitions = spec.get("leaseDurationSeconds"), spec.get("leaseTransitions")
    return Lease(
        holder=str(spec.get("holderIdentity") or ""),
        lease_s=seconds if isinstance(seconds, int) and 0 < seconds <= 3600 else 0,
        transitions=transitions if isinstance(transitions, int) and transitions >= 0 else 0,
        acquired_at=str(spec.get("acquireTime") or ""),
        version=str(obj["metadata"].get("resourceVersion", "")),
    )


def see(before: Sight | None, lease: Lease, now: float) -> Sight:
    """The new sight: only a change starts the time anew. Who held a lease that has no holder now and was not given back (it was
    deleted, or replaced as the chart has it) may write until it hears of that: it still counts as held for its whole duration."""
    if before is None or before.lease == lease:
        return before or Sight(lease, now)
    if not lease.holder and lease.lease_s != RELEASED_S:
        lease = replace(lease, holder=before.lease.holder or SOMEBODY, lease_s=before.lease.lease_s)
    return before if before.lease == lease else Sight(lease, now)


def decide(sight: Sight, me: str, terms: Terms, now: float) -> Step:
    """What `me` does about the lease that it sees. A holder's own duration counts, or ours when that is longer."""
    lease = sight.lease
    if lease.holder == me:
        return Step("renew", "it is ours")
    if not lease.holder:
        return Step("take", "nobody holds it")
    left_s = sight.since + max(lease.lease_s, terms.lease_s) - now
    if left_s <= 0:
        return Step("take", f"{lease.holder} has not renewed it")
    return Step("wait", f"{lease.holder} holds it")


def render_lease(name: str, namespace: str, sight: Sight, me: str, terms: Terms, wall_s: float) -> Object:
    """The lease as `me` holds it from now on, valid only on top of the version that was seen."""
    taking = sight.lease.holder != me
    stamp = datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return _lease(name, namespace, sight.lease.version) | {
        "spec": {
            "holderIdentity": me,
            "leaseDurationSeconds": terms.lease_s,
            "acquireTime": stamp if taking or not sight.lease.acquired_at else sight.lease.acquired_at,
            "renewTime": stamp,
            "leaseTransitions": sight.lease.transitions + taking,
        }
    }


def render_release(name: str, namespace: str, lease: Lease) -> Object:
    """Given back: no holder, so that the next one need not wait."""
    return _lease(name, namespace, lease.version) | {
        "spec": {"leaseDurationSeconds": RELEASED_S, "leaseTransitions": lease.transitions}
    }


def render_unborn(name: str, namespace: str) -> Object:
    """Without any content: making it twice takes nothing from whoever was faster."""
    return _lease(name, namespace, "")


def _lease(name: str, namespace: str, version: str) -> Object:
    metadata: Object = {"name": name, "namespace": namespace}
    if version:
        metadata["resourceVersion"] = version
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
