"""Scale to zero and back. Pure: telemetry with its age, memory and the clock come in as values.

Idle is a fleet, not a role or a tier: a fleet that nobody used for `scaling.toZero.idle` gives up all workers of every tier at
once, and whoever asks wakes all of them. So prefill and decode are both there or both not, and a tier is never missing while
another one is loaded. Tiers that keep warm workers keep all of theirs, and then answer the first requests themselves.

Rest needs proof: every router and engine was read just now, nothing runs, nothing is held, and the routers' counters of requests
did not move since. Without proof a fleet stays as it is. What has not served yet is not idle, and a rollout ends before its fleet
rests. To wake takes one router that holds one request.

That a tier is at zero is seen in its pools' sizes, so that it outlives the operator. After waking a fleet stays for `idle`, and
at least for as long as the waking took: it never spends more time on starting than on being there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from fleet_api.conditions import rfc3339
from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import ZeroStatus
from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.altered import altered
from fleet_planner.memory import RestMemory
from fleet_planner.ratio import Pair
from fleet_planner.roles import ROLES
from fleet_planner.scale import is_fresh, unusable
from fleet_planner.types import Demand, Observed

STAY_MOST_S = 1_800.0
"""A fleet that took longer than this to wake stays for this long. Nor does a wake take longer for which nobody waits any more."""
NOTHING: Pair = (0, 0)


@dataclass(frozen=True, slots=True)
class Rest:
    """Which tiers have no workers, and why the others have some."""

    asleep: frozenset[str]
    reason: str
    memory: RestMemory
    zero: Mapping[str, ZeroStatus] = field(default_factory=dict)
    """By tier: those without workers, and those that wake."""


def plan_rest(fleet: InferenceFleet, observed: Observed, sizes: Mapping[str, Pair], scaled: bool, now: float) -> Rest:
    """`sizes`: (prefill, decode) workers that were planned last, by tier. `scaled`: a user has just set the size of a tier."""
    spec, before = fleet.spec.scaling.to_zero, observed.rest
    states = before.zero
    if states is None:
        states = {known.name: known.zero for known in fleet.status.tiers if known.zero is not None}
    if not spec.enabled:
        return _with_states(observed, sizes, states, Rest(frozenset(), "", RestMemory()), now)
    demand = _newest(observed, fleet.spec.telemetry.interval_s, now)
    use = "a user set a size" if scaled else _use(fleet, observed, sizes, demand, now)
    starting = [name for name, size in sizes.items() if size != NOTHING and name not in states and not _serves(name, observed)]
    if starting and not use:
        use = f"tier {starting[0]} has not served yet"
    use = use or _waking(fleet, observed, sizes, states, now)
    memory = RestMemory(
        used_at=now if use or before.used_at is None else min(before.used_at, now),
        arrivals=before.arrivals if demand is None or demand.arrivals is None else demand.arrivals,
        woke_in_s=before.woke_in_s,
    )
    resting = frozenset[str]() if use else frozenset(tier.name for tier in fleet.spec.tiers if may_rest(tier))
    stay_s = max(spec.idle_s, min(memory.woke_in_s, STAY_MOST_S))
    if _idle_s(memory, demand) >= stay_s and not _keeps(fleet, observed, demand, now):
        found = Rest(resting, f"no request for {spec.idle}", memory)
    else:
        found = Rest(frozenset(name for name in resting if sizes[name] == NOTHING), use or "at zero until somebody asks", memory)
    return _with_states(observed, sizes, states, found, now)


def _waking(
    fleet: InferenceFleet, observed: Observed, sizes: Mapping[str, Pair], states: Mapping[str, ZeroStatus], now: float
) -> str:
    """That a tier's wake goes on, in words, though whoever woke it may have left: where a model takes longer to load than clients
    wait and than `idle`, each wake was given up half-way, and nobody was ever answered. Empty where no node comes in time."""
    for name, size in sizes.items():
        known = states.get(name)
        if known is None or known.state != "Waking" or size == NOTHING or _serves(name, observed):
            continue
        pods = [pod for pod in observed.pods if pod.tier == name and not pod.terminating]
        stuck = any(pod.unschedulable and now - pod.created_at >= fleet.spec.scaling.capacity_wait_s for pod in pods)
        took_s = now - datetime.fromisoformat(known.since).timestamp()
        if {pod.role for pod in pods} == set(ROLES) and not stuck and took_s < STAY_MOST_S:
            return f"tier {name} wakes"
    return ""


def _idle_s(memory: RestMemory, demand: Demand | None) -> float:
    """For how long nobody used it, up to the last reading: what came since is not known."""
    return demand.measured_at - memory.used_at if demand is not None and memory.used_at is not None else 0.0


def may_rest(tier: TierSpec) -> bool:
    """Warm workers are there for a burst at any moment."""
    return tier.prefill.warm == 0 and tier.decode.warm == 0


def _newest(observed: Observed, interval_s: float, now: float) -> Demand | None:
    """What routers said last, if that is fresh: read with all telemetry, or heard since."""
    read = next((known.demand for known in observed.telemetry.values() if known.demand is not None), None)
    found = [one for one in (read, observed.heard) if one is not None and is_fresh(one.measured_at, interval_s, now)]
    return max(found, key=lambda one: one.measured_at, default=None)


def _use(fleet: InferenceFleet, observed: Observed, sizes: Mapping[str, Pair], demand: Demand | None, now: float) -> str:
    """How the fleet is seen to be used, in words; empty when it is not."""
    if demand is not None and demand.held:
        return f"{demand.held} held by the router"
    for name, known in observed.telemetry.items():
        load = max(known.prefill.inflight or 0.0, known.decode.inflight or 0.0)
        if load > 0 and not unusable(known, fleet.spec.telemetry.interval_s, now):
            return f"{load:.0f} in flight in tier {name}"
    counts = (demand.arrivals if demand is not None else None), observed.rest.arrivals
    if None not in counts and counts[0] != counts[1] and set(sizes.values()) != {NOTHING}:
        return "requests came"  # with no worker at all it was one that has left, or a router is new: who waits is held
    return ""


def _keeps(fleet: InferenceFleet, observed: Observed, demand: Demand | None, now: float) -> bool:
    """An idle fleet keeps its workers: something is not known, or not over."""
    if demand is None or demand.arrivals is None:
        return True
    interval_s = fleet.spec.telemetry.interval_s
    unknown = any(unusable(observed.telemetry.get(tier.name), interval_s, now) for tier in fleet.spec.tiers)
    return unknown or any(rolls(fleet, tier, observed) for tier in fleet.spec.tiers)


def rolls(fleet: InferenceFleet, tier: TierSpec, observed: Observed) -> bool:
    """It has workers of two revisions, or of one that is about to be replaced. What was rolled back stays so, and what is paused
    begins nothing."""
    found = {pod.revision for pod in observed.pods if pod.tier == tier.name and not pod.terminating}
    status = next((known.rollout for known in fleet.status.tiers if known.name == tier.name), None)
    wanted = observed.templates[tier.name].revision
    if found and not fleet.spec.rollout.paused and (status is None or status.failed != wanted):
        found.add(wanted)
    return len(found) > 1


def _with_states(observed: Observed, sizes: Mapping[str, Pair], states: Mapping[str, ZeroStatus], rest: Rest, now: float) -> Rest:
    """The decision with the state of each tier; one that serves again ends its waking and counts as used."""
    zero: dict[str, ZeroStatus] = {}
    memory = rest.memory
    for name, size in sizes.items():
        known = states.get(name)
        if name in rest.asleep:
            zero[name] = _state("AtZero", known, now)
        elif known is None and size != NOTHING:
            continue
        elif not _serves(name, observed):
            zero[name] = _state("Waking", known, now)
        elif known is not None and known.state == "Waking":
            memory = replace(memory, used_at=now, woke_in_s=max(0.0, now - datetime.fromisoformat(known.since).timestamp()))
    return altered(rest, memory=altered(memory, zero=zero), zero=zero)


def _state(state: Literal["AtZero", "Waking"], known: ZeroStatus | None, now: float) -> ZeroStatus:
    return known if known is not None and known.state == state else ZeroStatus(state=state, since=rfc3339(now))


def _serves(tier: str, observed: Observed) -> bool:
    """The routers are told of a prefill and of a decode worker that serve."""
    return {pod.role for pod in observed.pods if pod.tier == tier and pod.serving} == set(ROLES)
