"""When the operator is ill, as a pure function of what was seen of it and the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Bounds:
    """Longest silences, seconds."""

    loop_s: float = 120.0
    """The work loop turns at least every 30 s even when nothing happens."""
    pass_s: float = 300.0
    """One pass over one fleet without an answer to a write of it: every request in it has a bound of its own."""
    watch_s: float = 150.0
    """The API server sends a bookmark every minute, and a watch without any byte is opened anew after 70 s."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What was seen, on one monotonic clock."""

    working: bool = False
    """The work loop runs; a standby's does not."""
    loop_at: float | None = None
    """When the loop last turned; None before its first turn."""
    pass_since: float | None = None
    """When the pass that runs now and has shown no sign of life for longest last did: its begin, or an answer to a write of it.
    None between passes."""
    heard: Mapping[str, float] = field(default_factory=dict)
    """By kind: when its watch last carried anything."""
    answered_at: float | None = None
    """When the API server last answered a request of ours that asked whether it is there."""


def ailments(seen: Vitals, now: float, bounds: Bounds) -> tuple[str, ...]:
    """What a restart may help against; empty: well. An API server that does not answer is not ours to be restarted for."""
    found = []
    if seen.working and seen.pass_since is not None and now - seen.pass_since > bounds.pass_s:
        found.append(f"one pass over a fleet has not moved for {now - seen.pass_since:.0f} s")
    if seen.working and seen.loop_at is not None and now - seen.loop_at > bounds.loop_s:
        found.append(f"the work loop has not turned for {now - seen.loop_at:.0f} s")
    for kind in silent(seen, now, bounds):
        if seen.answered_at is not None and seen.answered_at - seen.heard[kind] > bounds.watch_s:
            found.append(f"the watch of {kind} has been silent for {now - seen.heard[kind]:.0f} s though the API server answers")
    return tuple(found)


def silent(seen: Vitals, now: float, bounds: Bounds) -> tuple[str, ...]:
    """Kinds whose watch has carried nothing for longer than it may."""
    return tuple(kind for kind, at in sorted(seen.heard.items()) if now - at > bounds.watch_s)
