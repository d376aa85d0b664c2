"""The newest that is known of each pod. Behind one address may be several replicas of Prometheus that answer by turns, each with
scrapes of its own: an answer that is older than the one before says nothing new, and its counters did not begin anew.

What a pod's series were is kept as long as its fleet is asked about, and is as old as it was.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleet_operator.telemetry.series import TargetSeries

FORGET_S = 900.0
"""A fleet that nobody asked about for this long is gone; an interval is 5 minutes at most."""
Fleet = tuple[str, str]
Targets = Mapping[str, TargetSeries | None]
"""By pod."""


class Newest:
    """Of all fleets."""

    def __init__(self) -> None:
        self._known: dict[Fleet, tuple[float, dict[str, TargetSeries]]] = {}
        """When it was asked about last, which is their order, and what was read."""

    def of(self, fleet: Fleet, told: Targets, now: float) -> Targets:
        """What an answer says of the fleet's pods (None: nothing), or what an earlier one said, where that is newer."""
        _, before = self._known.pop(fleet, (now, {}))
        found = {pod: _later(before.get(pod), target, now) for pod, target in told.items()}
        kept = {pod: target or before.get(pod) for pod, target in found.items()}
        self._known[fleet] = now, {pod: target for pod, target in kept.items() if target is not None}
        while now - self._known[oldest := next(iter(self._known))][0] > FORGET_S:
            del self._known[oldest]
        return found


def _later(known: TargetSeries | None, told: TargetSeries | None, now: float) -> TargetSeries | None:
    """What was read in the future was not: the clock was set back since."""
    if known is None or told is None or not told.newest < known.newest <= now:
        return told
    return known
