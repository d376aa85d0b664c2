"""A token bucket as one number: the moment at which it is full again.

Integers of nanoseconds, so that taking and giving back the same amount leaves exactly what was there, whatever happened between.
"""

from __future__ import annotations

from math import ceil
from typing import Final

SECOND_NS: Final = 1_000_000_000
MS_NS: Final = 1_000_000


class Bucket:
    """At most `size` units at once, refilled at `per_s` units a second."""

    __slots__ = ("each_ns", "full_at_ns", "size", "span_ns", "taken")

    def __init__(self, per_s: float, size: int) -> None:
        self.each_ns = ceil(SECOND_NS / per_s)
        """Rounded up: never faster than was asked for."""
        self.size = size
        self.span_ns = size * self.each_ns
        self.full_at_ns = 0
        self.taken = 0
        """Units that were ever taken here, less those given back."""

    def resized(self, per_s: float, size: int, now_ns: int) -> Bucket:
        """With other limits, and as many units taken or owed: a reload is no way to a full bucket, nor out of debt. With the same
        ones it is this bucket: of a unit that takes minutes to come back, what has come would be lost each time."""
        other = Bucket(per_s, size)
        if (other.each_ns, other.size) == (self.each_ns, self.size):
            return self
        other.full_at_ns = now_ns + max(0, -(-(self.full_at_ns - now_ns) // self.each_ns)) * other.each_ns
        other.taken = self.taken
        return other

    def wait_ns(self, units: int, now_ns: int) -> int:
        """How long until so many units are there; 0 or less: they are. Units above `size` never are."""
        full_at = self.full_at_ns
        return (full_at if full_at > now_ns else now_ns) + units * self.each_ns - now_ns - self.span_ns

    def take_if(self, units: int, now_ns: int) -> bool:
        """Take them if they are there."""
        full_at = self.full_at_ns
        after = (full_at if full_at > now_ns else now_ns) + units * self.each_ns
        if after - now_ns > self.span_ns:
            return False
        self.full_at_ns = after
        self.taken += units
        return True

    def take(self, units: int, now_ns: int) -> None:
        """Also more than there is: whoever comes next waits for the debt."""
        full_at = self.full_at_ns
        self.full_at_ns = (full_at if full_at > now_ns else now_ns) + units * self.each_ns
        self.taken += units

    def give(self, units: int) -> None:
        """Back what was taken; never more than full, because a time in the past counts as now."""
        self.full_at_ns -= units * self.each_ns
        self.taken -= units

    def drain(self, units: int, most: int, now_ns: int) -> None:
        """Others took so many units of the same budget, or gave them back. No debt above `most` units is run up by it."""
        full_at = self.full_at_ns
        after = (full_at if full_at > now_ns else now_ns) + units * self.each_ns
        self.full_at_ns = min(after, max(full_at, now_ns + self.span_ns + most * self.each_ns))

    def exchange(self, taken: int, used: int, now_ns: int) -> None:
        """Give back what was taken, take what was used."""
        full_at = self.full_at_ns - taken * self.each_ns
        self.full_at_ns = (full_at if full_at > now_ns else now_ns) + used * self.each_ns
        self.taken += used - taken

    def left(self, now_ns: int) -> int:
        """Whole units that are there, 0 in debt."""
        return self.left_and_reset(now_ns)[0]

    def left_and_reset(self, now_ns: int) -> tuple[int, int]:
        """(whole units that are there, ms until it is full)."""
        owed_ns = self.full_at_ns - now_ns
        if owed_ns <= 0:
            return self.size, 0
        left_ns = self.span_ns - owed_ns
        return left_ns // self.each_ns if left_ns > 0 else 0, owed_ns // MS_NS + 1
