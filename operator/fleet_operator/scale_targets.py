"""Writes the scale targets whose name lasts, and what they say of the workers of their role."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping
from typing import Any

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import POD, POOL, Object
from fleet_operator.names import PLANNED, ROLE, SIZE, TIER, WRITTEN, labels, owner_reference
from fleet_operator.ownership import owned
from fleet_operator.pool_sizes import Sizes, sealed
from fleet_operator.pool_status import pool_status
from fleet_planner.reconcile import Plan
from fleet_planner.scale_targets import target_name
from fleet_planner.wanted import PoolWanted

Live = Mapping[tuple[str, str], Object]
"""(kind, name) → object, of one fleet."""


def is_target(pool: Object) -> bool:
    """Whether this WorkerPool stands for a role, not for one revision of it: its name says so, which nobody can edit."""
    name, spec = pool["metadata"]["name"], pool["spec"]
    return not name.endswith(spec["revision"]) and bool(name == target_name(spec["fleet"], spec["tier"], spec["role"]))


def is_heard(fleet: InferenceFleet, target: Object) -> bool:
    """Whether its replicas are a wish for this fleet. Where nobody scales from outside only what is its own, and still to be
    deleted, is: what another one of this name left (`--cascade=orphan`, a restored backup) is answered by nobody, so that one
    edit of it held the size for ever, against load and every other /scale."""
    return fleet.spec.scaling.mode == "external" or owned(target, {"metadata": {"uid": fleet.metadata.uid}})


def render_target(fleet: InferenceFleet, target: PoolWanted, owner: Object) -> Object:
    """The WorkerPool; its annotations let the operator see when somebody else changed replicas."""
    name, namespace = target.name, fleet.metadata.namespace
    size = target.size if target.wish is not None else None  # that two disagree
    notes = {PLANNED: str(target.replicas), WRITTEN: sealed(namespace, name, Sizes(target.replicas, size, None))}
    notes |= {SIZE: str(size)} if size is not None else {}
    return {
        "apiVersion": POOL.api_version,
        "kind": POOL.kind,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": labels(fleet.metadata.name, **{TIER: target.tier, ROLE: target.role}),
            "annotations": notes,
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": {
            "fleet": fleet.metadata.name, "tier": target.tier, "role": target.role, "revision": target.revision,
            "replicas": target.replicas,
        },
    }  # fmt: skip


def unwanted(plan: Plan, live: Live, owner: Object) -> list[Object]:
    """Targets of a role that is gone, or of a fleet that is not scaled from outside any more."""
    kept = {target.name for target in plan.targets_wanted}
    pools = [obj for (kind, name), obj in live.items() if kind == POOL.kind and name not in kept]
    return [pool for pool in pools if is_target(pool) and owned(pool, owner)]


async def put_targets(
    fleet: InferenceFleet, plan: Plan, owner: Object, put: Callable[[Object], Awaitable[Any]], *, sized: bool
) -> None:
    """Write them. `sized`: all pools are as planned, before that no target says that its wish was heard."""
    for target in plan.targets_wanted if sized else ():
        await put(render_target(fleet, target, owner))


def target_statuses(
    fleet: InferenceFleet, plan: Plan, live: Live, serving: Container[str], made: Container[str]
) -> list[tuple[str, Object]]:
    """(name, status) of targets whose status is to be looked at; not of those whose pools (`made`) got pods in this pass. Pods
    are counted by their labels, which their pools say."""
    found = []
    for target in plan.targets_wanted:
        pools = [pool.name for pool in plan.pools if (pool.tier, pool.role) == (target.tier, target.role)]
        if (POOL.kind, target.name) not in live or any(name in made for name in pools):
            continue
        marks = {TIER: target.tier, ROLE: target.role}
        pods = [o for (kind, _), o in live.items() if kind == POD.kind and marks.items() <= o["metadata"]["labels"].items()]
        found.append((target.name, pool_status(pods, fleet.metadata.name, target, serving)))
    return found
