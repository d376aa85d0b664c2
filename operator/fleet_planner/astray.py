"""Workers whose agent says another role than their pod's label, though no flip of them is under way. Pure.

A flip is judged while it lasts, and the two can part afterwards: a container that ended between the proof and the new label began
again in the old role, somebody took the mark of a flip off a pod, or edited a label just when its container began anew. Such a
worker is told to routers by its label, and cannot do what they send it for.

Telemetry has the role that each agent says. Whoever says another one than its label is doubtful, and is asked itself: telemetry
is as old as its last reading. Its own word then holds until it says otherwise. An agent that says no role is not judged.

As long as it is astray it does not serve, and routers drain it. It is told its role once more, as a flip is (`flip.py`): when
routers know, proven by tokens, and deleted when its time is up. One at a time in a tier, and none for a while after one that
failed. Whoever is astray again afterwards is deleted: it was told once, and need not be told for ever.
"""

from __future__ import annotations

from dataclasses import replace

from fleet_api.v1alpha1.status import FlipStatus
from fleet_planner.flip import Settled
from fleet_planner.replicas import ENDED
from fleet_planner.types import FlipReport, FlipWanted, Observed, ObservedPod, PodGone

SERVING = "Serving"
"""The phase of an agent that works in the role that it says: in any other one it is not ready, and may still change."""


def doubtful(observed: Observed) -> frozenset[str]:
    """Uids of the workers that are to be asked which role they have."""
    known = {name: role for tier in observed.telemetry.values() for name, role in tier.astray.items()}
    if not known and not observed.flips:
        return frozenset()
    asked = [pod for pod in observed.pods if pod.flipping is None and not pod.terminating and pod.ip is not None]
    return frozenset(
        pod.uid for pod in asked if known.get(pod.name, pod.role) != pod.role or _is_astray(pod, observed.flips.get(pod.uid))
    )


def strayed(observed: Observed) -> Observed:
    """Those that are astray as workers that are not ready, with the reason in words."""
    if not observed.flips and all([pod.flipping != pod.role for pod in observed.pods]):
        return observed
    found = {pod.uid: words for pod in observed.pods if (words := _words(pod, observed.flips.get(pod.uid)))}
    if not found:
        return observed
    pods = [_not_serving(pod, found[pod.uid]) if pod.uid in found else pod for pod in observed.pods]
    return replace(observed, pods=tuple(pods))


def told_again(settled: Settled, failed: FlipStatus | None, now: float) -> Settled:
    """The next one is told its role, unless one of the tier is on its way or `failed` a moment ago."""
    waiting = [pod for pod in settled.pods if pod.astray and pod.flipping is None and _stays(pod)]
    if not waiting or failed is not None or any(pod.flipping is not None for pod in settled.pods):
        return settled
    pod = min(waiting, key=lambda one: one.name)
    if not pod.righted:
        return replace(settled, told=(FlipWanted(pod.name, pod.uid, pod.role, now),))
    why = f"{pod.astray}, again after it was told its role"
    pods = tuple(replace(one, terminating=True) if one.uid == pod.uid else one for one in settled.pods)
    gone = (*settled.gone, PodGone(pod.name, pod.uid, why))
    return replace(settled, pods=pods, gone=gone, failure=f"{pod.name}: {why}")


def _is_astray(pod: ObservedPod, report: FlipReport | None) -> bool:
    return report is not None and report.role not in (None, pod.role) and report.phase == SERVING


def _words(pod: ObservedPod, report: FlipReport | None) -> str:
    """Why a worker is not believed; empty when it is. One that is told its own role is astray until it was proven."""
    is_told = pod.flipping == pod.role
    if not is_told and not (pod.flipping is None and _is_astray(pod, report)):
        return ""
    says = report.role if report is not None else None
    known = f"a {pod.role} worker whose agent says {says}" if says not in (None, pod.role) else f"a {pod.role} worker"
    return f"{known}, and is told its role again" if is_told else known


def _not_serving(pod: ObservedPod, words: str) -> ObservedPod:
    return replace(pod, ready=False, astray=words, message=pod.message or words)


def _stays(pod: ObservedPod) -> bool:
    return not pod.terminating and pod.phase not in ENDED
