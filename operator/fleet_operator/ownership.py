"""Whose is an object that has the name of one of ours? Pure."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping

from fleet_operator.cluster.interface import FLEET as FLEET_KIND
from fleet_operator.cluster.interface import POD, POOL, Object
from fleet_operator.names import (
    APPLIED,
    FETCH,
    FLEET,
    MANAGED_BY,
    MANAGER,
    REVISION,
    ROLE,
    TIER,
    owner_reference,
    pool_name,
)  # fmt: skip
from fleet_operator.names import POOL as POOL_LABEL
from fleet_operator.observe import timestamp
from fleet_operator.pool_names import named
from fleet_planner.events import NAME_CONFLICT
from fleet_planner.roles import ROLES
from fleet_planner.scale_targets import target_name
from fleet_planner.types import Problem


def owned(found: Object, owner: Object) -> bool:
    """Whether it belongs to `owner`, by its references."""
    references = found["metadata"].get("ownerReferences") or []
    return any(reference.get("uid") == owner["metadata"]["uid"] for reference in references)


def parted(found: Object | None, wish: Object, owner: Object) -> bool:
    """It was made for this very `owner`, and somebody took its owner reference away: it is put back, as Kubernetes' controllers
    do. Not where that is how `--cascade=orphan` deletes the owner.

    Its hash shows that, which covers the owner, or, where the wish has changed since, that it bears our marks and is no older
    than its owner: what is left of another one of that name was made before that one went."""
    if found is None or _is_held(found, owner) or not owned(wish, owner):
        return False
    meta = found["metadata"]
    applied = (meta.get("annotations") or {}).get(APPLIED)
    if applied is None or applied == wish["metadata"]["annotations"][APPLIED]:
        return applied is not None
    return _is_marked(meta, wish["metadata"], (MANAGED_BY, FLEET)) and _made_at(owner) <= _made_at(found) < math.inf


def is_strange(obj: Object, fleet: Object) -> bool:
    """A pool or a worker's pod that has this fleet's label and is not of it: a label was edited, or a manifest copied. Another
    fleet's pool was deleted as one too many, with all of its workers. Names say whose they are: an owner may have been edited,
    too, and the pool of a pod may not be seen at this moment. One of ours whose spec was edited is ours."""
    name = fleet["metadata"]["name"]
    if obj["kind"] == POOL.kind:
        spec = obj["spec"]
        mine = pool_name(name, spec["tier"], spec["role"], spec["revision"]), target_name(name, spec["tier"], spec["role"])
        return (obj["metadata"]["name"] not in mine or spec["fleet"] != name) and named(obj, fleet) is None
    return obj["kind"] == POD.kind and _is_strange_pod(obj["metadata"], name)


def _is_strange_pod(meta: Object, fleet: str) -> bool:
    """Somebody else controls it, and it has no worker's name. A worker that changed its role has a name of the other one."""
    controller = next((one for one in meta.get("ownerReferences") or [] if one.get("controller")), None)
    labels = meta.get("labels") or {}
    if controller is None or labels.get(ROLE) not in ROLES:
        return False
    mine = [pool_name(fleet, labels.get(TIER, ""), role, labels.get(REVISION, "")) for role in ROLES]
    if controller.get("kind") == POOL.kind and controller.get("name") in mine:
        return False
    return not any(meta["name"].startswith(f"{pool}-") for pool in mine)


def without_strangers(live: dict[tuple[str, str], Object], fleet: Object) -> dict[tuple[str, str], Object]:
    """`live`, (kind, name) → object, less what only looks like the fleet's. Most pods are of a pool that is there: no more is
    asked of them, for this is done in every pass."""
    pools = [(at, obj) for at, obj in live.items() if at[0] == POOL.kind]
    strange = {at for at, pool in pools if is_strange(pool, fleet)}
    mine = {pool["metadata"]["uid"] for at, pool in pools if at not in strange}
    for at, obj in live.items():
        if at[0] == POD.kind and not _is_of(obj, mine) and is_strange(obj, fleet):
            strange.add(at)
    return {at: obj for at, obj in live.items() if at not in strange} if strange else live


def _is_of(obj: Object, owners: Container[str]) -> bool:
    references = obj["metadata"].get("ownerReferences")
    return bool(references) and references[0].get("uid") in owners


def lonely(found: Object, wish: Object, pool: Object) -> bool:
    """It is what a pool's workers need beside their pods, as the wish says, and nobody owns it any more. One of the same content
    serves whichever life of the pool it was made for."""
    marks = wish["metadata"]["labels"]
    return not _is_held(found, pool) and _is_marked(found["metadata"], wish["metadata"], marks)


