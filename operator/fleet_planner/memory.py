"""What the planner remembers between passes. Kept by the shell, passed in and out; all of it may be lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fleet_api.v1alpha1.status import FlipStatus, ZeroStatus
from fleet_planner.healed import NOTHING_HEALED, Asked, HealingMemory
from fleet_planner.roles import Role
from fleet_planner.too_few import TooFew

Wants = tuple[tuple[float, int, int], ...]
"""(time, prefill, decode), oldest first."""


@dataclass(frozen=True, slots=True)
class GangHold:
    """Of this role and revision there are no more than `most` workers until then: one gave its nodes back."""

    role: Role
    revision: str
    most: int
    until: float
    words: str


@dataclass(frozen=True, slots=True)
class GangMemory:
    """What workers over several nodes leave behind."""

    holds: tuple[GangHold, ...] = ()
    settle_until: float = 0.0
    """Their nodes change hands: until then nobody is told that there is none for it."""


@dataclass(frozen=True, slots=True)
class ScaleMemory:
    """What scaling must remember between passes: recent wants, for stabilisation. Kept by the shell, passed in and out."""

    wants: Wants = ()
    """Bounded by the window."""
    cap: tuple[int, int] | None = None
    """What the cluster could hold when it last refused more; None: nothing was refused."""
    cap_until: float = 0.0
    cap_reason: str = ""
    placed: tuple[int, int] | None = None
    """Most workers that had a node at once since the tier last had one revision; None: not known."""
    gated: tuple[tuple[str, float], ...] = ()
    """(uid, when it was last seen in a queue) of pods that Kueue held: only since then can a node have been looked for."""
    flip: FlipStatus | None = None
    """The last role flip that failed: the status that says so may be read late."""
    reached: tuple[int, int] = (0, 0)
    """Workers that were there at once, up to the present size: making one of so many again is a repair, more is growth."""
    gangs: GangMemory = GangMemory()
    room_at: float = 0.0
    """When a worker of a tier that left the spec last made room for others."""
    lacking: tuple[str, float] | None = None
    """(key of its model, since when a node lacks it); None: every node has it."""
    healing: HealingMemory = NOTHING_HEALED
    asked: Asked = ()
    too_few: tuple[TooFew | None, TooFew | None] = (None, None)
    """Of prefill and decode workers, for the role's objective."""


@dataclass(frozen=True, slots=True)
class ClockMemory:
    """What is remembered of the operator's clock, so that times of before count as if it had never been set."""

    ahead_s: float = 0.0
    """By how much it was set in all since the operator started."""
    pods: tuple[tuple[str, float], ...] = ()
    """(uid, or uid and the time of a role flip; seconds by which its times are moved)."""
    stamps: tuple[tuple[str, str], ...] = ()
    """(time as the status has it, time that it counts as)."""


@dataclass(frozen=True, slots=True)
class RestMemory:
    """What scaling to zero must remember between passes; all of it may be lost: then the fleet counts as just used."""

    used_at: float | None = None
    """When the fleet was last seen in use."""
    arrivals: float | None = None
    """Requests that the routers had counted at the last complete reading."""
    woke_in_s: float = 0.0
    """How long the last waking took."""
    zero: dict[str, ZeroStatus] | None = None
    """By tier: those without workers and those that wake. None: not known, the fleet's status has it."""


CLOCK_UNSET: Final = ClockMemory()
NEVER_RESTED: Final = RestMemory()
