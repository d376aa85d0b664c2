"""What a tier can really have: back out of what the cluster cannot hold, without stranding the other role over the ratio. Pure.

A worker that finds no node within `scaling.capacityWait` (a cluster autoscaler had that long to bring one; time in a queue does
not count), or that a quota refuses, caps its tier at what exists; for as long again nothing is tried, then once more. A budget of
devices caps all tiers of a fleet together, in the order of the spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleet_api.conditions import rfc3339
from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.ratio import Bounds, Pair, bounds_of, grown, largest, smallest
from fleet_planner.types import ObservedPod, ScaleMemory

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
) -> Fitted:
    """`want`, or what the nodes and quotas leave of it. `pods`: the tier's, of the revision that it goes to."""
    bounds = bounds_of(tier)
    refused = [problem for problem in problems if QUOTA_WORDS in problem]
    gated = _last_gated(pods, dict(memory.gated), now)
    memory = replace(memory, gated=tuple(gated.items()))
    looked_for = [pod for pod in pods if pod.unschedulable and not pod.terminating]
    stuck = [pod for pod in looked_for if now - max(pod.created_at, gated.get(pod.uid, 0.0)) >= wait_s]
    have = _placed(pods, "prefill"), _placed(pods, "decode")
    if (stuck or refused) and not _covers(have, want):
        words = refused[0] if refused else f"no node for {stuck[0].name}: {stuck[0].message}"
        memory = ScaleMemory(memory.wants, have, now + wait_s, words, memory.gated)
    if memory.cap is None or now >= memory.cap_until:
        return Fitted(want, "", ScaleMemory(memory.wants, gated=memory.gated))
    capped = _inside((min(want[0], memory.cap[0]), min(want[1], memory.cap[1])), bounds)
    if capped == want:
        return Fitted(want, "", memory)
    return Fitted(capped, f"{memory.cap_reason}; tried again at {rfc3339(memory.cap_until)}", memory)


def fit_budget(tier: TierSpec, want: Pair, gpus: Pair, left: int | None) -> tuple[Pair, str]:
    """`want`, or the largest pair that `left` devices pay for; the tier's minimum is never refused. `gpus`: of one worker."""
    cost = want[0] * gpus[0] + want[1] * gpus[1]
    if left is None or cost <= left:
        return want, ""
    bounds = bounds_of(tier)
    least = _at_least((0, 0), bounds)
    size = grown(least, want, gpus, left, bounds.low, bounds.high)
    if size == want:
        return want, ""
    return size, f"{want[0]} prefill and {want[1]} decode workers need {cost} devices, scaling.budget.gpus leaves {max(0, left)}"


def _last_gated(pods: Sequence[ObservedPod], before: dict[str, float], now: float) -> dict[str, float]:
    """By uid, of the pods that are there."""
    return {pod.uid: now if pod.gated else before[pod.uid] for pod in pods if pod.gated or pod.uid in before}


def _placed(pods: Sequence[ObservedPod], role: str) -> int:
    return sum(pod.role == role and not pod.unschedulable and not pod.terminating for pod in pods)


def _covers(have: Pair, want: Pair) -> bool:
    return have[0] >= want[0] and have[1] >= want[1]


def _at_least(pair: Pair, bounds: Bounds) -> Pair:
    """The bounds' minimum is always asked for."""
    return smallest((max(pair[0], bounds.prefill_min), max(pair[1], bounds.decode_min)), bounds.low, bounds.high)


def _inside(pair: Pair, bounds: Bounds) -> Pair:
    """The largest allowed part of `pair` that still has the minimum."""
    found = largest(pair, bounds.low, bounds.high)
    return found if bounds.allow(*found) else _at_least((0, 0), bounds)
