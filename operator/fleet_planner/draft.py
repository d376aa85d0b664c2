"""The pods of all pools of one tier: which are created, which deleted, and which worker changes its role instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet_planner.flip import Draft, Terms, choose, other, waiting
from fleet_planner.replicas import Replica, plan_replicas
from fleet_planner.types import FlipWanted, PoolWanted

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
