"""Consistent-hash ring with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016): a key belongs to the first worker clockwise
that is below its bound; adding or removing a worker moves only that worker's keys."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from typing import Final

import xxhash

VIRTUAL_NODES: Final = 64
LOAD_FLOOR: Final = 4
"""Requests that any worker may have whatever the mean is: without it one request in flight would already exceed the bound."""
SPACE: Final = 2**64


class Ring:
    """Immutable; built anew when the worker set changes. `before`: the ring so far, whose points are used again."""

    def __init__(self, workers: Sequence[str], before: Ring | None = None) -> None:
        known: dict[str, list[int]] = before._own if before is not None else {}
        self._own: dict[str, list[int]] = {name: known.get(name) or _points(name) for name in workers}
        old = zip(before._points, before._names, strict=True) if before is not None else ()
        kept = [(point, name) for point, name in old if name in self._own]
        fresh = sorted([(point, name) for name, own in self._own.items() if name not in known for point in own])
        points = sorted(kept + fresh)  # two sorted runs: merged, not sorted again
        self._points: list[int] = [point for point, _ in points]
        self._names: list[str] = [name for _, name in points]

    def first(self, key: int, wanted: Container[str]) -> str | None:
        """The first of `wanted` in ring order from `key`."""
        names, start = self._names, bisect_left(self._points, key % SPACE)
        for i in range(start - len(names), start):  # a negative index counts from the end: no modulo
            if names[i] in wanted:
                return names[i]
        return None

    def owner(self, key: int) -> str:
        """Whom the key belongs to; the ring must not be empty."""
        at = bisect_left(self._points, key % SPACE)
        return self._names[at if at < len(self._names) else 0]

    def along(self, key: int, most: int) -> Iterator[str]:
        """Workers in ring order from `key`, over the next `most` points; one may come again."""
        names, start = self._names, bisect_left(self._points, key % SPACE)
        for i in range(start - len(names), min(start, start - len(names) + most)):
            yield names[i]

    def nearest(self, key: int, few: Sequence[str]) -> int:
        """Which of these `first` finds, cheaper when few are wanted: each one's own next point. They must be on the ring."""
        key %= SPACE
        if len(few) == len(self._own):
            return few.index(self.owner(key))
        best, least, own = 0, SPACE, self._own
        for i, name in enumerate(few):
            points = own[name]
            at = bisect_left(points, key)
            away = (points[at] if at < VIRTUAL_NODES else points[0] + SPACE) - key
            if away < least:
                best, least = i, away
        return best

    def away(self, key: int, name: str) -> int:
        """How far it is from the key to the next point of this one, which must be on the ring: the same on every ring, so that
        the nearest of several rings' workers is the one that a ring of all of them would find."""
        points = self._own[name]
        return (points[bisect_left(points, key % SPACE) % VIRTUAL_NODES] - key) % SPACE


def _points(name: str) -> list[int]:
    digest = xxhash.xxh3_64_intdigest
    return sorted([digest(f"{name}#{i}".encode()) for i in range(VIRTUAL_NODES)])


def load_cap(loads: Sequence[int], bound: float) -> int:
    """Most requests that one of these workers may have after the next one arrives: ceil(bound × mean), at least the floor."""
    return cap_of(sum(loads), len(loads), bound)


def cap_of(total: int, workers: int, bound: float) -> int:
    """The same from the sum of the loads."""
    return max(LOAD_FLOOR, math.ceil(bound * (total + 1) / workers)) if workers else 0
