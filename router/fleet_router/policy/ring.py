"""Consistent-hash ring with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016): a key belongs to the first worker clockwise
that is below its bound; adding or removing a worker moves only that worker's keys."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Sequence

import xxhash

VIRTUAL_NODES = 64
LOAD_FLOOR = 2
"""Requests that any worker may have whatever the mean is: without it one request in flight would already exceed the bound."""


class Ring:
    """Immutable; built anew when the worker set changes."""

    def __init__(self, workers: Sequence[str]) -> None:
        points = sorted(
            (xxhash.xxh3_64_intdigest(f"{name}#{i}".encode()), name) for name in workers for i in range(VIRTUAL_NODES)
        )
        self._points = [point for point, _ in points]
        self._names = [name for _, name in points]

    def first(self, key: int, wanted: Container[str]) -> str | None:
        """The first of `wanted` in ring order from `key`."""
        names, start = self._names, bisect_left(self._points, key % 2**64)
        for i in range(start - len(names), start):  # a negative index counts from the end: no modulo
            if names[i] in wanted:
                return names[i]
        return None


def load_cap(loads: Sequence[int], bound: float) -> int:
    """Most requests that one of these workers may have after the next one arrives: ceil(bound × mean), at least the floor."""
    if not loads:
        return 0
    return max(LOAD_FLOOR, math.ceil(bound * (sum(loads) + 1) / len(loads)))
