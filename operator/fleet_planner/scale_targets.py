"""Scale targets whose name lasts: with `scaling.mode: external` each role of a tier has one, for an HPA or KEDA. Pure.

A WorkerPool is one revision's, and goes with it. A target stands for all workers of the role, whatever their revisions, and is
written after the pools: its `replicas` is what is wished for the role, and one that is not what the operator wrote last is
somebody's new wish. So a rollout, whose pools come and go, is nothing to whoever scales; and what nodes, quota or bounds do not
allow now stays asked for, as the target's `replicas`, beside the workers that there are in its status.

Two that scale both roles against the ratio disagree: both wishes are met with more workers, and each target goes on saying what
was asked of it, so that whoever asked finds it there and writes no more. That they disagree is written on the target, too
(`size`, beside `planned`): both stand until one of them asks for something that goes with the other.

Who finds what it asked for writes nothing, and nor does who has gone. So every half hour whoever did not get what it asked for
is asked again: its target says what there is, which is more than it asked for. One that is there writes its wish once more, for
which no worker goes; else it is over. Whose wish is met is never asked: its target would have to say less, and it climb back.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleet_api.v1alpha1 import InferenceFleet
from fleet_planner.healed import Asked
from fleet_planner.ratio import Pair
from fleet_planner.roles import ROLES, Role
from fleet_planner.types import Observed
from fleet_planner.wanted import PoolWanted

STANDS_S = 120.0
"""Autoscalers ask every 15 to 30 s for what they do not have. Two that ask for what the ratio does not allow together each took
away what the other one had just got: three workers were made and drained in every round, for ever."""
ASK_AGAIN_S = 1_800.0
"""A wish that is not met counts for so long, if it is not said again."""
EVERY_REVISION = "00000000"
"""What a target says where a pool has its revision. Operators that know no targets take it for nobody's, and leave it alone."""


def target_name(fleet: str, tier: str, role: str) -> str:
    """A pool's name has its revision behind it."""
    return f"{fleet}-{tier}-{role}"


def asked_of_targets(tier: str, observed: Observed) -> dict[Role, int]:
    """Wanted size of each role whose target says something else than the operator wrote."""
    mine = [one for one in observed.targets if one.tier == tier and one.planned is not None]
    return {one.role: one.replicas for one in mine if one.replicas != one.planned}


def disputed(tier: str, observed: Observed) -> dict[Role, int]:
    """Wanted size of both roles, where the operator wrote that two disagree; empty where it did not. It writes that on both
    targets, and one of these writes may have failed."""
    mine = {one.role: one for one in observed.targets if one.tier == tier}
    disagree = len(mine) == len(ROLES) and any(one.size is not None for one in mine.values())
    return {role: one.replicas for role, one in mine.items()} if disagree else {}


def dispute_words(said: Pair, sizes: Pair) -> str:
    """Who disagrees, who wins, and what to do."""
    met = [role for role, one, size in zip(ROLES, said, sizes, strict=True) if one == size]
    wins = f"the wish for {met[0]} wins" if met else "neither wish is met as it is"
    return (
        f"{said[0]} prefill and {said[1]} decode workers were asked for, which its ratio and bounds do not allow together: "
        f"{wins}, with {sizes[0]} prefill and {sizes[1]} decode; ask for these, or change the tier's ratio"
    )


def asked_again(lately: Asked, said: Mapping[Role, int], now: float) -> tuple[bool, Asked]:
    """Whether two that disagree are to be asked again now, and what was asked lately from now on. An operator that has just
    started does not know since when they do. What is there stands meanwhile, however seldom who is asked looks (`standing`)."""
    since = max((at for _, at, *_ in lately), default=None)
    if since is not None and now - since < ASK_AGAIN_S:
        return False, lately
    return since is not None, _noted(said, now, ASK_AGAIN_S)


def standing(lately: Asked, scaled: Mapping[Role, int], sizes: Mapping[Role, int], now: float) -> tuple[dict[Role, int], Asked]:
    """What was asked of the other role less than its time ago and would be taken away by `sizes`: it stands, so that both wishes
    are met with more workers of the one now `scaled`. Also what was asked lately, from now on: what stands, stands as long as
    somebody goes on asking."""
    known = [one for one in lately if one[0] not in scaled and now - one[1] < one[3]]
    stands = {role: size for role, _, size, _ in known if sizes[role] < size}
    others = [one for one in known if one[0] not in stands]
    return stands, tuple(sorted([*others, *_noted(stands | dict(scaled), now, STANDS_S)]))


def _noted(said: Mapping[Role, int], now: float, stands_s: float) -> Asked:
    return tuple(sorted((role, now, size, stands_s) for role, size in said.items()))


def plan_targets(
    fleet: InferenceFleet, wished: Mapping[str, Pair], asked: Mapping[str, Pair], nodes: Mapping[str, Pair]
) -> tuple[PoolWanted, ...]:
    """One per tier and role. `wished`: by tier, what it is to have; `asked`: what was asked for, which is something else where
    two disagree, and then the `wish` of both targets; `nodes`: of one worker of each role."""
    return tuple(
        PoolWanted(
            target_name(fleet.metadata.name, tier, role), tier, role, EVERY_REVISION, said, size, count,
            wish=said if asked[tier] != sizes else None,
        )
        for tier, sizes in wished.items()
        for role, said, size, count in zip(ROLES, asked[tier], sizes, nodes[tier], strict=True)
    )  # fmt: skip
