"""Workers over several nodes: seen as workers, and given back when they cannot become whole. Pure.

A scheduler that knows nothing of groups places pods one by one, so a worker may get some of its nodes and wait for the rest for
ever; two such workers that wait for each other's nodes are a deadlock. So one that made no progress for `scaling.capacityWait`,
and for a part of that again which differs between workers (those of two fleets must not give back and try again in step), gives
back what it has, all of it. In a tier one goes at a time, the one with the fewest nodes first, and the others get a moment to
take the nodes. For as long again none is made in its place; then it is tried once more. So is one of which a quota lets only the
first pods in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from fleet_api.conditions import rfc3339
from fleet_planner.flip import on_its_way
from fleet_planner.memory import GangHold, GangMemory
from fleet_planner.replicas import Replica, replicas_of
from fleet_planner.roles import Role
from fleet_planner.types import Observed, ObservedPod
from fleet_planner.wanted import PodGone

SETTLE_S = 15.0
"""After a worker over several nodes was deleted: as long the scheduler has to give its nodes to others."""
SPREAD = 0.5
"""Part of the wait by which workers differ."""


def workers_of(observed: Observed, tier: str) -> list[Replica]:
    """All workers of a tier; one that is told another role as one of that role."""
    sizes = {revision: template.nodes for revision, template in observed.stored.get(tier, {}).items()}
    if tier in observed.templates:
        sizes[observed.templates[tier].revision] = observed.templates[tier].nodes
    pods = [on_its_way(pod) for pod in observed.pods if pod.tier == tier]
    revisions = sorted({pod.revision for pod in pods})
    return [
        found
        for revision in revisions
        for found in replicas_of([pod for pod in pods if pod.revision == revision], sizes.get(revision, (1, 1)))
    ]


def as_pods(workers: Sequence[Replica], memory: GangMemory, wait_s: float, now: float) -> list[ObservedPod]:
    """One pod per worker, as capacity counts them: a worker over several nodes stands for itself by its leader, finds no node
    when one of its pods finds none, and waits since its last progress. While nodes change hands, none is told to find no node."""
    if all([worker.size == 1 for worker in workers]):
        return [worker.leader for worker in workers if not worker.broken]
    calm = _calm(workers, memory, now)
    hopeful = _hopeful(workers)
    return [_as_pod(worker, wait_s, calm=calm and worker.leader.uid not in hopeful) for worker in workers if not worker.broken]


def _as_pod(worker: Replica, wait_s: float, *, calm: bool) -> ObservedPod:
    if worker.size == 1:
        return worker.leader
    missing = next((pod for pod in worker.pods if pod.unschedulable), None)
    message = f"{worker.placed} of its {worker.size} pods have one: {missing.message}" if missing is not None else ""
    return replace(
        worker.leader,
        created_at=_since(worker) + _patience_s(worker, wait_s) - wait_s,
        ready=worker.ready,
        terminating=worker.terminating,
        unschedulable=calm and missing is not None,
        message=message,
    )


def _hopeful(workers: Sequence[Replica]) -> set[str]:
    """Of the workers that have some of their nodes: as many of each role as those nodes make whole, the furthest first."""
    found: set[str] = set()
    for role in ("prefill", "decode"):
        some = sorted((worker for worker in workers if worker.role == role and is_partial(worker)), key=_last_to_go)
        count = sum(worker.placed for worker in some) // max((worker.size for worker in some), default=1)
        found.update(worker.leader.uid for worker in some[:count])
    return found


def _last_to_go(worker: Replica) -> tuple[int, float, str]:
    return -worker.placed, worker.leader.created_at, worker.leader.name


def is_partial(worker: Replica) -> bool:
    """It holds some of its nodes and waits for others."""
    return worker.size > 1 and worker.alive and 0 < worker.placed < worker.size


def _calm(workers: Iterable[Replica], memory: GangMemory, now: float) -> bool:
    settling = now < memory.settle_until <= now + SETTLE_S  # later than that: the clock was set back
    return not settling and not any(worker.size > 1 and worker.terminating and not worker.is_stuck(now) for worker in workers)


def _since(worker: Replica) -> float:
    """When it last came nearer to being whole."""
    return max(max(pod.created_at, pod.scheduled_at or 0.0) for pod in worker.pods)


def _patience_s(worker: Replica, wait_s: float) -> float:
    """Differs between any two workers, and between a worker and the one that is made in its place: uids are random."""
    digest = hashlib.sha256(worker.leader.uid.encode()).digest()
    return wait_s * (1 + SPREAD * int.from_bytes(digest[:4], "big") / 2**32)


@dataclass(frozen=True, slots=True)
class GivenBack:
    """What is given back now. `most`: by revision and role, how many workers there may be until a hold ends."""

    gone: tuple[PodGone, ...]
    memory: GangMemory
    most: Mapping[tuple[str, Role], int]
    limited: str
    """Why there are fewer than wanted, in words."""


def give_back(
    replicas: Mapping[str, Sequence[Replica]],
    memory: GangMemory,
    wait_s: float,
    now: float,
    cut_short: Mapping[tuple[str, Role], str] = MappingProxyType({}),
) -> GivenBack:
    """At most one worker of a tier that has some of its nodes and waited too long for the rest. `replicas`: by revision.
    `cut_short`: by revision and role, what a quota said that refused one of a worker's later pods."""
    everything = [replica for found in replicas.values() for replica in found]
    holds = tuple(hold for hold in memory.holds if now < hold.until <= now + wait_s and hold.revision in replicas)
    for (revision, role), refusal in cut_short.items():  # its first pods go, and would be made again in every pass
        there = sum(one.role == role for one in _staying(replicas.get(revision, ())))
        words = f"{refusal}; tried again at {rfc3339(now + wait_s)}"
        kept = (hold for hold in holds if (hold.revision, hold.role) != (revision, role))
        holds = (*kept, GangHold(role, revision, there, now + wait_s, words))
    gone: tuple[PodGone, ...] = ()
    late = [one for one in everything if is_partial(one) and _late(one, wait_s, now)] if _calm(everything, memory, now) else []
    if late:
        victim = max(late, key=_last_to_go)
        hold = _hold(victim, _staying(everything), now + wait_s)
        holds = (*(one for one in holds if (one.revision, one.role) != (hold.revision, hold.role)), hold)
        why = f"{victim.placed} of its {victim.size} pods found a node"
        gone = tuple(PodGone(pod.name, pod.uid, f"given back: {why}") for pod in victim.pods if not pod.terminating)
    most = {(hold.revision, hold.role): hold.most for hold in holds}
    return GivenBack(gone, GangMemory(holds, memory.settle_until), most, "; ".join(hold.words for hold in holds))


