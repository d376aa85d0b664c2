"""The plan of one fleet: (spec, observed, now) → everything that should be. Pure, level-based: planning again after the plan was
carried out changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import FleetStatus
from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.pods import plan_pods
from fleet_planner.ratio import Bounds, bounds_of, project
from fleet_planner.scale import ScaleDecision, ScaleInputs, want
from fleet_planner.status import TierView, plan_status
from fleet_planner.types import (
    ROLES,
    Observed,
    ObservedPod,
    ObservedPool,
    PodGone,
    PodWanted,
    PoolWanted,
    Role,
    ScaleMemory,
    Target,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What should be."""

    pools: tuple[PoolWanted, ...]
    pools_gone: tuple[ObservedPool, ...]
    create: tuple[PodWanted, ...]
    delete: tuple[PodGone, ...]
    targets: tuple[Target, ...]
    status: FleetStatus
    memory: dict[str, ScaleMemory] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


def reconcile(fleet: InferenceFleet, observed: Observed, now: float) -> Plan:
    """The plan. Only `observed` and `now` decide; nothing is remembered but what comes back in `memory`."""
    pools: list[PoolWanted] = []
    views: list[TierView] = []
    memory: dict[str, ScaleMemory] = {}
    for tier in fleet.spec.tiers:
        decision = size_tier(fleet, tier, observed, now)
        memory[tier.name] = decision.memory
        sizes: dict[Role, int] = {"prefill": decision.prefill, "decode": decision.decode}
        for role in ROLES:
            pools += plan_pools(fleet.metadata.name, tier.name, role, sizes[role], observed)
        views.append(TierView(tier, decision, observed.templates[tier.name].revision))
    create, delete = _plan_all_pods(pools, observed)
    names = {pool.name for pool in pools}
    targets = tuple(target for pod in observed.pods if (target := _target(pod)) is not None)
    return Plan(
        pools=tuple(pools),
        pools_gone=tuple(pool for pool in observed.pools if pool.name not in names and not _has_pods(pool, observed)),
        create=tuple(create),
        delete=tuple(delete),
        targets=targets,
        status=plan_status(fleet, views, observed, now),
        memory=memory,
        reasons=tuple(f"{view.tier.name}: {view.decision.reason}" for view in views),
    )


def size_tier(fleet: InferenceFleet, tier: TierSpec, observed: Observed, now: float) -> ScaleDecision:
    """Sizes of a tier: somebody's /scale first, then load, always inside bounds and ratio."""
    revision, bounds = observed.templates[tier.name].revision, bounds_of(tier)
    current = current_size(tier, observed)
    scaled = _scaled_by_others(tier.name, revision, observed)
    memory = observed.memory.get(tier.name, ScaleMemory())
    if scaled:
        wish = (scaled.get("prefill", current[0]), scaled.get("decode", current[1]))
        sizes = _follow(wish, scaled, bounds)
        held = ScaleMemory(((now, *sizes),))  # the wish counts like a need of this moment, for one window
        return ScaleDecision(*sizes, f"scaled by a user to {wish[0]} prefill and {wish[1]} decode workers", held)
    if fleet.spec.scaling.mode == "manual":
        return ScaleDecision(*project(*current, bounds), "scaling.mode is manual", memory)
    inputs = ScaleInputs(tier, fleet.spec.slo, fleet.spec.scaling, fleet.spec.telemetry.interval_s, current)
    decision = want(inputs, observed.telemetry.get(tier.name), memory, now)
    sizes = project(decision.prefill, decision.decode, bounds)  # bounds may have changed while holding
    return ScaleDecision(*sizes, decision.reason, decision.memory, decision.held)


