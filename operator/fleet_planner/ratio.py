"""The ratio rule: prefill and decode counts that are allowed together, and the nearest allowed pair to a wish."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from fleet_api.quantities import Ratio
from fleet_api.v1alpha1.tier import TierSpec

Pair = tuple[int, int]
"""(prefill, decode): workers, or devices, of both roles."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one tier may have: replicas per role, and prefill:decode between `low` and `high`."""

    prefill_min: int
    prefill_max: int
    decode_min: int
    decode_max: int
    low: Ratio
    high: Ratio

    def allow(self, prefill: int, decode: int) -> bool:
        """This pair is inside replica bounds and ratio."""
        inside = self.prefill_min <= prefill <= self.prefill_max and self.decode_min <= decode <= self.decode_max
        return inside and within(prefill, decode, self.low, self.high)


def bounds_of(tier: TierSpec) -> Bounds:
    """Bounds of a tier's spec. Warm workers are no part of the minimum: they are added to what the load needs (scale.py)."""
    prefill, decode = tier.prefill, tier.decode
    return Bounds(
        prefill_min=prefill.min_replicas,
        prefill_max=prefill.max_replicas,
        decode_min=decode.min_replicas,
        decode_max=decode.max_replicas,
        low=tier.ratio.min_ratio,
        high=tier.ratio.max_ratio,
    )


def within(prefill: int, decode: int, low: Ratio, high: Ratio) -> bool:
    """low ≤ prefill/decode ≤ high."""
    return low.allows(prefill, decode)[0] and high.allows(prefill, decode)[1]


def largest(box: Pair, low: Ratio, high: Ratio) -> Pair:
    """The largest pair inside the ratio and inside `box` in both roles; (0, 0) when none is.

    Allowed pairs form a cone, and a cone is closed under taking the larger of each coordinate: so one pair is largest in both
    roles at once, and taking away whatever cannot be paired, again and again, arrives at it.
    """
    prefill, decode = box
    while True:
        paired = min(prefill, decode * high.prefill // high.decode)
        served = min(decode, paired * low.decode // low.prefill)
        if (paired, served) == (prefill, decode):
            return prefill, decode
        prefill, decode = paired, served


def smallest(need: Pair, low: Ratio, high: Ratio) -> Pair:
    """The smallest pair inside the ratio that has at least `need` of both roles; closed under the smaller of each, as above."""
    prefill, decode = need
    while True:
        paired = max(decode, -(-prefill * high.decode // high.prefill))
        served = max(prefill, -(-paired * low.prefill // low.decode))
        if (served, paired) == (prefill, decode):
            return prefill, decode
        prefill, decode = served, paired


def grown(
    have: Pair,
    target: Pair,
    cost: Pair,
    room: int,
    low: Ratio,
    high: Ratio,
    *,
    level: bool = False,
    among: Set[Pair] | None = None,
) -> Pair:
    """On the way from `have` to `target`: the pair inside the ratio, with at least `have`, that `room` devices can hold and that
    is furthest along in the role that lags behind; `have` itself when there is none. `cost`: devices of one worker per role;
    `level`: of equals the one in which no role is far ahead; `among`: the only pairs that may be found."""
    best: tuple[tuple[Fraction, int, Fraction], Pair] = ((Fraction(-1), 0, Fraction(0)), have)
    for prefill in range(max(have[0], 1), target[0] + 1):
        left = room - prefill * cost[0]
        most = min(target[1], prefill * low.decode // low.prefill, left // cost[1] if cost[1] else target[1])
        least = max(have[1], -(-prefill * high.decode // high.prefill))
        found = (decode for decode in range(most, least - 1, -1) if among is None or (prefill, decode) in among)
        if left < 0 or (decode := next(found, None)) is None:
            continue
        lag, lead = sorted((Fraction(prefill, target[0]), Fraction(decode, target[1])))
        best = max(best, ((lag, prefill + decode, -lead if level else Fraction(0)), (prefill, decode)))
    return best[1]


@lru_cache(maxsize=4096)
def project(want_prefill: int, want_decode: int, bounds: Bounds) -> tuple[int, int]:
    """The allowed pair that covers both wants with the fewest workers; when none covers both, the one that misses least.

    Walks the prefill counts (at most 1,000) and computes for each the decode counts that the ratio leaves. Validation
    guarantees that some pair is allowed; ValueError says that it did not.
    """
    best: tuple[tuple[int, int, int], tuple[int, int]] | None = None
    for prefill in range(bounds.prefill_min, bounds.prefill_max + 1):
        fewest = max(bounds.decode_min, -(-prefill * bounds.high.decode // bounds.high.prefill))
        most = min(bounds.decode_max, prefill * bounds.low.decode // bounds.low.prefill)
        if fewest > most:
            continue
        decode = min(max(want_decode, fewest), most)
        missing = max(0, want_prefill - prefill) + max(0, want_decode - decode)
        key = (missing, prefill + decode, abs(prefill - want_prefill) + abs(decode - want_decode))
        if best is None or key < best[0]:
            best = (key, (prefill, decode))
    if best is None:
        raise ValueError("no pair of replica counts inside the bounds has an allowed ratio")
    return best[1]
