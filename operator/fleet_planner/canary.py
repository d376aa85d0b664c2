"""Which revision a tier goes to, how large its canary is, and whether it is good. Pure: everything remembered comes in as the
status that the last pass wrote, and goes out the same way.

A canary step lasts at least `interval` from the moment at which its workers serve, and until enough requests were answered; no
data never passes a step. Every reading is judged: the first breach rolls back, at once. Workers that crash again and again are
one, whether or not they have requests (crashes.py). A revision that was rolled back is not tried again; any other revision is,
and until that begins the status says what was rolled back.
Only what routers counted since its rollout began is its own.
A paused canary stays one, with its share, and is judged, whichever third revision the spec asks for meanwhile.
A rollout does not end because all old workers are lost at once, neither before its canary is judged nor while it is paused.
The deadline for progress runs while workers are on their way: it begins anew when a step was passed and when a paused rollout
goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from fleet_api.conditions import rfc3339
from fleet_api.v1alpha1.rollout import AnalysisSpec, CanarySpec, RolloutSpec, parse_factor
from fleet_api.v1alpha1.status import RolloutStatus
from fleet_planner.ratio import Pair, largest, smallest
from fleet_planner.rollout import Canary, Group, Limits, auto_surge, covers, smaller, why_stuck
from fleet_planner.types import RevisionLoad


@dataclass(frozen=True, slots=True)
class Course:
    """Where the tier goes now."""

    target: str
    canary: Canary | None
    status: RolloutStatus
    rolled_back: str = ""
    """Why this pass rolled back; empty when it did not."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What the course depends on besides the spec and the last status."""

    wanted: str
    """The revision of the present spec."""
    groups: Mapping[str, Group]
    loads: Mapping[str, RevisionLoad]
    want: Pair
    limits: Limits
    now: float
    crashing: Mapping[str, str] = field(default_factory=dict)
    """By revision: how its workers crash, in words; those whose workers do not are absent."""
    unready: Mapping[str, str] = field(default_factory=dict)
    """By revision, while there are several: why workers are not ready, in words; may be empty."""
    planned: frozenset[str] = frozenset()
    """Revisions that were to have workers when they were planned last."""
    awaited: str = ""
    """The revision of the present spec where that waits for its model, and `wanted` is the one before it."""


def plot_course(spec: RolloutSpec, before: RolloutStatus | None, scene: Scene) -> Course:
    """The revision to go to, and the canary's bounds while it is judged."""
    known = before or RolloutStatus(stable=_present(scene))
    target = known.stable if scene.wanted == known.failed and known.stable in scene.groups else scene.wanted
    if spec.paused and known.stable in scene.groups and not any(larger_of(scene.groups.get(target, Group(target)))):
        target = known.target if _is_canary(spec, known, scene) else known.stable  # a paused fleet begins nothing, and ends none
    asked = scene.awaited or scene.wanted
    waits = target == known.stable != asked  # a paused fleet goes back all the same, whatever it asks for next
    failed = known.failed if scene.wanted == known.failed or waits else ""
    others = [group for name, group in scene.groups.items() if name != target and any(larger_of(group))]
    if not others and not _is_held_open(spec, known, target, scene):
        # at zero nothing is wanted, and a revision of which nothing ever ran was not rolled out to its end; one that serves alone
        # is what to return to, whole or not: it may lack nodes for as long as it lives
        serves = any(scene.want) and any(largest(scene.groups.get(target, Group(target)).ready, *scene.limits.ratio))
        stable = target if serves or not known.stable else known.stable
        previous = known.stable if known.stable not in ("", stable) else known.previous
        failed = failed if failed != stable else ""  # it serves: its old revision is lost, or somebody wrote it there
        message = known.message if failed else ""
        return Course(target, None, RolloutStatus(stable=stable, previous=previous, failed=failed, message=message))
    begun = known if known.target == target else _begun(known, target, failed)
    status = _progress(_counted(begun, scene), scene, target, failed, paused=spec.paused)
    if spec.canary is None or target == known.stable:
        told = {} if failed else {"message": scene.crashing.get(target, "")}
        return Course(target, None, status.model_copy(update={"percent": None, **told}))
    return _judged(spec, spec.canary, status, scene)


def _begun(known: RolloutStatus, target: str, failed: str) -> RolloutStatus:
    """Why a revision was rolled back stays known as long as that is."""
    return RolloutStatus(stable=known.stable, previous=known.previous, target=target, message=known.message if failed else "")


