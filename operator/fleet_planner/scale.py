"""How many workers each role of a tier should have. Pure: telemetry with its age, memory and the clock come in as values.

A role needs requests in flight (also those that wait in routers) ÷ target per worker, plus its warm workers; a role whose latency
objective is missed needs one more than it has, once all that it has are ready, and were for all of the time that was measured:
those that still come up, or have just come, may be enough. Who is missed as soon as they left comes back for longer. Growing is
immediate; shrinking waits until a smaller number was enough for a whole window. No data, stale data or nonsense means hold: what
is asked for stays, and after a whole window of it another one must pass first, as after a restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleet_api.v1alpha1.routing import LatencySpec, ScalingSpec, SloSpec
from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.memory import ScaleMemory, Wants
from fleet_planner.ratio import Pair, bounds_of, project
from fleet_planner.too_few import Reading, TooFew, kept, noted
from fleet_planner.types import RoleLoad, TierTelemetry

MEMORY_ENTRIES = 512
"""Wants that are remembered apart in one window: of those nearer together the largest counts, so that no number of passes, and no
length of the window, pushes out what shows that the window is covered."""
STALE_INTERVALS = 3
STALE_SLACK_S = 5.0
LOAD_LIMIT = 1e9
"""More requests at once than any tier has."""
LATENCY_LIMIT_S = 86_400.0
"""Nobody waits a day for a token: nothing was missed that was measured so."""


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    """Wanted sizes; `reason` for status and events."""

    prefill: int
    decode: int
    reason: str
    memory: ScaleMemory
    held: bool = False
    """True: nothing was decided, the present size stays."""
    limited: str = ""
    """Why it is smaller than wanted: nodes, quota or budget; empty when it is not."""
    disputed: tuple[int, int] | None = None
    """What was asked of the two roles by two that disagree: the ratio does not allow it. None: nobody does."""


@dataclass(frozen=True, slots=True)
class ScaleInputs:
    """Everything that one decision depends on."""

    tier: TierSpec
    slo: SloSpec
    scaling: ScalingSpec
    interval_s: float
    current: tuple[int, int]
    ready: tuple[int, int] | None = None
    """How many of them could serve, for all of the time that latencies are of; None: all."""
    wished: tuple[int, int] | None = None
    """What was asked for last, where nodes, quota or budget allow less than that; None: `current` is all of it."""


def want(inputs: ScaleInputs, telemetry: TierTelemetry | None, memory: ScaleMemory, now: float) -> ScaleDecision:
    """The sizes that this tier should have now."""
    prefill, decode = inputs.wished or inputs.current
    why = unusable(telemetry, inputs.interval_s, now)
    if telemetry is None or why:
        return ScaleDecision(prefill, decode, f"holding: {why}", memory, held=True)
    target, missed = inputs.scaling.target_inflight, _missed(inputs, telemetry)
    loads = telemetry.prefill, telemetry.decode
    few = _too_few(memory, missed, inputs, loads, now)
    needed = (
        _needed(loads[0], target.prefill, inputs.tier.prefill.warm, missed[0], few[0], now),
        _needed(loads[1], target.decode, inputs.tier.decode.warm, missed[1], few[1], now),
    )
    wants = _remember(memory, now, needed, inputs.scaling.scale_down_window_s, _stale_after_s(inputs.interval_s))
    remembered = ScaleMemory(wants, too_few=few)
    grown = (
        max(needed[0], _floor(remembered, 0, prefill, now, inputs)),
        max(needed[1], _floor(remembered, 1, decode, now, inputs)),
    )
    sizes = project(*grown, bounds_of(inputs.tier))
    return ScaleDecision(
        *sizes, f"load needs {needed[0]} prefill and {needed[1]} decode workers{_unheard(inputs, telemetry)}", remembered
    )


def _unheard(inputs: ScaleInputs, telemetry: TierTelemetry) -> str:
    said = telemetry.unheard and inputs.slo != SloSpec()
    return "; nobody leaves, as no router can be read: whether slo is met is not known" if said else ""


def unusable(telemetry: TierTelemetry | None, interval_s: float, now: float) -> str:
    """Why this telemetry cannot be acted on; empty when it can."""
    if telemetry is None:
        return "no telemetry"
    if telemetry.problem is not None:
        return telemetry.problem
    for name, load in (("prefill", telemetry.prefill), ("decode", telemetry.decode)):
        if load.inflight is None or load.measured_at is None:
            return f"no {name} load"
        if not 0 <= load.inflight < LOAD_LIMIT:
            return f"{name} load is {load.inflight}"
        if not is_fresh(load.measured_at, interval_s, now):
            return f"{name} telemetry is {now - load.measured_at:.0f} s old"
    return ""


def is_fresh(measured_at: float, interval_s: float, now: float) -> bool:
    """Young enough to act on, and not from the future."""
    return 0 <= now - measured_at <= _stale_after_s(interval_s)


def _stale_after_s(interval_s: float) -> float:
    return STALE_INTERVALS * interval_s + STALE_SLACK_S


def _needed(load: RoleLoad, target: int, warm: int, missed: int, few: TooFew | None, now: float) -> int:
    """`missed`: as many as it takes to meet the objective; 0 while it is met. `few`: as many did not, lately."""
    inflight = load.inflight or 0.0
    return max(math.ceil(inflight / target) + warm, missed, kept(few, inflight, now))


def _too_few(
    memory: ScaleMemory, missed: Pair, inputs: ScaleInputs, loads: tuple[RoleLoad, RoleLoad], now: float
) -> tuple[TooFew | None, TooFew | None]:
    goals = [None if goal is None else goal.p99_s for goal in (inputs.slo.ttft, inputs.slo.itl)]
    window_s = inputs.scaling.scale_down_window_s
    prefill, decode = (
        noted(known, Reading(now, size, asked, load.inflight or 0.0, goal_s, window_s, inputs.interval_s))
        for known, asked, size, load, goal_s in zip(memory.too_few, missed, inputs.current, loads, goals, strict=True)
    )
    return prefill, decode


def _missed(inputs: ScaleInputs, telemetry: TierTelemetry) -> tuple[int, int]:
    """How many workers of each role it takes to meet its objective; 0 where it is met."""
    ready, size = inputs.ready or inputs.current, inputs.current
    breached = (
        _breached(inputs.slo.ttft, telemetry.prefill.ttft_p99_s, telemetry),
        _breached(inputs.slo.itl, telemetry.decode.itl_p99_s, telemetry),
    )
    more = not telemetry.unheard
    return (
        size[0] + (more and ready[0] >= size[0]) if breached[0] else 0,
        size[1] + (more and ready[1] >= size[1]) if breached[1] else 0,
    )


def _breached(goal: LatencySpec | None, found: float | None, telemetry: TierTelemetry) -> bool:
    """It is missed, or nobody says that it is not: who may be needed for it stays."""
    return goal is not None and (telemetry.unheard or (found is not None and goal.p99_s < found < LATENCY_LIMIT_S))


def _remember(memory: ScaleMemory, now: float, needed: tuple[int, int], window_s: float, stale_s: float) -> Wants:
    """The last window of wants, plus the newest one before it: that one shows that the window is covered, unless nothing at all
    is known of the window."""
    wants = list(memory.wants)
    if wants and now - wants[-1][0] > window_s + stale_s:
        wants = []
    if wants and window_s > 0 and wants[-1][0] // (step_s := window_s / MEMORY_ENTRIES) == now // step_s:
        at, prefill, decode = wants.pop()
        wants.append((max(at, now), max(prefill, needed[0]), max(decode, needed[1])))
    else:
        wants.append((now, *needed))
    older = [entry for entry in wants if entry[0] <= now - window_s]
    return tuple([*older[-1:], *(entry for entry in wants if entry[0] > now - window_s)])


def _floor(memory: ScaleMemory, role: int, current: int, now: float, inputs: ScaleInputs) -> int:
    """Not below what any moment of the last window needed; without a whole window of data (a restart, somebody's /scale) not
    below `current`, what is asked for today."""
    if not memory.wants or memory.wants[0][0] > now - inputs.scaling.scale_down_window_s:
        return current
    return max((prefill, decode)[role] for _, prefill, decode in memory.wants)