def _late(worker: Replica, wait_s: float, now: float) -> bool:
    stuck = any(pod.unschedulable for pod in worker.pods)
    return stuck and now - _since(worker) >= _patience_s(worker, wait_s)


def _staying(workers: Iterable[Replica]) -> list[Replica]:
    """Those that a pool counts: in the place of one whose node goes away another is made."""
    return [one for one in workers if one.alive and not one.leaving]


def _hold(victim: Replica, staying: Sequence[Replica], until: float) -> GangHold:
    leader = victim.leader
    others = sum(one.role == victim.role and one.leader.revision == leader.revision and one is not victim for one in staying)
    missing = next(pod for pod in victim.pods if pod.unschedulable)
    words = (
        f"{leader.name} found {victim.placed} of its {victim.size} nodes and gave them back "
        f"({missing.name}: {missing.message}); tried again at {rfc3339(until)}"
    )
    return GangHold(victim.role, leader.revision, others, until, words)


def settled(memory: GangMemory, gone: Iterable[PodGone], workers: Iterable[Replica], now: float) -> GangMemory:
    """What is remembered after these pods were told to go."""
    going = {pod.uid for pod in gone}
    many = any(worker.size > 1 and not going.isdisjoint(pod.uid for pod in worker.pods) for worker in workers)
    return replace(memory, settle_until=now + SETTLE_S) if many else memory
