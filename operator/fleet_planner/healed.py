"""What healing remembers between passes."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_api.v1alpha1.status import ReplacedStatus


@dataclass(frozen=True, slots=True)
class HealingMemory:
    """Of one tier."""

    since: tuple[tuple[str, float], ...] = ()
    """(uid, since when the worker looks poisoned without a break)."""
    replaced: tuple[ReplacedStatus, ...] = ()
    """What was decided in the last hour: the status that says so may be read late."""


NOTHING_HEALED = HealingMemory()
