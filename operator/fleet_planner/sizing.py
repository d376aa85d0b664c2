"""The size of one tier: /scale by somebody, else load, inside bounds and ratio, then what nodes, quotas and the budget allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.altered import altered
from fleet_planner.capacity import fit_budget, fit_cluster, refusals
from fleet_planner.gang import as_pods
from fleet_planner.healed import Asked
from fleet_planner.memory import ScaleMemory
from fleet_planner.money import Purse
from fleet_planner.ratio import Bounds, Pair, bounds_of, project
from fleet_planner.replicas import Replica
from fleet_planner.roles import ROLES, Role
from fleet_planner.rollout import Limits, larger, next_step, smaller
from fleet_planner.scale import ScaleDecision, ScaleInputs, want
from fleet_planner.scale_targets import asked_again, asked_of_targets, dispute_words, disputed, standing
from fleet_planner.types import Observed, ObservedPool
from fleet_planner.zero import rolls


def fit(
    fleet: InferenceFleet,
    tier: TierSpec,
    decision: ScaleDecision,
    observed: Observed,
    workers: Sequence[Replica],
    left: Purse,
    now: float,
    *,
    halted: bool = False,
) -> ScaleDecision:
    """The decision as nodes, quotas and what is `left` of the budget allow it. `halted`: a rollout waits for other things."""
    wait_s, moves = fleet.spec.scaling.capacity_wait_s, rolls(fleet, tier, observed)
    before = observed.memory.get(tier.name, ScaleMemory())
    if moves and tier.name not in observed.memory:
        before = _as_found(tier, observed, now + wait_s)
    memory = altered(before, wants=decision.memory.wants, asked=decision.memory.asked, too_few=decision.memory.too_few)
    if before.room_at > 0:
        memory = replace(memory, cap=None, placed=None)  # what it gets is decided below
    placed = fit_cluster(
        tier, (decision.prefill, decision.decode), as_pods(workers, before.gangs, wait_s, now),
        refusals(fleet.metadata.name, tier.name, [str(problem) for problem in observed.problems]), memory, wait_s, now,
        rolls=moves or before.room_at > 0, paused=fleet.spec.rollout.paused or halted,
    )  # fmt: skip
    gpus = observed.templates[tier.name].gpus
    size, unpaid = fit_budget(tier, placed.size, gpus, left, sum(worker.alive for worker in workers))
    size, given = _as_given(tier, size, gpus, workers) if before.room_at > 0 else (size, "")
    limited = "; ".join(words for words in (placed.limited, unpaid, given) if words)
    reason = f"{decision.reason}; {limited}" if limited else decision.reason
    return altered(decision, prefill=size[0], decode=size[1], reason=reason, memory=placed.memory, limited=limited)


def _as_given(tier: TierSpec, size: Pair, gpus: Pair, workers: Sequence[Replica]) -> tuple[Pair, str]:
    """What has nodes and the next step beyond it: more would take what workers of a tier that left the spec give up step by step,
    and any part of it may find nodes first. Old workers serve for the minimum meanwhile."""
    roles = [worker.role for worker in workers if worker.alive and worker.placed == worker.size]
    limits = Limits(tier.ratio.min_ratio, tier.ratio.max_ratio, (max(1, gpus[0]), max(1, gpus[1])))
    have = smaller((roles.count("prefill"), roles.count("decode")), size)
    step = size if have == size else next_step(have, size, limits)
    return step, "" if step == size else "workers of a tier that left the spec make room step by step"


def _as_found(tier: TierSpec, observed: Observed, until: float) -> ScaleMemory:
    """The cap of an operator that has just started, in the middle of a rollout: the size that its pools say."""
    size = current_size(tier, observed)
    if size == wished_size(tier, observed):
        return ScaleMemory()
    return ScaleMemory(cap=size, cap_until=until, cap_reason="more had no room before the operator started")


def size_tier(fleet: InferenceFleet, tier: TierSpec, observed: Observed, workers: Sequence[Replica], now: float) -> ScaleDecision:
    """Sizes of a tier: somebody's /scale first, then load, always inside bounds and ratio."""
    revision, bounds = observed.templates[tier.name].revision, bounds_of(tier)
    pools = _sized(tier, observed)
    current, wished = _current(tier, pools), _wished(tier, pools)
    scaled = scaled_by_others(tier.name, revision, observed)
    memory = observed.memory.get(tier.name, ScaleMemory())
    both = disputed(tier.name, observed) if fleet.spec.scaling.mode == "external" else {}
    if both and not scaled:
        return _still_between(_clamped(both, bounds), bounds, memory, now)
    if scaled := both | scaled:
        wish = (scaled.get("prefill", wished[0]), scaled.get("decode", wished[1]))
        lately = memory.asked if fleet.spec.scaling.mode == "external" else None
        return _scaled(wish, scaled, bounds, lately, now)
    if fleet.spec.scaling.mode != "auto":
        return ScaleDecision(*project(*wished, bounds), f"scaling.mode is {fleet.spec.scaling.mode}", memory)
    telemetry = observed.telemetry.get(tier.name)
    since = telemetry.latencies_since if telemetry is not None else None
    ready = [worker.role for worker in workers if worker.ready and _is_measured(worker, since)]
    inputs = ScaleInputs(
        tier, fleet.spec.slo, fleet.spec.scaling, fleet.spec.telemetry.interval_s, current,
        (ready.count("prefill"), ready.count("decode")), wished,
    )  # fmt: skip
    decision = want(inputs, telemetry, memory, now)
    size, kept = (decision.prefill, decision.decode), decision.memory
    names = {each.name for each in fleet.spec.tiers}
    if any(pod.serving and pod.tier not in names for pod in observed.pods):  # they have a part of the load that it is to have
        size, kept = larger(size, wished), replace(kept, wants=())
    sizes = project(*size, bounds)  # bounds may have changed while holding
    return ScaleDecision(*sizes, decision.reason, kept, decision.held)


