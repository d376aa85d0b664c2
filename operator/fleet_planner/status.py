"""What the operator says about a fleet: counts per role, ratio, proof of KV movement, conditions with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleet_api.conditions import ConditionType, set_conditions
from fleet_api.quantities import format_ratio
from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.fleet import DRAIN
from fleet_api.v1alpha1.status import FleetStatus, KvStatus, RoleStatus, RolloutStatus, TierStatus, ZeroStatus
from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.adapters import adapter_statuses, adapters_loaded
from fleet_planner.canary import overdue
from fleet_planner.capacity import QUOTA_WORDS, refusals
from fleet_planner.causes import (
    LOOK_AT_IT,
    grouped,
    router_begins,
    router_words,
    routers_failing,
    stuck,
    unready,
    unready_too_long,
    unseen,
)
from fleet_planner.events import NAME_CONFLICT
from fleet_planner.fabric import disaggregating, transport_verified
from fleet_planner.gang import workers_of
from fleet_planner.healing import UNHURT, Healing
from fleet_planner.memory import ScaleMemory
from fleet_planner.money import beyond, cost_left, cost_now, exact, may_hold, purse_of
from fleet_planner.peerkey import peer_key, pending
from fleet_planner.ratio import bounds_of, project, within
from fleet_planner.replicas import Replica
from fleet_planner.revisions import TierPlan
from fleet_planner.roles import ROLES, Role
from fleet_planner.rollout import devices
from fleet_planner.scale import ScaleDecision, unusable
from fleet_planner.scale_targets import dispute_words
from fleet_planner.starting import come_too_late, exceeds, starting_since
from fleet_planner.types import Observed, ObservedPod, Problem, Verdict

MAX_CAUSES = 3
FAILING_RESTARTS = 1
AT_ZERO = "AtZero"
WAKING = "Waking"
"""Reasons of Available and Ready: nothing runs because nobody asks; somebody asks and nothing serves yet."""
ROUTERS_FAILING = "RoutersFailing"
"""Of both as well: others of its routers answer."""
STARTING = "WorkersStarting"
BEGINNING = (STARTING, WAKING)
"""Reasons of a tier that has not served yet, and that nobody is woken for."""
FROM_TELEMETRY: tuple[ConditionType, ...] = ("Disaggregating", "TransportVerified", "TelemetryFresh")
"""Conditions that stand as they are until the first reading after the operator started: a restart is no news."""


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier with its decision."""

    tier: TierSpec
    decision: ScaleDecision
    plan: TierPlan
    workers: Sequence[Replica] = ()
    zero: ZeroStatus | None = None
    healing: Healing = UNHURT


