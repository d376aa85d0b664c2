"""The worker's life as a pure state machine: what each probe answers in each phase.

Preparing (model) → Warming (engine starts and gives a first token) → Serving → Draining; Failed ends the process. A role flip
goes from Serving through FlippingRole back to Serving. The router never sees the phase directly: it follows from readiness.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["Preparing", "Warming", "Serving", "FlippingRole", "Draining", "Failed"]

ENGINE_SILENCE_S = 10.0
"""Seconds of failing engine health checks after which /live turns red: three kubelet probes at the default period."""
ENGINE_START_S = 1_800.0
"""An engine that is started for another role has so long to answer, as a new worker's has: large models take half an hour."""


@dataclass(frozen=True, slots=True)
class Life:
    """Everything the probes need to know."""

    phase: Phase = "Preparing"
    detail: str = ""
    engine_pid: int | None = None
    engine_healthy: bool = False
    unhealthy_since: float | None = None
    draining_since: float | None = None
    epoch: int = 0
    """Grows with every change of the role."""
    flip_problem: str = ""
    """Why the last change of the role did not come to its end."""
    anew_since: float | None = None
    """Since when its engine is stopped and started for another role: meanwhile silence is no fault."""


def noted(life: Life, detail: str) -> Life:
    """What the agent is busy with, for a person who reads /state."""
    return replace(life, detail=detail)


def engine_started(life: Life, pid: int | None) -> Life:
    """The engine process exists, but does not answer yet. None: this pod has none. A drain, or another role,
    that was asked for stays."""
    if life.phase in ("Draining", "FlippingRole"):
        return replace(life, engine_pid=pid)
    return replace(life, phase="Warming", engine_pid=pid, detail="engine starting")


def engine_checked(life: Life, healthy: bool, now: float) -> Life:
    """One health check of the engine came back."""
    if healthy:
        phase: Phase = "Serving" if life.phase == "Warming" else life.phase
        detail = "" if life.phase == "Warming" else life.detail
        return replace(life, phase=phase, detail=detail, engine_healthy=True, unhealthy_since=None)
    if life.anew_since is not None and now - life.anew_since < ENGINE_START_S:
        return replace(life, engine_healthy=False, unhealthy_since=None)
    since = life.unhealthy_since if life.unhealthy_since is not None else now
    return replace(life, engine_healthy=False, unhealthy_since=since)


def drain_asked(life: Life, now: float) -> Life:
    """Drain begins once; asking again changes nothing. With an engine that is gone there is nothing to wait for."""
    if life.phase in ("Draining", "Failed"):
        return life
    return replace(life, phase="Draining", draining_since=now, detail="waiting for requests and leases")


def flip_asked(life: Life) -> Life:
    """The worker empties itself to take the other role: not ready at once."""
    return replace(life, phase="FlippingRole", detail="waiting for requests and leases of the old role", flip_problem="")


def engine_anew(life: Life, now: float) -> Life:
    """The worker is empty, and its engine is started once more, for another role."""
    return replace(life, engine_pid=None, engine_healthy=False, unhealthy_since=None, anew_since=now)


def flipped(life: Life) -> Life:
    """It has the other role, and serves; unless it drains by now."""
    return replace(returned(life), epoch=life.epoch + 1) if life.phase == "FlippingRole" else life


def returned(life: Life) -> Life:
    """It keeps its role after a change that failed, and serves; unless it drains by now."""
    return replace(life, phase="Serving", detail="", anew_since=None) if life.phase == "FlippingRole" else life


def flip_failed(life: Life, problem: str) -> Life:
    """It stays as it is, not ready: whoever asked decides. Asking again, for either role, begins anew. One whose engine
    is gone turns /live red, and begins again as its label says."""
    return replace(life, detail=problem, flip_problem=problem, anew_since=None)


def failed(life: Life, detail: str) -> Life:
    """The engine is gone."""
    return replace(life, phase="Failed", detail=detail, engine_healthy=False)


def is_started(life: Life) -> bool:
    """startupProbe: the engine answered at least once. Before, no request came: there is nothing to drain."""
    return life.phase in ("Serving", "FlippingRole", "Draining")


def is_ready(life: Life) -> bool:
    """readinessProbe: new requests are welcome."""
    return life.phase == "Serving" and life.engine_healthy


def is_live(life: Life, now: float) -> bool:
    """livenessProbe: red when the engine is gone or silent for too long after it had started."""
    if life.phase == "Failed":
        return False
    if life.phase in ("Preparing", "Warming") or life.unhealthy_since is None:
        return True
    return now - life.unhealthy_since < ENGINE_SILENCE_S


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine still holds; None = the engine did not say, which is never zero."""

    running: int | None
    waiting: int | None
    leases: int | None
    ended: int | None = None
    """Requests that ended since its start: one that comes and goes between two looks is in no other number."""
    kv_share: float | None = None
    """Of vLLM's KV cache, what requests hold, 0 to 1. Where none runs or waits that is what nobody has read yet."""
    moved: tuple[float, ...] | None = None
    """vLLM: numbers of which one changes with each step in which a request gets on."""
    open: int | None = None
    """vLLM: what came in and is not answered to the end. Its other numbers are as of its last step, and one may last."""
    leaving: bool = False
    """Torch: a SIGTERM came to the engine itself, and it takes nothing new."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Since when nothing has moved in an engine that has running requests."""

    moved: tuple[float, ...] | None = None
    since: float = 0.0


def paced(pace: Pace, load: Load, now: float) -> Pace:
    """After one more look. An engine that runs nothing, has nothing open, or does not say is not still: vLLM's gauge of what runs
    may stay as it was when all of it was aborted (vLLM #22545)."""
    is_still = bool(load.running) and (load.open or 0) > 0 and load.moved is not None and load.moved == pace.moved
    return pace if is_still else Pace(load.moved, now)


def is_stuck(pace: Pace, now: float, most_s: float) -> bool:
    """Requests run, and nothing has moved for too long."""
    return pace.moved is not None and now - pace.since >= most_s


OPEN_S = 120.0
"""vLLM may lose count of who left: an open request with which nothing happens for so long is none."""
NOTICE_S = 2.0
"""Routers hear within a second that a worker drains: what they sent before that must still be served."""


def drain_done(
    load: Load, *, waited_s: float, idle_for_s: float, lease_s: float, has_lease_counter: bool, is_prefill: bool
) -> bool:
    """No request and no unread lease is left, and none can come any more.

    An engine without a lease counter (vLLM) is waited for one whole lease after its last request, on prefill workers only, and
    as long as its cache holds anything: a decode worker with a queue extends the leases of those who wait there.
    """
    if waited_s < NOTICE_S or load.running is None or load.waiting is None or load.running + load.waiting > 0:
        return False
    if has_lease_counter:
        return load.leases == 0
    if load.open is not None and load.open > 0 and idle_for_s < OPEN_S:
        return False
    return not is_prefill or (idle_for_s >= lease_s and not load.kv_share)
