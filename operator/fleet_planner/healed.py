"""What healing remembers between passes, and what somebody asked for."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_api.v1alpha1.status import ReplacedStatus
from fleet_planner.roles import Role

Asked = tuple[tuple[Role, float, int, float], ...]
"""(role, when, how many workers, for how many seconds that stands): with scaling.mode external, what somebody asked for each role
last. It may be lost: then the newest wish alone counts."""


@dataclass(frozen=True, slots=True)
class HealingMemory:
    """Of one tier."""

    since: tuple[tuple[str, float], ...] = ()
    """(uid, since when the worker looks poisoned without a break)."""
    replaced: tuple[ReplacedStatus, ...] = ()
    """What was decided in the last hour: the status that says so may be read late."""


NOTHING_HEALED = HealingMemory()