def plan_status(
    fleet: InferenceFleet, views: Sequence[TierView], observed: Observed, now: float, cached: Verdict | None = None
) -> FleetStatus:
    """The whole status; lastTransitionTime is kept from the present one. `cached`: ModelCached, for fleets that fetch ahead."""
    tiers = tuple(_tier_status(view, observed, fleet.status, now) for view in views)
    verdicts: dict[ConditionType, Verdict] = {
        "Accepted": ("True", "Valid", _accepted(fleet)),
        "Provisioned": _provisioned(fleet, views, observed, now),
        "Available": _available(fleet, tiers, observed, now),
        "Disaggregating": disaggregating(
            {view.tier.name: observed.telemetry.get(view.tier.name) for view in views},
            {view.tier.name: view.healing.verdict for view in views if view.healing.verdict is not None},
        ),
        "TransportVerified": transport_verified([(v.tier, observed.telemetry.get(v.tier.name)) for v in views]),
        "WithinRatio": _within_ratio(views, tiers),
        "TelemetryFresh": _telemetry(fleet, observed, now),
        "CapacityLimited": _capacity(fleet, views, observed, now),
        "RollingOut": _rolling(fleet, views, observed, now),
    }
    if not observed.telemetry_read:
        verdicts |= {c.type: (c.status, c.reason, c.message) for c in fleet.status.conditions if c.type in FROM_TELEMETRY}
    adapters = adapter_statuses(fleet, observed.pods, observed.adapters)
    if (loaded := adapters_loaded(adapters)) is not None:
        verdicts["AdaptersLoaded"] = loaded
    if cached is not None:
        verdicts["ModelCached"] = cached
    keyless = peer_key(fleet, makes_keys=observed.makes_keys)
    if (keyless := keyless or pending(fleet, observed.pods, observed.stored, observed.templates)) is not None:
        verdicts["PeerKey"] = keyless
    verdicts["Ready"] = _ready(verdicts)
    known = tuple([condition for condition in fleet.status.conditions if condition.type in verdicts])
    conditions = set_conditions(known, verdicts, generation=fleet.metadata.generation, now=now)
    name, namespace = fleet.metadata.name, fleet.metadata.namespace
    return FleetStatus(
        observed_generation=fleet.metadata.generation,
        endpoint=f"{_scheme(fleet)}://{name}-router.{namespace}.svc:8080",
        authentication="open" if fleet.spec.tenants is None else "keys",
        tiers=tiers,
        cost_per_hour=_cost(fleet, tiers, observed),
        adapters=adapters,
        conditions=conditions,
        resolved=observed.resolved if observed.resolved is not None else fleet.resolved(),
    )


def _workers(view: TierView, role: Role) -> list[Replica]:
    """Those that have all of their pods and keep them."""
    return [
        worker for worker in view.workers if worker.role == role and not worker.terminating and len(worker.pods) == worker.size
    ]


def _tier_status(view: TierView, observed: Observed, present: FleetStatus, now: float) -> TierStatus:
    name = view.tier.name
    telemetry = observed.telemetry.get(name)
    sizes: dict[Role, int] = {"prefill": view.decision.prefill, "decode": view.decision.decode}

    def role(which: Role, serving: int, flipping: int) -> RoleStatus:
        ready = sum(worker.ready for worker in _workers(view, which))
        return RoleStatus(desired=sizes[which], ready=ready, serving=serving, flipping=flipping)

    (prefill, decode) = (role(*args) for args in zip(ROLES, view.plan.serving, view.plan.flipping, strict=True))
    proof = telemetry.kv if telemetry is not None else None
    kv = None
    if not observed.telemetry_read:
        kv = next((tier.kv for tier in present.tiers if tier.name == name), None)
    if proof is not None and telemetry is not None:
        kv = KvStatus(
            transfers=proof.transfers, blocks=proof.blocks, bytes=proof.bytes, failed=proof.failed, transport=telemetry.transport
        )
    ratio = format_ratio(prefill.serving, decode.serving)
    revision, rollout, price = view.plan.revision, view.plan.rollout, view.tier.cost
    costs = None if price is None else cost_now(price.per_gpu_hour, view.workers, observed)
    cost = None if costs is None else float(costs)
    return TierStatus(
        name=name, prefill=prefill, decode=decode, ratio=ratio, cost_per_hour=cost, revision=revision, rollout=rollout,
        flip=view.plan.flip, kv=kv, zero=view.zero, healing=view.healing.status,
        starting_since=None if view.zero is not None or all(view.plan.serving) else starting_since(name, revision, present, now),
    )  # fmt: skip


def _cost(fleet: InferenceFleet, tiers: Sequence[TierStatus], observed: Observed) -> float | None:
    """Of all tiers, and of those that left the spec; None: some worker holds devices of which nobody says what they cost."""
    known = {tier.name: exact(tier.cost_per_hour) for tier in tiers if tier.cost_per_hour is not None}
    if not known:  # most fleets: nothing is looked at for them
        return None
    others = {pod.tier for pod in observed.pods if pod.node is not None} - known.keys()
    workers = {name: workers_of(observed, name) for name in others}
    mine = [worker for tier in tiers for worker in workers.pop(tier.name, [])]
    left = cost_left([worker for found in workers.values() for worker in found], observed)
    if left is None or any(may_hold(worker, observed) for worker in mine):
        return None
    return float(sum(known.values()) + left)


