"""What the reconciler keeps of one fleet between passes. All of it may be lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fleet_api.v1alpha1.status import FleetStatus
from fleet_operator.adapters.memory import AdapterMemory
from fleet_operator.cluster.interface import Object
from fleet_operator.known_fleet import KnownFleet
from fleet_operator.observe import PodsSeen, Published
from fleet_operator.pace import Pace
from fleet_operator.pod_marks import MarksSeen
from fleet_operator.pool_names import PoolFights
from fleet_operator.refusals import Refusals
from fleet_operator.render.revision import RevisionsSeen
from fleet_operator.settled import Settled
from fleet_operator.turned_away import TurnedAway
from fleet_planner.astray import doubtful
from fleet_planner.clock import FUTURE_S
from fleet_planner.ending import EndingMemory
from fleet_planner.memory import ClockMemory, RestMemory, ScaleMemory
from fleet_planner.types import FlipReport, Observed, ObservedPod, Problem, TierTelemetry

SET_LEAST_S = 5.0
DOUBT_S = 5.0
"""How often workers of whom it is doubtful are asked which role they have."""


@dataclass(slots=True)
class FleetState:
    """What is kept between passes; all of it may be lost."""

    telemetry: dict[str, TierTelemetry] = field(default_factory=dict)
    telemetry_read: bool = False
    telemetry_ahead_s: float | None = None
    """Like `ahead_s`, when the telemetry was read."""
    memory: dict[str, ScaleMemory] = field(default_factory=dict)
    rest: RestMemory = field(default_factory=RestMemory)
    clock: ClockMemory = field(default_factory=ClockMemory)
    ahead_s: float | None = None
    """The wall clock less the monotonic one, when the last plan was made."""
    problems: tuple[Problem, ...] = ()
    pace: Pace = field(default_factory=Pace)
    read_at: float = float("-inf")
    reading: bool = False
    flips: dict[str, FlipReport] = field(default_factory=dict)
    """By uid: what workers say that change their role, and those of whom it is doubtful which one they have."""
    changing: frozenset[str] = frozenset()
    """Uids of workers that change their role, as the last pass saw them."""
    doubtful: frozenset[str] = frozenset()
    """Uids of the others."""
    doubted_at: float = float("-inf")
    """When they were last asked."""
    following: set[str] = field(default_factory=set)
    """Those of them that are being asked, each by itself: a proof may take minutes, and the others have their own time."""
    doubting: bool = False
    """Those of whom it is doubtful are being asked: how long they take to answer costs nobody else time."""
    adapters: AdapterMemory = field(default_factory=AdapterMemory)
    known: KnownFleet | None = None
    restless: bool = False
    pods: PodsSeen = field(default_factory=dict)
    stored: RevisionsSeen = field(default_factory=RevisionsSeen)
    marks: MarksSeen = field(default_factory=MarksSeen)
    fights: PoolFights = field(default_factory=PoolFights)
    published: Published = field(default_factory=Published)
    settled: Settled = field(default_factory=Settled)
    refusals: Refusals = field(default_factory=Refusals)
    turned_away: TurnedAway = field(default_factory=TurnedAway)
    ending: EndingMemory = field(default_factory=EndingMemory)
    young: dict[str, float] | None = None
    """By uid: since when pods that fetch, or have no node yet, are known (see `aged`); None: before the first pass."""
    needed: dict[tuple[str, str], Object] = field(default_factory=dict)
    """See `needed_templates`."""


def heed(state: FleetState, observed: Observed) -> None:
    """Whom to look at until the next pass. What they said is kept as long: it is of this flip, not of one before it. Of the
    doubtful ones nothing is known but their word."""
    state.changing = moving = frozenset([pod.uid for pod in observed.pods if pod.flipping is not None])
    state.doubtful = doubtful(observed)
    words = {uid: FlipReport(said.role, said.phase) for uid, said in state.flips.items() if uid in state.doubtful}
    state.flips = {uid: said for uid, said in state.flips.items() if uid in moving} | words


def aged(state: FleetState, observed: Observed, now: float) -> Observed:
    """With pods that fetch no older than they are known. What the API server has just made is minutes old where its clock is so
    far behind ours, and then all of them had failed, and were made anew in every pass; and a worker without a node was given up
    before one could come. Those that were there before our first pass are as old as they say."""
    before, first = (state.young, now) if state.young is not None else ({}, float("-inf"))
    nowhere = [pod for pod in observed.pods if pod.node is None]
    uids = [*(pod.uid for pod in observed.fetching), *(pod.uid for pod in nowhere)]
    state.young = known = {uid: before.get(uid, first) for uid in uids}
    if not known:
        return observed
    fetching = tuple([replace(pod, created_at=max(pod.created_at, known[pod.uid])) for pod in observed.fetching])
    late = any(known[pod.uid] > pod.created_at + FUTURE_S for pod in nowhere)
    pods = tuple([_no_older(pod, known) for pod in observed.pods]) if late else observed.pods
    return replace(observed, fetching=fetching, pods=pods)


def _no_older(pod: ObservedPod, known: Mapping[str, float]) -> ObservedPod:
    """A worker's. Clocks that differ by less leave it as it is: what is written of it later is of the same clocks."""
    by_s = known.get(pod.uid, float("-inf")) - pod.created_at
    if by_s <= FUTURE_S:
        return pod
    unready_since = pod.unready_since if pod.unready_since is None else pod.unready_since + by_s
    return replace(pod, created_at=pod.created_at + by_s, unready_since=unready_since)


def doubts_due(state: FleetState, now: float) -> frozenset[str]:
    """Those of whom it is doubtful, when they are to be asked now."""
    return state.doubtful if not 0 <= now - state.doubted_at < DOUBT_S else frozenset()


def clock_set_s(before_s: float | None, ahead_s: float) -> float:
    """By how much the wall clock was set between two plans: `ahead_s` is how far it is ahead of the monotonic one. What a time
    service corrects little by little is nothing."""
    set_s = 0.0 if before_s is None else ahead_s - before_s
    return set_s if abs(set_s) >= SET_LEAST_S else 0.0


def telemetry_at(state: FleetState, ahead_s: float) -> dict[str, TierTelemetry]:
    """What was read last, as old as it is by the monotonic clock: a clock that is set makes no reading stale."""
    set_s = clock_set_s(state.telemetry_ahead_s, ahead_s)
    return {name: _dated(one, set_s) for name, one in state.telemetry.items()} if set_s else state.telemetry


def _dated(one: TierTelemetry, set_s: float) -> TierTelemetry:
    prefill, decode = (
        replace(load, measured_at=None if load.measured_at is None else load.measured_at + set_s)
        for load in (one.prefill, one.decode)
    )
    demand = None if one.demand is None else replace(one.demand, measured_at=one.demand.measured_at + set_s)
    idle = {name: at + set_s for name, at in one.idle.items()}
    since = None if one.latencies_since is None else one.latencies_since + set_s
    return replace(one, prefill=prefill, decode=decode, demand=demand, idle=idle, latencies_since=since)


def is_restless(status: FleetStatus) -> bool:
    """Something is under way that may go on by time alone: such a fleet is looked at at every reading of its telemetry."""
    moving = any(c.type in ("RollingOut", "CapacityLimited") and c.status == "True" for c in status.conditions)
    roles = [role for tier in status.tiers for role in (tier.prefill, tier.decode)]
    return moving or any(not role.desired == role.ready == role.serving for role in roles)
