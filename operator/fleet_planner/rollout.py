"""How many workers of each revision a tier should have at this moment. Pure arithmetic on counts; nothing is remembered.

A revision is a group of prefill and decode workers that hand KV to each other; while a new one comes, several groups exist. The
rules, from which every state of a rollout follows:

1. Every group is sized inside the ratio, so that it can serve alone; the sum of groups inside the ratio is inside it, too.
2. All workers together hold at most the wanted devices plus `surge_gpus`; workers that terminate count, those on nodes that go
   away do not, nor those that should have been gone for long. What events take is brought back inside this bound, too.
3. At least `want - unavailable` workers of each role serve. The old group keeps what the new one does not serve yet, and beside
   a canary one pair at least.
4. The new group grows as far as rule 2 lets it, both roles in step, and only to sizes from which the rest can follow (ways.py).
   It is never shrunk for the sake of rule 2.
5. The old group gives way when all that was started of the new one is ready: so the path does not depend on who is ready first.
   A worker on a node that goes away serves, but nobody gives way to it.
6. Only when the new group cannot grow (no room) does the old one go below `want`, down to what rule 3 leaves it; not when the
   new one could not grow into that, either.
7. Then old groups of which nothing serves, because a role of them was not ready for a long time, keep nothing: what does not come
   up may hold the very room that those need that mend it.
8. Where the old workers hand KV to the new ones, they serve in pairs with each other: rule 3 counts them so, and when nothing
   else can go on, one old worker of one role gives way. So one free device is enough, and 1+2 is replaced with one missing.

Rule 6 is what makes surge and unavailability one mechanism: with room nothing is ever taken away early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from fleet_api.quantities import Ratio
from fleet_planner.ratio import Pair, grown, largest, smallest
from fleet_planner.ways import ways

STEPS_MOST = 10_000
STUCK = "Stuck"
"""The reason of RollingOut that a pass before gave (status.py)."""


@dataclass(frozen=True, slots=True)
class Group:
    """The workers of one revision."""

    revision: str
    alive: Pair = (0, 0)
    """Workers that exist and stay: neither terminating nor on a node that goes away."""
    ready: Pair = (0, 0)
    """Workers that could serve now, those on nodes that go away included."""
    unschedulable: bool = False
    """Some worker finds no node."""
    leaving: Pair = (0, 0)
    """Those of the ready ones whose nodes go away."""
    terminating: bool = False
    """Some worker of it terminates, or is to because it can never be whole again."""
    refused: bool = False
    """A quota refuses some worker."""
    queued: bool = False
    """Some worker waits in a queue for long: whoever lets them in has no room, either."""
    mates: bool = False
    """Its workers hand KV to those of the new group, so that they serve in pairs with them."""
    starting: bool = False
    """Some worker has its nodes and is not ready yet."""
    hopeless: bool = False
    """Nothing of it serves, and for a long time no worker of one role was ready."""
    returns: bool = False
    """Its workers come back though none is left: the new group is a canary."""

    @property
    def roomless(self) -> bool:
        """The cluster has no room for all of it."""
        return self.unschedulable or self.refused or self.queued

    @property
    def firm(self) -> Pair:
        """Ready workers that stay."""
        return self.ready[0] - self.leaving[0], self.ready[1] - self.leaving[1]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a rollout may use. `gpus`: devices of one worker of each role."""

    low: Ratio
    high: Ratio
    gpus: Pair = (1, 1)
    surge_gpus: int | None = None
    """None: as few as let the rollout go on."""
    unavailable: int = 0
    """Workers of each role that may be missing."""

    @property
    def ratio(self) -> tuple[Ratio, Ratio]:
        """Its bounds."""
        return self.low, self.high


@dataclass(frozen=True, slots=True)
class Canary:
    """The new group while it is judged."""

    size: Pair
    """It gets no more workers than these, and the old group keeps all of its own as long as there is room."""


