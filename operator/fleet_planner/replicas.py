"""Workers as they count: one pod, or all pods of a worker that spans several nodes. A worker is whole or it is nothing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fleet_planner.roles import Role
from fleet_planner.types import ObservedPod
from fleet_planner.wanted import PodGone, PodWanted, PoolWanted

ENDED = ("Succeeded", "Failed")
LATE_MOST = 16
"""So many workers of a pool may be on nodes that went away before they came, or as many as it has: then no further one is made
until these have gone. Two nodes of eight devices are full by then; more of them at once are whoever says so of nodes."""
STUCK_S = 120.0
"""Beyond its grace: so long its kubelet may take to put its volumes away."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One worker. `size`: pods that it needs to be whole."""

    pods: tuple[ObservedPod, ...]
    size: int = 1
    # worked out once: every one of these is asked many times in every pass
    leader: ObservedPod = field(init=False, repr=False, compare=False)
    """The pod that talks to routers; the first that is left of a worker that lost it."""
    role: Role = field(init=False, repr=False, compare=False)
    """prefill or decode."""
    leaving: str = field(init=False, repr=False, compare=False)
    """Why a node under it goes away."""
    sick: bool = field(init=False, repr=False, compare=False)
    """A device under it fails."""
    suspected: str = field(init=False, repr=False, compare=False)
    """Which condition of a node under it is not believed."""
    broken: bool = field(init=False, repr=False, compare=False)
    """It can never be whole again: a pod ended, is missing, or follows a leader that is gone."""
    terminating: bool = field(init=False, repr=False, compare=False)
    """It goes: a worker that loses one pod has lost all."""
    alive: bool = field(init=False, repr=False, compare=False)
    """It serves or may still come to serve."""
    ready: bool = field(init=False, repr=False, compare=False)
    """It could serve now."""

    def __post_init__(self) -> None:
        pods, leader, put = self.pods, self.pods[0], object.__setattr__
        put(self, "leader", leader)
        put(self, "role", leader.role)
        leaving, sick, terminating, ready = leader.leaving, bool(leader.sick), leader.terminating, leader.ready
        suspected = leader.suspected
        if len(pods) == self.size == 1:
            broken = leader.phase in ENDED
        else:
            leaving = next((pod.leaving for pod in pods if pod.leaving), "")
            sick = any([bool(pod.sick) for pod in pods])
            suspected = next((pod.suspected for pod in pods if pod.suspected), "")
            stray = any([pod.group not in ("", leader.uid) for pod in pods])
            broken = stray or len(pods) < self.size or any([pod.phase in ENDED for pod in pods])
            terminating = any([pod.terminating for pod in pods])
            ready = all([pod.ready for pod in pods])
        put(self, "leaving", leaving)
        put(self, "sick", sick)
        put(self, "suspected", suspected)
        put(self, "broken", broken)
        put(self, "terminating", terminating)
        alive = not broken and not terminating
        put(self, "alive", alive)
        put(self, "ready", alive and ready and leader.ip is not None)

    @property
    def placed(self) -> int:
        """Pods that have a node."""
        if len(self.pods) == 1:
            return int(self.leader.node is not None)
        return sum(pod.node is not None for pod in self.pods)

    @property
    def serving(self) -> bool:
        """The routers are told to use it."""
        return self.leader.serving

    @property
    def held(self) -> bool:
        """A node turned a pod of it away a moment ago, or goes away itself: another one would come to the same."""
        return any(pod.held for pod in self.pods)

    @property
    def unready_since(self) -> float:
        """Since when some pod of it is not ready; for ever from now when all are, or when it is not known."""
        if len(self.pods) == 1 and self.leader.ready:
            return math.inf
        known = [pod.unready_since for pod in self.pods if pod.unready_since is not None and not pod.ready]
        return min(known, default=math.inf)

    @property
    def queued_since(self) -> float:
        """Since when some pod of it waits to be let in; for ever from now when none does."""
        if len(self.pods) == 1:
            return self.leader.created_at if self.leader.gated else math.inf
        return min((pod.created_at for pod in self.pods if pod.gated), default=math.inf)

    @property
    def unschedulable(self) -> bool:
        """Some pod finds no node."""
        if len(self.pods) == 1:
            return self.leader.unschedulable
        return any(pod.unschedulable for pod in self.pods)

    def is_stuck(self, now: float) -> bool:
        """All that goes of it should have been gone for long, so nobody waits for it."""
        going = [pod for pod in self.pods if pod.terminating]
        return bool(going) and all([is_overdue(pod, now) for pod in going])


def is_overdue(pod: ObservedPod, now: float) -> bool:
    """It should have been gone for long: nothing ends its process, or somebody's finalizer holds it."""
    return pod.terminating and pod.gone_by is not None and now - pod.gone_by > STUCK_S


