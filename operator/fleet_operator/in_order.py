"""Whether a pass has to look at the fleet's objects at all.

Most passes follow an event about one pod, or a reading of its load, and plan what is there: a dozen objects were rendered and
looked at for nothing, a quarter of a pass. So it is remembered what a pass saw and wanted that found all in order and had nothing
to ask of anybody; while both are the same the next one skips it. What is compared are values and objects of the cache, never
which event came. All of it may be lost: then everything is looked at once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final

from fleet_api.v1alpha1.fleet import FleetSpec
from fleet_operator.cluster.interface import POD, Object
from fleet_operator.gangs import waiting_leaders
from fleet_operator.outcome import Outcome
from fleet_planner.reconcile import Plan

Live = Mapping[tuple[str, str], Object]
"""(kind, name) → object, of one fleet."""
NOT_IN_OBJECTS: Final = frozenset({"status", "memory", "rest", "clock", "reasons"})
"""Fields of a plan that no object but the fleet itself tells; of the status only which roles have a ready worker (`_ready`)."""
TOLD_BY_PLAN: Final = frozenset({"containerStatuses", "initContainerStatuses"})
"""Fields of a pod's status that only the planner looks at, and its plan tells what follows from them."""
VERSION: Final = frozenset({"resourceVersion"})
_said = attrgetter(*(field.name for field in fields(Plan) if field.name not in NOT_IN_OBJECTS))


class InOrder:
    """Of one fleet: what the last pass that found all in order saw and wanted."""

    def __init__(self) -> None:
        self._known: tuple[FleetSpec, Any, Live] | None = None

    def holds(self, spec: FleetSpec, plan: Plan, live: Live) -> bool:
        """Whether nothing has to be looked at. `spec`: the very same value while neither it nor the fleet's metadata change."""
        known = self._known
        if known is None or known[0] is not spec or known[1] != (_said(plan), _ready(plan)) or not _alike(known[2], live):
            self._known = None
            return False
        self._known = *known[:2], live
        return True

    def note(self, spec: FleetSpec, plan: Plan, live: Live, outcome: Outcome) -> None:
        """A pass looked at everything and asked the API nothing. A worker that waits for its nodes has a PodGroup, which is put
        again by time alone."""
        if outcome == Outcome() and not waiting_leaders(live):
            self._known = spec, (_said(plan), _ready(plan)), live


def _ready(plan: Plan) -> tuple[tuple[str, bool, bool], ...]:
    return tuple([(tier.name, tier.prefill.ready > 0, tier.decode.ready > 0) for tier in plan.status.tiers])


def _alike(before: Live, after: Live) -> bool:
    """The very same objects; pods may differ in what `TOLD_BY_PLAN` says."""
    if before.keys() != after.keys():
        return False
    for key, found in after.items():
        known = before[key]
        if found is not known and not (key[0] == POD.kind and _same_pod(known, found)):
            return False
    return True


def _same_pod(before: Object, after: Object) -> bool:
    if before.get("spec") != after.get("spec") or _without(before["metadata"], VERSION) != _without(after["metadata"], VERSION):
        return False
    return _without(before.get("status") or {}, TOLD_BY_PLAN) == _without(after.get("status") or {}, TOLD_BY_PLAN)


def _without(part: Object, names: frozenset[str]) -> Object:
    return {key: value for key, value in part.items() if key not in names}