def _is_canary(spec: RolloutSpec, known: RolloutStatus, scene: Scene) -> bool:
    """The rollout that goes on is still judged, and has workers that answer."""
    judged = spec.canary is not None and known.step < len(spec.canary.steps) and known.target not in ("", known.stable)
    return judged and any(larger_of(scene.groups.get(known.target, Group(known.target))))


def _is_held_open(spec: RolloutSpec, known: RolloutStatus, target: str, scene: Scene) -> bool:
    """All old workers are gone at once, and are to come back: the new ones are still a canary, or the rollout is paused."""
    if known.target != target or not any(scene.want):
        return False
    canary = spec.canary is not None and known.step < len(spec.canary.steps) and known.stable != target
    return (canary and known.stable in scene.groups) or (spec.paused and bool(scene.planned - {target} & scene.groups.keys()))


def overdue(spec: RolloutSpec, status: RolloutStatus, now: float) -> bool:
    """Nothing moved for longer than the deadline. A canary that serves and waits for requests is not late."""
    return (
        bool(status.target)
        and not spec.paused
        and not status.step_since
        and now - _at(status.progress_since, now) > spec.progress_deadline_s
    )


def larger_of(group: Group) -> Pair:
    """Workers that exist in any way."""
    return max(group.alive[0], group.ready[0]), max(group.alive[1], group.ready[1])


def _present(scene: Scene) -> str:
    """Without any memory: the revision of which most is ready, else the wanted one."""
    found = sorted(scene.groups.values(), key=lambda group: (-min(group.ready), group.revision))
    return found[0].revision if found and any(found[0].ready) else ""


def _counted(status: RolloutStatus, scene: Scene) -> RolloutStatus:
    """With what was counted of the target before it has any worker: not in the first pass alone, in which nobody may be able to
    say. Where it has workers by then, its beginning is not known any more; of one that has served, all counts."""
    load, there = scene.loads.get(status.target), any(larger_of(scene.groups.get(status.target, Group(status.target))))
    if load is None or (load.partial and load.total_requests < (status.requests_before or 0)):
        return status  # a router that cannot be read now is there again in a moment
    if there or status.step or status.step_since:
        return _less_counted(status, load)
    return _with_before(status, load.total_requests, load.total_errors)


def _less_counted(status: RolloutStatus, load: RevisionLoad) -> RolloutStatus:
    """Routers that started anew, or are gone, took what they had counted with them; of the others it is not known what they had
    counted before. From here on it counts, and what the window has."""
    if load.total_requests >= (status.requests_before or 0):
        return status
    return _with_before(status, load.total_requests - load.requests, load.total_errors - load.errors)


def _with_before(status: RolloutStatus, requests: float, errors: float) -> RolloutStatus:
    before = {"requests_before": max(0, round(requests)) or None, "errors_before": max(0, round(errors)) or None}
    return status.model_copy(update=before)


def _since(load: RevisionLoad | None, status: RolloutStatus) -> RevisionLoad | None:
    """What routers counted of it since its rollout began: a revision that one returns to, or tries again, has served before. The
    window may reach further back. With less than before some router cannot be read: of the others the window alone is known."""
    before, failed = status.requests_before or 0, status.errors_before or 0
    if load is None or not before:
        return load
    if load.total_requests < before:
        return replace(load, total_requests=load.requests, total_errors=load.errors)
    requests, errors = load.total_requests - before, max(0.0, load.total_errors - failed)
    return replace(
        load, requests=min(load.requests, requests), errors=min(load.errors, errors), total_requests=requests, total_errors=errors
    )


def _progress(status: RolloutStatus, scene: Scene, target: str, failed: str, *, paused: bool = False) -> RolloutStatus:
    """The counts, and since when they are so: while it is paused nothing is late, and its deadline begins when it goes on."""
    new = scene.groups.get(target, Group(target))
    old = [group.alive for name, group in scene.groups.items() if name != target]
    left = sum(pair[0] for pair in old), sum(pair[1] for pair in old)
    text = f"new {new.ready[0]}+{new.ready[1]} ready of {scene.want[0]}+{scene.want[1]}, old {left[0]}+{left[1]}"
    since = status.progress_since if text == status.progress and status.progress_since else rfc3339(scene.now)
    since = "" if paused else since
    message = status.message if failed else ""
    return status.model_copy(update={"progress": text, "progress_since": since, "failed": failed, "message": message})


