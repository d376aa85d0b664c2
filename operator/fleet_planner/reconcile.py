"""The plan of one fleet: (spec, observed, now) → everything that should be. Pure, level-based: planning again after the plan was
carried out changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import FleetStatus
from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.adapters import fitted
from fleet_planner.altered import altered
from fleet_planner.astray import strayed
from fleet_planner.capacity import fit_budget, least_devices, least_workers, refusals
from fleet_planner.clock import steady
from fleet_planner.ending import Ended, Ending, plan_ending
from fleet_planner.gang import settled, workers_of
from fleet_planner.healing import UNHURT, Healing, marked, plan_healing
from fleet_planner.memory import ClockMemory, RestMemory, ScaleMemory
from fleet_planner.money import Purse, devices_of, left_over, price_of, purse_of
from fleet_planner.orphans import TierNow, plan_orphans, serving_on
from fleet_planner.prefetch import Prefetch, held_back, plan_prefetch, reached, repairs
from fleet_planner.replicas import Replica
from fleet_planner.revisions import TierPlan, plan_tier
from fleet_planner.rollout import devices
from fleet_planner.scale import ScaleDecision
from fleet_planner.scale_targets import plan_targets
from fleet_planner.sizing import current_size, fit, scaled_by_others, size_tier
from fleet_planner.status import TierView, plan_status
from fleet_planner.types import FetchWanted, Observed, ObservedPool
from fleet_planner.wanted import FlipWanted, PodGone, PodWanted, PoolWanted, Relabel, Split, Target, ZeroTier
from fleet_planner.zero import NOTHING, Rest, plan_rest


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
    needed: frozenset[tuple[str, str]]
    """Like `keep`, and those that have pods or are returned to: without its template no worker of a revision is made again."""
    forget: tuple[tuple[str, str], ...]
    """(tier, revision) whose stored templates nobody needs any more."""
    status: FleetStatus
    targets_wanted: tuple[PoolWanted, ...] = ()
    """Scale targets, one per role, of a fleet that is scaled from outside."""
    zero: tuple[ZeroTier, ...] = ()
    """Tiers for which routers hold requests."""
    rest: RestMemory = field(default_factory=RestMemory)
    clock: ClockMemory = field(default_factory=ClockMemory)
    memory: dict[str, ScaleMemory] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    ended: Ended | None = None
    """It was deleted, and drains."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """What one tier gets."""

    plan: TierPlan
    view: TierView
    memory: ScaleMemory
    devices: int
    """Of the fleet's budget."""
    workers: int
    """Of the routers' document."""
    asked: tuple[int, int]
    """What it would have if quota and nodes had room."""
    asked_devices: int
    wished: tuple[int, int]
    """What is asked for, whatever allows it."""
    said: tuple[int, int]
    """What the scale targets say: what was asked of each role, where two disagree."""


def reconcile(fleet: InferenceFleet, observed: Observed, now: float, ending: Ending | None = None) -> Plan:
    """The plan. Only `observed`, `ending` and `now` decide; nothing is remembered but what comes back in `memory`, `rest`,
    `clock` and `ended`. `ending`: of a fleet that was deleted and has our finalizer."""
    fleet, observed, clock = steady(fleet, observed, now)
    observed = strayed(fleet, observed)
    if ending is not None:
        return _end(fleet, observed, ending, clock, now)
    healing = plan_healing(fleet, observed, now)
    observed = marked(fleet, observed, now)
    prefetch = plan_prefetch(fleet, observed, now)
    sizes = {tier.name: current_size(tier, observed) for tier in fleet.spec.tiers}
    scaled = any(scaled_by_others(tier.name, observed.templates[tier.name].revision, observed) for tier in fleet.spec.tiers)
    rest = plan_rest(fleet, observed, sizes, scaled, now)
    planned = _plan_tiers(fleet, observed, sizes, prefetch, rest, healing, now)
    tiers, views = [one.plan for one in planned.values()], [one.view for one in planned.values()]
    names = {pool.name for plan in tiers for pool in plan.pools}
    left = plan_orphans(fleet, observed, {name: _tier_now(one) for name, one in planned.items()}, now)
    targets = fitted([*(target for plan in tiers for target in plan.targets), *left.targets], fleet, observed.adapters)
    deleted = (pod for plan in tiers for pod in plan.delete)
    return Plan(
        pools=tuple(pool for plan in tiers for pool in plan.pools),
        pools_gone=tuple(pool for pool in observed.pools if pool.name not in names and not _has_pods(pool, observed)),
        create=tuple(pod for plan in tiers for pod in plan.create),
        delete=(*deleted, *left.gone, *prefetch.delete),
        fetch=prefetch.create,
        flips=tuple(flip for plan in tiers for flip in plan.flips),
        relabels=tuple(relabel for plan in tiers for relabel in plan.relabels),
        targets=tuple(sorted(targets, key=lambda target: target.name)),
        splits=tuple(plan.split for plan in tiers if plan.split is not None),
        keep=tuple((name, observed.templates[name].revision) for name in planned),
        needed=_needed(planned, observed),
        forget=_forgotten(fleet, {name: one.plan for name, one in planned.items()}, observed),
        status=plan_status(fleet, views, observed, now, prefetch.verdict),
        targets_wanted=_targets(fleet, planned, observed) if fleet.spec.scaling.mode == "external" else (),
        zero=tuple(_zero_tier(fleet, view, observed) for view in views if view.zero is not None),
        memory={name: altered(one.memory, room_at=left.room_at) for name, one in planned.items()},
        rest=rest.memory,
        clock=clock,
        reasons=tuple(f"{view.tier.name}: {view.decision.reason}" for view in views),
    )


