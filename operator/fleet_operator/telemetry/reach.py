"""Which targets are worth asking: one that did not answer is asked again after a pause as long as it has been silent, and of
those that never answered only a few at a time. Pure; times are seconds of a clock that nobody sets.

Without it 8,000 addresses that nobody answers at (a partition, a network policy) keep every connection waiting for its timeout,
and the fleets whose workers do answer wait behind them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
FORGET_S = 900.0
"""A target that nobody asked for this long is gone."""
FIRST_WAVE = 4
"""Unknown targets that are asked at once; each wave in which one answers doubles the next."""


@dataclass(slots=True)
class _Target:
    answered: bool
    again_at: float
    pause_s: float
    wanted_at: float


class Reach:
    """What is known of each target."""

    def __init__(self) -> None:
        self._targets: dict[str, _Target] = {}
        self._swept_at = float("-inf")

    def split(self, targets: Iterable[str], now: float) -> tuple[list[str], list[str]]:
        """(those that answered last time, those to try); the others are let be until their pause is over."""
        known: list[str] = []
        to_try: list[str] = []
        for target in targets:
            found = self._targets.get(target)
            if found is None:
                to_try.append(target)
                continue
            found.wanted_at = now
            if found.answered:
                known.append(target)
            elif now >= found.again_at:
                to_try.append(target)
        self._sweep(now)
        return known, to_try

    def answered(self, target: str) -> bool:
        """Whether it answered last time."""
        return target in self._targets and self._targets[target].answered

    def told(self, target: str, answered: bool, now: float) -> None:
        """Whether anything came back, whatever it was."""
        before = self._targets.get(target)
        if answered:
            self._targets[target] = _Target(True, now, FIRST_PAUSE_S, now)
            return
        pause_s = FIRST_PAUSE_S if before is None or before.answered else min(LONGEST_PAUSE_S, before.pause_s * 2)
        self._targets[target] = _Target(False, now + pause_s, pause_s, now)

    def _sweep(self, now: float) -> None:
        if now - self._swept_at < FORGET_S / 10:
            return
        self._swept_at = now
        self._targets = {name: target for name, target in self._targets.items() if now - target.wanted_at < FORGET_S}

    def __len__(self) -> int:
        return len(self._targets)
