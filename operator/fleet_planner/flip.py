"""Role flips: a worker of the role that has too many becomes one of the role that has too few, instead of a cold start.

A flip is a worker on its way: from the moment it is told its new role it counts for that role, as one that is not ready yet. So
whoever compares sizes creates nothing in its place and deletes nothing else, and what serves follows from what is ready, as ever.
The routers are told that it drains. It is one of these at any moment, and all of it is seen in objects and in what it reports:

told → drains → says the new role → proven by tokens → its labels and its owner change: it is an ordinary worker of that role.

A worker that is `astray` is told the role of its own label in the same way; it is never given back.

It is given back when it declines, and deleted when its time is up or when its proof fails; then a worker is made cold, and the
tier tries no flip for a while. At most one worker per tier is on its way; wishes that a next flip would fulfil sooner than a cold
start wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from statistics import median

from fleet_api.conditions import rfc3339
from fleet_api.quantities import Ratio
from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import FlipStatus
from fleet_planner.ratio import Pair, largest
from fleet_planner.replicas import ENDED, Replica
from fleet_planner.roles import ROLES, Role
from fleet_planner.types import FlipReport, Observed, ObservedPod, RoleLoad, TierTelemetry
from fleet_planner.wanted import FlipWanted, PodGone, PodWanted

NOTICE_S = 2.0
"""How long a worker waits so that every router has heard of it (the agent's NOTICE_S)."""
PROOF_MOST_S = 30.0
"""Beyond its drain: for the switch and its proof."""
ANEW_TIMES = 2.0
"""An engine that is started anew for its other role has so many times as long as one is known to take."""
COLD_START_S = 60.0
"""From creation to ready, as long as no worker of the tier has shown it."""
COLD_START_MOST_S = 1_800.0
"""What took longer was no cold start: a worker that was ready twice shows its last time only."""
ANEW_MOST_S = 3_600.0
"""And this at most, or where nothing is known: the agent gives an engine up before that, and says so (half an hour until it
answers, ten minutes for a first token, ten for adapters)."""
RETRY_S = 600.0
"""No flip in a tier for this long after one that failed."""
TOLD_KEPT_S = COLD_START_MOST_S + ANEW_MOST_S
"""So long it is remembered of which role one was replaced that did not take it."""


def other(role: Role) -> Role:
    """The other role."""
    return "decode" if role == "prefill" else "prefill"


def on_its_way(pod: ObservedPod) -> ObservedPod:
    """A worker that was told a role, as it counts: one of that role that is not ready."""
    return pod if pod.flipping is None else replace(pod, role=pod.flipping, ready=False)


def known_as(pod: ObservedPod) -> Role:
    """The role that routers know it by, of one that counts as `on_its_way`: that of its label."""
    return pod.role if pod.flipping is None or pod.astray else other(pod.role)


# -- workers on their way ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Settled:
    """What becomes of the workers on their way."""

    pods: tuple[ObservedPod, ...]
    """All pods as they count now."""
    proven: tuple[tuple[ObservedPod, str], ...] = ()
    """With the words of their proof."""
    given_back: tuple[FlipWanted, ...] = ()
    told: tuple[FlipWanted, ...] = ()
    """Astray, and told their own role now."""
    gone: tuple[PodGone, ...] = ()
    failure: str = ""
    """What went wrong, in words."""
    failed_role: Role | None = None
    """Of one that was told its own role and is replaced."""


def settle(pods: Iterable[ObservedPod], reports: Mapping[str, FlipReport], now: float, anew_s: float = 0.0) -> Settled:
    """Judge every worker on its way by what it reports. `pods` as they are observed; `anew_s`: what an engine may take that is
    started anew, 0 where none is."""
    found, counted = Settled(()), []
    for one in pods:
        pod = on_its_way(one)
        if pod.flipping is None:
            counted.append(pod)
            continue
        report = reports.get(pod.uid, FlipReport())
        moving = not pod.terminating and pod.phase not in ENDED
        if moving and report.refused and not one.astray:
            words = f"{pod.name}: stays {one.role}: {report.refused}"
            given = (*found.given_back, FlipWanted(pod.name, pod.uid, None))
            found = replace(found, given_back=given, failure=words)
            pod = replace(one, flipping=None)
        elif moving and (why := report.refused or report.problem or _overdue(pod, report, now, anew_s)):
            why = f"its role was told to it again: {why}" if one.astray else why
            gone = (*found.gone, PodGone(pod.name, pod.uid, f"role flip failed: {why}"))
            found = replace(found, gone=gone, failure=f"{pod.name}: {why}", failed_role=one.role if one.astray else None)
            pod = replace(pod, terminating=True)
        elif moving and report.proof and report.role == pod.role:
            found = replace(found, proven=(*found.proven, (pod, report.proof)))
        counted.append(pod)
    return replace(found, pods=tuple(counted))


def _overdue(pod: ObservedPod, report: FlipReport, now: float, anew_s: float) -> str:
    """Why it is given up, in words; empty while it has time."""
    allowed_s = NOTICE_S + pod.drain_s + anew_s + PROOF_MOST_S
    if now - pod.flip_since <= allowed_s:
        return ""
    says = f"its agent says {report.role} and {report.phase}" if report.role is not None else "its agent does not answer"
    return f"not done within {allowed_s:.0f} s: {says}"


def failures(fleet: InferenceFleet, tier: str, observed: Observed) -> list[FlipStatus | None]:
    """The last one of a tier, as the status and as the memory has it."""
    kept = observed.memory.get(tier)
    return [next((one.flip for one in fleet.status.tiers if one.name == tier), None), kept.flip if kept is not None else None]


def remember(
    known: Iterable[FlipStatus | None], failure: str, now: float, role: Role | None = None, *, doubted: bool = False
) -> FlipStatus | None:
    """The last failure, for as long as no flip is tried because of it. That of one that was told its own `role` longer: whether
    the one in its place says the same is known when it has started, and holds as long as any of the tier is `doubted`."""
    # of two that say the same, the memory's has a role that an older CRD does not keep in the status
    before = max((one for one in known if one is not None), key=lambda one: (one.failed_at, one.role), default=None)
    fresh = pauses(before, now)
    if failure and not (fresh and before is not None and before.message == failure):
        return FlipStatus(failed_at=rfc3339(now), message=failure, role=role or "")
    kept = before is not None and before.role and (doubted or _age_s(before, now) < TOLD_KEPT_S)
    return before if fresh or kept else None


def pauses(failed: FlipStatus | None, now: float) -> bool:
    """It was so short a while ago that none is tried."""
    return failed is not None and _age_s(failed, now) < RETRY_S


def _age_s(failed: FlipStatus, now: float) -> float:
    return now - datetime.fromisoformat(failed.failed_at).timestamp()


# -- a new flip -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Terms:
    """What decides in one tier whether a flip is worth it."""

    low: Ratio
    high: Ratio
    cold_s: float
    """From creation to ready, without a flip."""
    warm_s: Callable[[Replica], float]
    """How long this worker would take to become one of the other role."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a tier would do without flips, in the order of replicas.plan_replicas."""

    create: Sequence[PodWanted]
    delete: Sequence[PodGone]


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for the next flip: names to be created, uids to be deleted."""

    names: frozenset[str] = field(default_factory=frozenset)
    uids: frozenset[str] = field(default_factory=frozenset)


def choose(draft: Draft, replicas: Sequence[Replica], terms: Terms) -> Replica | None:
    """The worker to be told the other role; None when none should be."""
    if any(pod.flipping is not None or pod.astray or pod.excused for replica in replicas for pod in replica.pods):
        return None
    for role in ROLES:
        if any(wanted.role == role for wanted in draft.create):
            fit = _surplus(draft, replicas, other(role)) or _spare(replicas, other(role), terms)
            chosen = min(fit, key=_idle_first, default=None)
            if chosen is not None and terms.warm_s(chosen) < terms.cold_s:
                return chosen
    return None


def waiting(draft: Draft, replicas: Sequence[Replica], terms: Terms) -> Waiting:
    """While a worker is on its way: pairs of a worker to create and one to delete that the next flips make up for sooner."""
    names: set[str] = set()
    uids: set[str] = set()
    for role in {replica.role for replica in replicas if replica.leader.flipping is not None and replica.alive}:
        surplus = sorted(_surplus(draft, replicas, other(role)), key=_idle_first)
        created = [wanted.name for wanted in draft.create if wanted.role == role]
        in_time = [one for place, one in enumerate(surplus, 2) if place * terms.warm_s(one) < terms.cold_s]
        pairs = min(len(in_time), len(created))
        names.update(created[:pairs])
        uids.update(one.leader.uid for one in in_time[:pairs])
    return Waiting(frozenset(names), frozenset(uids))


def _fits(replica: Replica) -> bool:
    return replica.ready and replica.size == 1 and not replica.leaving and not replica.sick


def _surplus(draft: Draft, replicas: Sequence[Replica], role: Role) -> list[Replica]:
    """Workers that would go though nothing is wrong with them."""
    gone = {pod.uid for pod in draft.delete}
    return [replica for replica in replicas if replica.role == role and replica.leader.uid in gone and _fits(replica)]


def _spare(replicas: Sequence[Replica], role: Role, terms: Terms) -> list[Replica]:
    """Workers of this role, when one less of it and one more of the other lets more serve inside the ratio."""
    well = [replica.role for replica in replicas if replica.ready and not replica.sick]
    now = well.count("prefill"), well.count("decode")
    after: Pair = (now[0] + 1, now[1] - 1) if role == "decode" else (now[0] - 1, now[1] + 1)
    if min(after) < 1 or sum(largest(after, terms.low, terms.high)) <= sum(largest(now, terms.low, terms.high)):
        return []
    return [replica for replica in replicas if replica.role == role and _fits(replica)]


def _idle_first(replica: Replica) -> tuple[bool, float, int, float, str]:
    """Held before serving, idle before busy, then cheap and young."""
    leader = replica.leader
    busy = leader.busy if leader.busy is not None else float("inf")
    return replica.serving, busy, leader.deletion_cost, -leader.created_at, leader.name


# -- times ------------------------------------------------------------------------------------------------------------
def cold_start_s(pods: Iterable[ObservedPod]) -> float:
    """How long the tier's workers took from creation to ready: the median of those that show it."""
    known = shown_s(pods)
    return COLD_START_S if known is None else known


def shown_s(pods: Iterable[ObservedPod]) -> float | None:
    """The same; None: no worker shows it."""
    known = [pod.ready_since - pod.created_at for pod in pods if pod.ready_since and not pod.flipped and not pod.restarts]
    fit = [took for took in known if 0 <= took <= COLD_START_MOST_S]
    return median(fit) if fit else None


def anew_most_s(telemetry: TierTelemetry, cold_s: float | None) -> float:
    """How long an engine that is started anew may take: a cold start has one in it, so that it is never less than that. None: no
    worker shows one."""
    known = [took for took in (telemetry.engine_start_s, cold_s) if took is not None]
    return min(ANEW_MOST_S, ANEW_TIMES * max(known)) if known else ANEW_MOST_S


def flip_s(replica: Replica, telemetry: TierTelemetry, most_tokens: int, lease_s: float, *, starts_anew: bool = False) -> float:
    """How long a worker takes to change its role: the notice, what it runs, and its engine where that `starts_anew`, which
    nobody guesses: unknown is for ever. `lease_s`: how long an engine that does not count its leases is waited for after a
    prefill."""
    if starts_anew:
        start_s = telemetry.engine_start_s if telemetry.engine_start_s is not None else float("inf")
        return start_s + flip_s(replica, telemetry, most_tokens, lease_s)
    leader = replica.leader
    before = lease_s if replica.role == "prefill" else 0.0
    if leader.busy == 0:
        return max(NOTICE_S, before)
    load = telemetry.prefill if replica.role == "prefill" else telemetry.decode
    return NOTICE_S + min(leader.drain_s, _longest_s(replica.role, load, most_tokens)) + before


def _longest_s(role: Role, load: RoleLoad, most_tokens: int) -> float:
    """The longest that a request of this role still runs, from what was measured; unknown is for ever."""
    if role == "prefill":
        return load.ttft_p99_s if load.ttft_p99_s is not None else float("inf")
    return load.itl_p99_s * most_tokens if load.itl_p99_s is not None else float("inf")