def _follow(wish: tuple[int, int], scaled: dict[Role, int], bounds: Bounds) -> tuple[int, int]:
    """The pair nearest to the wish that keeps the scaled role where the user put it, if the other role's bounds allow."""
    pinned = Bounds(
        prefill_min=_clamp(wish[0], bounds.prefill_min, bounds.prefill_max) if "prefill" in scaled else bounds.prefill_min,
        prefill_max=_clamp(wish[0], bounds.prefill_min, bounds.prefill_max) if "prefill" in scaled else bounds.prefill_max,
        decode_min=_clamp(wish[1], bounds.decode_min, bounds.decode_max) if "decode" in scaled else bounds.decode_min,
        decode_max=_clamp(wish[1], bounds.decode_min, bounds.decode_max) if "decode" in scaled else bounds.decode_max,
        low=bounds.low,
        high=bounds.high,
    )
    try:
        return project(*wish, pinned)
    except ValueError:
        return project(*wish, bounds)


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def current_size(tier: TierSpec, observed: Observed) -> tuple[int, int]:
    """What was planned last; the spec's initial size before that."""
    revision = observed.templates[tier.name].revision
    found: dict[Role, int] = {}
    for role in ROLES:
        pools = [pool for pool in observed.pools if pool.tier == tier.name and pool.role == role and pool.size is not None]
        newest = next((pool for pool in pools if pool.revision == revision), pools[0] if pools else None)
        if newest is not None and newest.size is not None:
            found[role] = newest.size
    initial = tier.initial
    return found.get("prefill", initial[0]), found.get("decode", initial[1])


def _scaled_by_others(tier: str, revision: str, observed: Observed) -> dict[Role, int]:
    """Roles whose pool's spec.replicas is not what the operator wrote."""
    return {
        pool.role: pool.replicas
        for pool in observed.pools
        if pool.tier == tier and pool.revision == revision and pool.planned is not None and pool.replicas != pool.planned
    }


def plan_pools(fleet: str, tier: str, role: Role, size: int, observed: Observed) -> list[PoolWanted]:
    """Pools of one role. While an older revision still has pods, the new one grows by one above what is ready and the old
    ones keep the rest, so that never fewer than `size` workers are ready or coming."""
    revision = observed.templates[tier].revision
    pods = [pod for pod in observed.pods if pod.tier == tier and pod.role == role and not pod.terminating]
    old = sorted({pod.revision for pod in pods if pod.revision != revision})
    ready = sum(pod.ready and pod.revision == revision for pod in pods)
    mine = size if not old else min(size, ready + 1)
    pools = [PoolWanted(f"{fleet}-{tier}-{role}-{revision}", tier, role, revision, mine, size)]
    left = max(0, size - ready)
    for other in old:
        has = sum(pod.revision == other for pod in pods)
        keep = min(has, left)
        left -= keep
        pools.append(PoolWanted(f"{fleet}-{tier}-{role}-{other}", tier, role, other, keep, size))
    return pools


def _plan_all_pods(pools: list[PoolWanted], observed: Observed) -> tuple[list[PodWanted], list[PodGone]]:
    create: list[PodWanted] = []
    delete: list[PodGone] = []
    for pool in pools:
        mine = [p for p in observed.pods if (p.tier, p.role, p.revision) == (pool.tier, pool.role, pool.revision)]
        new, gone = plan_pods(pool, mine)
        create += new
        delete += gone
    known = {(pool.tier, pool.role, pool.revision) for pool in pools}
    orphans = [p for p in observed.pods if (p.tier, p.role, p.revision) not in known and not p.terminating]
    delete += [PodGone(pod.name, pod.uid, "its tier is not in the spec") for pod in orphans]
    return create, delete


def _has_pods(pool: ObservedPool, observed: Observed) -> bool:
    return any((p.tier, p.role, p.revision) == (pool.tier, pool.role, pool.revision) for p in observed.pods)


def _target(pod: ObservedPod) -> Target | None:
    """Ready pods serve; a terminating one is told as draining until it is gone; others are not told at all."""
    if pod.ip is None or not (pod.ready or pod.terminating):
        return None
    return Target(pod.name, pod.uid, pod.ip, pod.role, pod.tier, pod.revision, draining=pod.terminating)
