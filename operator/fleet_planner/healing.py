"""Replacing a worker that is poisoned: it is ready, and no KV gets from it (or to it) while its partners get along with others.

The decision is written into the fleet's status, and only a decision that is read from there is carried out: so neither a restart
of the operator nor a write that failed makes it forget what its budget was spent on. Carried out, it is a worker on a node that
goes away: another one is made, it serves until that one is ready, then routers are told and it drains; of several nodes all pods
go. Where there is no room for both, it goes first, if what is left serves inside the ratio.

One at a time in a tier, at most `perHour` in any hour; none while the tier is paused, rolls or has workers that still start, and
none when so many fail at once that it must be what is between them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf

from fleet_api.conditions import rfc3339
from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.healing import RestartPoisonedSpec
from fleet_api.v1alpha1.status import HealingStatus, ReplacedStatus
from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.gang import workers_of
from fleet_planner.healed import NOTHING_HEALED, HealingMemory
from fleet_planner.poisoned import Found, find_poisoned
from fleet_planner.replicas import Replica, is_overdue
from fleet_planner.rollout import Group, Limits
from fleet_planner.scale import is_fresh
from fleet_planner.serving import serves_without
from fleet_planner.types import Observed, TierTelemetry, Verdict
from fleet_planner.wanted import PodGone
from fleet_planner.zero import rolls

WINDOW_S = 3_600.0
"""What `perHour` is counted in."""
SECOND_S = 1.0
"""Times of the status are whole seconds, cut off."""
NAMES_MOST = 3
UNTOLD = "its replacement was decided"


@dataclass(frozen=True, slots=True)
class Healing:
    """Of one tier."""

    memory: HealingMemory = NOTHING_HEALED
    status: HealingStatus | None = None
    verdict: Verdict | None = None
    """What Disaggregating says of it; None: no side is known to be at fault."""


UNHURT = Healing()


def plan_healing(fleet: InferenceFleet, observed: Observed, now: float) -> dict[str, Healing]:
    """By tier; those of which there is nothing to say are absent."""
    found = {}
    before = {tier.name: tier.healing for tier in fleet.status.tiers if tier.healing is not None} if is_healing(fleet) else {}
    for tier in fleet.spec.tiers:
        known, kept = observed.telemetry.get(tier.name), observed.memory.get(tier.name)
        memory = kept.healing if kept is not None else UNHURT.memory
        if (known is not None and known.pairs) or tier.name in before or memory.since or memory.replaced:
            there = _there(observed, now)
            replaced = _remembered(before.get(tier.name), memory, there, fleet.spec.healing.restart_poisoned, now)
            found[tier.name] = _of_tier(fleet, tier, observed, known or TierTelemetry(), memory, replaced, now)
    return found


def marked(fleet: InferenceFleet, observed: Observed, now: float) -> Observed:
    """All pods of workers whose replacement the status says, as if their node went away."""
    if not is_healing(fleet):
        return observed
    going = decided(fleet, _there(observed, now))
    if not going:
        return observed
    words = {uid: one.message or UNTOLD for uid, one in going.items()}
    pods = [replace(pod, leaving=pod.leaving or words.get(pod.uid) or words.get(pod.group, "")) for pod in observed.pods]
    return replace(observed, pods=tuple(pods))


def is_healing(fleet: InferenceFleet) -> bool:
    """Whether the status says of any worker that it is, or was, replaced: of most fleets nothing more has to be asked."""
    return any([tier.healing is not None for tier in fleet.status.tiers])


def decided(fleet: InferenceFleet, there: Collection[str]) -> dict[str, ReplacedStatus]:
    """By uid of the pod that leads: what the status says was decided and is carried out now. `there`: uids of pods. Whoever wrote
    that status, it is one in a tier, within the budget, and none where it is switched off."""
    spec, found = fleet.spec.healing.restart_poisoned, dict[str, ReplacedStatus]()
    for tier in fleet.status.tiers if spec.enabled else ():
        known = _within_budget(tier.healing.replaced, spec) if tier.healing is not None else ()
        found.update([(one.uid, one) for one in known if one.uid in there][:1])
    return found


def _within_budget(known: Iterable[ReplacedStatus], spec: RestartPoisonedSpec) -> tuple[ReplacedStatus, ...]:
    """The oldest first. More than the budget nobody decided: a status that somebody wrote, or a budget that was larger."""
    return tuple(sorted((one for one in known if one.uid), key=lambda one: (one.at, one.uid))[: spec.per_hour])


def gone_first(
    fleet: InferenceFleet, workers: Sequence[Replica], groups: Mapping[str, Group], limits: Limits, now: float
) -> tuple[PodGone, ...]:
    """Pods of such workers that go before others are ready in their place: no surge is allowed, or there was no room for
    `capacityWait`. What is left serves inside the ratio. `groups`: by revision."""
    there = {worker.leader.uid for worker in workers if not worker.is_stuck(now)}
    going, found = decided(fleet, there), list[PodGone]()
    for worker in workers:
        one = going.get(worker.leader.uid)
        if one is None or not worker.alive:
            continue
        devices = limits.gpus[0 if worker.role == "prefill" else 1]
        tight = limits.surge_gpus is not None and limits.surge_gpus < devices
        waited = now - _time(one.at) >= fleet.spec.scaling.capacity_wait_s
        roomless = worker.leader.revision in groups and groups[worker.leader.revision].roomless
        if (tight or (waited and roomless)) and serves_without(workers, {worker.leader.uid}, limits.ratio):
            found += [PodGone(pod.name, pod.uid, f"no room for another one: {one.message}") for pod in worker.pods]
    return tuple(found)


def _there(observed: Observed, now: float) -> set[str]:
    """Uids of pods, without those that should have been gone for long: who replaces them is there, and they may never go."""
    return {pod.uid for pod in observed.pods if not is_overdue(pod, now)}


def _remembered(
    status: HealingStatus | None, memory: HealingMemory, there: Collection[str], spec: RestartPoisonedSpec, now: float
) -> tuple[ReplacedStatus, ...]:
    """What was decided in the last hour, or is not done yet; the oldest first."""
    known = {one.uid: one for one in (*memory.replaced, *(status.replaced if status is not None else ()))}
    kept = [one for one in known.values() if one.uid in there or now - _time(one.at) < WINDOW_S + SECOND_S]
    return _within_budget(kept, spec)


def _of_tier(
    fleet: InferenceFleet,
    tier: TierSpec,
    observed: Observed,
    known: TierTelemetry,
    memory: HealingMemory,
    replaced: tuple[ReplacedStatus, ...],
    now: float,
) -> Healing:
    spec, workers = fleet.spec.healing.restart_poisoned, workers_of(observed, tier.name)
    told = Healing(
        HealingMemory((), replaced) if replaced else NOTHING_HEALED, HealingStatus(replaced=replaced) if replaced else None
    )
    fresh = known.demand is not None and is_fresh(known.demand.measured_at, fleet.spec.telemetry.interval_s, now)
    failing = [pair for pair in known.pairs if not known.doubtful.issuperset(pair)]
    found = find_poisoned(failing, known.moved) if fresh else Found()
    alive = {worker.leader.name: worker for worker in workers if worker.alive}
    suspects = found.suspects & alive.keys()
    if len(suspects) > max(1, spec.fabric_percent * len(alive) // 100):
        return replace(told, verdict=_fabric(tier, sorted(suspects), len(alive)))
    ill = {name: partners for name, partners in found.poisoned.items() if name in alive and name not in known.doubtful}
    if not ill:
        return told
    before = dict(memory.since)
    since = {alive[name].leader.uid: min(before.get(alive[name].leader.uid, now), now) for name in ill}
    told = replace(told, memory=HealingMemory(tuple(sorted(since.items())), replaced))
    going = {one.uid for one in replaced} if spec.enabled else set[str]()
    waiting = sorted(
        ill.keys() - {name for name in ill if alive[name].leader.uid in going}, key=lambda name: (-len(ill[name]), name)
    )
    words = [_words(alive[name], ill[name]) for name in (waiting or sorted(ill))]
    if not waiting:
        return replace(told, verdict=_poisoned(tier, words, "it is being replaced"))
    why = _why_not(fleet, tier, observed, [worker for worker in workers if not worker.is_stuck(now)], going)
    if why:
        return replace(told, verdict=_poisoned(tier, words, why))
    spent = [one for one in replaced if now - _time(one.at) < WINDOW_S + SECOND_S]
    if len(spent) >= spec.per_hour:
        return replace(told, verdict=_spent(tier, words, spec, _time(spent[-spec.per_hour].at) + WINDOW_S + SECOND_S))
    ripe = [name for name in waiting if now - since[alive[name].leader.uid] >= spec.after_s and alive[name].ready]
    if not ripe:
        return replace(told, verdict=_poisoned(tier, words, f"replaced when it is so for {spec.after}"))
    leader, message = alive[ripe[0]].leader, _words(alive[ripe[0]], ill[ripe[0]])
    one = ReplacedStatus(worker=leader.name, uid=leader.uid, at=rfc3339(now), message=message)
    replaced = (*replaced, one)
    told = replace(told, memory=replace(told.memory, replaced=replaced), status=HealingStatus(replaced=replaced))
    return replace(told, verdict=_poisoned(tier, words, f"{leader.name} is being replaced"))


def _why_not(
    fleet: InferenceFleet, tier: TierSpec, observed: Observed, workers: Sequence[Replica], going: Collection[str]
) -> str:
    """Why none is replaced now, in words."""
    if not fleet.spec.healing.restart_poisoned.enabled:
        return "healing.restartPoisoned is off, delete that pod"
    if fleet.spec.rollout.paused:
        return "replaced when rollout.paused is false"
    if rolls(fleet, tier, observed):
        return "replaced when the rollout is over"
    if any(worker.leader.uid in going for worker in workers):
        return "replaced when the one before it is"
    # what finds no node may never start: it holds nobody up
    starting = [w for w in workers if w.alive and not w.ready and not w.unschedulable and w.queued_since == inf]
    return "replaced when workers that start are ready" if starting else ""


def _words(worker: Replica, partners: Sequence[str]) -> str:
    more = f" and {len(partners) - NAMES_MOST} others" if len(partners) > NAMES_MOST else ""
    named = ", ".join(partners[:NAMES_MOST]) + more
    way = "from it to" if worker.role == "prefill" else "to it from"
    return f"{worker.leader.name}: no KV gets {way} {named}, which get along with others"


def _poisoned(tier: TierSpec, words: Sequence[str], what: str) -> Verdict:
    return "False", "WorkerPoisoned", f"tier {tier.name}: {_some(words)}; {what}"


def _spent(tier: TierSpec, words: Sequence[str], spec: RestartPoisonedSpec, at: float) -> Verdict:
    budget = (
        f"{spec.per_hour} in an hour may be replaced and {'was' if spec.per_hour == 1 else 'were'}, the next one at {rfc3339(at)}"
    )
    return "False", "HealingBudgetSpent", f"tier {tier.name}: {_some(words)}; {budget}"


def _fabric(tier: TierSpec, suspects: Sequence[str], workers: int) -> Verdict:
    words = f"{len(suspects)} of {workers} workers hand no KV over to nearly all of their partners at once: {_some(suspects)}"
    return "False", "FabricSuspected", f"tier {tier.name}: {words}; it must be what is between them, so none is replaced"


def _some(words: Sequence[str]) -> str:
    return "; ".join(words[:NAMES_MOST]) + (f" and {len(words) - NAMES_MOST} more" if len(words) > NAMES_MOST else "")


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
