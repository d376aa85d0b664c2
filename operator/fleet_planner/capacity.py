"""What a tier can really have: back out of what the cluster cannot hold, without stranding the other role over the ratio. Pure.

A worker that finds no node within `scaling.capacityWait` (a cluster autoscaler had that long to bring one; time in a queue does
not count), or that a quota refuses, caps its tier at what exists; for as long again nothing is tried, then once more. A budget of
devices, or of money by the hour, caps all tiers of a fleet together, in the order of the spec.

A rollout has its own answer to a lack of room (rollout.py), and it counts from the size that there is: a cap holds for as long as
a rollout moves, or could with more nodes. One is only made meanwhile when more is wanted than had nodes ever since it began: what
it takes away itself to make room is no lack of nodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleet_api.conditions import rfc3339
from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.altered import altered
from fleet_planner.memory import ScaleMemory
from fleet_planner.money import Purse, price_of
from fleet_planner.ratio import Bounds, Pair, bounds_of, grown, largest, smallest
from fleet_planner.rollout import covers, devices, larger, smaller
from fleet_planner.types import ObservedPod

QUOTA_WORDS = "exceeded quota"


@dataclass(frozen=True, slots=True)
class Fitted:
    """A size that fits, why it is smaller than wanted (empty when it is not), and what to remember."""

    size: Pair
    limited: str
    memory: ScaleMemory


def fit_cluster(
    tier: TierSpec,
    want: Pair,
    pods: Sequence[ObservedPod],
    problems: Sequence[str],
    memory: ScaleMemory,
    wait_s: float,
    now: float,
    *,
    rolls: bool = False,
    paused: bool = False,
) -> Fitted:
    """`want`, or what the nodes and quotas leave of it. `pods`: the tier's, of all revisions; `rolls`: one replaces another;
    `paused`: that waits for somebody, or for requests."""
    bounds = bounds_of(tier)
    refused = [problem for problem in problems if QUOTA_WORDS in problem]
    gated = _last_gated(pods, dict(memory.gated), now)
    looked_for = [pod for pod in pods if pod.unschedulable and not pod.terminating]
    stuck = [pod for pod in looked_for if now - max(pod.created_at, gated.get(pod.uid, 0.0)) >= wait_s]
    have: Pair | None = (_count(pods, "prefill"), _count(pods, "decode"))
    if rolls:
        have = larger(memory.placed, have) if memory.placed is not None and have is not None else None
    memory = altered(memory, gated=tuple(gated.items()), placed=have)
    moves = rolls and not paused
    if not (moves or now < memory.cap_until <= now + wait_s):  # later than that: the clock was set back
        memory = altered(memory, cap=None)
    if (stuck or refused) and have is not None and not covers(have, want):
        # while it holds it never grows: who waits for nodes that change hands counts as one that has one
        cap = have if memory.cap is None else smaller(memory.cap, have)
        if cap != memory.cap:  # else one of the minimum that finds no node would move that time in every pass
            words = refused[0] if refused else f"no node for {stuck[0].name}: {stuck[0].message}"
            memory = replace(memory, cap=cap, cap_until=now + wait_s, cap_reason=words)
    if memory.cap is None:
        return Fitted(want, "", altered(memory, cap=None, cap_until=0.0, cap_reason=""))
    capped = _inside(smaller(want, memory.cap), bounds)
    if capped == want:
        return Fitted(want, "", memory)
    when = "when the rollout is over" if moves else f"at {rfc3339(memory.cap_until)}"
    return Fitted(capped, f"{memory.cap_reason}; tried again {when}", memory)


def refusals(fleet: str, tier: str, problems: Sequence[str]) -> tuple[str, ...]:
    """What a quota said of this tier's pods; another tier's, or another kind of object, is no reason to have fewer of them."""
    if not problems:
        return ()
    mine = re.compile(rf"Pod {re.escape(fleet)}-{re.escape(tier)}-(prefill|decode)-[^- ]+-[0-9]+(-[0-9]+)?: ")
    return tuple(words for words in problems if QUOTA_WORDS in words and mine.match(words))


def fit_budget(tier: TierSpec, want: Pair, gpus: Pair, left: Purse, have: int = 0) -> tuple[Pair, str]:
    """`want`, or the largest pair that what is `left` pays for and that routers can be told of; the tier's minimum is never
    refused, nor for their sake the `have` workers that are there. `gpus`: of one worker."""
    paid, unpaid = _paid(tier, want, gpus, left)
    if left.workers is None or sum(paid) <= (room := max(left.workers, have)):
        return paid, unpaid
    bounds = bounds_of(tier)
    size = grown(_at_least((0, 0), bounds), paid, (1, 1), room, bounds.low, bounds.high)
    untold = f"the routers' document (a ConfigMap, 1 MiB) has room for {max(0, left.workers)} workers more than other tiers have"
    words = f"{paid[0]} prefill and {paid[1]} decode workers are too many: {untold}: fewer adapters or a second fleet"
    return (paid, unpaid) if size == paid else (size, "; ".join(part for part in (unpaid, words) if part))


def _paid(tier: TierSpec, want: Pair, gpus: Pair, left: Purse) -> tuple[Pair, str]:
    price, cost = price_of(tier), devices(want, gpus)
    room, lacking = left.devices(price), left.lacking(cost, price)
    if room is None or not lacking:  # what takes no device is always paid for
        return want, ""
    bounds = bounds_of(tier)
    least = _at_least((0, 0), bounds)
    size = grown(least, want, gpus, room, bounds.low, bounds.high)
    if size == want:
        return want, ""
    return size, f"{want[0]} prefill and {want[1]} decode workers {lacking}"


def least_workers(tier: TierSpec) -> int:
    """The tier's minimum."""
    return sum(_at_least((0, 0), bounds_of(tier)))


def least_devices(tier: TierSpec, gpus: Pair) -> int:
    """What the tier's minimum costs; `gpus`: of one worker."""
    prefill, decode = _at_least((0, 0), bounds_of(tier))
    return prefill * gpus[0] + decode * gpus[1]


def _last_gated(pods: Sequence[ObservedPod], before: dict[str, float], now: float) -> dict[str, float]:
    """By uid, of the pods that are there."""
    return {pod.uid: now if pod.gated else before[pod.uid] for pod in pods if pod.gated or pod.uid in before}


def _count(pods: Sequence[ObservedPod], role: str) -> int:
    """Workers that have a node, or may still get one."""
    return sum(pod.role == role and not pod.unschedulable and not pod.terminating for pod in pods)


def _at_least(pair: Pair, bounds: Bounds) -> Pair:
    """The bounds' minimum is always asked for."""
    return smallest((max(pair[0], bounds.prefill_min), max(pair[1], bounds.decode_min)), bounds.low, bounds.high)


def _inside(pair: Pair, bounds: Bounds) -> Pair:
    """The largest allowed part of `pair` that still has the minimum."""
    found = largest(pair, bounds.low, bounds.high)
    return found if bounds.allow(*found) else _at_least((0, 0), bounds)