def _judged(spec: RolloutSpec, canary: CanarySpec, status: RolloutStatus, scene: Scene) -> Course:
    """One look at the new revision: back, on, or wait."""
    new, stable = _since(scene.loads.get(status.target), status), scene.loads.get(status.stable)
    breach = _breach(canary.analysis, new, stable) or scene.crashing.get(status.target, "")
    if not breach and overdue(spec, status, scene.now):
        why = scene.unready.get(status.target, "") or _no_room(scene, status.target)
        breach = f"no progress for {spec.progress_deadline}: {status.progress}{'; ' + why if why else ''}"
    if breach and status.stable in scene.groups:
        message = f"revision {status.target} was rolled back: {breach}"
        kept = {"stable": status.stable, "previous": status.previous}
        back = RolloutStatus(**kept, target=status.stable, failed=status.target, message=message)
        return Course(
            status.stable, None, _progress(back, scene, status.stable, status.target, paused=spec.paused), rolled_back=message
        )
    if status.step >= len(canary.steps):
        return Course(status.target, None, status.model_copy(update={"percent": None, "message": ""}))
    size = _size(canary.steps[status.step], scene)
    if not covers(scene.groups.get(status.target, Group("")).ready, size):
        return Course(status.target, Canary(size), _waiting(status, canary, "its workers are coming", ""))
    since = status.step_since or rfc3339(scene.now)
    if scene.now - _at(since, scene.now) < canary.interval_s or spec.paused:
        return Course(status.target, Canary(size), _waiting(status, canary, f"step lasts {canary.interval}", since))
    if new is None or new.total_requests < canary.analysis.min_requests:
        seen = 0 if new is None else round(new.total_requests)
        text = f"{seen} of {canary.analysis.min_requests} requests were answered"
        return Course(status.target, Canary(size), _waiting(status, canary, text, since))
    passed = {"step": status.step + 1, "step_since": "", "progress_since": rfc3339(scene.now)}
    return _judged(spec, canary, status.model_copy(update=passed), scene)


def _no_room(scene: Scene, target: str) -> str:
    """Why not one worker of it was made, in words; empty where one was, or where limits and quotas let it."""
    new, surge = scene.groups.get(target, Group(target)), scene.limits.surge_gpus
    if any(larger_of(new)):
        return ""
    short = surge is not None and auto_surge(scene.want, scene.limits, None) > surge
    return why_stuck(scene.want, new, scene.limits) if short or new.refused else ""


def _waiting(status: RolloutStatus, canary: CanarySpec, text: str, since: str) -> RolloutStatus:
    """The same step; its share of requests only once its workers serve."""
    percent = canary.steps[status.step]
    serving = percent if since else (canary.steps[status.step - 1] if status.step else 0)
    update = {"percent": serving, "step_since": since, "message": f"canary at {percent} %: {text}"}
    return status.model_copy(update=update)


def _size(percent: int, scene: Scene) -> Pair:
    """Workers that carry the share: the smallest pair inside the ratio, never more than the whole tier."""
    need = -(-scene.want[0] * percent // 100), -(-scene.want[1] * percent // 100)
    return smaller(smallest(need, scene.limits.low, scene.limits.high), scene.want)


def _breach(analysis: AnalysisSpec, new: RevisionLoad | None, stable: RevisionLoad | None) -> str:
    """What is wrong with the new revision; empty when nothing is, or when too little is known."""
    if new is None:
        return ""
    for requests, errors in ((new.requests, new.errors), (new.total_requests, new.total_errors)):
        if requests >= analysis.min_requests and errors > requests * analysis.error_rate:
            return f"{errors:.0f} of {requests:.0f} requests failed, {analysis.error_rate:.2%} may"
    if stable is None or min(_timed(new), _timed(stable)) < analysis.min_requests:
        return ""  # p99 of a few requests is the slowest of them: the old revision's is no measure either
    for name, factor, mine, theirs in (
        ("TTFT", analysis.ttft_p99, new.ttft_p99_s, stable.ttft_p99_s),
        ("ITL", analysis.itl_p99, new.itl_p99_s, stable.itl_p99_s),
    ):
        if mine is not None and theirs is not None and theirs > 0 and mine > theirs * parse_factor(factor):
            return f"{name} p99 is {mine:.3f} s, {mine / theirs:.2f}x of the old revision's {theirs:.3f} s; {factor} is allowed"
    return ""


def _timed(load: RevisionLoad) -> float:
    """Requests of the window whose first token was seen: those of streams."""
    return load.requests if load.streams is None else min(load.requests, load.streams)


def _at(text: str, default: float) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else default