def _is_measured(worker: Replica, since: float | None) -> bool:
    """It was ready for all of the time that latencies are of; True where that is not known."""
    return since is None or all(pod.ready_since is None or pod.ready_since <= since for pod in worker.pods)


def _scaled(wish: Pair, scaled: dict[Role, int], bounds: Bounds, lately: Asked | None, now: float) -> ScaleDecision:
    """What somebody asked for, and what the other role then has. `lately`: see `standing`; None: nothing but this counts."""
    sizes, reason = _follow(wish, scaled, bounds), f"scaled by a user to {wish[0]} prefill and {wish[1]} decode workers"
    asked: Asked = ()
    stands: dict[Role, int] = {}
    if lately is not None:
        stands, asked = standing(lately, scaled, dict(zip(ROLES, sizes, strict=True)), now)
        if stands:
            sizes = project(stands.get("prefill", wish[0]), stands.get("decode", wish[1]), bounds)
            reason += "".join(f"; {size} {role} workers were asked for just before, and stand" for role, size in stands.items())
    held = ScaleMemory(((now, *sizes),), asked=asked)  # the wish counts like a need of this moment, for one window
    both = scaled | stands
    if lately is not None and len(both) == len(ROLES) and sizes != (said := _clamped(both, bounds)):
        return _between(said, bounds, held)
    return ScaleDecision(*sizes, reason, held)


def _still_between(said: Pair, bounds: Bounds, memory: ScaleMemory, now: float) -> ScaleDecision:
    """The same, of two that have not said anything since."""
    found = _between(said, bounds, memory)
    if found.disputed is None:
        return found
    is_due, asked = asked_again(memory.asked, dict(zip(ROLES, said, strict=True)), now)
    found = replace(found, memory=altered(memory, asked=asked))
    words = f"{found.reason}; whoever did not get what it asked for is asked again"
    return replace(found, reason=words, disputed=None) if is_due else found


def _between(said: Pair, bounds: Bounds, memory: ScaleMemory) -> ScaleDecision:
    """The size where two ask for what the ratio does not allow together."""
    sizes = project(*said, bounds)
    if sizes == said:
        return ScaleDecision(*sizes, f"scaled by others to {said[0]} prefill and {said[1]} decode workers", memory)
    return ScaleDecision(*sizes, dispute_words(said, sizes), memory, disputed=said)


def _clamped(asked: Mapping[Role, int], bounds: Bounds) -> Pair:
    return (
        _clamp(asked["prefill"], bounds.prefill_min, bounds.prefill_max),
        _clamp(asked["decode"], bounds.decode_min, bounds.decode_max),
    )


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
    return _current(tier, _sized(tier, observed))


def _current(tier: TierSpec, pools: Mapping[Role, ObservedPool]) -> tuple[int, int]:
    found = {role: pool.size for role, pool in pools.items() if pool.size is not None}
    initial = tier.initial if len(found) < len(ROLES) else (0, 0)
    return found.get("prefill", initial[0]), found.get("decode", initial[1])


def wished_size(tier: TierSpec, observed: Observed) -> tuple[int, int]:
    """What was asked for last, whatever of it was there: it stays wished while a part is backed out of, also by an operator that
    has just started."""
    return _wished(tier, _sized(tier, observed))


def _wished(tier: TierSpec, pools: Mapping[Role, ObservedPool]) -> tuple[int, int]:
    sizes = _current(tier, pools)
    prefill, decode = (pool.wish if (pool := pools.get(role)) is not None else None for role in ROLES)
    return sizes[0] if prefill is None else prefill, sizes[1] if decode is None else decode


def _sized(tier: TierSpec, observed: Observed) -> dict[Role, ObservedPool]:
    """The pool of each role that says how large the role is: the wanted revision's, if there is one."""
    revision = observed.templates[tier.name].revision
    found: dict[Role, ObservedPool] = {}
    for pool in observed.pools:
        if pool.tier == tier.name and pool.size is not None and (pool.role not in found or pool.revision == revision):
            found[pool.role] = pool
    return found


def scaled_by_others(tier: str, revision: str, observed: Observed) -> dict[Role, int]:
    """Wanted size of each role whose pool's spec.replicas is not what the operator wrote: while two revisions share a role, what
    was added to one pool or taken from it counts for the role. Before the wanted revision has a pool the ones before it count: a
    user may scale and change the template while the operator is away. What a role's own target says counts before all of them."""
    pools = [pool for pool in observed.pools if pool.tier == tier]
    newest = {pool.role for pool in pools if pool.revision == revision}
    found: dict[Role, int] = {
        pool.role: max(0, (pool.size or pool.planned) + pool.replicas - pool.planned)
        for pool in pools
        if (pool.revision == revision or pool.role not in newest) and pool.planned is not None and pool.replicas != pool.planned
    }
    return found | asked_of_targets(tier, observed) if observed.targets else found