def _rolling(fleet: InferenceFleet, views: Sequence[TierView], observed: Observed, now: float) -> Verdict:
    """Stuck and rolled back before rolling, rolling before done."""
    halted = [view for view in views if view.plan.stuck]
    stuck = [f"tier {view.tier.name}: {view.plan.stuck}" for view in halted]
    if stuck:
        return "False", "Stuck", f"{'; '.join(stuck)}; give it room, raise that limit, or go back: {_undo(fleet, halted)}"
    late = [view for view in views if view.plan.rolling and overdue(fleet.spec.rollout, view.plan.rollout, now)]
    if late:
        deadline = fleet.spec.rollout.progress_deadline
        words = [
            f"tier {v.tier.name} did not move for {deadline}: {_moving(v.plan.rollout)}{_not_coming(v, observed, now)}"
            for v in late
        ]
        return "False", "ProgressDeadlineExceeded", f"{'; '.join(words)}; mend the spec, or go back: {_undo(fleet, late)}"
    if failed := [view for view in views if view.plan.rollout.failed]:
        return "False", "RolledBack", _rolled_back(fleet, failed, observed)
    rolling = [f"tier {view.tier.name}: {_moving(view.plan.rollout)}" for view in views if view.plan.rolling]
    rolling += _not_served(views) + _not_begun(fleet, views, observed) + _left({view.tier.name for view in views}, observed)
    if rolling and fleet.spec.rollout.paused:
        return "True", "Paused", "; ".join(rolling)
    return (
        ("True", "Progressing", "; ".join(rolling)) if rolling else ("False", "Complete", "every worker has the wanted revision")
    )


def _rolled_back(fleet: InferenceFleet, views: Sequence[TierView], observed: Observed) -> str:
    """Why, and what can be done now: another revision that waits is already asked for."""
    words = [f"tier {view.tier.name}: {view.plan.rollout.message}" for view in views]
    others = [view for view in views if observed.templates[view.tier.name].revision != view.plan.rollout.failed]
    told = ["the old revision serves", *_not_begun(fleet, others, observed)]
    if len(others) < len(views):
        again = f"fleet rollout restart {fleet.metadata.name} -n {fleet.metadata.namespace}"
        told.append(f"mend the spec to try another one, or have this one tried again: {again}")
    return "; ".join([*words, *told])


def _undo(fleet: InferenceFleet, views: Sequence[TierView]) -> str:
    """The command that takes the first of these tiers back."""
    tier = f" --tier {views[0].tier.name}" if len(fleet.spec.tiers) > 1 else ""
    return f"fleet rollout undo {fleet.metadata.name} -n {fleet.metadata.namespace}{tier}"


def _not_coming(view: TierView, observed: Observed, now: float) -> str:
    """Why workers of the new revision are not ready: while the old ones serve no other condition says so. Those that crash were
    told of."""
    if view.plan.rollout.message:
        return ""
    mine = [pod for pod in observed.pods if (pod.tier, pod.revision) == (view.tier.name, view.plan.revision)]
    causes = unready([pod for pod in mine if not pod.ready and not pod.terminating], now)
    return f"; {causes}" if causes else ""


def _not_served(views: Sequence[TierView]) -> list[str]:
    """Tiers whose old workers are lost, all of them, before the new revision ever served, in words; none at zero."""
    mine = [view for view in views if not view.plan.rolling and any((view.decision.prefill, view.decision.decode))]
    lost = [view for view in mine if view.plan.rollout.stable not in ("", view.plan.revision)]
    return [f"tier {view.tier.name}: revision {view.plan.revision} has not served yet" for view in lost]


