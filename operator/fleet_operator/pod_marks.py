"""What a worker's pod says of itself by labels and annotations, against what its pool and its stored template say. Of a pod that
fetches a model ahead, its name says it; and of one of a worker over several nodes, which of its pods it is.

A pod is found by its labels, but whose it is its owner reference says: the operator writes both at once, also for a role flip.
Where they differ somebody edited the labels. Believed, a prefill worker with the other role's label was told to routers as a
decode worker and deleted, and one of another revision was replaced. So the pool is believed, and the marks are put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import is_
from typing import Final

from fleet_operator.cluster.interface import (
    CONTROLLER_REVISION,
    POD,
    POOL,
    Cluster,
    ClusterError,
    ConflictError,
    NotFoundError,
    Object,
)
from fleet_operator.names import COMPAT, FETCH, FETCH_ROLE, MEMBER, NAMESPACE, REVISION, ROLE, TIER, group_service
from fleet_operator.names import POOL as POOL_LABEL
from fleet_operator.outcome import Outcome, StopError
from fleet_operator.ownership import owned
from fleet_operator.render.gang import group_labels
from fleet_operator.render.revision import place_of
from fleet_planner.events import Deed
from fleet_planner.prefetch import fetched_by

Live = Mapping[tuple[str, str], Object]
"""(kind, name) → object, of one fleet."""
Marks = Mapping[str, Mapping[str, str]]
"""labels, annotations."""
SOURCES: Final = frozenset({POOL.kind, CONTROLLER_REVISION.kind})
"""What says how pods are to be marked."""


@dataclass(slots=True)
class MarksSeen:
    """Of one fleet: pods that were found in order, and the pools and templates by which they were. Objects of the cache never
    change in place. All of it may be lost: then every pod is looked at once more."""

    fleet: str = ""
    sources: list[Object] = field(default_factory=list)
    wanted: dict[str, Marks] = field(default_factory=dict)
    well: dict[str, Object] = field(default_factory=dict)

    def look(self, live: Live, fleet: Object) -> None:
        """Whether what is known holds for what is there now; else nothing is known."""
        uid, sources = fleet["metadata"]["uid"], [obj for (kind, _), obj in live.items() if kind in SOURCES]
        if uid != self.fleet or len(sources) != len(self.sources) or not all(map(is_, sources, self.sources)):
            self.fleet, self.sources, self.wanted, self.well = uid, sources, _wanted(sources, fleet), {}


def rightful(
    live: Live, fleet: Object, seen: MarksSeen | None = None
) -> tuple[dict[tuple[str, str], Object], list[tuple[Object, Marks]]]:
    """`live` with every worker's pod as its pool and its template have it, and those that fetch as their names do; and what is to
    be put back of which pod."""
    seen = MarksSeen() if seen is None else seen
    seen.look(live, fleet)
    before, seen.well = seen.well, {}
    found, edited = dict(live), []
    for at, pod in live.items():
        if at[0] != POD.kind:
            continue
        if before.get(at[1]) is pod or not (marks := _edited(pod, seen.wanted, fleet)):
            seen.well[at[1]] = pod
            continue
        edited.append((pod, marks))
        meta = pod["metadata"]
        found[at] = {**pod, "metadata": {**meta, **{part: {**(meta.get(part) or {}), **of} for part, of in marks.items()}}}
    return found, edited


async def put_back(cluster: Cluster, edited: Sequence[tuple[Object, Marks]]) -> Outcome:
    """Write them. One that has gone meanwhile, or is another one by now, is left."""
    outcome = Outcome()
    with suppress(StopError):
        for pod, marks in edited:
            namespace, name, uid = (pod["metadata"][part] for part in ("namespace", "name", "uid"))
            try:
                await cluster.patch(POD, namespace, name, {"metadata": {"uid": uid, **marks}})
            except (NotFoundError, ConflictError):
                continue
            except ClusterError as error:
                outcome.fail(f"Pod {name}", error)
                continue
            outcome.writes += 1
            outcome.vain += 1
            words = ", ".join(f"metadata.{part}.{key}" for part, of in marks.items() for key in of)
            outcome.done.append(Deed("changed", POD.kind, name, uid, undid=words))
    return outcome


def _wanted(sources: Sequence[Object], fleet: Object) -> dict[str, Marks]:
    """By uid of a pool: what the pods that it owns say."""
    stored = [obj for obj in sources if obj["kind"] == CONTROLLER_REVISION.kind and owned(obj, fleet)]
    compat = {place: obj["data"]["compat"] for obj in stored if (place := _place(obj)) is not None}
    wanted = dict[str, Marks]()
    for pool in [obj for obj in sources if obj["kind"] == POOL.kind and owned(obj, fleet)]:
        meta, spec = pool["metadata"], pool["spec"]
        labels = {TIER: spec["tier"], ROLE: spec["role"], REVISION: spec["revision"]}
        labels |= {POOL_LABEL: meta["name"], NAMESPACE: meta["namespace"]}
        known = compat.get((spec["tier"], spec["revision"]))
        wanted[meta["uid"]] = {"labels": labels, "annotations": {COMPAT: known} if known is not None else {}}
    return wanted


def _place(stored: Object) -> tuple[str, str] | None:
    """(tier, revision) of a stored template; None: its labels, which somebody may have edited, too, are not those of its name."""
    place = place_of(stored)
    return place if place is not None and stored["metadata"]["name"].endswith("-".join(("", *place))) else None


def _of_fetching(pod: Object, fleet: Object) -> Marks | None:
    """What a pod that fetches a model ahead says; None: it is none."""
    key = fetched_by(fleet["metadata"]["name"], pod["metadata"]["name"]) if owned(pod, fleet) else None
    return {"labels": {ROLE: FETCH_ROLE, FETCH: key}} if key is not None else None


def _of_group(pod: Object, pool: str, fleet: Object) -> Marks:
    """What one of a worker over several nodes says of its place there; nothing of others. Its name has that, and its spec, which
    nobody can edit, that it is one."""
    place = pod["metadata"]["name"].removeprefix(f"{pool}-").split("-")
    if pod["spec"].get("subdomain") != group_service(fleet["metadata"]["name"]) or not all(map(str.isdecimal, place)):
        return {}
    member = int(place[1]) if len(place) > 1 else 0
    return {"labels": group_labels(f"{pool}-{place[0]}", member), "annotations": {MEMBER: str(member)}}


def _edited(pod: Object, wanted: Mapping[str, Marks], fleet: Object) -> Marks | None:
    """What differs; None: nothing does, or it is of no pool of the fleet and fetches nothing."""
    meta = pod["metadata"]
    owners = [owner.get("uid", "") for owner in meta.get("ownerReferences") or []]
    of = next((marks for uid in owners if (marks := wanted.get(uid))), None) or _of_fetching(pod, fleet)
    if of is None or "deletionTimestamp" in meta:
        return None
    group = _of_group(pod, of["labels"].get(POOL_LABEL, ""), fleet)
    differ: dict[str, dict[str, str]] = {}
    for part, texts in [*of.items(), *group.items()]:
        found = meta.get(part) or {}
        for key, text in texts.items():
            if found.get(key) != text:
                differ.setdefault(part, {})[key] = text
    return differ or None
