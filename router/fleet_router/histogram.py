"""Histograms that cost next to nothing to feed: on the data path a value is only put down."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from weakref import WeakSet


class Histogram:
    """Cumulative buckets in seconds. Values are only put down when they are seen, and counted when `fold_all` or a scrape asks:
    sorting many at once costs a quarter of finding the bucket of each."""

    __slots__ = ("__weakref__", "_counts", "_seen", "_total", "bounds", "observe")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._seen: list[float] = []
        self._total = 0.0
        self.observe: Callable[[float], None] = self._seen.append
        """Add one value. A list's own method: no call of Python for each token of a stream."""
        _ALIVE.add(self)

    @property
    def total_s(self) -> float:
        """All values together."""
        self.fold()
        return self._total

    def fold(self) -> list[int]:
        """Count what was seen; the counts by bucket."""
        seen, counts, at = self._seen, self._counts, 0
        if seen:
            seen.sort()
            for i, bound in enumerate(self.bounds):
                upto = bisect_right(seen, bound, at)
                counts[i] += upto - at
                at = upto
            counts[-1] += len(seen) - at
            self._total += sum(seen)
            seen.clear()
        return counts

    def lines(self, name: str, labels: str) -> Iterable[str]:
        """Prometheus text of one label set."""
        seen = 0
        for bound, count in zip((*self.bounds, float("inf")), self.fold(), strict=True):
            seen += count
            yield f'{name}_bucket{{{labels},le="{"+Inf" if bound == float("inf") else bound}"}} {seen}'
        yield f"{name}_sum{{{labels}}} {self.total_s}"
        yield f"{name}_count{{{labels}}} {seen}"


_ALIVE: WeakSet[Histogram] = WeakSet()


def fold_all() -> None:
    """Called twice a second: what is put down meanwhile is bounded by what a process can see in half a second."""
    for histogram in _ALIVE:
        histogram.fold()
