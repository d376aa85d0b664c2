"""Why pods are not what they should be, for somebody who is called at night: each cause once, with the pods that have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from fleet_api.conditions import rfc3339
from fleet_planner.crashes import is_often
from fleet_planner.replicas import is_overdue
from fleet_planner.roles import Role
from fleet_planner.types import ObservedPod, RouterPod, RouterView

LOOK_AT_IT: Final = "look at podTemplate.schedulerName, and at that scheduler's log"
CAUSES_MOST: Final = 3
NAMES_MOST: Final = 3
SILENT_S: Final = 60.0
"""A pod that is not ready and says nothing is named after so long: most are ready by then, and a status that names each of them
as it comes up would be written once per worker."""
UNSEEN_S: Final = 120.0
"""A scheduler says of each pod within seconds where it goes, or why nowhere; of who leads of several that is known in half a
minute."""
ROUTER_TAKES_S: Final = 30.0
"""A router is ready when it knows a worker that serves: this long after the first one did, it is late."""
ENDED_LATELY_S: Final = 3_600.0
"""One that ends again and again is mostly ready: for so long after its last end it is told of, and not anew with each of them."""


class Named(Protocol):
    """A pod."""

    @property
    def name(self) -> str:
        """Its name."""


Pod = TypeVar("Pod", bound=Named)


def grouped(pods: Sequence[Pod], words: Callable[[Pod], str]) -> str:
    """Each cause once, with the names of the pods that give it; empty causes are none."""
    found: dict[str, list[str]] = {}
    for pod in pods:
        if cause := words(pod):
            found.setdefault(cause, []).append(pod.name)
    told = [f"{_named(names)}: {cause}" for cause, names in found.items()]
    more = len(told) - CAUSES_MOST
    return "; ".join(told[:CAUSES_MOST]) + (f"; and {more} other causes" if more > 0 else "")


def unready(pods: Sequence[ObservedPod], now: float) -> str:
    """Why workers are not ready; one that says nothing for a minute is named with since when and where."""
    return grouped(pods, lambda pod: _why(pod, now))


def stuck(pods: Sequence[ObservedPod], now: float) -> str:
    """Workers that should have been gone for long, behind a semicolon; empty when there are none."""
    found = [pod for pod in pods if is_overdue(pod, now)]
    words = grouped(found, lambda pod: f"should have been gone at {rfc3339(pod.gone_by or 0.0)}, and is there still{_on(pod)}")
    return f"; {words}" if words else ""


def unready_too_long(pods: Sequence[ObservedPod], deadline_s: float, now: float) -> bool:
    """Whether one of them says nothing for longer than a revision may take to move, and no scheduler or queue says it."""
    own = (pod.unready_since for pod in pods if pod.node is not None or not (pod.unschedulable or pod.gated))
    return any(since is not None and now - since > deadline_s for since in own)


def unseen(pods: Sequence[ObservedPod], now: float) -> list[ObservedPod]:
    """Those without a node of which no scheduler says anything: none of that name runs, or it hangs."""
    waiting = [pod for pod in pods if pod.node is None and pod.phase == "Pending" and not (pod.unschedulable or pod.gated)]
    return [pod for pod in waiting if not (pod.message or pod.terminating) and now - pod.created_at >= UNSEEN_S]


def router_begins(router: RouterView | None, pods: Sequence[ObservedPod], now: float) -> bool:
    """Whether routers have had no time yet to notice that workers serve, and say nothing that explains more."""
    since: dict[tuple[str, Role], float] = {}
    for pod in pods:
        if pod.ready and pod.ready_since is not None:
            since[pod.tier, pod.role] = min(pod.ready_since, since.get((pod.tier, pod.role), pod.ready_since))
    young = bool(since) and now - max(since.values()) < ROUTER_TAKES_S
    return young and (router is None or not router.message)


def router_words(router: RouterView | None) -> str:
    """Why no router is ready, behind a colon; one that says nothing is named."""
    if router is None or not (router.message or router.silent):
        return ""
    beside = next((pod.beside for pod in router.pods if pod.name == router.silent), "")
    why = f"answers, and its pod is not ready: {beside}" if beside else "runs and does not become ready: look at its log"
    return f": {router.message or f'{router.silent} {why}'}"


def routers_failing(router: RouterView, deadline_s: float, now: float) -> str:
    """Routers that fail while others serve, and why there are no more; empty when all are well, or only begin."""
    words = grouped(router.pods, lambda pod: _router_fails(pod, deadline_s, now))
    return "; ".join(part for part in (words, router.refused) if part)


def _router_fails(pod: RouterPod, deadline_s: float, now: float) -> str:
    again = f" ({pod.restarts} restarts)" if pod.restarts > 1 else ""
    if not pod.ready and pod.message:
        return pod.message + again
    lately = pod.ended_at is not None and abs(now - pod.ended_at) < ENDED_LATELY_S
    if lately and is_often(pod.restarts, pod.created_at, now):
        return (pod.message or "ends again and again") + again
    if pod.pending and now - pod.created_at > deadline_s:  # a Secret or a volume that is not there: nobody says so but events
        return f"not started since {rfc3339(pod.created_at)}: look at its events"
    return ""


def _why(pod: ObservedPod, now: float) -> str:
    again = f" ({pod.restarts} restarts)" if pod.restarts > 1 else ""
    if pod.message:
        return pod.message + again
    if pod.unready_since is None or (now - pod.unready_since < SILENT_S and not pod.silent):
        return ""
    if pod.node is None:
        return f"no node since {rfc3339(pod.unready_since)}, and no scheduler says why: {LOOK_AT_IT}"
    if pod.beside:
        return f"answers, and its pod is not ready since {rfc3339(pod.unready_since)}{_on(pod)}: {pod.beside}"
    what = "was ready, and does not answer" if pod.silent else "not ready"
    return f"{what} since {rfc3339(pod.unready_since)}{_on(pod)}{again}: look at its log"


def _on(pod: ObservedPod) -> str:
    return f" on node {pod.node}" if pod.node else ""


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMES_MOST
    return ", ".join(names[:NAMES_MOST]) + (f" and {more} more" if more > 0 else "")