def lost_owners(
    live: Mapping[tuple[str, str], Object], pools: Mapping[str, Object], fleet: Object
) -> list[tuple[Object, Object]]:
    """Pods of a fleet without the owner that their labels name, and that owner. `live`: (kind, name) → object; `pools`: by
    name."""
    found = []
    for pod in [obj for (kind, _), obj in live.items() if kind == POD.kind]:
        labels = pod["metadata"].get("labels") or {}
        owner = pools.get(labels.get(POOL_LABEL, "")) if labels.get(ROLE) in ROLES else fleet if FETCH in labels else None
        if owner is not None and _has_lost(pod, owner):
            found.append((pod, owner))
    return found


def _has_lost(pod: Object, owner: Object) -> bool:
    """Nobody controls it, and both stay."""
    references = pod["metadata"].get("ownerReferences") or []
    leaves = "deletionTimestamp" in pod["metadata"] or "deletionTimestamp" in owner["metadata"]
    return not (leaves or owned(pod, owner) or any(reference.get("controller") for reference in references))


def put_back(found: Object, owner: Object) -> Object:
    """The merge patch that makes it `owner`'s again; it keeps what others it has, and is about the version that was seen."""
    meta = found["metadata"]
    references = [*(meta.get("ownerReferences") or []), owner_reference(owner)]
    return {"metadata": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"], "ownerReferences": references}}


def _is_held(found: Object, owner: Object) -> bool:
    return "deletionTimestamp" in owner["metadata"] or bool(found["metadata"].get("ownerReferences"))


def _is_marked(has: Object, wanted: Object, keys: Iterable[str]) -> bool:
    labels = has.get("labels") or {}
    return all(labels.get(key) == wanted["labels"][key] for key in keys)


def _made_at(obj: Object) -> float:
    """By the API server's clock."""
    try:
        return timestamp(obj["metadata"].get("creationTimestamp")) or math.inf
    except ValueError:
        return math.inf


def of_a_life_before(there: Object, fleet: str) -> bool:
    """Nobody owns it but a fleet of this name that is no more: garbage collection comes behind who deletes a fleet and makes it
    anew at once."""
    owners = there["metadata"].get("ownerReferences") or []
    return bool(owners) and all((one.get("kind"), one.get("name")) == (FLEET_KIND.kind, fleet) for one in owners)


def name_conflict(there: Object, wish: Object) -> Problem:
    """An object of somebody else has the name of this wish. One with our labels and no owner is what stays when a fleet is
    deleted with `--cascade=orphan`."""
    kind, meta, has = wish["kind"], wish["metadata"], there["metadata"]
    fleet, marks = meta["labels"][FLEET], has.get("labels") or {}
    if words := _of_two_fleets(kind, meta, marks):
        return Problem(NAME_CONFLICT, words)
    what_to_do = ": delete or rename it, or give this fleet another name"
    if not has.get("ownerReferences") and (marks.get(MANAGED_BY), marks.get(FLEET)) == (MANAGER, fleet):
        what_to_do = (
            f", or is left of a fleet {fleet} that was deleted with --cascade=orphan: then delete it and all else with label "
            f"{FLEET}={fleet} in namespace {meta['namespace']}, and everything is made anew"
        )
    if of_a_life_before(there, fleet):
        what_to_do = f": to a fleet {fleet} that was deleted; it is made anew once the garbage collector or you have deleted it"
    return Problem(NAME_CONFLICT, f"{kind} {meta['name']} exists and belongs to somebody else{what_to_do}")


def _of_two_fleets(kind: str, wish: Object, has: Mapping[str, str]) -> str:
    """Fleet `g` with tier `a-b` and fleet `g-a` with tier `b` make the same names: that, in words; empty where it is not so. Who
    came first keeps what it has."""
    mine, theirs = ([labels[key] for key in (FLEET, TIER) if key in labels] for labels in (wish["labels"], has))
    alike = has.get(MANAGED_BY) == MANAGER and len(mine) == len(theirs) == 2 and mine[0] != theirs[0]
    if not alike or "-".join(mine) != "-".join(theirs):
        return ""
    return (
        f"{kind} {wish['name']} belongs to fleet {theirs[0]} and is left alone: fleet {theirs[0]} with tier {theirs[1]} and "
        f"fleet {mine[0]} with tier {mine[1]} give it the same name: give the tier of one of them another name"
    )


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
    again = "where it is lost again, an admission webhook or a policy of the cluster takes it"
    words = f"{kind} {name} is this fleet's without its label {', '.join(lost)}: set it again, or delete the {kind}; {again}"
    return Problem(NAME_CONFLICT, words) if lost else None
