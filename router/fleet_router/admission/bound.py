"""How long the queue may be: Little's law says how many requests leave it within the time that they may wait."""

from __future__ import annotations

from math import ceil
from typing import Final

BUDGET_SHARE: Final = 0.85
"""Of the time to the first token; the rest is for the prefill itself."""
LEAST: Final = 8
"""Waiting requests that are always allowed: a burst into an idle router has no rate yet."""
WINDOW_S: Final = 5.0
SLOWEST_PER_S: Final = 1 / (2 * WINDOW_S)
"""A lower rate cannot be told from none."""
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
    """Whole seconds until so many requests will have left, 1 to MOST_WAIT_S. Without a rate (None) nobody knows. One of 0 says
    that none has for a whole window: who came again at once would only be turned away again."""
    if starts_per_s is None:
        return 1
    return max(1, min(MOST_WAIT_S, ceil(waiting / max(starts_per_s, SLOWEST_PER_S))))


class RateMeter:
    """Events per second over the last one to two windows, from a running count that somebody else keeps: counting must cost a
    request nothing more."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []
        """(time, count): the present window's beginning last, the one before first."""

    def sample(self, count: int, now: float) -> None:
        """Called some times a second."""
        samples = self._samples
        if samples and now - samples[-1][0] > 2 * WINDOW_S:
            samples.clear()  # nobody called for so long that the count says nothing of now
        if not samples or now - samples[-1][0] >= WINDOW_S:
            self._samples = [*samples[-1:], (now, count)]

    def per_s(self, count: int, now: float) -> float | None:
        """None while less than half a window was seen."""
        if not self._samples:
            return None
        since, before = self._samples[0]
        return (count - before) / (now - since) if now - since >= WINDOW_S / 2 else None
