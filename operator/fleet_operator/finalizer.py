"""Our finalizer on fleets with spec.deletion: put on, and taken off when they have drained. Other finalizers are never touched.

It is written as the whole list, on top of the version that was seen: the API refuses that when anybody has changed the fleet
since.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.fleet import DRAIN
from fleet_api.v1alpha1.status import FleetStatus
from fleet_operator.cluster.interface import FLEET, POD, POOL, ClusterError, NotFoundError, Object
from fleet_operator.names import FLEET as FLEET_LABEL
from fleet_operator.names import ROLE
from fleet_operator.observe import timestamp
from fleet_operator.outcome import Outcome, StopError
from fleet_operator.ownership import owned
from fleet_operator.write_through import WriteThrough
from fleet_planner.ending import Ending, EndingMemory, held_status
from fleet_planner.events import Deed
from fleet_planner.roles import ROLES
from fleet_planner.types import Problem

ORPHAN = "orphan"
"""Finalizer of `kubectl delete --cascade=orphan`: whoever asks for that wants the workers to stay."""
Live = Mapping[tuple[str, str], Object]
"""(kind, name) → object, of one fleet."""


def is_going(raw: Object) -> bool:
    """It was deleted, and nothing of ours is to be done any more: its children go by garbage collection."""
    return "deletionTimestamp" in raw["metadata"] and not is_ending(raw)


def is_ending(raw: Object) -> bool:
    """It was deleted, and our finalizer keeps it."""
    return "deletionTimestamp" in raw["metadata"] and DRAIN in _finalizers(raw)


def same_wish(now: Object, seen: Object) -> bool:
    """It is the fleet that was seen, and nobody has asked for something else since."""
    return is_ending(now) and all(now["metadata"].get(key) == seen["metadata"].get(key) for key in ("uid", "generation"))


def ending_of(fleet: InferenceFleet, raw: Object, named: frozenset[str] | None, memory: EndingMemory) -> Ending | None:
    """What the plan of an ending needs; None: the fleet is wanted."""
    if not is_ending(raw) or fleet.spec.deletion is None:
        return None
    return Ending(timestamp(raw["metadata"]["deletionTimestamp"]) or 0.0, fleet.spec.deletion.wait_s, named, memory)


def kept_by_others(raw: Object, before: FleetStatus, now: float) -> FleetStatus:
    """What is said of one that is going, and is still there."""
    return held_status(before, _finalizers(raw), raw["metadata"].get("generation", 0), now)


def still_ours(raw: Object, live: Live) -> dict[tuple[str, str], Object]:
    """Without pods of pools that are not this fleet's any more: it was deleted with `--cascade=orphan`."""
    left = [pool for (kind, _), pool in live.items() if kind == POOL.kind and not owned(pool, raw)]
    return {at: obj for at, obj in live.items() if at[0] != POD.kind or not any(owned(obj, pool) for pool in left)}


async def as_asked(cluster: WriteThrough, raw: Object, fleet: InferenceFleet | None) -> Outcome:
    """Put it on, or take it off, as the spec says; nobody may put one on what is deleted. `fleet` None: the spec makes no sense,
    so nobody knows how to drain it."""
    found, outcome = _finalizers(raw), Outcome()
    deleted = "deletionTimestamp" in raw["metadata"]
    wanted = fleet is not None and fleet.spec.deletion is not None and not (deleted and ORPHAN in found)
    if wanted != (DRAIN in found) and not (wanted and deleted):
        await _write(cluster, raw, [*found, DRAIN] if wanted else _others(found), "as spec.deletion says", outcome)
    return outcome


async def release(cluster: WriteThrough, raw: Object, live: Live, outcome: Outcome, *, late: bool) -> None:
    """Take it off what has drained. What the cache says of that is looked up, unless the time is over in any case."""
    meta = raw["metadata"]
    try:
        found = [] if late else await cluster.list(POD, meta["namespace"], {FLEET_LABEL: meta["name"]})
    except ClusterError as error:
        with suppress(StopError):
            outcome.fail(f"listing the workers of {FLEET.kind} {meta['name']}", error)
        return
    there = still_ours(raw, {**live, **{(POD.kind, pod["metadata"]["name"]): pod for pod in found}})
    if any(at in there and _stays(pod) for pod in found if (at := (POD.kind, pod["metadata"]["name"]))):
        outcome.read += found
        outcome.conflicts.append(Problem("Conflict", f"workers of {FLEET.kind} {meta['name']} are there that were not seen"))
        return
    await _write(cluster, raw, _others(_finalizers(raw)), "its time is over" if late else "its workers have drained", outcome)


def _stays(pod: Object) -> bool:
    meta = pod["metadata"]
    return (meta.get("labels") or {}).get(ROLE) in ROLES and "deletionTimestamp" not in meta


def _finalizers(raw: Object) -> list[str]:
    return list(raw["metadata"].get("finalizers") or [])


def _others(found: list[str]) -> list[str]:
    return [name for name in found if name != DRAIN]


async def _write(cluster: WriteThrough, raw: Object, names: list[str], why: str, outcome: Outcome) -> None:
    meta = raw["metadata"]
    patch = {"metadata": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"], "finalizers": names}}
    try:
        await cluster.patch(FLEET, meta["namespace"], meta["name"], patch)
    except NotFoundError:
        outcome.gone = True
        return
    except ClusterError as error:
        with suppress(StopError):
            outcome.fail(f"finalizer {DRAIN} of {FLEET.kind} {meta['name']}", error)
        return
    outcome.writes += 1
    verb = "put on" if DRAIN in names else "taken off"
    outcome.done.append(Deed("changed", FLEET.kind, meta["name"], meta["uid"], why=f"finalizer {DRAIN} {verb}, {why}"))
    outcome.gone |= "deletionTimestamp" in meta and not names
