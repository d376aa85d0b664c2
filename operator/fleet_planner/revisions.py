"""One tier's plan: which revisions exist with which sizes, which pods come and go, which workers serve."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import FlipStatus, RolloutStatus, TierStatus
from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.astray import doubtful, told_again
from fleet_planner.canary import Course, Scene, plot_course
from fleet_planner.capacity import QUOTA_WORDS
from fleet_planner.causes import unready
from fleet_planner.crashes import crashing
from fleet_planner.draft import draft_pods, scarce_first
from fleet_planner.flip import (
    Draft,
    Settled,
    Terms,
    anew_most_s,
    cold_start_s,
    failures,
    flip_s,
    known_as,
    pauses,
    remember,
    settle,
    shown_s,
)
from fleet_planner.gang import GivenBack, give_back
from fleet_planner.healing import gone_first, is_healing
from fleet_planner.memory import GangMemory, ScaleMemory
from fleet_planner.ratio import Pair
from fleet_planner.replicas import ENDED, Replica, replicas_of
from fleet_planner.roles import ROLES, Role
from fleet_planner.rollout import STUCK, Group, Limits, Step, hold_step, larger, plan_step, stays_stuck, why_stuck
from fleet_planner.serving import choose_serving, could_serve, still_needed
from fleet_planner.types import Observed, ObservedPod, ObservedPool, Problem, Template, TierTelemetry
from fleet_planner.wanted import FlipWanted, PodGone, PodWanted, PoolWanted, Relabel, Split, Target, TargetState

ABSENT_S = 120.0
"""A decode worker that is not ready is told as absent for so long: twice as long as any router lets a request wait for it."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What should be of one tier."""

    pools: tuple[PoolWanted, ...]
    create: tuple[PodWanted, ...]
    delete: tuple[PodGone, ...]
    flips: tuple[FlipWanted, ...]
    relabels: tuple[Relabel, ...]
    targets: tuple[Target, ...]
    split: Split | None
    revision: str
    """The revision that the tier goes to."""
    revisions: frozenset[str]
    """Revisions whose templates are needed: the wanted one, the one to return to, every one that has pods."""
    rollout: RolloutStatus
    rolling: bool
    stuck: str
    halted: bool
    """The rollout waits for what no node brings: another limit, or requests for its canary."""
    rolled_back: str
    serving: Pair
    flipping: Pair
    """Workers on their way into each role."""
    flip: FlipStatus | None
    gangs: GangMemory
    limited: str
    """Which worker over several nodes waits for nodes, in words."""


def plan_tier(
    fleet: InferenceFleet, tier: TierSpec, want: Pair, observed: Observed, workers: Sequence[Replica], now: float
) -> TierPlan:
    """The plan of `tier` with `want` workers of each role. `workers`: all that it has (`gang.workers_of`)."""
    templates = {**observed.stored.get(tier.name, {}), observed.templates[tier.name].revision: observed.templates[tier.name]}
    telemetry, mine = observed.telemetry.get(tier.name, TierTelemetry()), [pod for pod in observed.pods if pod.tier == tier.name]
    anew = any(templates[pod.revision].starts_anew for pod in mine if pod.flipping is not None and pod.revision in templates)
    settled = settle(mine, observed.flips, now, anew_most_s(telemetry, shown_s(mine)) if anew else 0.0)
    doubted = not observed.telemetry_read or not doubtful(observed).isdisjoint(pod.uid for pod in mine)
    before = failures(fleet, tier.name, observed)
    settled = told_again(settled, remember(before, settled.failure, now, settled.failed_role), now)
    remembered = remember(before, settled.failure, now, settled.failed_role, doubted=doubted)
    pods = settled.pods
    revisions = {*templates, *[pod.revision for pod in pods]}
    if settled.gone or any(
        [worker.leader.flipping is not None for worker in workers]
    ):  # what became of those on their way decides
        replicas = {revision: _replicas(pods, revision, templates) for revision in revisions}
    else:
        replicas = {name: [worker for worker in workers if worker.leader.revision == name] for name in revisions}
    limits = _limits(fleet, tier, templates[observed.templates[tier.name].revision])
    able = could_serve([replica for found in replicas.values() for replica in found], limits.low, limits.high)
    late = now - fleet.spec.scaling.capacity_wait_s
    groups = {name: group_of(name, found, able, late) for name, found in replicas.items() if found or name in templates}
    refused = _refused(fleet, tier, groups, observed.problems)
    groups |= {name: replace(groups[name], refused=True) for name in refused}
    wanted = observed.templates[tier.name].revision
    pools = {(pool.revision, pool.role): pool for pool in observed.pools if pool.tier == tier.name}
    planned = _planned(pools)
    had = frozenset(revision for revision, size in planned.items() if any(size))
    unready_words = _unready(replicas, now)
    scene = Scene(
        wanted, groups, telemetry.revisions, want, limits, now, crashing(replicas, now), unready_words, had, observed.awaited
    )
    course = plot_course(fleet.spec.rollout, _before(fleet, tier).rollout, scene)
    back = course.target == course.status.stable == wanted  # the spec asks for what served before
    step = _step(fleet, course, groups, want, limits, replicas, pools, planned, now, back=back)
    template = templates.get(course.target)
    rests = template is None or not template.flippable or step.rolling or pauses(remembered, now)
    free = None if rests else template
    terms = _terms(fleet, tier, limits, telemetry, pods, free) if free is not None else None
    changing = Changing(settled, remembered, terms)
    memory = observed.memory.get(tier.name, ScaleMemory()).gangs
    cut_short = _cut_short(fleet, tier, groups, observed.problems)
    given = give_back(replicas, memory, fleet.spec.scaling.capacity_wait_s, now, cut_short)
    if is_healing(fleet):
        first = gone_first(fleet, [one for found in replicas.values() for one in found], groups, limits, now)
        given = replace(given, gone=(*given.gone, *first))
    return _carried_out(fleet, tier, course, step, replicas, scene, templates, changing, given)


