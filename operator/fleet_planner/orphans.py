"""Workers of a tier that left the spec, because it was taken out or renamed. Pure.

They go as others do: told as draining first, then deleted, with their grace for streams and leases. Those that serve stay until
the tiers of the spec serve in their place, as in a rollout. Where budget, quota or cluster have no room for both they give way
step by step: one of each role (or as many as rollout.maxUnavailable says), the last pair as a whole, and no further ones before
what they left is taken and serves.
Their own spec is gone, so nothing is repaired or sized: what is not ready, or does not serve, goes at once. When none is seen to
serve, somebody took the routers' document away: then all that are ready count as serving.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fleet_api.v1alpha1 import InferenceFleet
from fleet_planner.capacity import QUOTA_WORDS
from fleet_planner.gang import SETTLE_S, workers_of
from fleet_planner.money import left_over, price_of, purse_of
from fleet_planner.ratio import Pair
from fleet_planner.replicas import Replica, first_to_go
from fleet_planner.revisions import target_of
from fleet_planner.roles import ROLES
from fleet_planner.types import Observed
from fleet_planner.wanted import PodGone, Target


@dataclass(frozen=True, slots=True)
class TierNow:
    """A tier of the spec. `wanted`: what is asked for and paid; `devices`: what that takes of the budget; `limited`: why it
    cannot grow, in words."""

    wanted: Pair
    serving: Pair
    devices: int
    limited: str = ""
    made: bool = True
    """All workers of its present size exist."""


@dataclass(frozen=True, slots=True)
class Orphans:
    """What becomes of them."""

    gone: tuple[PodGone, ...] = ()
    targets: tuple[Target, ...] = ()
    room_at: float = 0.0
    """When one of them was last seen to make room; 0: never."""


def plan_orphans(fleet: InferenceFleet, observed: Observed, tiers: Mapping[str, TierNow], now: float) -> Orphans:
    """Deletions, and what routers are told of those that are there. `tiers`: those of the spec, by name."""
    names = sorted({pod.tier for pod in observed.pods} - tiers.keys())
    if not names:
        return Orphans()
    workers, serving = _left(observed, names)
    room_at = min(now, max((memory.room_at for memory in observed.memory.values()), default=0.0))
    room_at = now if room_at and any(worker.terminating and not worker.is_stuck(now) for worker in workers) else room_at
    unpaid = not _is_paid(fleet, observed, serving, tiers)
    short = _short_since(observed, tiers, begun=room_at > 0, unpaid=unpaid)
    patience_s = SETTLE_S if room_at or unpaid else fleet.spec.scaling.capacity_wait_s  # what was given up finds its new owner
    if not serving or _replaced(serving, tiers, whole=unpaid or room_at > 0 or short is not None):
        serving = []
    elif short is not None and now - max(short, room_at) >= patience_s and not _starts(fleet, observed, tiers, now):
        serving, room_at = _fewer(serving, max(1, fleet.spec.rollout.max_unavailable)), now
    staying = frozenset(worker.leader.uid for worker in serving)
    going = [pod for worker in workers if worker.leader.uid not in staying for pod in worker.pods]
    gone = tuple(PodGone(pod.name, pod.uid, "its tier is not in the spec") for pod in going if not pod.terminating)
    targets = (target_of(worker, staying, {pod.uid for pod in gone}, now) for worker in workers)
    return Orphans(gone, tuple(target for target in targets if target is not None), room_at)


def serving_on(observed: Observed, tiers: Collection[str]) -> list[Replica]:
    """Workers that serve on though their tiers left the spec. `tiers`: those of the spec."""
    names = sorted({pod.tier for pod in observed.pods}.difference(tiers))
    return _left(observed, names)[1] if names else []


def _left(observed: Observed, names: Sequence[str]) -> tuple[list[Replica], list[Replica]]:
    """All workers of these tiers, and those that serve."""
    workers = [worker for name in names for worker in workers_of(observed, name)]
    told = any(pod.serving for pod in observed.pods)
    return workers, [worker for worker in workers if _could_serve(worker) and (worker.serving or not told)]


def _could_serve(worker: Replica) -> bool:
    return worker.ready and not worker.sick and worker.leader.flipping is None


def _replaced(serving: Sequence[Replica], tiers: Mapping[str, TierNow], *, whole: bool) -> bool:
    """Every tier of the spec serves with as many of each role as go (not when `whole`: some went already), or with all that it
    wants; one at zero wants none."""
    roles = [worker.role for worker in serving]
    return all(
        there >= (wanted if whole else min(wanted, max(1, roles.count(role))))
        for tier in tiers.values()
        for there, wanted, role in zip(tier.serving, tier.wanted, ROLES, strict=True)
    )


def _is_paid(fleet: InferenceFleet, observed: Observed, serving: Sequence[Replica], tiers: Mapping[str, TierNow]) -> bool:
    """They and the tiers of the spec fit into the budget, and routers can be told of all."""
    left = purse_of(fleet)
    for name, tier in tiers.items():
        left = left.less(tier.devices, price_of(fleet.tier(name)), sum(tier.wanted))
    theirs = left_over(fleet, serving, observed)
    left = left.after(theirs.devices, theirs.cost, theirs.workers)
    return all(rest is None or rest >= 0 for rest in (left.gpus, left.per_hour, left.workers))


def _short_since(observed: Observed, tiers: Mapping[str, TierNow], *, begun: bool, unpaid: bool) -> float | None:
    """Since when a tier of the spec asks for more than nodes, queues or quotas let in; 0: for long. None: none does. Once one
    went (`begun`) it asks for no more than has room, and is limited for that. `unpaid`: the budget has no more for them; their
    minimum was made first."""
    limited = not begun and any(tier.limited for tier in tiers.values())
    if (limited and not unpaid) or any(QUOTA_WORDS in problem.message for problem in observed.problems):
        return 0.0
    mine = [pod for pod in observed.pods if pod.tier in tiers and not pod.terminating]
    if unpaid:
        made = all(tier.made for tier in tiers.values())
        return max((pod.created_at for pod in mine if not pod.ready), default=0.0) if made else None
    return min((pod.created_at for pod in mine if pod.unschedulable or pod.gated), default=None)


def _starts(fleet: InferenceFleet, observed: Observed, tiers: Mapping[str, TierNow], now: float) -> bool:
    """A worker of the spec has its nodes and comes up; not for longer than a rollout may stand still."""
    late = now - fleet.spec.rollout.progress_deadline_s
    found = [worker for name in tiers for worker in workers_of(observed, name) if worker.alive and not worker.ready]
    return any(worker.placed == worker.size and min(worker.unready_since, now) > late for worker in found)


def _fewer(serving: Sequence[Replica], step: int) -> list[Replica]:
    """Those that stay when so many of each role of one tier go; its last pair goes as a whole."""
    tier = min(worker.leader.tier for worker in serving)
    mine = sorted((worker for worker in serving if worker.leader.tier == tier), key=first_to_go, reverse=True)
    by_role = [[worker for worker in mine if worker.role == role] for role in ROLES]
    is_last = max(map(len, by_role)) == 1
    kept = [] if is_last else [worker for found in by_role for worker in found[: max(1, len(found) - step)]]
    return [worker for worker in serving if worker.leader.tier != tier] + kept
