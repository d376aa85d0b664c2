"""The workers of one role in one group, and which of them a decision looks at.

Small sides are looked at whole. Of a large one: those that hold most of the prompt, those with the fewest requests, and the
prompt's own worker on the ring; a number that does not grow with the side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import inf
from operator import attrgetter
from typing import Final

from fleet_router.policy.candidate import Candidate
from fleet_router.policy.ring import LOAD_FLOOR, Ring, cap_of

WHOLE: Final = 16
"""Sides up to this size are looked at whole."""
HOLDERS: Final = 4
IDLE: Final = 4
IDLE_LOOKED: Final = 24
COMMON_LEAST: Final = 3
"""What fewer workers hold may be one conversation's: with two of them the bound of requests brings new ones their first."""
NO_BOUND: Final = 1_000_000_000
"""Of requests: a share of it is none, too."""
RING_POINTS: Final = 256
"""So many points of the ring are tried for the prompt's own worker."""

HEAT_S: Final = 60.0
"""Prefill work is remembered about this long."""
HEAT_LEAST: Final = 4.0
"""Below so many requests like the one at hand per worker it tells nothing."""
HEAT_WORTH: Final = 1.5
"""A worker that had twice the prefill work of the others is taken to be that much slower once more: work and new blocks are
spread, and a cache that is filled no faster than the others keeps as long as they do."""

Usable = Callable[[Candidate], bool]
Steps = Sequence[tuple[float, int]]
"""(tokens, workers as bits), most tokens first: who holds how much of a prompt. A worker is in one step at most."""
Depths = tuple[float, int, float, int, Steps]
"""(tokens, workers as bits) of the deepest step and of the next one, and the other steps."""