def _end(fleet: InferenceFleet, observed: Observed, ending: Ending, clock: ClockMemory, now: float) -> Plan:
    """Of a fleet that wants nothing any more."""
    ended = plan_ending(fleet, observed, ending, clock, now)
    return Plan(
        pools=(), pools_gone=(), create=(), delete=ended.gone, fetch=(), flips=(), relabels=(), targets=ended.targets, splits=(),
        keep=(), needed=frozenset((pod.tier, pod.revision) for pod in observed.pods), forget=(), status=ended.status,
        rest=observed.rest, clock=clock, memory=dict(observed.memory), ended=ended,
        reasons=tuple(f"{tier.name}: the fleet is deleted" for tier in fleet.spec.tiers),
    )  # fmt: skip


def _plan_tiers(
    fleet: InferenceFleet,
    observed: Observed,
    sizes: dict[str, tuple[int, int]],
    prefetch: Prefetch,
    rest: Rest,
    healing: dict[str, Healing],
    now: float,
) -> dict[str, _Planned]:
    """By name. Out of the budget the minimum of every tier is paid first, then what else they want, in the spec's order."""
    found: dict[str, _Planned] = {}
    left, there = purse_of(fleet), _workers_there(fleet, observed)
    later = {
        tier.name: (
            least_devices(tier, observed.templates[tier.name].gpus), price_of(tier), max(least_workers(tier), there[tier.name])
        )
        for tier in fleet.spec.tiers
        if tier.name not in rest.asleep
    }  # fmt: skip
    for tier in fleet.spec.tiers:
        later.pop(tier.name, None)
        mine = left
        for needed in later.values():
            mine = mine.less(*needed)
        heals = healing.get(tier.name, UNHURT)
        found[tier.name] = one = _plan_tier(fleet, tier, observed, sizes[tier.name], prefetch, rest, heals, mine, now)
        left = left.less(one.devices, price_of(tier), one.workers)
    return found


def _workers_there(fleet: InferenceFleet, observed: Observed) -> Counter[str]:
    """By tier: of whom routers are told, and who stays for their document's sake. Not counted where there is one tier."""
    if len(fleet.spec.tiers) == 1:
        return Counter()
    return Counter([pod.tier for pod in observed.pods if pod.member == 0 and not pod.terminating])


def _plan_tier(
    fleet: InferenceFleet,
    tier: TierSpec,
    seen: Observed,
    before: tuple[int, int],
    prefetch: Prefetch,
    rest: Rest,
    healing: Healing,
    left: Purse,
    now: float,
) -> _Planned:
    observed = held_back(tier, seen, prefetch.waiting, fleet)
    workers = workers_of(observed, tier.name)
    if tier.name in rest.asleep:
        wished = decision = ScaleDecision(*NOTHING, rest.reason, ScaleMemory())
    else:
        wished = size_tier(fleet, tier, observed, workers, now)
        decision = fit(fleet, tier, wished, observed, workers, free := _free(fleet, tier, observed, workers, left), now)
        if before == NOTHING:
            decision = replace(decision, reason=f"woken: {rest.reason or 'scaling.toZero is off'}")
    plan = plan_tier(fleet, tier, (decision.prefill, decision.decode), observed, workers, now)
    if plan.halted and decision.limited:
        halted = fit(fleet, tier, wished, observed, workers, free, now, halted=True)
        decision, plan = _tried_again(fleet, tier, decision, halted, plan, observed, workers, now)
    size, plan = (decision.prefill, decision.decode), _with_wish(plan, wished)
    gangs, whole = settled(plan.gangs, plan.delete, workers, now), reached(tier, size, seen, fleet)
    zero = rest.zero.get(tier.name)
    wakes = zero is not None and zero.state == "Waking"  # requests are held meanwhile, and not for as long as a model takes
    if tier.name in prefetch.waiting and size != whole and not wakes:  # growth waits for the model; a repair never does
        plan = replace(plan, create=repairs(plan.create, {pod.uid for pod in plan.delete}, workers, size, whole))
    lacking = prefetch.lacking.get(tier.name)
    kept = healing.memory
    memory = altered(decision.memory, flip=plan.flip, gangs=gangs, reached=whole, lacking=lacking, healing=kept)
    gpus = observed.templates[tier.name].gpus
    asked, alive = NOTHING, sum(worker.alive for worker in workers)
    if tier.name not in rest.asleep:
        asked, _ = fit_budget(tier, (wished.prefill, wished.decode), gpus, left, alive)
    view = TierView(tier, decision, plan, workers, zero, healing)
    wish = wished.prefill, wished.decode
    return _Planned(
        plan, view, memory, devices(size, gpus), sum(size), asked, devices(asked, gpus), wish, wished.disputed or wish
    )


