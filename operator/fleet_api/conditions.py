"""Condition types of a fleet, and the one way to change a condition."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal

from fleet_api.v1alpha1.status import Condition, ConditionStatus

ConditionType = Literal[
    "Accepted",
    "Provisioned",
    "Available",
    "Disaggregating",
    "TransportVerified",
    "WithinRatio",
    "TelemetryFresh",
    "CapacityLimited",
    "RollingOut",
    "ModelCached",
    "AdaptersLoaded",
    "Ready",
]
CONDITION_TYPES: tuple[ConditionType, ...] = (
    "Accepted",
    "Provisioned",
    "Available",
    "Disaggregating",
    "TransportVerified",
    "WithinRatio",
    "TelemetryFresh",
    "CapacityLimited",
    "RollingOut",
    "ModelCached",
    "AdaptersLoaded",
    "Ready",
)
_RANKS: Final[dict[str, int]] = {kind: rank for rank, kind in enumerate(CONDITION_TYPES)}


def rfc3339(now: float) -> str:
    """A UNIX timestamp in seconds as the API writes times: UTC, whole seconds."""
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def set_condition(
    conditions: tuple[Condition, ...],
    kind: ConditionType,
    status: ConditionStatus,
    reason: str,
    message: str = "",
    *,
    generation: int,
    now: float,
) -> tuple[Condition, ...]:
    """`conditions` with one changed; lastTransitionTime moves only when `status` does. Known types come first, in their order."""
    before = next((condition for condition in conditions if condition.type == kind), None)
    told = (status, reason, message[:4096], generation)
    if before is not None and (before.status, before.reason, before.message, before.observed_generation) == told:
        return tuple(sorted(conditions, key=_rank))
    since = before.last_transition_time if before is not None and before.status == status else rfc3339(now)
    changed = Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message[:4096],
        observed_generation=generation,
        last_transition_time=since,
    )
    others = [condition for condition in conditions if condition.type != kind]
    return tuple(sorted([*others, changed], key=_rank))


def _rank(condition: Condition) -> tuple[int, str]:
    return _RANKS.get(condition.type, len(_RANKS)), condition.type