class Side:
    """Workers of one role in one group. `inflight` is the sum of theirs."""

    __slots__ = (
        "_by_index", "_by_name", "bits", "fresh", "heat", "inflight", "large", "levels", "members", "ramping", "ring", "squares",
    )  # fmt: skip

    def __init__(self) -> None:
        self.members: list[Candidate] = []
        self.levels: list[dict[str, Candidate]] = [{}]
        """Of a large side, by requests in flight; the last one is not empty unless it is the first."""
        self.large = False
        """Not looked at whole."""
        self.inflight = 0
        self.heat = 0.0
        """Tokens that they were sent to compute lately."""
        self.squares = 0.0
        """The same of their squares, prompt by prompt."""
        self.ramping = False
        """Some worker is in its slow start."""
        self.fresh = 0
        """These workers as bits."""
        self.bits = 0
        self.ring = Ring(())
        self._by_index: dict[int, Candidate] = {}
        self._by_name: dict[str, Candidate] = {}

    def update(self, workers: Sequence[tuple[Candidate, int]]) -> None:
        """These, each with its bit in `Steps`. The ring keeps what it knows."""
        names = [worker.uid for worker, _ in workers]
        if names != [worker.uid for worker in self.members]:
            self.ring = Ring(names, self.ring)
        self.members = [worker for worker, _ in workers]
        self._by_index = {bit.bit_length(): worker for worker, bit in workers}
        self._by_name = {worker.uid: worker for worker in self.members}
        self.bits, self.inflight, self.heat = 0, 0, sum(worker.heat for worker, _ in workers)
        self.large = len(self.members) > WHOLE
        self.levels = [{} for _ in range(max((w.inflight for w in self.members), default=0) + 1)]
        for worker, bit in workers:
            self.bits |= bit
            self.inflight += worker.inflight
            self.levels[worker.inflight][worker.uid] = worker
            worker.home = self
            worker.bit = bit
        self.mark_ramping()

    def mark_ramping(self) -> None:
        """After shares have changed."""
        self.fresh = 0
        for worker in self.members:
            if worker.share < 1.0:
                self.fresh |= worker.bit
        self.ramping = self.fresh != 0

    def with_common(self, steps: Steps) -> Steps:
        """The same as if workers in their slow start held what most of the others hold. They will need it, and it is computed
        there once; whoever is the first finds them dearer by it, so that where all prompts begin alike nobody would be."""
        fresh, found, holders = self.fresh, 0, 0
        for at, (tokens, mask) in enumerate(steps):
            found |= mask & self.bits
            holders = (found & ~fresh).bit_count()
            if holders >= COMMON_LEAST and 2 * holders > (self.bits & ~fresh).bit_count():
                fresh &= ~found
                return [*steps[:at], (tokens, mask | fresh), *[(fewer, others & ~fresh) for fewer, others in steps[at + 1 :]]]
        return steps

    def moved(self, worker: Candidate, by: int) -> None:
        """On a large side: the worker is about to have `by` (1 or -1) more requests."""
        levels, before = self.levels, worker.inflight
        del levels[before][worker.uid]
        if before + by == len(levels):
            levels.append({})
        levels[before + by][worker.uid] = worker
        if not levels[-1]:
            levels.pop()

    def reaches(self, inflight: int) -> bool:
        """Somebody has so many requests."""
        return len(self.levels) > inflight if self.large else any(w.inflight >= inflight for w in self.members)

    def cool(self, keep: float) -> None:
        """Time passes."""
        for worker in self.members:
            worker.heat *= keep
        self.heat = sum(worker.heat for worker in self.members)
        self.squares *= keep

    @property
    def lump(self) -> float:
        """Tokens of the prompt to which a token of heat belongs in the mean; 0: not known."""
        return self.squares / self.heat if self.heat > 1.0 else 0.0

    def shifted(self, worker: Candidate, by: int) -> None:
        """The same for any number: other routers say what they have there."""
        levels, before = self.levels, worker.inflight
        del levels[before][worker.uid]
        levels.extend({} for _ in range(before + by + 1 - len(levels)))
        levels[before + by][worker.uid] = worker
        while len(levels) > 1 and not levels[-1]:
            levels.pop()

    def look(
        self, steps: Steps, key: int, bound: float, usable: Usable | None, tokens: float = 0.0, new: float = 0.0
    ) -> list[Candidate]:
        """Who is worth a look at a prompt of so many tokens, of which nobody has computed `new` yet: usable workers below their
        bound of requests; when all are at it, those below that of the usable ones alone."""
        free = usable is None and not self.ramping
        if free and not self.large:
            return self._below(bound)
        cap = cap_of(self.inflight, len(self.members), bound)
        if self.large:
            room = bound * self.heat / len(self.members) - tokens
            found = self._few(steps, key, cap, room) if free else self._few_of_some(steps, key, cap, usable, new)
        else:
            fits = self._fitting(cap, usable, new)
            found = [worker for worker in self.members if fits(worker)]
        return found or self._at_the_bound(steps, key, bound, usable)

    def _at_the_bound(self, steps: Steps, key: int, bound: float, usable: Usable | None) -> list[Candidate]:
        """Those that may not be used have next to nothing, and the mean of all is little to the others: they have one of their
        own. Where slow starts leave nobody below that either, nobody has a bound."""
        some = [w for w in self.members if usable is None or usable(w)]
        if len(some) <= WHOLE:
            return some
        load = sum([w.inflight for w in some])
        found = self._few_of_some(steps, key, cap_of(load, len(some), bound), usable)
        return found or self._few_of_some(steps, key, NO_BOUND, usable)

    def _below(self, bound: float) -> list[Candidate]:
        """Of a small side, all of whom may be used: `look`."""
        members = self.members
        cap = bound * (self.inflight + 1) / len(members) if members else 0.0
        cap = cap if cap > LOAD_FLOOR else LOAD_FLOOR
        found = [worker for worker in members if worker.inflight < cap]
        return found if found and len(found) < len(members) else members

    def _few(self, steps: Steps, key: int, cap: int, room: float) -> list[Candidate]:
        """Of all workers, without a filter."""
        found, seen = self._holders(steps, cap) if steps else ([], 0)
        own = self._own(key, cap)
        if own.inflight < cap and not seen & own.bit:
            seen |= own.bit
            found.append(own)
        return found + self._idle(seen, cap, room)

    def _idle(self, seen: int, cap: int, room: float) -> list[Candidate]:
        """Some of the others with the fewest requests, below their bound: of the first few of these those with less heat than
        most, and than `room`, then the coolest."""
        cool: list[Candidate] = []
        hot: list[Candidate] = []
        mean, left = self.heat / len(self.members), IDLE_LOOKED
        most = mean if mean < room else room
        for level in self.levels[:cap]:
            for worker in level.values():
                if not seen & worker.bit:
                    if worker.heat <= most:
                        cool.append(worker)
                        if len(cool) == IDLE:
                            return cool
                    else:
                        hot.append(worker)
                    left -= 1
                    if not left:
                        break
            if not left:
                break
        hot.sort(key=attrgetter("heat"))
        return cool + hot[: IDLE - len(cool)]

    def _holders(self, steps: Steps, cap: int) -> tuple[list[Candidate], int]:
        """(some of those that hold most, they as bits)."""
        found: list[Candidate] = []
        seen, left, by_index, most = 0, HOLDERS, self._by_index, len(self.members) // 2
        for _, mask in steps:
            holders = mask & self.bits
            if holders.bit_count() > most:
                break  # what most of them hold, the others that are looked at hold as well
            while holders and left:
                low = holders & -holders
                holders ^= low
                left -= 1
                worker = by_index[low.bit_length()]
                if worker.inflight < cap:
                    seen |= low
                    found.append(worker)
        return found, seen

    def _own(self, key: int, cap: int) -> Candidate:
        """The prompt's own worker: the first on the ring that is below its bound."""
        own = self._by_name[self.ring.owner(key)]
        if own.inflight < cap:
            return own
        along = (self._by_name[name] for name in self.ring.along(key, RING_POINTS))
        return next((worker for worker in along if worker.inflight < cap), own)

    def _few_of_some(self, steps: Steps, key: int, cap: int, usable: Usable | None, new: float = 0.0) -> list[Candidate]:
        """Of those that may be used."""
        fits = self._fitting(cap, usable, new)
        holders = (self._by_index[index] for _, mask in steps for index in _bits(mask & self.bits))
        found = list(islice(filter(fits, holders), HOLDERS))
        along = (self._by_name[name] for name in self.ring.along(key, RING_POINTS))
        found += [worker for worker in islice(filter(fits, along), 1) if worker not in found]
        idle = (worker for level in self.levels for worker in level.values() if worker not in found)
        return found + list(islice(filter(fits, idle), IDLE))

    def _fitting(self, cap: int, usable: Usable | None, new: float) -> Usable:
        """Who may be used for a prompt with so many new tokens, and is below its bound. In its slow start a worker takes none
        with more than usual by more than its share: it is idle, so that the longest would all go there first."""
        usual = self.lump or inf

        def fits(worker: Candidate) -> bool:
            share = worker.share
            if worker.inflight >= cap * share or (share < 1.0 and new > usual * (1.0 + share)):
                return False
            return usable is None or usable(worker)

        return fits


def _bits(mask: int) -> Iterator[int]:
    left = mask
    while left:
        low = left & -left
        left ^= low
        yield low.bit_length()