@dataclass(frozen=True, slots=True)
class Step:
    """Wanted sizes by revision; a revision that is absent should have no workers."""

    sizes: dict[str, Pair]
    rolling: bool = False
    stuck: bool = False
    """Nothing can go on before somebody changes a limit or the nodes; `why_stuck` has the words."""


def plan_step(
    want: Pair, new: Group, olds: Sequence[Group], limits: Limits, *, leaving_gpus: int = 0, canary: Canary | None = None
) -> Step:
    """The sizes that follow from what exists. `leaving_gpus`: devices that terminating workers still hold."""
    ending = leaving_gpus > 0 and any(old.terminating for old in olds)
    olds = [old for old in olds if any(old.alive) or any(old.ready) or old.returns]
    if not olds:
        have, spare = smaller(new.alive, want), _spare(want, (new,), limits, canary) - leaving_gpus
        return Step({new.revision: _repaired(have, want, spare, limits) if ending else want})
    full = want if canary is None else smaller(canary.size, want)
    have = smaller(new.alive, full)
    whole = covers(new.firm, have)
    mixed = canary is None and all(old.mates for old in olds) and any(_together(want, new, olds, have, limits))
    held = {} if mixed else _share(olds, want, _floor(want, new, have, limits), limits)
    surplus_gpus = devices(new.alive, limits.gpus) - devices(have, limits.gpus)
    leads = _leading(want, have, limits) if canary is None and not mixed else None
    size = _grow(have, full, _room(want, olds, held, limits, canary) - leaving_gpus - surplus_gpus, limits, leads)
    blocked = (size == have != full and whole) or new.roomless
    some = [old for old in olds if not old.hopeless or old.returns]
    if blocked and 0 < len(some) < len(olds):  # rule 7: planned as when the others are on their way out
        gone = [old for old in olds if old not in some]
        leaving_gpus += sum(devices(old.alive, limits.gpus) for old in gone)
        step = plan_step(want, new, some, limits, leaving_gpus=leaving_gpus, canary=canary)
        return replace(step, sizes={**step.sizes, **dict.fromkeys([old.revision for old in gone], (0, 0))})
    firm = replace(new, ready=new.firm, leaving=(0, 0))
    most, least = want, (0, 0) if mixed else larger(_floor(want, new, size, limits), _fallback(want, limits, canary))
    if blocked:
        most, grows = _kept(want, olds, _floor(want, firm, size, limits), (have, full), surplus_gpus, limits, canary, leads)
        if not new.roomless and not grows:  # it would be taken away in vain
            most = least = _left(want, _serving(firm, size, limits), limits)
    elif whole and canary is None:
        most = _left(want, _serving(firm, size, limits), limits)
    spare = _spare(want, (replace(new, alive=larger(new.alive, size)), *olds), limits, canary) - leaving_gpus
    sizes = _share(olds, most, least, limits, spare)
    resting = leaving_gpus == surplus_gpus == 0 and not any(_coming(old) for old in olds)
    stuck = blocked and resting and all(sizes.get(old.revision, (0, 0)) == old.alive for old in olds)
    if stuck and mixed and not new.starting and (fewer := _one_fewer(want, new, olds, size, limits)):
        rest = [fewer if old.revision == fewer.revision else old for old in olds]
        if new.roomless or _grow(have, full, _room(want, rest, {}, limits, canary), limits) != have:
            return Step({new.revision: size, **sizes, fewer.revision: fewer.alive}, rolling=True)
    paired = larger(largest(have, *limits.ratio), smaller(have, _serving(new, have, limits)))
    if stuck and size == have != paired and not new.roomless:
        size, stuck = paired, False  # what lost its partners gives its devices back, else it may hold those that partners need
    elif stuck and limits.surge_gpus is None and not new.roomless:
        size, stuck = next_step(have, full, limits), False
    return Step({new.revision: size, **sizes}, rolling=True, stuck=stuck)


