"""How often a status is written: at once when a word or a count of workers changes, rarely when only the engines' counters moved.

A busy fleet's counters move at every reading; a thousand fleets would write two hundred times a second to say so. Every pass
compares again, so the last counters are written at the latest at the first pass after the pause.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from fleet_operator.cluster.interface import Object

COUNTERS_S: Final = 30.0
"""Counters alone are written this often."""
INDEX: Final = re.compile(r"\[\d+\]")
TELLS_COUNTERS: Final = "Disaggregating"
"""The condition whose message counts."""


class StatusPace:
    """Remembers when each fleet's status was written last."""

    def __init__(self, now: Callable[[], float], counters_s: float = COUNTERS_S) -> None:
        self._now = now
        self._counters_s = counters_s
        self._written_at: dict[str, float] = {}
        self._dropped: set[str] = set()

    def is_due(self, uid: str, present: Object | None, wish: Object) -> bool:
        """Whether `wish` should be written now."""
        if present == wish:
            return False
        since_s = self._now() - self._written_at.get(uid, float("-inf"))
        waited = not 0 <= since_s < self._counters_s  # before 0: the clock was set back
        return waited or present is None or _without_counters(present) != _without_counters(wish)

    def written(self, uid: str) -> None:
        """The status was written."""
        self._written_at[uid] = self._now()

    def is_news(self, dropped: str) -> bool:
        """Whether no fleet's status has lost this field before; of tiers and other lists any entry is the same."""
        field = INDEX.sub("[]", dropped)
        news = field not in self._dropped
        self._dropped.add(field)
        return news

    def forget(self, uid: str) -> None:
        """The fleet is gone."""
        self._written_at.pop(uid, None)


def _without_counters(status: Object) -> Object:
    tiers = [{**tier, "kv": _words(tier.get("kv"))} for tier in status.get("tiers") or []]
    conditions = [
        {**condition, "message": ""} if condition["type"] == TELLS_COUNTERS else condition
        for condition in status.get("conditions") or []
    ]
    return {**status, "tiers": tiers, "conditions": conditions}


def _words(kv: Any) -> Any:
    """Counters become whether they count anything."""
    return {name: bool(value) if isinstance(value, int) else value for name, value in kv.items()} if kv else kv
