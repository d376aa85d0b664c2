"""Condition types of a fleet, and the one way to change a condition."""

from __future__ import annotations

from collections.abc import Mapping
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
    "PeerKey",
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
    "PeerKey",
    "ModelCached",
    "AdaptersLoaded",
    "Ready",
)
MESSAGE_MOST: Final = 4096
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
    return set_conditions(conditions, {kind: (status, reason, message)}, generation=generation, now=now)


def set_conditions(
    conditions: tuple[Condition, ...],
    verdicts: Mapping[ConditionType, tuple[ConditionStatus, str, str]],
    *,
    generation: int,
    now: float,
) -> tuple[Condition, ...]:
    """The same for several: status, reason and message by type. One that says the same stays the very same value."""
    found: dict[str, Condition] = {condition.type: condition for condition in reversed(conditions)}  # of two the first counts
    for kind, (status, reason, message) in verdicts.items():
        before, told = found.get(kind), (status, reason, message[:MESSAGE_MOST], generation)
        if before is not None and (before.status, before.reason, before.message, before.observed_generation) == told:
            continue
        found[kind] = Condition(
            type=kind,
            status=status,
            reason=reason,
            message=told[2],
            observed_generation=generation,
            last_transition_time=before.last_transition_time if before is not None and before.status == status else rfc3339(now),
        )
    return tuple(sorted(found.values(), key=_rank))


def _rank(condition: Condition) -> tuple[int, str]:
    return _RANKS.get(condition.type, len(_RANKS)), condition.type
