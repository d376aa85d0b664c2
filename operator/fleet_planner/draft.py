"""The pods of all pools of one tier: which are created, which deleted, and which worker changes its role instead."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet_planner.flip import Draft, Terms, choose, other, waiting
from fleet_planner.ratio import Pair
from fleet_planner.replicas import Replica, plan_replicas
from fleet_planner.roles import ROLES, Role
from fleet_planner.rollout import Group
from fleet_planner.wanted import FlipWanted, PodWanted, PoolWanted

Replicas = Mapping[str, Sequence[Replica]]
"""By revision."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """What becomes of the pods. `replicas`: all of them, a worker that is told its new role as one that is on its way."""

    draft: Draft
    replicas: Replicas
    flips: tuple[FlipWanted, ...] = ()


def draft_pods(
    pools: Sequence[PoolWanted], replicas: Replicas, makeable: Collection[str], target: str, terms: Terms | None, now: float
) -> Drafted:
    """`makeable`: revisions that pods can still be made from. `target`: the one whose workers may change their role; `terms`
    None: none may."""
    first = _draft(pools, replicas, makeable)
    if terms is None:
        return Drafted(first, replicas)
    mine, flips = replicas.get(target, ()), tuple[FlipWanted, ...]()
    chosen = choose(first, mine, terms)
    if chosen is not None:
        role, leader = other(chosen.role), chosen.leader
        turned = Replica((replace(leader, role=role, flipping=role, flip_since=now, ready=False),))
        replicas = {**replicas, target: [turned if one is chosen else one for one in mine]}
        flips = (FlipWanted(leader.name, leader.uid, role, now),)
        first = _draft(pools, replicas, makeable)
    held = waiting(first, replicas.get(target, ()), terms)
    create = [wanted for wanted in first.create if wanted.name not in held.names]
    delete = [gone for gone in first.delete if gone.uid not in held.uids]
    return Drafted(Draft(create, delete), replicas, flips)


def _draft(pools: Sequence[PoolWanted], replicas: Replicas, makeable: Collection[str]) -> Draft:
    taken = {pod.name for found in replicas.values() for replica in found for pod in replica.pods}
    draft = Draft([], [])
    for pool in pools:
        mine = [replica for replica in replicas.get(pool.revision, ()) if replica.role == pool.role]
        new, gone = plan_replicas(pool, mine, taken)
        draft = Draft([*draft.create, *(new if pool.revision in makeable else [])], [*draft.delete, *gone])
    return draft


def scarce_first(
    create: Sequence[PodWanted], groups: Mapping[str, Group], sizes: Mapping[str, Pair], target: str
) -> list[PodWanted]:
    """In the order in which they are made: any first part of them may be all that finds a place, so each worker is of the role
    that is further from its size when those before it are there. Repairs of older revisions come before the `target`."""
    found: list[PodWanted] = []
    for revision in sorted({pod.revision for pod in create}, key=lambda revision: (revision == target, revision)):
        size = sizes.get(revision, (0, 0))
        workers = tuple(_workers(create, revision, role) for role in ROLES)
        have = list(groups.get(revision, Group(revision)).alive)
        while any(workers):
            behind = any(have) and have[0] * size[1] <= have[1] * size[0]  # the very first is decode: prefill waits for it
            index = 0 if workers[0] and (behind or not workers[1]) else 1
            found += workers[index].popleft()
            have[index] += 1
    return found


def _workers(create: Sequence[PodWanted], revision: str, role: Role) -> deque[list[PodWanted]]:
    """The pods of each worker, by ordinal; the leader first."""
    found: dict[int, list[PodWanted]] = defaultdict(list)
    for pod in sorted(create, key=lambda pod: (pod.ordinal, pod.member)):
        if (pod.revision, pod.role) == (revision, role):
            found[pod.ordinal].append(pod)
    return deque(found.values())
