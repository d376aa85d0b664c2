"""The plan of one fleet: (spec, observed, now) → everything that should be. Pure, level-based: planning again after the plan was
carried out changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import FleetStatus
from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.adapters import fitted
from fleet_planner.capacity import QUOTA_WORDS, Fitted, fit_budget, fit_cluster
from fleet_planner.gang import as_pods, settled, workers_of
from fleet_planner.prefetch import held_back, plan_prefetch, reached
from fleet_planner.ratio import Bounds, bounds_of, project
from fleet_planner.replicas import Replica
from fleet_planner.revisions import TierPlan, plan_tier
from fleet_planner.scale import ScaleDecision, ScaleInputs, want
from fleet_planner.status import TierView, plan_status
from fleet_planner.types import (
    ROLES,
    FetchWanted,
    FlipWanted,
    Observed,
    ObservedPool,
    PodGone,
    PodWanted,
    PoolWanted,
    Relabel,
    RestMemory,
    Role,
    ScaleMemory,
    Split,
    Target,
    ZeroTier,
)
from fleet_planner.zero import NOTHING, plan_rest


@dataclass(frozen=True, slots=True)
class Plan:
    """What should be."""

    pools: tuple[PoolWanted, ...]
    pools_gone: tuple[ObservedPool, ...]
    create: tuple[PodWanted, ...]
    delete: tuple[PodGone, ...]
    fetch: tuple[FetchWanted, ...]
    flips: tuple[FlipWanted, ...]
    relabels: tuple[Relabel, ...]
    targets: tuple[Target, ...]
    splits: tuple[Split, ...]
    keep: tuple[tuple[str, str], ...]
    """(tier, revision) of the wanted revision of each tier: its template must be stored."""
    forget: tuple[tuple[str, str], ...]
    """(tier, revision) whose stored templates nobody needs any more."""
    status: FleetStatus
    zero: tuple[ZeroTier, ...] = ()
    """Tiers for which routers hold requests."""
    rest: RestMemory = field(default_factory=RestMemory)
    memory: dict[str, ScaleMemory] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


def reconcile(fleet: InferenceFleet, observed: Observed, now: float) -> Plan:
    """The plan. Only `observed` and `now` decide; nothing is remembered but what comes back in `memory`."""
    tiers: list[TierPlan] = []
    views: list[TierView] = []
    memory: dict[str, ScaleMemory] = {}
    kept: list[tuple[str, str]] = []
    left = fleet.spec.scaling.budget.gpus if fleet.spec.scaling.budget is not None else None
    prefetch, seen = plan_prefetch(fleet, observed, now), observed
    sizes = {tier.name: current_size(tier, observed) for tier in fleet.spec.tiers}
    scaled = any(_scaled_by_others(tier.name, observed.templates[tier.name].revision, observed) for tier in fleet.spec.tiers)
    rest = plan_rest(fleet, observed, sizes, scaled, now)
    for tier in fleet.spec.tiers:
        observed = held_back(tier, seen, prefetch.waiting, fleet)
        workers = workers_of(observed, tier.name)
        if tier.name in rest.asleep:
            decision = ScaleDecision(*NOTHING, rest.reason, ScaleMemory())
        else:
            decision = fit(fleet, tier, size_tier(fleet, tier, observed, now), observed, workers, left, now)
            if sizes[tier.name] == NOTHING:
                decision = replace(decision, reason=f"woken: {rest.reason or 'scaling.toZero is off'}")
        gpus = observed.templates[tier.name].gpus
        left = None if left is None else left - decision.prefill * gpus[0] - decision.decode * gpus[1]
        plan = plan_tier(fleet, tier, (decision.prefill, decision.decode), observed, now)
        gangs = settled(plan.gangs, plan.delete, workers, now)
        size, whole = (decision.prefill, decision.decode), reached(tier, (decision.prefill, decision.decode), seen)
        if tier.name in prefetch.waiting and size != whole:
            plan = replace(plan, create=())  # growth waits for the model; a repair never does
        memory[tier.name] = replace(decision.memory, flip=plan.flip, gangs=gangs, reached=whole)
        kept.append((tier.name, observed.templates[tier.name].revision))
        tiers.append(plan)
        views.append(TierView(tier, decision, plan, workers, rest.zero.get(tier.name)))
    observed = seen
    orphans = _orphans(fleet, observed)
    names = {pool.name for plan in tiers for pool in plan.pools}
    targets = fitted((target for plan in tiers for target in plan.targets), fleet, observed.adapters)
    return Plan(
        pools=tuple(pool for plan in tiers for pool in plan.pools),
        pools_gone=tuple(pool for pool in observed.pools if pool.name not in names and not _has_pods(pool, observed)),
        create=tuple(pod for plan in tiers for pod in plan.create),
        delete=(*(pod for plan in tiers for pod in plan.delete), *orphans, *prefetch.delete),
        fetch=prefetch.create,
        flips=tuple(flip for plan in tiers for flip in plan.flips),
        relabels=tuple(relabel for plan in tiers for relabel in plan.relabels),
        targets=tuple(sorted(targets, key=lambda target: target.name)),
        splits=tuple(plan.split for plan in tiers if plan.split is not None),
        keep=tuple(kept),
        forget=_forgotten(fleet, dict(zip((tier.name for tier in fleet.spec.tiers), tiers, strict=True)), observed),
        status=plan_status(fleet, views, observed, now, prefetch.verdict),
        zero=tuple(_zero_tier(view, observed) for view in views if view.zero is not None),
        memory=memory,
        rest=rest.memory,
        reasons=tuple(f"{view.tier.name}: {view.decision.reason}" for view in views),
    )


def _zero_tier(view: TierView, observed: Observed) -> ZeroTier:
    stuck = any(pod.unschedulable and not pod.terminating for pod in observed.pods if pod.tier == view.tier.name)
    refused = any(QUOTA_WORDS in problem.message for problem in observed.problems)
    return ZeroTier(view.tier.name, limited=bool(view.decision.limited) or stuck or refused)


def _forgotten(fleet: InferenceFleet, plans: dict[str, TierPlan], observed: Observed) -> tuple[tuple[str, str], ...]:
    """Stored templates beyond the history's limit, oldest first; what has pods or is returned to is never among them."""
    found: list[tuple[str, str]] = []
    for tier, stored in sorted(observed.stored.items()):
        has_pods = any(pod.tier == tier for pod in observed.pods)
        needed = plans[tier].revisions if tier in plans else frozenset()
        rest = sorted((t for t in stored.values() if t.revision not in needed), key=lambda t: -t.number)
        limit = fleet.spec.rollout.history_limit if tier in plans or has_pods else 0
        found += [(tier, template.revision) for template in rest[limit:]]
    return tuple(found)


