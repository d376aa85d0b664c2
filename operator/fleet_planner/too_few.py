"""How many workers were too few for a role's latency objective, and were seen to be so again when the others had left. Pure.

Requests in flight say little of latency. Where an objective needs more workers than they do, the load that asks for fewer is the
same when it is met: all that were added left after a window, it was missed, and they were made anew one by one, for ever. So who
is missed as soon as they have left comes back, and stays twice as long each time. A miss at another time is one by itself: slow
requests now and then keep nobody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fleet_planner.altered import altered

SEEN_S = 60.0
"""That some are missed is seen within this: latencies are of the last minute."""
STAYS_MOST_S = 3_600.0


@dataclass(frozen=True, slots=True)
class TooFew:
    """So many workers missed an objective while so many requests were in flight."""

    workers: int
    inflight: float
    goal_s: float
    at: float
    """When it was last missed."""
    more_at: float | None = None
    """When more than these were last there; None: not since."""
    stays_s: float = 0.0
    """One more is kept for so long after `at`; 0: as long as it is not seen that they are missed."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one reading says of a role."""

    now: float
    size: int
    missed: int
    """Workers that the objective asks for: more than `size`, which are there; as many while some come up; 0: it is met."""
    inflight: float
    goal_s: float | None
    window_s: float
    interval_s: float


def noted(known: TooFew | None, read: Reading) -> TooFew | None:
    """What is known after a reading."""
    if read.goal_s is None:
        return None
    if known is not None and known.goal_s != read.goal_s:
        known = None
    if read.missed > read.size:
        if known is not None and read.size <= known.workers and _have_just_left(known, read):
            stays_s = max(read.window_s, min(2 * max(known.stays_s, read.window_s), STAYS_MOST_S))
            return replace(known, at=read.now, stays_s=stays_s)
        return TooFew(read.size, read.inflight, read.goal_s, read.now)
    if known is None:
        return None
    if read.missed:
        known = altered(known, at=read.now)
    if read.size > known.workers:
        return altered(known, more_at=read.now)
    return known if known.more_at is None or _have_just_left(known, read) else None


def _have_just_left(known: TooFew, read: Reading) -> bool:
    return known.more_at is not None and read.now - known.more_at <= SEEN_S + 2 * read.interval_s


def kept(known: TooFew | None, inflight: float, now: float) -> int:
    """At least so many workers; of fewer requests in flight than when they were too few: their part."""
    if known is None or now - known.at >= known.stays_s:
        return 0
    share = min(1.0, inflight / known.inflight) if known.inflight > 0 else 1.0
    return math.ceil((known.workers + 1) * share)
