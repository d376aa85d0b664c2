"""Workers whose agent says another role than their pod's label, though no flip of them is under way. Pure.

A flip is judged while it lasts, and the two can part afterwards: a container that ended between the proof and the new label began
again in the old role, somebody took the mark of a flip off a pod, or edited a label just when its container began anew. Such a
worker is told to routers by its label, and cannot do what they send it for.

Telemetry has the role that each agent says. Whoever says another one than its label is doubtful, and is asked itself: telemetry
is as old as its last reading. Its own word then holds until it says otherwise. An agent that says no role is not judged.

As long as it is astray it does not serve, and routers drain it. It is told its role once more, as a flip is (`flip.py`): when
routers know, proven by tokens, and deleted when its time is up. One at a time in a tier, and none for a while after one that
was told in vain (a flip that failed keeps nobody out of service). Whoever is astray again afterwards is deleted: it was told
once, and need not be told for ever.

Flips go one by one, so that workers part from their labels one by one. Where many of a role say another one at once, it is what
they have in common that is wrong, their image or their agent: to take them out would take the role away, and those made in their
place would say the same. So all of them are excused: they serve on, none is told or deleted, and the status says so. So is the
only one of its role, when one was replaced for that already, and the last one that serves, while others take their role again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import FlipStatus
from fleet_planner.flip import Settled, failures, pauses
from fleet_planner.replicas import ENDED
from fleet_planner.roles import Role
from fleet_planner.types import FlipReport, Observed, ObservedPod
from fleet_planner.wanted import FlipWanted, PodGone

SERVING = "Serving"
"""The phase of an agent that works in the role that it says: in any other one it is not ready, and may still change."""
MOST_PERCENT = 25
"""Of the workers of one role in a tier: so many may be astray at once, and one in any case."""
LAST = "no other one serves until those have their role again that were told it"
"""Why one is excused, though not those that were told."""
Place = tuple[str, Role]
"""(tier, role by the label)."""


def doubtful(observed: Observed) -> frozenset[str]:
    """Uids of the workers that are to be asked which role they have."""
    known = {name: role for tier in observed.telemetry.values() for name, role in tier.astray.items()}
    if not known and not observed.flips:
        return frozenset()
    asked = [pod for pod in observed.pods if pod.flipping is None and not pod.terminating and pod.ip is not None]
    return frozenset(
        pod.uid for pod in asked if known.get(pod.name, pod.role) != pod.role or _is_astray(pod, observed.flips.get(pod.uid))
    )


def strayed(fleet: InferenceFleet, observed: Observed) -> Observed:
    """Those that are astray as workers that are not ready, with the reason in words; excused ones as told nothing."""
    if not observed.flips and all([pod.flipping != pod.role for pod in observed.pods]):
        return observed
    found = {pod.uid: words for pod in observed.pods if (words := _words(pod, observed.flips.get(pod.uid)))}
    if not found:
        return observed
    excused = _excused(fleet, observed)
    pods = [_judged(pod, found[pod.uid], excused) if pod.uid in found else pod for pod in observed.pods]
    return replace(observed, pods=tuple(pods))


def told_again(settled: Settled, failed: FlipStatus | None, now: float) -> Settled:
    """The next one is told its role, unless one of the tier is on its way or `failed` a moment ago. Who was told, and is excused
    now, is told so."""
    marked = [pod for pod in settled.pods if pod.excused and pod.flip_since and _stays(pod)]
    settled = replace(settled, given_back=(*settled.given_back, *(FlipWanted(pod.name, pod.uid, None) for pod in marked)))
    waiting = [pod for pod in settled.pods if pod.astray and pod.flipping is None and _stays(pod)]
    vain = failed is not None and bool(failed.role) and pauses(failed, now)
    if not waiting or vain or any(pod.flipping is not None and _stays(pod) for pod in settled.pods):
        return settled
    pod = min(waiting, key=lambda one: one.name)
    if not pod.righted:
        return replace(settled, told=(FlipWanted(pod.name, pod.uid, pod.role, now),))
    why = f"{pod.astray}, again after it was told its role"
    pods = tuple(replace(one, terminating=True) if one.uid == pod.uid else one for one in settled.pods)
    gone = (*settled.gone, PodGone(pod.name, pod.uid, why))
    return replace(settled, pods=pods, gone=gone, failure=f"{pod.name}: {why}", failed_role=pod.role)


def _is_astray(pod: ObservedPod, report: FlipReport | None) -> bool:
    return report is not None and report.role not in (None, pod.role) and report.phase == SERVING


def _words(pod: ObservedPod, report: FlipReport | None) -> str:
    """Why a worker is not believed; empty when it is. One that is told its own role is astray until it was proven."""
    is_told = pod.flipping == pod.role
    if not is_told and not (pod.flipping is None and _is_astray(pod, report)):
        return ""
    says = report.role if report is not None else None
    return f"a {pod.role} worker whose agent says {says}" if says not in (None, pod.role) else f"a {pod.role} worker"


def _excused(fleet: InferenceFleet, observed: Observed) -> Mapping[Place, str]:
    """Where too many are astray at once, and why that is too many, in words."""
    heard, astray, told = dict[Place, int](), dict[Place, int](), set[Place]()
    for pod in observed.pods:
        if pod.member > 0 or not _stays(pod) or pod.flipping not in (None, pod.role):
            continue
        place, says_so = (pod.tier, pod.role), _is_astray(pod, observed.flips.get(pod.uid))
        heard[place] = heard.get(place, 0) + (pod.ready or says_so)
        astray[place] = astray.get(place, 0) + says_so
        told |= {place} if pod.flipping is not None and not says_so else set()
    found = {place: _too_many(fleet, observed, place, count, heard[place]) for place, count in astray.items() if count}
    lasts = {place: LAST for place in told if 0 < astray[place] == heard[place]}
    return lasts | {place: words for place, words in found.items() if words}


def _too_many(fleet: InferenceFleet, observed: Observed, place: Place, astray: int, heard: int) -> str:
    """Empty: they are not."""
    tier, role = place
    if astray > max(1, MOST_PERCENT * heard // 100):
        return f"{astray} of {heard} say so at once"
    replaced = any(one is not None and one.role == role for one in failures(fleet, tier, observed))
    return "no other one is there, and one was replaced for it already" if astray == heard and replaced else ""


def _judged(pod: ObservedPod, words: str, excused: Mapping[Place, str]) -> ObservedPod:
    why = excused.get((pod.tier, pod.role))
    if why is not None and not (why is LAST and pod.flipping is not None):
        return replace(pod, flipping=None, excused=f"{words}, and {why}")
    words = words if pod.flipping is None else f"{words}, and is told its role again"
    return replace(pod, ready=False, astray=words, message=pod.message or words)


def _stays(pod: ObservedPod) -> bool:
    return not pod.terminating and pod.phase not in ENDED