def replicas_of(pods: Sequence[ObservedPod], sizes: tuple[int, int]) -> list[Replica]:
    """Pods of one tier and revision as workers, in name order. `sizes`: pods of one prefill and of one decode worker."""
    groups: dict[str, list[ObservedPod]] = defaultdict(list)
    for pod in pods:
        groups[pod.name if pod.member == 0 else pod.name.rpartition("-")[0]].append(pod)
    found = (sorted(group, key=lambda pod: pod.member) for _, group in sorted(groups.items()))
    return [Replica(tuple(group), sizes[0] if group[0].role == "prefill" else sizes[1]) for group in found]


def plan_replicas(
    pool: PoolWanted, replicas: Sequence[Replica], taken: Collection[str] = ()
) -> tuple[list[PodWanted], list[PodGone]]:
    """Pods of one pool. Ended and incomplete workers are replaced as a whole, missing ones get the lowest free ordinals (what
    still terminates holds its own, and so do the `taken` names of workers that changed to another pool). A worker on a node that
    goes away leaves when enough others are ready; one that came there too late, or that its node turned away, after a while."""
    if len(replicas) == pool.replicas and all([replica.alive and not replica.leaving for replica in replicas]):
        return [], []  # as nearly always
    alive = [replica for replica in replicas if replica.alive]
    staying = sorted((replica for replica in alive if not replica.leaving), key=first_to_go, reverse=True)
    broken = [replica for replica in replicas if replica.broken and not replica.terminating]
    held = [replica for replica in broken if replica.held][: max(0, pool.replicas - len(staying))]
    gone = [_gone(replica, _why_broken(replica)) for replica in broken if replica not in held]
    gone += [_gone(replica, "a pod of its group is gone") for replica in replicas if replica.size > 1 and replica.terminating]
    gone += [_gone(replica, f"{len(staying)} workers, {pool.replicas} wanted") for replica in staying[pool.replicas :]]
    needed = pool.replicas - sum(replica.ready for replica in staying[: pool.replicas])
    leaving = sorted((replica for replica in alive if replica.leaving), key=first_to_go, reverse=True)
    spared = leaving[max(0, needed) :]
    gone += [_gone(replica, f"replaced: {replica.leaving}") for replica in spared if not replica.held]
    names = {pod.name for replica in replicas for pod in replica.pods}.union(taken)
    wanted = pool.replicas if pool.most is None else min(pool.replicas, pool.most)
    late = sum([replica.held for replica in leaving])
    missing = max(0, wanted - len(staying) - len(held)) if late < max(pool.replicas, LATE_MOST) else 0
    created = _created(pool, names, missing)
    return created, [pod for group in gone for pod in group]


def first_to_go(replica: Replica) -> tuple[bool, bool, bool, int, int, float, float, str]:
    """Smallest goes first: not ready, on failing devices, not serving, furthest from whole, cheap, idle, young. An unknown load
    counts as busy. So does who was held for a condition that is not believed any more: who was made in its place goes."""
    leader = replica.leader
    serving, busy = replica.serving, leader.busy if leader.busy is not None else float("inf")
    if replica.suspected and not serving:
        serving, busy = True, float("inf")
    missing = replica.placed - replica.size if replica.size > 1 else 0
    return replica.ready, not replica.sick, serving, missing, leader.deletion_cost, busy, -leader.created_at, leader.name


def _created(pool: PoolWanted, taken: Collection[str], missing: int) -> list[PodWanted]:
    found: list[PodWanted] = []
    ordinal = 0
    while len(found) < missing * pool.nodes:
        names = [_name(pool.name, ordinal, member) for member in range(pool.nodes)]
        if not any(name in taken for name in names):
            found += [
                PodWanted(name, pool.name, pool.tier, pool.role, pool.revision, ordinal, member)
                for member, name in enumerate(names)
            ]
        ordinal += 1
    return found


def _name(pool: str, ordinal: int, member: int) -> str:
    """The leader has the worker's name; the others add their place."""
    return f"{pool}-{ordinal}" if member == 0 else f"{pool}-{ordinal}-{member}"


def _gone(replica: Replica, reason: str) -> list[PodGone]:
    return [PodGone(pod.name, pod.uid, reason) for pod in replica.pods if not pod.terminating]


def _why_broken(replica: Replica) -> str:
    ended = next((pod for pod in replica.pods if pod.phase in ENDED), None)
    if ended is not None:
        return f"its phase is {ended.phase}{': ' if ended.message else ''}{ended.message}"
    return f"{len(replica.pods)} of its {replica.size} pods exist"