def group_of(revision: str, replicas: Sequence[Replica], able: Collection[str], late: float) -> Group:
    """The counts of one revision. `able`: uids of leaders that could serve; `late`: who was not ready since then is given up."""
    alive = [replica for replica in replicas if replica.alive]
    staying = [replica for replica in alive if not replica.leaving]
    ready = [replica for replica in alive if replica.leader.uid in able]
    return Group(
        revision,
        alive=_counts(staying),
        ready=_counts(ready),
        unschedulable=any([replica.unschedulable for replica in staying]),
        leaving=_counts([replica for replica in ready if replica.leaving]),
        terminating=any([not replica.alive for replica in replicas]),
        queued=any([replica.queued_since <= late for replica in staying]),
        starting=any([not replica.ready and replica.placed == replica.size for replica in alive]),
        hopeless=_is_hopeless(alive, late),
    )


def _is_hopeless(alive: Sequence[Replica], late: float) -> bool:
    """Nothing serves, and of one role no worker was ready since: the others have no partner."""
    if any([replica.serving for replica in alive]):
        return False
    since = [[replica.unready_since for replica in alive if replica.role == role] for role in ROLES]
    return any(found and max(found) <= late for found in since)


def _refused(fleet: InferenceFleet, tier: TierSpec, revisions: Collection[str], problems: Sequence[Problem]) -> set[str]:
    """Revisions of which a quota refused a pod: the message has its name."""
    words = [problem.message for problem in problems if QUOTA_WORDS in problem.message]
    if not words:
        return set()
    pools = {revision: [pool_name(fleet, tier.name, role, revision) for role in ROLES] for revision in revisions}
    return {name for name, found in pools.items() if any(f"{pool}-" in message for pool in found for message in words)}


def _cut_short(
    fleet: InferenceFleet, tier: TierSpec, revisions: Collection[str], problems: Sequence[Problem]
) -> dict[tuple[str, Role], str]:
    """By revision and role: what a quota said when it refused a pod that follows a leader."""
    words = [problem.message for problem in problems if QUOTA_WORDS in problem.message]
    found: dict[tuple[str, Role], str] = {}
    for revision, role in product(revisions if words else (), ROLES):
        follower = re.compile(rf"Pod {re.escape(pool_name(fleet, tier.name, role, revision))}-[0-9]+-[0-9]+: ")
        if mine := [message for message in words if follower.match(message)]:
            found[revision, role] = mine[0]
    return found


def _replicas(pods: Sequence[ObservedPod], revision: str, templates: Mapping[str, Template]) -> list[Replica]:
    nodes = templates[revision].nodes if revision in templates else (1, 1)
    return replicas_of([pod for pod in pods if pod.revision == revision], nodes)


