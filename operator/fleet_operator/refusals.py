"""When is a worker that a quota refused, or whose name is taken, asked for again? Pure: every time is passed in.

Nothing tells when a quota has room, or a pod without our labels is gone, and a refused request costs the API server as much as
any other. So a worker waits as long
again as it was refused already, FIRST_S to MOST_S; not when a pod of its fleet has gone meanwhile, whose room it may get. What is
not asked for is told as what it was refused with, so that plans and status stay as they are. All of it may be lost.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fleet_planner.capacity import QUOTA_WORDS
from fleet_planner.events import NAME_CONFLICT
from fleet_planner.types import Problem
from fleet_planner.wanted import PodWanted

FIRST_S = 1.0
MOST_S = 30.0
_POD = re.compile(r"Pod ([^ :]+):? ")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Of one pod."""

    problem: Problem
    since: float
    """When it was refused first, without being made since."""
    until: float
    pods: frozenset[str]
    """Uids of the fleet's pods at that moment: while they are there, so is what they take of the quota."""


class Refusals:
    """Of one fleet, by the name of the worker's first pod. Times are of a clock that nobody sets."""

    def __init__(self) -> None:
        self._found: dict[str, Refusal] = {}

    def held(self, create: Sequence[PodWanted], pods: Collection[str], now: float) -> tuple[tuple[PodWanted, ...], list[Problem]]:
        """What is asked for now of `create`, and what is told of the rest. `pods`: uids of all pods of the fleet."""
        waiting = {one.name: found for one in create if (found := self._waits(one.name, pods, now)) is not None}
        workers = {(one.pool, one.ordinal) for one in create if one.name in waiting}
        asked = tuple(one for one in create if (one.pool, one.ordinal) not in workers)
        return asked, [found.problem for found in waiting.values()]

    def note(
        self, asked: Iterable[PodWanted], problems: Iterable[Problem], pods: Collection[str], wait_s: float, now: float
    ) -> None:
        """What came of it. `wait_s`: after so long it is asked for in any case (scaling.capacityWait)."""
        there = frozenset(pods)
        lasting = [one for one in problems if QUOTA_WORDS in one.message or one.reason == NAME_CONFLICT]
        refused = {match[1]: one for one in lasting if (match := _POD.match(one.message))}
        for name in [one.name for one in asked if one.member == 0]:
            before = self._found.pop(name, None)
            if name in refused:
                since = before.since if before is not None else now
                until = now + min(max(now - since, FIRST_S), MOST_S, wait_s)
                self._found[name] = Refusal(refused[name], since, until, there)
        for name in [name for name, one in self._found.items() if now > one.until + MOST_S]:
            del self._found[name]  # nobody asked for it again

    @staticmethod
    def in_order(problems: Iterable[Problem], create: Sequence[PodWanted]) -> list[Problem]:
        """Those of pods last and as these are made, asked for now or not: else the same problems would be told anew."""
        places = {one.name: place for place, one in enumerate(create)}
        return sorted(problems, key=lambda one: places.get(match[1], -1) if (match := _POD.match(one.message)) else -1)

    def _waits(self, name: str, pods: Collection[str], now: float) -> Refusal | None:
        found = self._found.get(name)
        return found if found is not None and now < found.until and found.pods.issubset(pods) else None
