"""Black holes: workers that take requests and say nothing.

A worker is silent when some request has waited for it for a while and no request at all has heard anything of it in that time.
How long is the configuration's to say; it counts from when the worker's queue of prefills should be done. Who waits for an answer
that comes as a whole hears nothing before its end: that alone is no silence, but a reason to ask the worker whether it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

SILENT: Final = "it has said nothing for too long"


@dataclass(frozen=True)
class Waits:
    """One leg that is under way."""

    worker: str
    sent_at: float
    heard_at: float
    """When something came of it last; `sent_at` when nothing has."""
    whole: bool = False
    """Its answer comes as a whole."""
    second: bool = False
    """It runs beside another leg of the same request, which was late."""


def silent(
    legs: Iterable[Waits], heard_before: Mapping[str, float], now: float, silent_s: float, *, whole: bool = False
) -> set[str]:
    """Workers that have said nothing to anybody for `silent_s` although somebody has waited as long. `heard_before`: by worker,
    when it was last heard of by legs that are over, or should be done with its queue; who is not in it is passed over. `whole`:
    those count, too, who wait for an answer as a whole."""
    oldest: dict[str, float] = {}
    heard: dict[str, float] = {}
    for leg in legs:
        if whole or not leg.whole:
            oldest[leg.worker] = min(oldest.get(leg.worker, leg.heard_at), leg.heard_at)
        if leg.heard_at > leg.sent_at:
            heard[leg.worker] = max(heard.get(leg.worker, 0.0), leg.heard_at)
    return {
        worker
        for worker, since in oldest.items()
        if worker in heard_before and now - max(since, heard.get(worker, 0.0), heard_before[worker]) > silent_s
    }
