"""Whose is an object that has the name of one of ours? Pure."""

from __future__ import annotations

from fleet_operator.cluster.interface import Object
from fleet_operator.names import APPLIED, FLEET, MANAGED_BY, MANAGER, ROLE
from fleet_planner.events import NAME_CONFLICT
from fleet_planner.types import ROLES, Problem


def owned(found: Object, owner: Object) -> bool:
    """Whether it belongs to `owner`, by its references."""
    references = found["metadata"].get("ownerReferences") or []
    return any(reference.get("uid") == owner["metadata"]["uid"] for reference in references)


def parted(found: Object | None, wish: Object, owner: Object) -> bool:
    """It was made for this very `owner`, which its hash of the wish covers, and somebody took its owner reference away: it is put
    back, as Kubernetes' controllers do. Not where that is how `--cascade=orphan` deletes the owner."""
    if found is None or "deletionTimestamp" in owner["metadata"] or found["metadata"].get("ownerReferences"):
        return False
    if not owned(wish, owner):
        return False
    marks = found["metadata"].get("annotations") or {}
    return bool(marks.get(APPLIED) == wish["metadata"]["annotations"][APPLIED])


def name_conflict(there: Object, wish: Object) -> Problem:
    """An object of somebody else has the name of this wish. One with our labels and no owner is what stays when a fleet is
    deleted with `--cascade=orphan`."""
    kind, meta, has = wish["kind"], wish["metadata"], there["metadata"]
    fleet, marks = meta["labels"][FLEET], has.get("labels") or {}
    what_to_do = ": delete or rename it, or give this fleet another name"
    if not has.get("ownerReferences") and (marks.get(MANAGED_BY), marks.get(FLEET)) == (MANAGER, fleet):
        what_to_do = (
            f", or is left of a fleet {fleet} that was deleted with --cascade=orphan: then delete it and all else with label "
            f"{FLEET}={fleet} in namespace {meta['namespace']}, and everything is made anew"
        )
    return Problem(NAME_CONFLICT, f"{kind} {meta['name']} exists and belongs to somebody else{what_to_do}")


def taken(there: Object, wish: Object) -> Problem | None:
    """Why the name of `wish` is taken for good: by somebody else, or by one of ours of which somebody took a label away by which
    we find it. None: it is ours of a life before, and the watch will show it."""
    kind, name = wish["kind"], wish["metadata"]["name"]
    if not any(owned(there, {"metadata": reference}) for reference in wish["metadata"]["ownerReferences"]):
        return name_conflict(there, wish)
    has, wanted = there["metadata"].get("labels") or {}, wish["metadata"]["labels"]
    lost = [f"{key}={wanted[key]}" for key in (FLEET, MANAGED_BY) if has.get(key) != wanted[key]]
    if wanted.get(ROLE) in ROLES and has.get(ROLE) not in ROLES:  # a worker may change its role, and keeps its name
        lost.append(f"{ROLE}={wanted[ROLE]}")
    words = f"{kind} {name} is this fleet's without its label {', '.join(lost)}: set it again, or delete the {kind}"
    return Problem(NAME_CONFLICT, words) if lost else None
