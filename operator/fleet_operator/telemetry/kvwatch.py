"""Does KV move while answers flow? Routers count answers whose prompt another worker prefilled; decode engines count transfers.

The two are compared from one reading to the next, for as long as the operator runs, so that a low rate is judged by the same
number of requests as a high one. What cannot be read is neither counted nor held against anybody. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Counts = Mapping[str, float | None]
"""Source (router or pod) → its counter; None: it could not be read."""
LATE_TOLD_TRANSFERS = 1_000
"""Transfers without a late one among them after which late ones before are told no more."""
NOBODY: Counts = {}


@dataclass(frozen=True, slots=True)
class KvWatch:
    """`answers` and `failed` since the last transfer was seen; None before two readings could be compared."""

    answers: int | None = None
    failed: int | None = None
    routers: Mapping[str, float] = field(default_factory=dict)
    moved: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    ended: Mapping[str, float] = field(default_factory=dict)
    late: int = 0
    """Reads that were told to vLLM's prefill workers after the lease's end."""
    in_time: int = 0
    """Transfers since the last of these."""


def watched(before: KvWatch, routers: Counts, moved: Counts, errors: Counts, ended: Counts = NOBODY) -> KvWatch:
    """One reading later. With an unreadable decode worker nothing is concluded: it may be the one that KV moves to. `ended`: what
    prefill workers heard of KV whose lease had ended."""
    answers, transfers = _grown(before.routers, routers), _grown(before.moved, moved)
    failures = _grown(before.errors, errors)
    late, in_time = _late(before, _grown(before.ended, ended) or 0, transfers or 0)
    known = KvWatch(
        before.answers, before.failed, _last(before.routers, routers), _last(before.moved, moved), _last(before.errors, errors),
        _last(before.ended, ended), late, in_time,
    )  # fmt: skip
    if transfers is not None and transfers > 0:
        return replace(known, answers=0, failed=0)
    if answers is None or transfers is None or failures is None or None in moved.values() or not moved:
        return known
    return replace(known, answers=(before.answers or 0) + answers, failed=(before.failed or 0) + failures)


def _late(before: KvWatch, more: int, transfers: int) -> tuple[int, int]:
    """(late reads, transfers since), until enough came in time."""
    if more:
        return before.late + more, 0
    in_time = before.in_time + transfers
    return (before.late, in_time) if before.late and in_time < LATE_TOLD_TRANSFERS else (0, 0)


def _grown(before: Mapping[str, float], now: Counts) -> int | None:
    """Sum of what sources that were known counted since; one that went back was restarted and counts from zero. None when no
    source can be compared."""
    pairs = [(before[name], value) for name, value in now.items() if value is not None and name in before]
    return round(sum(new - old if new >= old else new for old, new in pairs)) if pairs else None


def _last(before: Mapping[str, float], now: Counts) -> dict[str, float]:
    """The newest known count of every source that is still there."""
    found = {name: before.get(name) if value is None else value for name, value in now.items()}
    return {name: value for name, value in found.items() if value is not None}
