"""When is a worker replaced that its node turned away? Pure: every time is passed in.

A kubelet that cannot take a pod which a scheduler gave it (its device plugin is not back yet, its count of devices is another)
ends it before anything of it runs. One made in its place is mostly sent to the same node: without a pause that went on several
times a second until somebody mended the node. So such a pod stays, for everybody to see what its kubelet says, as long again as
workers of its kind were turned away already, FIRST_S to MOST_S. Kubernetes' DaemonSets do the same.

So it is with one that a scheduler sent to a node that goes away already (a condition keeps nobody from it, nor does a taint those
who tolerate it), but others are made meanwhile: while it stays they do not get its devices, and find another node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleet_planner.types import Observed, ObservedPod

FIRST_S = 1.0
MOST_S = 60.0
Sort = tuple[str, str, str]
"""Tier, role, revision."""


@dataclass(slots=True)
class _Run:
    """Workers of one sort that were turned away one after the other."""

    since: float
    until: float


class TurnedAway:
    """Of one fleet. Times are of a clock that nobody sets; all of it may be lost."""

    def __init__(self) -> None:
        self._runs: dict[Sort, _Run] = {}
        self._until: dict[str, float] = {}
        """By uid: when it may be replaced."""
        self._settled: frozenset[str] | None = None
        """Uids of those that have a node, and did not come to one that went away already; None: before the first look."""
        self.left_s: float | None = None
        """Until the next of them may be; None: none waits."""

    def look(self, observed: Observed, now: float) -> Observed:
        """With those that are not to be replaced yet."""
        found = [pod for pod in observed.pods if pod.rejected and not pod.terminating] + self._misplaced(observed.pods)
        if not (found or self._runs):
            return observed
        known = self._until
        self._until = {pod.uid: known[pod.uid] if pod.uid in known else self._waits(pod, now) for pod in found}
        self._runs = {sort: run for sort, run in self._runs.items() if now <= run.until + MOST_S}
        left = [until - now for until in self._until.values() if until > now]
        self.left_s = min(left, default=None)
        pods = [replace(pod, held=True) if self._until.get(pod.uid, now) > now else pod for pod in observed.pods]
        return replace(observed, pods=tuple(pods)) if left else observed

    def _misplaced(self, pods: Sequence[ObservedPod]) -> list[ObservedPod]:
        """Those that came to a node that went away already. Of those that were there before our first look nobody knows."""
        placed, before = [pod for pod in pods if pod.node is not None], self._settled
        self._settled = frozenset([pod.uid for pod in placed if not pod.leaving or before is None or pod.uid in before])
        return [pod for pod in placed if pod.leaving and not (pod.uid in self._settled or pod.terminating or pod.rejected)]

    def _waits(self, pod: ObservedPod, now: float) -> float:
        run = self._runs.setdefault((pod.tier, pod.role, pod.revision), _Run(now, now))
        until = now + min(max(now - run.since, FIRST_S), MOST_S)
        run.until = max(run.until, until)
        return until