def _tried_again(
    fleet: InferenceFleet,
    tier: TierSpec,
    decision: ScaleDecision,
    halted: ScaleDecision,
    plan: TierPlan,
    observed: Observed,
    workers: Sequence[Replica],
    now: float,
) -> tuple[ScaleDecision, TierPlan]:
    """What had no room is had or tried again though a rollout is not over: no node lets it go on. Not where a canary would begin
    its step anew for it, time and again."""
    if (halted.prefill, halted.decode) == (decision.prefill, decision.decode):
        return halted, plan
    again = plan_tier(fleet, tier, (halted.prefill, halted.decode), observed, workers, now)
    return (halted, again) if again.rollout.step_since == plan.rollout.step_since else (decision, plan)


def _free(fleet: InferenceFleet, tier: TierSpec, observed: Observed, workers: Sequence[Replica], left: Purse) -> Purse:
    """What of `left` is not taken by workers whose tiers left the spec."""
    serving = serving_on(observed, {each.name for each in fleet.spec.tiers})
    if not serving:
        return left
    kept = sum(devices_of(worker, observed) for worker in workers if worker.alive) * price_of(tier)
    return left.beside(left_over(fleet, serving, observed), kept)


def _targets(fleet: InferenceFleet, planned: dict[str, _Planned], observed: Observed) -> tuple[PoolWanted, ...]:
    nodes = {name: observed.templates[name].nodes for name in planned}
    wished, said = {name: one.wished for name, one in planned.items()}, {name: one.said for name, one in planned.items()}
    return plan_targets(fleet, wished, said, nodes)


def _with_wish(plan: TierPlan, wished: ScaleDecision) -> TierPlan:
    """Its pools say what was asked for where that is more than they get: what is capped now is wished for all the same."""
    asked = {"prefill": wished.prefill, "decode": wished.decode}
    if all(asked[pool.role] == pool.size for pool in plan.pools):
        return plan
    pools = (replace(pool, wish=asked[pool.role] if asked[pool.role] != pool.size else None) for pool in plan.pools)
    return replace(plan, pools=tuple(pools))


def _tier_now(one: _Planned) -> TierNow:
    decision, workers = one.view.decision, one.view.workers
    roles = [worker.role for worker in workers if worker.alive]
    made = roles.count("prefill") >= decision.prefill and roles.count("decode") >= decision.decode
    return TierNow(one.asked, one.plan.serving, one.asked_devices, decision.limited or one.plan.limited, made)


def _zero_tier(fleet: InferenceFleet, view: TierView, observed: Observed) -> ZeroTier:
    stuck = any(pod.unschedulable and not pod.terminating for pod in observed.pods if pod.tier == view.tier.name)
    refused = bool(refusals(fleet.metadata.name, view.tier.name, [str(problem) for problem in observed.problems]))
    return ZeroTier(view.tier.name, limited=bool(view.decision.limited) or stuck or refused)


def _needed(planned: dict[str, _Planned], observed: Observed) -> frozenset[tuple[str, str]]:
    """Revisions of tiers of the spec, and of those that left it and still have pods."""
    mine = {(name, revision) for name, one in planned.items() for revision in one.plan.revisions}
    return frozenset(mine | {(pod.tier, pod.revision) for pod in observed.pods})


def _forgotten(fleet: InferenceFleet, plans: dict[str, TierPlan], observed: Observed) -> tuple[tuple[str, str], ...]:
    """Stored templates beyond the history's limit, oldest first, and what served last after all others; what has pods or is
    returned to is never among them."""
    found: list[tuple[str, str]] = []
    for tier, stored in sorted(observed.stored.items()):
        has_pods = any(pod.tier == tier for pod in observed.pods)
        needed = plans[tier].revisions if tier in plans else frozenset()
        last = plans[tier].rollout.previous if tier in plans else None
        rest = [template for template in stored.values() if template.revision not in needed]
        rest.sort(key=lambda template: (template.revision != last, -template.number))
        limit = fleet.spec.rollout.history_limit if tier in plans or has_pods else 0
        found += [(tier, template.revision) for template in rest[limit:]]
    return tuple(found)


def _has_pods(pool: ObservedPool, observed: Observed) -> bool:
    """A worker on its way to the other role belongs to both pools until it has changed."""
    mine = [pod for pod in observed.pods if (pod.tier, pod.revision) == (pool.tier, pool.revision)]
    return any(pool.role in (pod.role, pod.flipping) for pod in mine)