def _limits(fleet: InferenceFleet, tier: TierSpec, template: Template) -> Limits:
    spec = fleet.spec.rollout
    gpus = max(1, template.gpus[0]), max(1, template.gpus[1])
    return Limits(tier.ratio.min_ratio, tier.ratio.max_ratio, gpus, spec.max_surge_gpus, spec.max_unavailable)


def _before(fleet: InferenceFleet, tier: TierSpec) -> TierStatus:
    return next((status for status in fleet.status.tiers if status.name == tier.name), None) or TierStatus(name=tier.name)


@dataclass(frozen=True, slots=True)
class Changing:
    """Workers that change their role."""

    settled: Settled
    remembered: FlipStatus | None
    terms: Terms | None
    """None: no further one may."""


def _terms(
    fleet: InferenceFleet,
    tier: TierSpec,
    limits: Limits,
    telemetry: TierTelemetry,
    pods: Sequence[ObservedPod],
    template: Template,
) -> Terms:
    spec = fleet.spec
    lease_s = 0.0 if spec.engine.type == "torch" else tier.kv_transfer.lease_duration_s  # torch counts its leases

    def warm_s(replica: Replica) -> float:
        return flip_s(replica, telemetry, spec.limits.max_output_tokens, lease_s, starts_anew=template.starts_anew)

    return Terms(limits.low, limits.high, cold_start_s(pods), warm_s)


def _step(
    fleet: InferenceFleet,
    course: Course,
    groups: Mapping[str, Group],
    want: Pair,
    limits: Limits,
    replicas: Mapping[str, Sequence[Replica]],
    pools: Mapping[tuple[str, Role], ObservedPool],
    planned: Mapping[str, Pair],
    now: float,
    *,
    back: bool,
) -> Step:
    """A pause holds a rollout, but not the way back from a bad revision, nor (`back`) to the old one because the spec asks for it
    again. So it is held when its own workers are excused (`astray.py`): nobody knows what they do, and those that it would take
    the place of are well."""
    new = groups.get(course.target, Group(course.target))
    olds = [group for revision, group in groups.items() if revision != course.target]
    compat = _compats(replicas.get(course.target, ())) if olds else set[str]()
    olds = [replace(old, mates=_compats(replicas.get(old.revision, ())) == compat) for old in olds]
    if course.canary is not None:
        olds = [replace(old, returns=True) if old.revision == course.status.stable else old for old in olds]
    suspected = any([replica.leader.excused for replica in replicas.get(course.target, ())])
    paused = fleet.spec.rollout.paused
    there = any(any(old.alive) or (paused and any(planned.get(old.revision, (0, 0)))) for old in olds)
    if ((paused and not back) or suspected) and not course.status.failed and there:
        sizes = zip(ROLES, want, strict=True)
        resized = any(pool.size not in (None, whole) for role, whole in sizes for pool in _of(pools, role))
        return hold_step(want, new, olds, planned, limits, resized=resized)
    step = plan_step(want, new, olds, limits, leaving_gpus=_leaving(replicas, limits, now), canary=course.canary)
    known = fleet.status.condition("RollingOut")
    was_stuck = known is not None and known.reason == STUCK
    return replace(step, stuck=True) if was_stuck and stays_stuck(want, new, olds, step, limits, course.canary) else step


def _compats(replicas: Sequence[Replica]) -> set[str]:
    """What they hand KV to."""
    return {pod.compat for replica in replicas for pod in replica.pods}


def _of(pools: Mapping[tuple[str, Role], ObservedPool], role: Role) -> list[ObservedPool]:
    return [pool for (_, its), pool in pools.items() if its == role]


def _planned(pools: Mapping[tuple[str, Role], ObservedPool]) -> dict[str, Pair]:
    """Sizes that were planned last, by revision; one whose pools do not say both is absent."""
    found: dict[str, Pair] = {}
    for revision in {revision for revision, _ in pools}:
        prefill, decode = (pools[revision, role].planned if (revision, role) in pools else 0 for role in ROLES)
        if prefill is not None and decode is not None:
            found[revision] = prefill, decode
    return found


def _unready(replicas: Mapping[str, Sequence[Replica]], now: float) -> dict[str, str]:
    """By revision: why workers are not ready, while there are several revisions."""
    if len(replicas) < 2:
        return {}
    pods = {name: [pod for worker in found if worker.alive for pod in worker.pods] for name, found in replicas.items()}
    return {name: unready([pod for pod in found if not pod.ready], now) for name, found in pods.items()}


