"""When is a worker that a quota refused, or whose name is taken, asked for again? Pure: every time is passed in.

Nothing tells when a quota has room, or a pod without our labels is gone, and a refused request costs the API server as much as
any other. So a worker waits as long
again as it was refused already, FIRST_S to MOST_S; not when a pod of its fleet has gone meanwhile, whose room it may get. What is
not asked for is told as what it was refused with, so that plans and status stay as they are. All of it may be lost.

A worker over several nodes of which the API server takes the first pod and refuses a later one, for whatever reason, goes, and
one of another name would be made in the next pass, which follows at once: so its whole pool waits. Of a quota the planner takes
care itself (`fleet_planner.gang`), for longer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    """Of one fleet, by the name of the worker's first pod, or of the pool. Times are of a clock that nobody sets."""

    def __init__(self) -> None:
        self._found: dict[str, Refusal] = {}

    def held(self, create: Sequence[PodWanted], pods: Collection[str], now: float) -> tuple[tuple[PodWanted, ...], list[Problem]]:
        """What is asked for now of `create`, and what is told of the rest. `pods`: uids of all pods of the fleet."""
        waiting = {one.name: found for one in create if (found := self._waits(one.name, pods, now)) is not None}
        waiting |= {one.pool: found for one in create if (found := self._waits(one.pool, pods, now)) is not None}
        workers = {(one.pool, one.ordinal) for one in create if one.name in waiting or one.pool in waiting}
        asked = tuple(one for one in create if (one.pool, one.ordinal) not in workers)
        return asked, [found.problem for found in waiting.values()]

    def note(
        self, asked: Sequence[PodWanted], problems: Iterable[Problem], pods: Collection[str], wait_s: float, now: float
    ) -> None:
        """What came of it. `wait_s`: after so long it is asked for in any case (scaling.capacityWait)."""
        there, found = frozenset(pods), [(match[1], one) for one in problems if (match := _POD.match(one.message))]
        refused = {name: one for name, one in found if QUOTA_WORDS in one.message or one.reason == NAME_CONFLICT}
        for name in [one.name for one in asked if one.member == 0]:
            self._heard(name, refused.get(name), there, wait_s, now)
        for pool, problem in _cut_short(asked, dict(found)).items():
            self._heard(pool, problem, frozenset(), wait_s, now)
        for name in [name for name, one in self._found.items() if now > one.until + MOST_S]:
            del self._found[name]  # nobody asked for it again

    def _heard(self, name: str, problem: Problem | None, there: frozenset[str], wait_s: float, now: float) -> None:
        """What the API server said of it; None: nothing against it."""
        before = self._found.pop(name, None)
        if problem is not None:
            since = before.since if before is not None else now
            until = now + min(max(now - since, FIRST_S), MOST_S, wait_s)
            self._found[name] = Refusal(problem, since, until, there)

    @staticmethod
    def in_order(problems: Iterable[Problem], create: Sequence[PodWanted]) -> list[Problem]:
        """Those of pods last and as these are made, asked for now or not: else the same problems would be told anew."""
        places = {one.name: place for place, one in enumerate(create)}
        return sorted(problems, key=lambda one: places.get(match[1], -1) if (match := _POD.match(one.message)) else -1)

    def _waits(self, name: str, pods: Collection[str], now: float) -> Refusal | None:
        found = self._found.get(name)
        return found if found is not None and now < found.until and found.pods.issubset(pods) else None


def _cut_short(asked: Sequence[PodWanted], problems: Mapping[str, Problem]) -> dict[str, Problem | None]:
    """By pool of workers over several nodes whose first pods were made: what was said of a later one; None: all were made."""
    made = [one for one in asked if one.member > 0 and f"{one.pool}-{one.ordinal}" not in problems]
    refused = {one.pool: problems[one.name] for one in made if one.name in problems}
    return {one.pool: found if (found := refused.get(one.pool)) and QUOTA_WORDS not in found.message else None for one in made}
