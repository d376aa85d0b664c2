"""Which sizes of a new revision lead to the end of a rollout with little surge. Pure arithmetic, for workers of two revisions
that do not hand KV to each other.

While the new group has `size`, the fewest that the old one may have are those of `floor` that the new one does not serve, and
nothing is won by keeping more: fewer hold fewer devices, and what grows serves more. So the sizes of the new group alone say what
can follow, and from the whole size back it is known from which of them some row of steps leads there.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf

from fleet_api.quantities import Ratio
from fleet_planner.ratio import Pair, smallest, within

SIZES_MOST = 10_000
"""More are not looked through: it is a pass of one fleet that waits for it."""


@lru_cache(maxsize=256)
def ways(want: Pair, floor: Pair, ratio: tuple[Ratio, Ratio], gpus: Pair, most: int) -> frozenset[Pair] | None:
    """Sizes of the new group from which it can become `want`, with at least `floor` serving and at most `most` devices held at
    each step; None when there are too many to look at."""
    if (want[0] + 1) * (want[1] + 1) > SIZES_MOST:
        return None
    found = {want}
    cheapest = [[inf] * (want[1] + 2) for _ in range(want[0] + 2)]
    """Devices of the smallest size among those that lead there and have at least as many of both roles."""
    for prefill in range(want[0], -1, -1):
        row, above = cheapest[prefill], cheapest[prefill + 1]
        for decode in range(want[1], -1, -1):
            row[decode] = next_cost = min(row[decode + 1], above[decode])
            whole = (prefill, decode) == want
            if whole or _leads((prefill, decode), floor, ratio, gpus, most - next_cost):
                found.add((prefill, decode))
                row[decode] = prefill * gpus[0] + decode * gpus[1]
    return frozenset(found)


def _leads(size: Pair, floor: Pair, ratio: tuple[Ratio, Ratio], gpus: Pair, left: float) -> bool:
    """The new group may have this size, and the old one beside it fits into what the next size leaves."""
    if left < 0 or not (size == (0, 0) or (0 not in size and within(*size, *ratio))):
        return False
    missing = max(0, floor[0] - size[0]), max(0, floor[1] - size[1])
    old = smallest(missing, *ratio) if any(missing) else (0, 0)
    return old[0] * gpus[0] + old[1] * gpus[1] <= left