def _leaving(replicas: Mapping[str, Sequence[Replica]], limits: Limits, now: float) -> int:
    """Devices of workers that go: they terminate, or are to because they can never be whole again, and not all of their pods have
    ended. Those of a node that goes away are nobody's to count, nor those that should have been free for long."""
    everything = [r for found in replicas.values() for r in found if not r.alive and not r.leaving and not r.is_stuck(now)]
    going = [r for r in everything if any(pod.phase not in ENDED for pod in r.pods)]
    return sum(limits.gpus[0] if replica.role == "prefill" else limits.gpus[1] for replica in going)


def _carried_out(
    fleet: InferenceFleet,
    tier: TierSpec,
    course: Course,
    step: Step,
    replicas: Mapping[str, Sequence[Replica]],
    scene: Scene,
    templates: Mapping[str, Template],
    changing: Changing,
    given: GivenBack,
) -> TierPlan:
    pools = _pools(fleet, tier, course.target, step, replicas, scene.want, templates)
    if given.most:
        pools = [replace(pool, most=given.most.get((pool.revision, pool.role))) for pool in pools]
    drafted = draft_pods(pools, replicas, templates.keys(), course.target, changing.terms, scene.now)
    settled = changing.settled
    everything = [replica for found in drafted.replicas.values() for replica in found]
    floor = scene.want[0] - scene.limits.unavailable, scene.want[1] - scene.limits.unavailable
    late = scene.now - fleet.spec.scaling.capacity_wait_s
    spared = scene.want if _comes(drafted.draft, everything, scene.groups, late) else larger(floor, (1, 1))
    needed = still_needed(everything, {pod.uid for pod in drafted.draft.delete}, spared, floor, scene.limits.ratio)
    drafted_gone = [pod for pod in drafted.draft.delete if pod.uid not in needed]
    drafted_uids = {pod.uid for pod in drafted_gone}
    delete = (*settled.gone, *drafted_gone, *(pod for pod in given.gone if pod.uid not in drafted_uids))
    gone_uids = {pod.uid for pod in delete}
    staying = [replica for replica in everything if not _goes(replica, gone_uids)]
    serving = choose_serving(staying, scene.limits.low, scene.limits.high)
    targets = tuple(target for replica in everything if (target := target_of(replica, serving, gone_uids, scene.now)) is not None)
    percent = course.status.percent
    new = scene.groups.get(course.target, Group(""))
    waits = step.rolling and not fleet.spec.rollout.paused and _is_tried_again(course.target, replicas, drafted.draft, given)
    lacks = _lacked(fleet, tier, course.target) if waits else ""
    stuck = why_stuck(scene.want, new, scene.limits) if step.stuck else lacks
    return TierPlan(
        pools=tuple(pools),
        create=tuple(scarce_first(drafted.draft.create, scene.groups, step.sizes, course.target)),
        delete=delete,
        flips=(*settled.given_back, *(one for one in settled.told if one.uid not in gone_uids), *drafted.flips),
        relabels=tuple(_relabel(fleet, pod, proof, scene.now) for pod, proof in settled.proven if pod.uid not in gone_uids),
        targets=targets,
        split=Split(tier.name, course.target, percent) if percent is not None and course.canary is not None else None,
        revision=course.target,
        revisions=frozenset({scene.wanted, course.target, course.status.stable, *(r.leader.revision for r in everything)} - {""}),
        rollout=course.status,
        rolling=step.rolling,
        stuck=stuck,
        halted=(step.stuck and not new.roomless) or _is_judged_only(fleet, course),
        rolled_back=course.rolled_back,
        serving=_counts([replica for replica in everything if replica.leader.uid in serving]),
        flipping=_counts([replica for replica in everything if replica.leader.flipping is not None and replica.alive]),
        flip=changing.remembered,
        gangs=given.memory,
        limited=given.limited,
    )


def _lacked(fleet: InferenceFleet, tier: TierSpec, target: str) -> str:
    """What the rollout to `target` was stuck for when the last pass said so, in words, where that was no limit of the spec."""
    if (before := _before(fleet, tier).rollout) is None or before.target != target:
        return ""
    known, begin = fleet.status.condition("RollingOut"), f"tier {tier.name}: "
    told = known.message.split("; ") if known is not None and known.reason == STUCK else []
    words = next((part.removeprefix(begin) for part in told if part.startswith(begin)), "")
    return "" if words.startswith("rollout.") else words


