"""A fleet that was deleted and has our finalizer (spec.deletion): its workers drain, for `wait` at the most. Pure.

Routers are told first; from then on nothing new comes, so a worker that was seen idle after that stays idle and goes. A request
that is still in a prefill worker needs a decode worker afterwards: those of decode go only when all of prefill were seen idle.
So it is with prefill workers that were on their way out or to the other role when the fleet was deleted: of what is going nobody
reads anything any more, so it is waited for until it is gone, or until routers say that they wait for no prefill worker (its node
may be lost, and then it is never gone), for its drain time at the most. What no router was ever told of, or can never serve, goes
at once. What cannot be read stays for as long as it may. When every worker is on its way out, or the time
is over, the finalizer goes: garbage collection takes the rest, inside grace periods.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from fleet_api.conditions import CONDITION_TYPES, ConditionType, rfc3339, set_conditions
from fleet_api.quantities import format_ratio
from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import FleetStatus, RoleStatus, TierStatus
from fleet_planner.clock import FUTURE_S
from fleet_planner.events import DELETING, DELETION_LATE, HELD_BY_OTHERS
from fleet_planner.flip import known_as
from fleet_planner.gang import workers_of
from fleet_planner.memory import ClockMemory
from fleet_planner.replicas import ENDED, Replica
from fleet_planner.revisions import target_of
from fleet_planner.roles import ROLES, Role
from fleet_planner.types import Observed, Verdict
from fleet_planner.wanted import PodGone, Target

SETTLE_S = 3.0
"""Routers follow their document within a second, and what they had sent by then has arrived."""
MAX_CAUSES = 3
ENDS_WITH_IT: Final[frozenset[ConditionType]] = frozenset({"RollingOut", "CapacityLimited"})
"""Conditions of a fleet that wants something: it is not rolled out any more, and waits for no node."""


@dataclass(frozen=True, slots=True)
class EndingMemory:
    """What an ending remembers between passes; all of it may be lost: then it is worked out again, and takes a moment longer."""

    began_at: float | None = None
    """When the fleet was deleted, by the clock as it is now."""
    told_at: float | None = None
    """When the routers' document was first seen to let nobody serve."""
    prefilled_at: float | None = None
    """When every prefill worker was first seen idle after that."""
    idle: frozenset[str] = frozenset()
    """Uids of prefill workers that were seen idle after that."""
    going: tuple[tuple[str, float], ...] = ()
    """Of the others those that go, and when each was first seen to."""
    wanted_at: float | None = None
    """Before it was deleted: when it was last seen not to be."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What an ending is planned from, beside what is observed."""

    deleted_at: float
    """By the API server's clock."""
    wait_s: float
    named: frozenset[str] | None = frozenset()
    """Uids that the routers' document names, in whichever state; None: it cannot be read."""
    memory: EndingMemory = EndingMemory()


@dataclass(frozen=True, slots=True)
class Ended:
    """What becomes of it."""

    gone: tuple[PodGone, ...]
    targets: tuple[Target, ...]
    status: FleetStatus
    memory: EndingMemory
    release: bool
    """The finalizer goes: no worker stays, or the time is over."""
    late: bool
    """It is over."""
    left_s: float
    """Until it is."""


def plan_ending(fleet: InferenceFleet, observed: Observed, ending: Ending, clock: ClockMemory, now: float) -> Ended:
    """Deletions, what routers are told, and whether the finalizer may go."""
    workers = [worker for tier in sorted({pod.tier for pod in observed.pods}) for worker in workers_of(observed, tier)]
    idle_at = {name: at for known in observed.telemetry.values() for name, at in known.idle.items()}
    memory = _remembered(observed, ending, workers, idle_at, clock, now)
    left_s = (memory.began_at or 0.0) + ending.wait_s - now
    late, staying = left_s <= 0, [worker for worker in workers if not _is_leaving(worker)]
    going = [worker for worker in staying if late or _may_go(worker, observed, ending, memory, idle_at)]
    why = f"the fleet is deleted, and its wait of {ending.wait_s:g} s is over" if late else "the fleet is deleted, and it is idle"
    partly = [worker for worker in workers if worker.terminating]  # a worker that loses one pod has lost all
    pods = [pod for worker in (*going, *partly) for pod in worker.pods if not pod.terminating]
    uids = {pod.uid for pod in observed.pods}
    known = (worker for worker in workers if worker.ready or _is_named(worker, ending))
    targets = (target_of(worker, frozenset(), uids, now) for worker in known)
    return Ended(
        gone=tuple(PodGone(pod.name, pod.uid, why) for pod in pods),
        targets=tuple(sorted((found for found in targets if found is not None), key=lambda target: target.name)),
        status=_status(fleet, observed, staying, late=late, until=memory.began_at or 0.0, wait_s=ending.wait_s, now=now),
        memory=memory,
        release=late or not staying,
        late=late,
        left_s=left_s,
    )