def hold_step(want: Pair, new: Group, olds: Sequence[Group], kept: Mapping[str, Pair], limits: Limits, *, resized: bool) -> Step:
    """A paused rollout: every group keeps the size that it had (`kept`), and so gets back what it lost; surge counts only when
    sizes change. `resized`: those sizes were made for another `want`; the old groups follow it, the new one does not."""
    had = {group.revision: smaller(kept.get(group.revision, group.alive), want) for group in (new, *olds)}
    if resized:
        need = _left(want, _serving(new, had[new.revision], limits), limits)
        spare = _most(want, limits, None) - sum(devices(size, limits.gpus) for size in had.values())
        had |= _share([replace(old, alive=had[old.revision]) for old in olds], need, need, limits, spare)
    return Step(had, rolling=True)


def stays_stuck(want: Pair, new: Group, olds: Sequence[Group], step: Step, limits: Limits, canary: Canary | None) -> bool:
    """A stuck rollout is so still once the old workers that come or go in `step` have: those are of the tier's size, not of the
    rollout's progress. Where it lacks room, who goes may give it some."""
    if step.stuck or not step.rolling or new.roomless or step.sizes.get(new.revision) != new.alive:
        return step.stuck
    sizes = {old.revision: step.sizes.get(old.revision, (0, 0)) for old in olds}
    settled = [replace(old, alive=sizes[old.revision], ready=sizes[old.revision], leaving=(0, 0)) for old in olds]
    return plan_step(want, new, settled, limits, canary=canary).stuck


def devices(pair: Pair, gpus: Pair) -> int:
    """Devices of that many workers."""
    return pair[0] * gpus[0] + pair[1] * gpus[1]


def larger(a: Pair, b: Pair) -> Pair:
    """The larger of each role."""
    return max(a[0], b[0]), max(a[1], b[1])


def smaller(a: Pair, b: Pair) -> Pair:
    """The smaller of each role."""
    return min(a[0], b[0]), min(a[1], b[1])


def covers(a: Pair, b: Pair) -> bool:
    """`a` has at least `b` of both roles."""
    return a[0] >= b[0] and a[1] >= b[1]


def _grow(have: Pair, full: Pair, room: int, limits: Limits, leads: Set[Pair] | None = None) -> Pair:
    """`leads`: the only sizes that may come of it."""
    return grown(have, full, limits.gpus, room, limits.low, limits.high, level=True, among=leads)  # no role is done early


def _leading(want: Pair, have: Pair, limits: Limits) -> Set[Pair] | None:
    """Sizes from which the rollout can go on to its end; None when that is not known, or is lost already."""
    floor = want[0] - limits.unavailable, want[1] - limits.unavailable
    found = ways(want, floor, limits.ratio, limits.gpus, _most(want, limits, None))
    return found if found is not None and have in found else None


def _shrunk(olds: Sequence[Group], most: Pair, limits: Limits) -> list[Group]:
    """Them, when they have gone down to `most`."""
    sizes = _share(olds, most, (0, 0), limits)
    return [replace(old, alive=sizes[old.revision]) for old in olds]


def _kept(
    want: Pair, olds: Sequence[Group], floor: Pair, way: tuple[Pair, Pair], surplus_gpus: int, limits: Limits,
    canary: Canary | None, leads: Set[Pair] | None,
) -> tuple[Pair, bool]:  # fmt: skip
    """What the old groups keep where the new one finds no room, and whether it can grow then; `way`: what it has, and all of it.
    Beside a canary a pair of them stays where both fit."""
    (have, full), most = way, (0, 0)
    pair = larger(floor, _fallback(want, limits, canary))
    for most in [(0, 0)] if all(old.hopeless for old in olds) else [pair, floor]:
        room = _room(want, _shrunk(olds, most, limits), {}, limits, canary) - surplus_gpus
        if have == full or _grow(have, full, room, limits, leads) != have:
            return most, True
    return most, False


