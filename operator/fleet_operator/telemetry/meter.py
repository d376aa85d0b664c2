"""KV counters that do not go down: an engine that starts again counts from zero, and one that is gone counts no more. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fleet_planner.types import KvProof

Counts = tuple[int, int, int, int]
"""Transfers, blocks, bytes, failed."""
ZERO: Counts = (0, 0, 0, 0)
COUNT_LIMIT = 2**63
"""The first number that a status cannot hold: an int64."""
PODS_MOST = 1_024
"""Pods whose last counts are kept apart, also of those that are gone: a pod that is away for one reading counts once."""


@dataclass(slots=True)
class KvMeter:
    """What the decode workers of one tier moved while it was watched, and before by those that ran then."""

    _ended: Counts = ZERO
    """Of engines that are gone or started again."""
    _last: dict[str, Counts] = field(default_factory=dict)
    """By pod."""

    def read(self, counts: Mapping[str, Counts | None], now: float) -> KvProof | None:
        """One reading by pod, None for a worker that could not be read; None when nothing was ever read."""
        if len(self._last) > PODS_MOST:
            for pod in self._last.keys() - counts.keys():
                self._ended = _plus(self._ended, self._last.pop(pod))
        for pod, new in counts.items():
            if new is None:
                continue
            old = self._last.get(pod, ZERO)
            if any(after < before for after, before in zip(new, old, strict=True)):
                self._ended = _plus(self._ended, old)
            self._last[pod] = new
        if not self._last and self._ended == ZERO:
            return None
        total = self._ended
        for known in self._last.values():
            total = _plus(total, known)
        return KvProof(transfers=total[0], blocks=total[1], bytes=total[2], failed=total[3], measured_at=now)


def metered(counted: KvProof | None, proof: KvProof | None) -> KvProof | None:
    """A meter's counters with what the watch says in `proof`: how many answers passed without KV, and what was read too late."""
    if counted is None or proof is None:
        return counted
    return replace(counted, answers_since=proof.answers_since, failed_since=proof.failed_since, late=proof.late)


def _plus(one: Counts, two: Counts) -> Counts:
    """No more than a status holds: an engine that counts nonsense up and down must not keep the status from being written."""
    most = COUNT_LIMIT - 1
    return min(one[0] + two[0], most), min(one[1] + two[1], most), min(one[2] + two[2], most), min(one[3] + two[3], most)
