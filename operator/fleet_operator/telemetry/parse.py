"""Prometheus text → typed numbers. Pure; a metric that is absent, or not a number, is None and never 0."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

LINE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'(?<![A-Za-z0-9_])([A-Za-z_][A-Za-z0-9_]*+)="((?:[^"\\]|\\.)*)"')
"""Starts only where a word starts and gives nothing back: a line of any length is read once."""
MAX_LINES = 20_000


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of an exposition."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_text(text: str, names: Collection[str] | None = None) -> list[Sample]:
    """All samples, or those of these names; lines that are not samples, NaN and infinities are left out."""
    samples = []
    for line in text.splitlines()[:MAX_LINES]:
        found = LINE.match(line)
        if found is None or (names is not None and found[1] not in names):
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if math.isfinite(value):
            samples.append(Sample(found[1], dict(LABEL.findall(found[2] or "")), value))
    return samples


def total(samples: list[Sample], name: str, **labels: str) -> float | None:
    """Sum over all label sets that match."""
    values = [s.value for s in samples if s.name == name and all(s.labels.get(k) == v for k, v in labels.items())]
    return sum(values) if values else None


def buckets(samples: list[Sample], name: str, **labels: str) -> dict[float, float]:
    """Cumulative histogram: upper bound in seconds → count, summed over the label sets that match. A bound that is no number is
    left out."""
    found: dict[float, float] = {}
    for sample in samples:
        if sample.name != f"{name}_bucket" or any(sample.labels.get(k) != v for k, v in labels.items()):
            continue
        try:
            bound = float(sample.labels.get("le", "NaN"))
        except ValueError:
            continue
        if not math.isnan(bound):
            found[bound] = found.get(bound, 0.0) + sample.value
    return found


def quantile(before: dict[float, float] | None, after: dict[float, float], q: float) -> float | None:
    """The q-quantile of what was observed between two readings of a cumulative histogram, linear inside a bucket.

    None when nothing was observed. A counter that went back (a restart) counts from zero. In the last, unbounded bucket the
    answer is its lower bound, as Prometheus' histogram_quantile does.
    """
    earlier = before or {}
    if any(after.get(bound, 0.0) < count for bound, count in earlier.items()):
        earlier = {}
    counts = sorted((bound, count - earlier.get(bound, 0.0)) for bound, count in after.items())
    if not counts or counts[-1][1] <= 0:
        return None
    rank, low, below = q * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * ((rank - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return low
