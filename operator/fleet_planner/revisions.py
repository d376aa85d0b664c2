"""One tier's plan: which revisions exist with which sizes, which pods come and go, which workers serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import RolloutStatus
from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.canary import Course, Scene, plot_course
from fleet_planner.ratio import Pair
from fleet_planner.replicas import Replica, plan_replicas, replicas_of
from fleet_planner.rollout import Canary, Group, Limits, Step, plan_step, why_stuck
from fleet_planner.serving import choose_serving
from fleet_planner.types import (
    ROLES,
    Observed,
    ObservedPod,
    PodGone,
    PodWanted,
    PoolWanted,
    Split,
    Target,
    TargetState,
    Template,
    TierTelemetry,
)


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What should be of one tier."""

    pools: tuple[PoolWanted, ...]
    create: tuple[PodWanted, ...]
    delete: tuple[PodGone, ...]
    targets: tuple[Target, ...]
    split: Split | None
    revision: str
    """The revision that the tier goes to."""
    revisions: frozenset[str]
    """Revisions whose templates are needed: the wanted one, the one to return to, every one that has pods."""
    rollout: RolloutStatus
    rolling: bool
    stuck: str
    rolled_back: str
    serving: Pair


def plan_tier(fleet: InferenceFleet, tier: TierSpec, want: Pair, observed: Observed, now: float) -> TierPlan:
    """The plan of `tier` with `want` workers of each role."""
    templates = {**observed.stored.get(tier.name, {}), observed.templates[tier.name].revision: observed.templates[tier.name]}
    pods = [pod for pod in observed.pods if pod.tier == tier.name]
    replicas = {revision: _replicas(pods, revision, templates) for revision in {*templates, *(pod.revision for pod in pods)}}
    groups = {revision: group_of(revision, found) for revision, found in replicas.items() if found or revision in templates}
    limits = _limits(fleet, tier, templates[observed.templates[tier.name].revision])
    loads = observed.telemetry.get(tier.name, TierTelemetry()).revisions
    scene = Scene(observed.templates[tier.name].revision, groups, loads, want, limits, now)
    course = plot_course(fleet.spec.rollout, _before(fleet, tier), scene)
    step = _step(fleet, course, groups, want, limits, replicas)
    return _carried_out(fleet, tier, course, step, replicas, scene, templates)


def group_of(revision: str, replicas: Sequence[Replica]) -> Group:
    """The counts of one revision."""

    def count(which: str, role: str) -> int:
        found = [replica for replica in replicas if replica.role == role and replica.alive]
        return sum(replica.ready if which == "ready" else not replica.leaving for replica in found)

    alive = count("alive", "prefill"), count("alive", "decode")
    ready = count("ready", "prefill"), count("ready", "decode")
    stuck = any(replica.unschedulable for replica in replicas if replica.alive and not replica.leaving)
    return Group(revision, alive, ready, stuck)


def _replicas(pods: Sequence[ObservedPod], revision: str, templates: Mapping[str, Template]) -> list[Replica]:
    nodes = templates[revision].nodes if revision in templates else (1, 1)
    return replicas_of([pod for pod in pods if pod.revision == revision], nodes)


def _limits(fleet: InferenceFleet, tier: TierSpec, template: Template) -> Limits:
    spec = fleet.spec.rollout
    gpus = max(1, template.gpus[0]), max(1, template.gpus[1])
    return Limits(tier.ratio.min_ratio, tier.ratio.max_ratio, gpus, spec.max_surge_gpus, spec.max_unavailable)


def _before(fleet: InferenceFleet, tier: TierSpec) -> RolloutStatus | None:
    return next((status.rollout for status in fleet.status.tiers if status.name == tier.name), None)


def _step(
    fleet: InferenceFleet,
    course: Course,
    groups: Mapping[str, Group],
    want: Pair,
    limits: Limits,
    replicas: Mapping[str, Sequence[Replica]],
) -> Step:
    new = groups.get(course.target, Group(course.target))
    olds = [group for revision, group in groups.items() if revision != course.target]
    canary = Canary(new.alive) if fleet.spec.rollout.paused and any(any(old.alive) for old in olds) else course.canary
    return plan_step(want, new, olds, limits, leaving_gpus=_leaving(replicas, limits), canary=canary)