def _not_begun(fleet: InferenceFleet, views: Sequence[TierView], observed: Observed) -> list[str]:
    """Tiers that go to the revision that they have, though the spec asks for another one, in words."""
    why = "rollout.paused is false" if fleet.spec.rollout.paused else "nodes have its model"
    wanted = [(view.tier.name, observed.templates[view.tier.name].revision, view.plan.revision) for view in views]
    return [f"tier {name}: revision {revision} waits until {why}" for name, revision, goal in wanted if revision != goal]


def _left(names: set[str], observed: Observed) -> list[str]:
    """Tiers that are not in the spec any more and still have workers, in words."""
    counts = Counter([pod.tier for pod in observed.pods if pod.tier not in names and not pod.terminating and pod.member == 0])
    words = "left the spec; its workers go when the tiers of the spec serve in their place, or need their room"
    return [f"tier {name}: {words}: {count} left" for name, count in sorted(counts.items())]


def _moving(rollout: RolloutStatus) -> str:
    return "; ".join(word for word in (rollout.progress, rollout.message) if word)


def _provisioned(fleet: InferenceFleet, views: Sequence[TierView], observed: Observed, now: float) -> Verdict:
    if problems := _unsolved(fleet, views, observed.problems):
        reason = NAME_CONFLICT if any(problem.reason == NAME_CONFLICT for problem in problems) else "ApplyFailed"
        return "False", reason, "; ".join(map(str, problems[:MAX_CAUSES]))
    short = [
        f"{view.tier.name}/{role}"
        for view in views
        for role, size in zip(ROLES, (view.decision.prefill, view.decision.decode), strict=True)
        if len(_workers(view, role)) < min(size, _planned(view, role))
    ]
    if short or observed.router is None:
        return "False", "Creating", f"pods are being created: {', '.join(short or ['router'])}{stuck(observed.pods, now)}"
    return "True", "AllCreated", f"every object exists{stuck(observed.pods, now)}"


def _unsolved(fleet: InferenceFleet, views: Sequence[TierView], problems: Sequence[Problem]) -> Sequence[Problem]:
    """Without workers that a quota refused and that are backed out of: CapacityLimited tells of those."""
    words = [problem.message for problem in problems]
    refused = {one for view in views for one in refusals(fleet.metadata.name, view.tier.name, words)}
    if not refused:
        return problems
    asked = tuple(f"Pod {pod.name}: " for view in views for pod in view.plan.create)
    return [problem for problem in problems if problem.message not in refused or problem.message.startswith(asked)]


def _planned(view: TierView, role: Role) -> int:
    """Workers that there may be now: in the middle of a rollout, held there or not, fewer than the tier's size; so while one over
    several nodes that gave them back is not tried again."""
    pools = [pool for pool in view.plan.pools if pool.role == role]
    return sum(pool.replicas if pool.most is None else min(pool.replicas, pool.most) for pool in pools)


def _available(fleet: InferenceFleet, tiers: Sequence[TierStatus], observed: Observed, now: float) -> Verdict:
    unserved = [tier for tier in tiers if not _rests(tier) and (tier.prefill.serving < 1 or tier.decode.serving < 1)]
    if verdicts := [_unserved(fleet, tier, observed, now) for tier in unserved]:  # one that begins hides none that is lost
        return next((verdict for verdict in verdicts if verdict[1] not in BEGINNING), verdicts[0])
    if observed.router is None or observed.router.ready < 1:
        reason = "RouterStarting" if router_begins(observed.router, observed.pods, now) else "NoRouter"
        return "False", reason, f"no router pod is ready{router_words(observed.router)}"
    url, rests = f"{_scheme(fleet)}://{fleet.metadata.name}-router", all(_rests(tier) for tier in tiers)
    words = f"no workers; the first request to {url} is held and wakes them" if rests else f"{url} answers"
    if failing := routers_failing(observed.router, fleet.spec.rollout.progress_deadline_s, now):
        return "True", ROUTERS_FAILING, f"{words}; {failing}"
    return "True", AT_ZERO if rests else "Serving", words


