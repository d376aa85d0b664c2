"""Does KV move while answers flow? Routers count answers whose prompt another worker prefilled; decode engines count transfers.

The two are compared from one reading to the next, for as long as the operator runs, so that a low rate is judged by the same
number of requests as a high one. What cannot be read is neither counted nor held against anybody. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Counts = Mapping[str, float | None]
"""Source (router or pod) → its counter; None: it could not be read."""


@dataclass(frozen=True, slots=True)
class KvWatch:
    """`answers` and `failed` since the last transfer was seen; None before two readings could be compared."""

    answers: int | None = None
    failed: int | None = None
    routers: Mapping[str, float] = field(default_factory=dict)
    moved: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)


def watched(before: KvWatch, routers: Counts, moved: Counts, errors: Counts) -> KvWatch:
    """One reading later. With an unreadable decode worker nothing is concluded: it may be the one that KV moves to."""
    answers, transfers = _grown(before.routers, routers), _grown(before.moved, moved)
    failures = _grown(before.errors, errors)
    known = KvWatch(routers=_last(before.routers, routers), moved=_last(before.moved, moved), errors=_last(before.errors, errors))
    if transfers is not None and transfers > 0:
        return KvWatch(0, 0, known.routers, known.moved, known.errors)
    if answers is None or transfers is None or failures is None or None in moved.values() or not moved:
        return KvWatch(before.answers, before.failed, known.routers, known.moved, known.errors)
    return KvWatch((before.answers or 0) + answers, (before.failed or 0) + failures, known.routers, known.moved, known.errors)


def _grown(before: Mapping[str, float], now: Counts) -> int | None:
    """Sum of what sources that were known counted since; one that went back was restarted and counts from zero. None when no
    source can be compared."""
    pairs = [(before[name], value) for name, value in now.items() if value is not None and name in before]
    return round(sum(new - old if new >= old else new for old, new in pairs)) if pairs else None


def _last(before: Mapping[str, float], now: Counts) -> dict[str, float]:
    """The newest known count of every source that is still there."""
    found = {name: before.get(name) if value is None else value for name, value in now.items()}
    return {name: value for name, value in found.items() if value is not None}