def _orphans(fleet: InferenceFleet, observed: Observed) -> list[PodGone]:
    known = {tier.name for tier in fleet.spec.tiers}
    left = [pod for pod in observed.pods if pod.tier not in known and not pod.terminating]
    return [PodGone(pod.name, pod.uid, "its tier is not in the spec") for pod in left]


def fit(
    fleet: InferenceFleet,
    tier: TierSpec,
    decision: ScaleDecision,
    observed: Observed,
    workers: Sequence[Replica],
    left: int | None,
    now: float,
) -> ScaleDecision:
    """The decision as nodes, quotas and the `left` devices of the budget allow it."""
    before = observed.memory.get(tier.name, ScaleMemory())
    memory = replace(decision.memory, cap=before.cap, cap_until=before.cap_until, cap_reason=before.cap_reason)
    wait_s = fleet.spec.scaling.capacity_wait_s
    pods = as_pods(workers, before.gangs, wait_s, now)
    if len({pod.revision for pod in pods}) > 1:  # a rollout has its own answer to a lack of room
        placed = Fitted((decision.prefill, decision.decode), "", memory)
    else:
        want_now = decision.prefill, decision.decode
        placed = fit_cluster(tier, want_now, pods, tuple(map(str, observed.problems)), memory, wait_s, now)
    size, unpaid = fit_budget(tier, placed.size, observed.templates[tier.name].gpus, left)
    limited = "; ".join(words for words in (placed.limited, unpaid) if words)
    reason = f"{decision.reason}; {limited}" if limited else decision.reason
    return replace(decision, prefill=size[0], decode=size[1], reason=reason, memory=placed.memory, limited=limited)


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
    """Wanted size of each role whose pool's spec.replicas is not what the operator wrote: while two revisions share a role, what
    was added to one pool or taken from it counts for the role. Before the wanted revision has a pool the ones before it count: a
    user may scale and change the template while the operator is away."""
    pools = [pool for pool in observed.pools if pool.tier == tier]
    newest = {pool.role for pool in pools if pool.revision == revision}
    return {
        pool.role: max(0, (pool.size or pool.planned) + pool.replicas - pool.planned)
        for pool in pools
        if (pool.revision == revision or pool.role not in newest) and pool.planned is not None and pool.replicas != pool.planned
    }


def _has_pods(pool: ObservedPool, observed: Observed) -> bool:
    """A worker on its way to the other role belongs to both pools until it has changed."""
    mine = [pod for pod in observed.pods if (pod.tier, pod.revision) == (pool.tier, pool.revision)]
    return any(pool.role in (pod.role, pod.flipping) for pod in mine)