def _is_tried_again(target: str, replicas: Mapping[str, Sequence[Replica]], draft: Draft, given: GivenBack) -> bool:
    """A worker over several nodes gave its own back, or is tried once more and has not found all of them: that it waits meanwhile
    is no progress."""
    held = any(hold.revision == target for hold in given.memory.holds)
    made = any(pod.member > 0 and pod.revision == target for pod in draft.create)
    return held or made or any([one.size > 1 and one.alive and one.placed < one.size for one in replicas.get(target, ())])


def _is_judged_only(fleet: InferenceFleet, course: Course) -> bool:
    """All that its canary needs now is time and requests. What is tried meanwhile is over before its next step could be late."""
    in_time = fleet.spec.scaling.capacity_wait_s < fleet.spec.rollout.progress_deadline_s
    return course.canary is not None and course.status.step_since != "" and in_time


def _comes(draft: Draft, workers: Sequence[Replica], groups: Mapping[str, Group], late: float) -> bool:
    """Some worker is made, or has not been unready since `late`: it may take the place of one whose node goes away. Without any,
    who drains that node would wait for ever."""
    made = any(pod.revision not in groups or not groups[pod.revision].refused for pod in draft.create)
    return made or any([worker.alive and not worker.ready and worker.unready_since > late for worker in workers])


def _pools(
    fleet: InferenceFleet,
    tier: TierSpec,
    target: str,
    step: Step,
    replicas: Mapping[str, Sequence[Replica]],
    want: Pair,
    templates: Mapping[str, Template],
) -> list[PoolWanted]:
    """One pool per role and revision that has a size or still has pods; a tier at zero has those of the revision to wake with."""
    found = []
    for revision in sorted({*step.sizes, *(revision for revision, mine in replicas.items() if mine)}):
        sizes = step.sizes.get(revision, (0, 0))
        nodes = templates[revision].nodes if revision in templates else (1, 1)
        kept = not any(want) and revision == target
        for role, size, whole, count in zip(ROLES, sizes, want, nodes, strict=True):
            if size or kept or any(replica.role == role for replica in replicas.get(revision, [])):
                name = pool_name(fleet, tier.name, role, revision)
                found.append(PoolWanted(name, tier.name, role, revision, size, whole, count))
    return found


def pool_name(fleet: InferenceFleet, tier: str, role: Role, revision: str) -> str:
    """Name of a WorkerPool, and the beginning of the names of the pods that are made for it."""
    return f"{fleet.metadata.name}-{tier}-{role}-{revision}"


def _relabel(fleet: InferenceFleet, pod: ObservedPod, proof: str, now: float) -> Relabel:
    pool = pool_name(fleet, pod.tier, pod.role, pod.revision)
    took_s = max(0.0, now - pod.flip_since)
    return Relabel(pod.name, pod.uid, pool, pod.tier, pod.role, now, took_s, proof, again=bool(pod.astray))


def target_of(replica: Replica, serving: frozenset[str], gone: set[str], now: float) -> Target | None:
    """Ready workers serve or are held; one that goes is told as draining until it is gone, one that changes its role or is
    astray until it has it; a decode worker that routers know and that was ready just now as absent. Others are not told at all.
    Of several nodes only the leader is told."""
    pod = replica.leader
    if pod.member > 0:
        return None
    leaving = replica.terminating or pod.flipping is not None or bool(pod.astray) or _goes(replica, gone)
    absent = not (replica.ready or leaving)
    if not _may_be_back(replica, now) if absent else pod.ip is None:
        return None
    state: TargetState = "draining" if leaving else "absent" if absent else "serving" if pod.uid in serving else "held"
    return Target(pod.name, pod.uid, pod.ip or "", known_as(pod), pod.tier, pod.revision, pod.compat, state)


def _goes(replica: Replica, gone: Collection[str]) -> bool:
    """A pod of it is among these uids."""
    return bool(gone) and any([pod.uid in gone for pod in replica.pods])


def _may_be_back(replica: Replica, now: float) -> bool:
    """It is not ready; a router that has just started is to wait for it as one does that saw it serve."""
    pod = replica.leader
    return pod.told and pod.role == "decode" and replica.alive and now - replica.unready_since <= ABSENT_S


def _counts(replicas: Sequence[Replica]) -> Pair:
    roles = [replica.role for replica in replicas]
    return roles.count("prefill"), roles.count("decode")
