"""Stored templates whose workers are there beside those of the wanted one: a rollout, one that was rolled back, a tier that left
the spec. What all workers of a fleet share (their NetworkPolicy, the Service of their names) must fit these, too. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.adapters.told import Place, place_of_pod
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


def served_name(fleet: InferenceFleet, place: Place, stored: Iterable[Object]) -> str:
    """The name under which workers of a revision serve the model: the spec's when that is not known. `stored`: templates."""
    data = next((obj.get("data") or {} for obj in stored if place_of(obj) == place), {})
    return (data.get("inputs") or {}).get("servedName") or fleet.served_name