def _unserved(fleet: InferenceFleet, tier: TierStatus, observed: Observed, now: float) -> Verdict:
    """A tier that misses a role: who is not ready, and why."""
    mine = [pod for pod in observed.pods if pod.tier == tier.name and not pod.terminating]
    workers, pods = workers_of(observed, tier.name), [pod for pod in mine if not pod.ready]
    there = {worker.role for worker in workers if worker.ready}
    waits = {pod.uid for worker in workers if worker.size > 1 and worker.unschedulable for pod in worker.pods}  # for the others
    own = [pod for pod in pods if pod.uid not in waits]
    given_back = _given_back(observed, tier.name)
    lacks = any(pod.unschedulable for pod in pods) or bool(given_back) or _lacks_still(fleet, workers)
    causes = unready(pods, now) or given_back
    since, deadline_s = (tier.starting_since if tier.zero is None else tier.zero.since), fleet.spec.rollout.progress_deadline_s
    reason = "WorkersLost" if since is None else STARTING if tier.zero is None else WAKING
    if any(pod.restarts >= FAILING_RESTARTS or pod.blocked for pod in pods):
        reason = "WorkersFailing"
    elif any(pod.silent and pod.role not in there for pod in pods):
        reason = "WorkersSilent"
    elif unready_too_long(own, deadline_s, now) or (not lacks and come_too_late(pods, since, deadline_s, now)):
        reason = "WorkersLate"
    elif (tier.zero is None or exceeds(since, deadline_s, now)) and lacks:
        reason = "WorkersPending"
    counts = f"{tier.prefill.serving} prefill and {tier.decode.serving} decode workers are serving"
    return "False", reason, f"tier {tier.name}: {counts}{': ' + causes if causes else ''}"


def _given_back(observed: Observed, tier: str) -> str:
    """Which workers over several nodes gave back what they had, and are tried again now at the earliest, in words."""
    holds = observed.memory.get(tier, ScaleMemory()).gangs.holds
    return "; ".join(hold.words for hold in holds if QUOTA_WORDS not in hold.words)


def _lacks_still(fleet: InferenceFleet, workers: Sequence[Replica]) -> bool:
    """Nodes were lacking, and a worker over several is tried once more: what its scheduler will say comes in a moment."""
    known = fleet.status.condition("Available")
    tried = any([worker.size > 1 and worker.alive and worker.placed < worker.size for worker in workers])
    return tried and known is not None and known.reason == "WorkersPending"


def _scheme(fleet: InferenceFleet) -> str:
    return "http" if fleet.spec.routing.tls is None else "https"


def _rests(tier: TierStatus) -> bool:
    return tier.zero is not None and tier.zero.state == "AtZero"


def _within_ratio(views: Sequence[TierView], tiers: Sequence[TierStatus]) -> Verdict:
    excused, astray, suspected, failing = (_of_each(views, said) for said in (_excused, _astray, _suspected, _failing))
    apart = "; ".join(words for words in (excused, astray, suspected, failing) if words)
    beside = f"; {apart}" if apart else ""
    for view, status in zip(views, tiers, strict=True):
        prefill, decode, ratio = status.prefill.serving, status.decode.serving, view.tier.ratio
        if prefill + decode == 0 and _rests(status):
            continue
        if prefill + decode == 0:
            return "Unknown", "NoServingSet", f"tier {view.tier.name} has no serving worker yet{beside}"
        if not within(prefill, decode, ratio.min_ratio, ratio.max_ratio):
            return (
                "False",
                "OutOfRatio",
                f"tier {view.tier.name} serves {prefill}:{decode}, allowed is {ratio.min} to {ratio.max}{beside}",
            )
    if apart:
        devices = "DevicesSuspected" if suspected else "DevicesFailing"
        return "True", "AgentsSuspected" if excused else "RoleMismatch" if astray else devices, apart
    both = [(view.tier, view.decision.disputed) for view in views if view.decision.disputed is not None]
    disputes = [f"tier {tier.name}: {dispute_words(said, project(*said, bounds_of(tier)))}" for tier, said in both]
    if disputes:
        return "True", "WishesDisagree", "; ".join(disputes)
    return "True", "InRatio", "every tier serves inside its ratio"


