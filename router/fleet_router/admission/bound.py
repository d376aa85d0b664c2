"""How long the queue may be: Little's law says how many requests leave it within the time that they may wait."""

from __future__ import annotations

from math import ceil
from typing import Final

BUDGET_SHARE: Final = 0.85
"""Of the time to the first token; the rest is for the prefill itself."""
LEAST: Final = 8
"""Waiting requests that are always allowed: a burst into an idle router has no rate yet."""
WINDOW_S: Final = 5.0
MOST_WAIT_S: Final = 60


def queue_bound(starts_per_s: float | None, budget_s: float, slots: int, per_slot: int) -> int:
    """Requests that may wait: 0.85 x TTFT budget x rate at which requests reach the workers, at least LEAST and at most
    `per_slot` x slots. Without a rate (None) the latter: requests leave by their deadline in any case.

    The rate is that of starts, which equals the arrival rate as long as the workers keep up; when they do not, the arrival rate
    would let in what nobody can serve in time.
    """
    most = max(1, per_slot * slots)
    if starts_per_s is None:
        return most
    return min(most, max(LEAST, ceil(BUDGET_SHARE * budget_s * starts_per_s)))


def retry_after_s(waiting: int, starts_per_s: float | None) -> int:
    """Whole seconds until so many requests will have left, 1 to MOST_WAIT_S."""
    if not starts_per_s:
        return 1
    return max(1, min(MOST_WAIT_S, ceil(waiting / starts_per_s)))


class RateMeter:
    """Events per second over the last one to two windows."""

    __slots__ = ("_before", "_count", "_ends", "_since")

    def __init__(self) -> None:
        self._since = self._ends = 0.0
        self._count = 0
        self._before: tuple[int, float] | None = None
        """(events, seconds) of the window before."""

    def event(self, now: float) -> None:
        """One more."""
        if now >= self._ends:
            self._roll(now)
        self._count += 1

    def per_s(self, now: float) -> float | None:
        """None while less than half a window was seen."""
        if now >= self._ends:
            self._roll(now)
        seen_s = now - self._since
        if self._before is not None:
            return (self._count + self._before[0]) / (seen_s + self._before[1])
        return self._count / seen_s if seen_s >= WINDOW_S / 2 else None

    def _roll(self, now: float) -> None:
        late = self._ends == 0.0 or now - self._ends > WINDOW_S  # nothing was asked for a whole window: it says nothing of now
        self._before = None if late else (self._count, now - self._since)
        self._since, self._ends, self._count = now, now + WINDOW_S, 0