def held_status(before: FleetStatus, finalizers: Collection[str], generation: int, now: float) -> FleetStatus:
    """Of a fleet that was deleted and that only `finalizers` of others keep: nobody looks after it any more, so it is not Ready,
    and of what runs nothing is known. Counts stay as they were last seen. Its budgets stay, too: it may have been deleted by
    mistake, and serve on for as long as it is kept, and whoever upgrades nodes would end it."""
    who = f"finalizer {', '.join(finalizers)} of somebody else, who takes it off"
    words = f"deleted, and kept by {who}; what runs goes on unattended: nothing is made, repaired, scaled or rolled out any more"
    words += ", and as no replacement comes its disruption budgets let no drain of a node end"
    verdicts: dict[ConditionType, Verdict] = {}
    for kind in (kind for kind in CONDITION_TYPES if kind != "Accepted" and before.condition(kind) is not None):
        verdicts[kind] = ("False" if kind in ENDS_WITH_IT else "Unknown", HELD_BY_OTHERS, "the fleet is deleted")
    verdicts |= {"Available": ("Unknown", HELD_BY_OTHERS, words), "Ready": ("False", HELD_BY_OTHERS, words)}
    conditions = set_conditions(before.conditions, verdicts, generation=generation, now=now)
    return before.model_copy(update={"observed_generation": generation, "conditions": conditions})


def _is_leaving(worker: Replica) -> bool:
    return all(pod.terminating for pod in worker.pods)


def _is_named(worker: Replica, ending: Ending) -> bool:
    return worker.leader.ip is not None and (ending.named is None or worker.leader.uid in ending.named)


def _remembered(
    observed: Observed, ending: Ending, workers: Sequence[Replica], idle_at: dict[str, float], clock: ClockMemory, now: float
) -> EndingMemory:
    before, set_s = ending.memory, observed.clock_set_s
    if before.began_at is None:
        by_s = clock.ahead_s if clock.ahead_s > 0 and ending.deleted_at + clock.ahead_s <= now + FUTURE_S else 0.0
        # not before it was seen to be wanted: the API server's clock may be minutes behind ours
        wanted_at = ending.deleted_at if before.wanted_at is None else before.wanted_at + set_s
        began_at = min(max(ending.deleted_at + by_s, wanted_at), now)
    else:
        began_at = min(before.began_at + set_s, now)
    told = ending.named is not None and not any(pod.serving or pod.told for pod in observed.pods)
    told_at = None if not told else now if before.told_at is None else min(before.told_at + set_s, now)
    waits = told_at is None or _unasked_at(observed) < told_at + SETTLE_S
    done, idle, going = _prefilled(before, set_s, told_at, ending, workers, idle_at, now, waits=waits)
    since = now if before.prefilled_at is None else min(before.prefilled_at + set_s, now)
    return EndingMemory(began_at, told_at, since if done else None, idle, going)


