"""Stored templates that somebody deleted by hand. While a rollback, a pause or a canary holds, the spec asks for another revision
than the one that serves: nothing but its stored template says how its workers are made, so the last one seen is stored again.
Pure; an operator that starts after the deletion has never seen it, and says so (`unmakeable`)."""

from __future__ import annotations

from collections.abc import Container, Mapping

from fleet_operator.cluster.interface import CONTROLLER_REVISION, POD, Object
from fleet_operator.compare import stamped
from fleet_operator.names import POOL, ROLE, owner_reference
from fleet_operator.ownership import owned, parted
from fleet_operator.render.revision import place_of, revision_name
from fleet_planner.reconcile import Plan
from fleet_planner.types import Problem

Name = tuple[str, str]
"""(kind, name)"""
WRITTEN = ("name", "namespace", "labels")


def needed_templates(plan: Plan, live: Mapping[Name, Object], fleet: Object) -> dict[Name, Object]:
    """The stored templates of this fleet that it cannot do without: to be kept until its next pass."""
    stored = {at: found for at, found in live.items() if at[0] == CONTROLLER_REVISION.kind and owned(found, fleet)}
    return {at: found for at, found in stored.items() if place_of(found) in plan.needed}


def lost_templates(needed: Mapping[Name, Object], live: Mapping[Name, Object]) -> dict[Name, Object]:
    """Those of them that are gone."""
    return {at: found for at, found in needed.items() if at not in live}


def made_again(plan: Plan, live: Mapping[Name, Object], lost: Container[Name], fleet: Object) -> dict[tuple[str, str], Object]:
    """Wishes by (tier, revision): for those that are gone and needed, and for those whose owner somebody took away."""
    wishes = dict[tuple[str, str], Object]()
    for name, found in live.items():
        place = place_of(found) if name[0] == CONTROLLER_REVISION.kind else None
        if place is None or (owned(found, fleet) and (name not in lost or place not in plan.needed)):
            continue
        wish = as_it_was(found, fleet)
        if name in lost or parted(found, stamped(wish), fleet):
            wishes[place] = wish
    return wishes


def as_it_was(found: Object, fleet: Object) -> Object:
    """The wish for a stored template that is gone, or nobody's."""
    meta = {part: found["metadata"][part] for part in WRITTEN} | {"ownerReferences": [owner_reference(fleet)]}
    return {**{part: found[part] for part in ("apiVersion", "kind", "revision", "data")}, "metadata": meta}


def unmakeable(fleet: str, plan: Plan, live: Mapping[Name, Object]) -> list[Problem]:
    """Workers that are missing and that nobody knows how to make, one problem per role of a revision."""
    known = {*plan.keep, *(place_of(found) for (kind, _), found in live.items() if kind == CONTROLLER_REVISION.kind)}
    return [
        Problem(
            "RevisionLost",
            f"ControllerRevision {revision_name(fleet, pool.tier, pool.revision)} was deleted, and without it no "
            f"{pool.role} worker of revision {pool.revision} can be made: apply the spec of that revision again, or a new one",
        )
        for pool in plan.pools
        if (pool.tier, pool.revision) not in known and pool.replicas > _alive(pool.name, pool.role, live)
    ]


def _alive(pool: str, role: str, live: Mapping[Name, Object]) -> int:
    """Pods of a pool that stay."""
    names = (found["metadata"] for (kind, _), found in live.items() if kind == POD.kind)
    mine = [meta for meta in names if meta["labels"].get(POOL) == pool and meta["labels"].get(ROLE) == role]
    return sum("deletionTimestamp" not in meta for meta in mine)