def next_step(have: Pair, full: Pair, limits: Limits) -> Pair:
    """The cheapest step up, whatever it costs."""
    cost = devices(have, limits.gpus)
    sizes = (_grow(have, full, room, limits) for room in range(cost, devices(full, limits.gpus) + 1))
    return next((size for size in sizes if size != have), full)


def _room(want: Pair, olds: Sequence[Group], held: dict[str, Pair], limits: Limits, canary: Canary | None) -> int:
    """Devices that the new group may hold in all, when the old ones hold what they have and what rule 3 gives back to them."""
    taken = (larger(old.alive, held.get(old.revision, (0, 0))) for old in olds)
    return _most(want, limits, canary) - sum(devices(pair, limits.gpus) for pair in taken)


def _most(want: Pair, limits: Limits, canary: Canary | None) -> int:
    surge = limits.surge_gpus if limits.surge_gpus is not None else auto_surge(want, limits, canary)
    return devices(want, limits.gpus) + surge


def _spare(want: Pair, groups: Sequence[Group], limits: Limits, canary: Canary | None) -> int:
    """Devices that rule 2 leaves beside what exists."""
    return _most(want, limits, canary) - sum(devices(group.alive, limits.gpus) for group in groups)


def _floor(want: Pair, new: Group, size: Pair, limits: Limits) -> Pair:
    """What the old groups must have by rule 3 when `size` workers of the new one stay."""
    return _left((want[0] - limits.unavailable, want[1] - limits.unavailable), _serving(new, size, limits), limits)


def _fallback(want: Pair, limits: Limits, canary: Canary | None) -> Pair:
    """What the old group must have however large the canary is: it gets requests, and is what a bad canary goes back to."""
    return (0, 0) if canary is None else smaller(smallest((1, 1), limits.low, limits.high), want)


def _serving(new: Group, size: Pair, limits: Limits) -> Pair:
    """What serves of the new group when no more than `size` of it stay; those on nodes that go away are kept while needed."""
    staying = smaller(new.firm, size)
    return largest((staying[0] + new.leaving[0], staying[1] + new.leaving[1]), *limits.ratio)


def _together(want: Pair, new: Group, olds: Sequence[Group], size: Pair, limits: Limits) -> Pair:
    """What serves of all that stay, in pairs of any of them; (0, 0) when that is less than rule 3 asks for."""
    firm = [smaller(new.firm, size), *(smaller(old.firm, old.alive) for old in olds)]
    served = largest((sum(pair[0] for pair in firm), sum(pair[1] for pair in firm)), *limits.ratio)
    return served if covers(served, (want[0] - limits.unavailable, want[1] - limits.unavailable)) else (0, 0)


def _one_fewer(want: Pair, new: Group, olds: Sequence[Group], size: Pair, limits: Limits) -> Group | None:
    """The old group without one worker of a role, so that most serve; None when none may go. No pair of a single group finds
    room for its successor, but one worker does, and serves with what is left."""
    best: tuple[Pair, Group | None] = ((0, 0), None)
    for old, role in product(olds, (0, 1)):
        if old.alive[role] > 0:
            alive = (old.alive[0] - 1, old.alive[1]) if role == 0 else (old.alive[0], old.alive[1] - 1)
            fewer = replace(old, alive=alive)
            served = _together(want, new, [fewer if one is old else one for one in olds], size, limits)
            best = max(best, (served, fewer), key=lambda one: (sum(one[0]), one[0]))
    return best[1]


def _left(want: Pair, served: Pair, limits: Limits) -> Pair:
    """What the old groups must have so that `want` workers serve: inside the ratio, and nothing when nothing is missing."""
    missing = max(0, want[0] - served[0]), max(0, want[1] - served[1])
    return smallest(missing, limits.low, limits.high) if any(missing) else (0, 0)


