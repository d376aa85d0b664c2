"""Workers of a tier that left the spec, because it was taken out or renamed. Pure.

They go as others do: told as draining first, then deleted, with their grace for streams and leases. Those that serve stay until
the tiers of the spec serve in their place, as in a rollout; not when both do not fit: into the budget, the quota or the cluster.
Their own spec is gone, so nothing is repaired or sized: what is not ready, or does not serve, goes at once. When none is seen to
serve, somebody took the routers' document away: then all that are ready count as serving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet_api.v1alpha1 import InferenceFleet
from fleet_planner.capacity import QUOTA_WORDS
from fleet_planner.gang import workers_of
from fleet_planner.ratio import Pair
from fleet_planner.replicas import Replica
from fleet_planner.revisions import target_of
from fleet_planner.types import ROLES, Observed, PodGone, Target


@dataclass(frozen=True, slots=True)
class TierNow:
    """A tier of the spec. `devices`: what its wanted size takes of the budget; `limited`: why it cannot grow, in words."""

    wanted: Pair
    serving: Pair
    devices: int
    limited: str = ""


@dataclass(frozen=True, slots=True)
class Orphans:
    """What becomes of them."""

    gone: tuple[PodGone, ...] = ()
    targets: tuple[Target, ...] = ()


def plan_orphans(fleet: InferenceFleet, observed: Observed, tiers: Mapping[str, TierNow], now: float) -> Orphans:
    """Deletions, and what routers are told of those that are there. `tiers`: those of the spec, by name."""
    names = sorted({pod.tier for pod in observed.pods} - tiers.keys())
    workers = [worker for name in names for worker in workers_of(observed, name)]
    told = any(pod.serving for pod in observed.pods)
    serving = [worker for worker in workers if _could_serve(worker) and (worker.serving or not told)]
    if not serving or _replaced(serving, tiers) or not _both_fit(fleet, observed, serving, tiers, now):
        serving = []
    staying = frozenset(worker.leader.uid for worker in serving)
    going = [pod for worker in workers if worker.leader.uid not in staying for pod in worker.pods]
    gone = tuple(PodGone(pod.name, pod.uid, "its tier is not in the spec") for pod in going if not pod.terminating)
    targets = (target_of(worker, staying, {pod.uid for pod in gone}) for worker in workers)
    return Orphans(gone, tuple(target for target in targets if target is not None))


def _could_serve(worker: Replica) -> bool:
    return worker.ready and not worker.sick and worker.leader.flipping is None


def _replaced(serving: Sequence[Replica], tiers: Mapping[str, TierNow]) -> bool:
    """Every tier of the spec serves with as many of each role as go, or with all that it wants; one at zero wants none."""
    roles = [worker.role for worker in serving]
    needed = [max(1, roles.count(role)) for role in ROLES]
    return all(
        there >= min(wanted, need)
        for tier in tiers.values()
        for there, wanted, need in zip(tier.serving, tier.wanted, needed, strict=True)
    )


def _both_fit(
    fleet: InferenceFleet, observed: Observed, serving: Sequence[Replica], tiers: Mapping[str, TierNow], now: float
) -> bool:
    """They take nothing that the tiers of the spec wait for."""
    budget, wait_s = fleet.spec.scaling.budget, fleet.spec.scaling.capacity_wait_s
    devices = sum(tier.devices for tier in tiers.values()) + sum(_devices(worker, observed) for worker in serving)
    if budget is not None and devices > budget.gpus:
        return False
    if any(tier.limited for tier in tiers.values()) or any(QUOTA_WORDS in problem.message for problem in observed.problems):
        return False
    return not any(
        (pod.unschedulable or pod.gated) and not pod.terminating and now - pod.created_at >= wait_s
        for pod in observed.pods
        if pod.tier in tiers
    )


def _devices(worker: Replica, observed: Observed) -> int:
    """Of its template, which is stored as long as it has pods."""
    leader = worker.leader
    template = observed.stored.get(leader.tier, {}).get(leader.revision)
    return template.gpus[ROLES.index(worker.role)] if template is not None else 0
