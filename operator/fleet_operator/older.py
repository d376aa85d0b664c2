"""Stored templates whose workers are there beside those of the wanted one: a rollout, one that was rolled back, a tier that left
the spec. What all workers of a fleet share (their NetworkPolicy, the Service of their names) must fit these, too. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from fleet_operator.adapters.told import place_of_pod
from fleet_operator.cluster.interface import CONTROLLER_REVISION, POD, Object
from fleet_operator.render.revision import place_of
from fleet_planner.reconcile import Plan


def older(plan: Plan, live: Mapping[tuple[str, str], Object]) -> list[Object]:
    """Those of revisions that have workers or are to have some, in order of names; `live` is (kind, name) → object."""
    there = {(pool.tier, pool.revision) for pool in plan.pools}
    there |= {place_of_pod(pod) for (kind, _), pod in live.items() if kind == POD.kind}
    if not (there := there - {("", ""), *plan.keep}):
        return []
    return [obj for (kind, _), obj in sorted(live.items()) if kind == CONTROLLER_REVISION.kind and place_of(obj) in there]