def _coming(group: Group) -> bool:
    """Workers of it are on their way to be ready."""
    return not (group.unschedulable or group.queued) and not covers(group.ready, group.alive)


def _share(olds: Sequence[Group], most: Pair, least: Pair, limits: Limits, spare: int | None = None) -> dict[str, Pair]:
    """`most` workers among the old groups, the readiest first; lost workers come back only up to `least`, in the first group, and
    while others still leave only on `spare` devices. A later group keeps what is ready as long as an earlier one only will be."""
    sizes: dict[str, Pair] = {}
    unserved = most
    for index, old in enumerate(sorted(olds, key=lambda old: (-min(old.ready), -sum(old.alive), old.revision))):
        kept = largest(smaller(smaller(old.ready, old.alive), unserved), *limits.ratio)
        size = larger(smaller(old.alive, most), kept)
        if index == 0:
            whole = larger(size, smaller(least, most))
            size = whole if spare is None else _repaired(size, whole, spare, limits)
        sizes[old.revision] = size
        most, least = _left(most, size, limits), _left(least, size, limits)
        unserved = _left(unserved, largest(smaller(old.ready, size), limits.low, limits.high), limits)
    return sizes


def _repaired(size: Pair, whole: Pair, spare: int, limits: Limits) -> Pair:
    """On the way from `size` to `whole`, with so many devices: inside the ratio, or else the role that lags behind first."""
    room = devices(size, limits.gpus) + spare
    if devices(whole, limits.gpus) <= room:
        return whole
    best = grown(size, whole, limits.gpus, room, *limits.ratio)
    if best != size:
        return best
    role = 0 if size[0] * whole[1] <= size[1] * whole[0] else 1
    count = min(whole[role] - size[role], max(0, spare) // max(1, limits.gpus[role]))
    return (size[0] + count, size[1]) if role == 0 else (size[0], size[1] + count)


def why_stuck(want: Pair, new: Group, limits: Limits) -> str:
    """What to change so that a stuck rollout goes on."""
    lets = f"and rollout.maxUnavailable lets no {'further ' if limits.unavailable else ''}old one go first"
    if new.unschedulable:
        return f"the new workers find no node, {lets}"
    if new.refused:
        return f"a quota refuses the new workers, {lets}"
    if new.queued:
        return f"the new workers wait in a queue, {lets}"
    # what there is does not suffice, though it may for a rollout without a canary
    needed = max(auto_surge(want, limits, None), (limits.surge_gpus or 0) + 1)
    return (
        f"rollout.maxSurgeGpus is {limits.surge_gpus}, but inside the ratio the next step needs {needed} more devices "
        f"than the {devices(want, limits.gpus)} of {want[0]} prefill and {want[1]} decode workers"
    )


def auto_surge(want: Pair, limits: Limits, canary: Canary | None) -> int:
    """The fewest devices above `want` with which a rollout from `want` to `want` goes on to its end; with a canary, at least
    its devices."""
    base = _fewest(want, replace(limits, surge_gpus=None))
    return base if canary is None else max(base, devices(smaller(canary.size, want), limits.gpus))


@lru_cache(maxsize=4096)
def _fewest(want: Pair, limits: Limits) -> int:
    low, high = 0, devices(want, limits.gpus)
    while low < high:
        middle = (low + high) // 2
        if _ends(want, replace(limits, surge_gpus=middle)):
            high = middle
        else:
            low = middle + 1
    return low


def _ends(want: Pair, limits: Limits) -> bool:
    """A rollout in which every worker is ready at once comes to its end."""
    new, old = Group("new"), Group("old", want, want)
    for _ in range(STEPS_MOST):
        step = plan_step(want, new, [old], limits)
        sizes = step.sizes.get("new", (0, 0)), step.sizes.get("old", (0, 0))
        if sizes == (new.alive, old.alive):
            return not any(old.alive)
        new, old = Group("new", sizes[0], sizes[0]), Group("old", sizes[1], sizes[1])
    return False