def _of_each(views: Sequence[TierView], said: Callable[[TierView], str]) -> str:
    """What is said of each tier, of those of which anything is."""
    return "; ".join(words for view in views if (words := said(view)))


def _astray(view: TierView) -> str:
    """Workers that say another role than their label and do not serve, in words; empty when there are none."""
    pods = [worker.leader for worker in view.workers if worker.leader.astray and worker.alive]
    return f"tier {view.tier.name}: out of service: {grouped(pods, lambda pod: pod.astray)}" if pods else ""


def _excused(view: TierView) -> str:
    """Workers that say so, too many at once, in words; empty when there are none."""
    pods = [worker.leader for worker in view.workers if worker.leader.excused and worker.alive]
    what = "it must be what they have in common, their image or their agent: they serve on, none is told its role or replaced, "
    what += "and no rollout to their revision goes on"
    return f"tier {view.tier.name}: {grouped(pods, lambda pod: pod.excused)}; {what}" if pods else ""


def _suspected(view: TierView) -> str:
    """Workers on nodes that a condition calls bad which is not believed, in words; empty when there are none."""
    workers = [worker for worker in view.workers if worker.suspected and worker.alive]
    pods = [next(pod for pod in worker.pods if pod.suspected) for worker in workers]
    what = "rather who sets that is at fault than so many devices: they serve on, and none is replaced for it; mend or stop that "
    what += "detector, and cordon a node whose devices do fail"
    return f"tier {view.tier.name}: {grouped(pods, lambda pod: pod.suspected)}; {what}" if pods else ""


def _failing(view: TierView) -> str:
    """Ready workers that are passed over because their devices fail, in words; empty when there are none. Until others are ready
    in their place nothing else tells that they do not serve."""
    held = {target.uid for target in view.plan.targets if target.state == "held"} if any([w.sick for w in view.workers]) else ()
    passed = [worker for worker in view.workers if worker.sick and worker.leader.uid in held]
    if not passed:
        return ""
    roles = [worker.role for worker in passed]
    counts = " and ".join(f"{roles.count(role)} {role}" for role in ROLES if role in roles)
    pods = [next(pod for pod in worker.pods if pod.sick) for worker in passed]
    what = "ready and get no new requests because their devices fail, until they are replaced"
    return f"tier {view.tier.name}: {counts} workers are {what}: {grouped(pods, lambda pod: pod.sick)}"


def _telemetry(fleet: InferenceFleet, observed: Observed, now: float) -> Verdict:
    """Whether load is known; whatever decides the sizes at this moment."""
    interval_s = fleet.spec.telemetry.interval_s
    reasons = {tier.name: unusable(observed.telemetry.get(tier.name), interval_s, now) for tier in fleet.spec.tiers}
    unknown = [f"tier {name}: {why}" for name, why in reasons.items() if why]
    if unknown:
        failed = any(known.problem for known in observed.telemetry.values())
        return "Unknown", "SourceFailed" if failed else "NoData", "load is unknown, sizes are held; " + "; ".join(unknown)
    return "True", "Fresh", "load and latency are known"