def _prefilled(
    before: EndingMemory, set_s: float, told_at: float | None, ending: Ending, workers: Sequence[Replica],
    idle_at: dict[str, float], now: float, *, waits: bool,
) -> tuple[bool, frozenset[str], tuple[tuple[str, float], ...]]:  # fmt: skip
    """Whether nothing is left to hand over; `idle` and `going` of the memory. `waits`: routers may wait for prefill workers."""
    prefills = [worker for worker in workers if _role(worker) == "prefill" and _is_named(worker, ending) and not _is_over(worker)]
    first, known = {worker.leader.uid: worker.leader for worker in prefills if not worker.alive}, dict(before.going)
    idle = {worker.leader.uid for worker in prefills if worker.alive and _was_idle(worker, told_at, idle_at)}
    if told_at is not None:
        idle |= first.keys() & before.idle if waits else first.keys()
    going = {uid: min(known.get(uid, now) + set_s, now) for uid in first if uid not in idle}
    late = {uid for uid, at in going.items() if now - at >= first[uid].drain_s}
    done = told_at is not None and all(worker.leader.uid in idle | late for worker in prefills)
    return done, frozenset(idle), tuple(going.items())


def _unasked_at(observed: Observed) -> float:
    """When it was last read of all routers that they wait for no prefill worker."""
    demands = [known.demand for known in observed.telemetry.values() if known.demand is not None]
    return max((demand.measured_at for demand in demands if demand.prefilling == 0), default=float("-inf"))


def _role(worker: Replica) -> Role:
    """The role that it has: one that is told the other counts as one of that everywhere else."""
    return known_as(worker.leader)


def _is_over(worker: Replica) -> bool:
    """Nothing runs in it any more, though it may be there."""
    return worker.leader.phase in ENDED or (worker.broken and not worker.terminating)


def _was_idle(worker: Replica, since: float | None, idle_at: dict[str, float]) -> bool:
    """It was read so long after `since` that nothing that was on its way then is missing."""
    return since is not None and idle_at.get(worker.leader.name, float("-inf")) >= since + SETTLE_S


def _may_go(worker: Replica, observed: Observed, ending: Ending, memory: EndingMemory, idle_at: dict[str, float]) -> bool:
    """It is idle for good, or never had anything to do."""
    leader = worker.leader
    if worker.broken or leader.phase == "Pending":
        return True
    known = observed.telemetry.get(leader.tier)
    unread = known is None or leader.name not in known.busy
    if unread and not worker.ready and not _is_named(worker, ending):
        return True
    return _was_idle(worker, memory.told_at if _role(worker) == "prefill" else memory.prefilled_at, idle_at)


def _status(
    fleet: InferenceFleet, observed: Observed, staying: Sequence[Replica], *, late: bool, until: float, wait_s: float, now: float
) -> FleetStatus:
    """As it was, but for what is not true any more. It is not Ready, and says who drains until when."""
    before = fleet.status
    prefill, decode = (sum(_role(worker) == role for worker in staying) for role in ROLES)
    at, counts = rfc3339(until + wait_s), f"{prefill} prefill and {decode} decode workers"
    words = f"deleted; {counts} drain, until {at} at the latest"
    if late:
        words = (
            f"deleted; {counts} were not idle at {at}, when deletion.wait was over: what they run is cut after their drain time"
        )
    if observed.problems:
        words += "; " + "; ".join(map(str, observed.problems[:MAX_CAUSES]))
    verdict: Verdict = ("False", DELETION_LATE if late else DELETING, words)
    verdicts: dict[ConditionType, Verdict] = {"Available": verdict, "Ready": verdict}
    over = (known.type for known in before.conditions if known.type in ENDS_WITH_IT and known.status == "True")
    verdicts |= dict.fromkeys(over, ("False", DELETION_LATE if late else DELETING, "the fleet is deleted"))
    generation = fleet.metadata.generation
    return before.model_copy(
        update={
            "observed_generation": generation,
            "tiers": tuple(_tier(tier, staying) for tier in before.tiers),
            "conditions": set_conditions(before.conditions, verdicts, generation=generation, now=now),
            "resolved": observed.resolved if observed.resolved is not None else fleet.resolved(),
        }
    )


def _tier(tier: TierStatus, staying: Collection[Replica]) -> TierStatus:
    def role(which: Role) -> RoleStatus:
        mine = [worker for worker in staying if worker.leader.tier == tier.name and _role(worker) == which]
        return RoleStatus(desired=0, ready=sum(worker.ready for worker in mine), serving=0, flipping=0)

    return tier.model_copy(
        update={"prefill": role("prefill"), "decode": role("decode"), "ratio": format_ratio(0, 0), "zero": None}
    )