def _leaving(replicas: Mapping[str, Sequence[Replica]], limits: Limits) -> int:
    """Devices of workers that terminate; those of a node that goes away are nobody's to count."""
    going = [r for found in replicas.values() for r in found if r.terminating and not r.leaving]
    return sum(limits.gpus[0] if replica.role == "prefill" else limits.gpus[1] for replica in going)


def _carried_out(
    fleet: InferenceFleet,
    tier: TierSpec,
    course: Course,
    step: Step,
    replicas: Mapping[str, Sequence[Replica]],
    scene: Scene,
    templates: Mapping[str, Template],
) -> TierPlan:
    pools = _pools(fleet, tier, step, replicas, scene.want, templates)
    create: list[PodWanted] = []
    delete: list[PodGone] = []
    for pool in pools:
        mine = [replica for replica in replicas.get(pool.revision, []) if replica.role == pool.role]
        new, gone = plan_replicas(pool, mine)
        create += new if pool.revision in templates else []  # else nothing is left to make such a pod from
        delete += gone
    gone_uids = {pod.uid for pod in delete}
    everything = [replica for found in replicas.values() for replica in found]
    staying = [replica for replica in everything if gone_uids.isdisjoint(pod.uid for pod in replica.pods)]
    serving = choose_serving(staying, scene.limits.low, scene.limits.high)
    targets = tuple(target for replica in everything if (target := _target(replica, serving, gone_uids)) is not None)
    percent = course.status.percent
    return TierPlan(
        pools=tuple(pools),
        create=tuple(_scarce_first(create, scene)),
        delete=tuple(delete),
        targets=targets,
        split=Split(tier.name, course.target, percent) if percent is not None and course.canary is not None else None,
        revision=course.target,
        revisions=frozenset({scene.wanted, course.target, course.status.stable, *(r.leader.revision for r in everything)} - {""}),
        rollout=course.status,
        rolling=step.rolling,
        stuck=why_stuck(scene.want, scene.groups.get(course.target, Group("")), scene.limits) if step.stuck else "",
        rolled_back=course.rolled_back,
        serving=_counts([replica for replica in everything if replica.leader.uid in serving]),
    )


def _pools(
    fleet: InferenceFleet,
    tier: TierSpec,
    step: Step,
    replicas: Mapping[str, Sequence[Replica]],
    want: Pair,
    templates: Mapping[str, Template],
) -> list[PoolWanted]:
    """One pool per role and revision that has a size or still has pods."""
    found = []
    for revision in sorted({*step.sizes, *(revision for revision, mine in replicas.items() if mine)}):
        sizes = step.sizes.get(revision, (0, 0))
        nodes = templates[revision].nodes if revision in templates else (1, 1)
        for role, size, whole, count in zip(ROLES, sizes, want, nodes, strict=True):
            if size or any(replica.role == role for replica in replicas.get(revision, [])):
                name = f"{fleet.metadata.name}-{tier.name}-{role}-{revision}"
                found.append(PoolWanted(name, tier.name, role, revision, size, whole, count))
    return found


def _scarce_first(create: Sequence[PodWanted], scene: Scene) -> list[PodWanted]:
    """The role that is further from its wanted size first: after a loss it is what the other role waits for."""
    ready = [sum(group.ready[role] for group in scene.groups.values()) for role in (0, 1)]
    share = {role: ready[index] / max(1, scene.want[index]) for index, role in enumerate(ROLES)}
    return sorted(create, key=lambda pod: (share[pod.role], pod.role, pod.ordinal, pod.member))


def _target(replica: Replica, serving: frozenset[str], gone: set[str]) -> Target | None:
    """Ready workers serve or are held; one that goes is told as draining until it is gone; others are not told at all."""
    pod = replica.leader
    leaving = replica.terminating or not gone.isdisjoint(pod.uid for pod in replica.pods)
    if pod.ip is None or not (replica.ready or leaving):
        return None
    state: TargetState = "draining" if leaving else "serving" if pod.uid in serving else "held"
    return Target(pod.name, pod.uid, pod.ip, pod.role, pod.tier, pod.revision, pod.compat, state)


def _counts(replicas: Sequence[Replica]) -> Pair:
    roles = [replica.role for replica in replicas]
    return roles.count("prefill"), roles.count("decode")