def _capacity(fleet: InferenceFleet, views: Sequence[TierView], observed: Observed, now: float) -> Verdict:
    causes = [(view.tier.name, words) for view in views for words in (view.decision.limited, view.plan.limited) if words]
    limited = [f"tier {tier}: {words}" for tier, words in causes]
    if limited:
        return "True", "BackedOut", "; ".join(limited)
    refused = [problem.message for problem in observed.problems if QUOTA_WORDS in problem.message]
    if refused:
        return "True", "QuotaExceeded", f"{refused[0]}{_replaced(observed)}"
    stuck = [pod for pod in observed.pods if pod.unschedulable]
    if stuck:
        return "True", "Unschedulable", f"{_pods(stuck)} cannot be scheduled: {_missing(views, stuck)}{_replaced(observed)}"
    queued = [words for view in views if (words := _queued(view, observed))]
    if queued:
        return "True", "Queued", "; ".join(queued)
    if waiting := unseen(observed.pods, now):
        return "True", "NoScheduler", f"{_pods(waiting)} got no node, and no scheduler says why: {grouped(waiting, _look)}"
    if (coming := _coming(views, observed)) and (known := fleet.status.condition("CapacityLimited")) and known.status == "True":
        return "True", "TriedAgain", f"there was no room, and it is tried again: pods without a node yet: {coming}"
    if over := beyond(purse_of(fleet), [(view.tier, _devices(view, observed)) for view in views]):
        return "False", "BeyondBudget", over
    return "False", "Sufficient", "every pod found a node"


def _replaced(observed: Observed) -> str:
    """Those in whose place others are made, behind a semicolon: why a fleet that nobody changed needs room. Empty without any."""
    going = grouped([pod for pod in observed.pods if pod.leaving and not pod.terminating], lambda pod: pod.leaving)
    return f"; to be replaced: {going}" if going else ""


def _coming(views: Sequence[TierView], observed: Observed) -> int:
    """Pods that are made now, or that nobody has found a node for yet."""
    return sum(len(view.plan.create) for view in views) + sum(pod.node is None and not pod.terminating for pod in observed.pods)


def _pods(found: Sequence[ObservedPod]) -> str:
    return f"{len(found)} pod{'' if len(found) == 1 else 's'}"


def _look(_: ObservedPod) -> str:
    return LOOK_AT_IT


def _devices(view: TierView, observed: Observed) -> int:
    """That the tier's workers are to have."""
    return devices((view.decision.prefill, view.decision.decode), observed.templates[view.tier.name].gpus)


def _missing(views: Sequence[TierView], stuck: Sequence[ObservedPod]) -> str:
    """Workers that lack nodes, and every reason once with who gives it: of a group that is refused as one, most pods only say
    that."""
    workers = [worker for view in views for worker in view.workers if worker.size > 1 and worker.alive and worker.unschedulable]
    groups = [f"{worker.leader.name} has {worker.placed} of its {worker.size} nodes" for worker in workers]
    return "; ".join([*groups[:MAX_CAUSES], grouped(stuck, lambda pod: pod.message or "no node yet")])


def _queued(view: TierView, observed: Observed) -> str:
    """Workers of a tier that nobody let in yet, in words; empty when there are none."""
    name, placement = view.tier.name, view.tier.placement
    waiting = [pod.name for pod in observed.pods if pod.tier == name and pod.gated and pod.member == 0]
    where = f"in queue {placement.queue}" if placement is not None and placement.queue else "behind scheduling gates"
    return f"tier {name}: {len(waiting)} workers wait {where}: {', '.join(waiting[:MAX_CAUSES])}" if waiting else ""


def _accepted(fleet: InferenceFleet) -> str:
    """Who deletes a fleet that no operator watches any more finds here what keeps it: nobody is left to tell."""
    words = "the spec makes sense"
    if fleet.spec.deletion is None:
        return words
    return f"{words}; deleted, it is kept by finalizer {DRAIN} until its operator takes that off, or without one kubectl edit"


def _ready(verdicts: dict[ConditionType, Verdict]) -> Verdict:
    """A fleet that serves stays ready while it grows: pods in creation only count as long as nothing answers."""
    accepted, provisioned, available = (verdicts[kind] for kind in ("Accepted", "Provisioned", "Available"))
    if accepted[0] != "True":
        return "False", "NotAccepted", accepted[2]
    if provisioned[1] in ("ApplyFailed", NAME_CONFLICT):
        return "False", "NotProvisioned", provisioned[2]
    if available[0] != "True":
        return available
    if available[1] in (AT_ZERO, ROUTERS_FAILING):
        return available
    return "True", "AllGood", "the fleet serves"
