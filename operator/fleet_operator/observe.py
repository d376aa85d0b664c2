"""Kubernetes dicts → what the planner sees. Pure and tolerant: a field that is not there yet is its own value, never a guess."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

from fleet_operator import pod_words
from fleet_operator.cluster.interface import Object
from fleet_operator.leftovers import ENDED
from fleet_operator.names import (
    COMPAT,
    FETCH,
    FETCH_CONTAINER,
    FETCH_NODE,
    FLIP,
    FLIP_SINCE,
    FLIPPED_AT,
    GROUP_UID,
    MEMBER,
    ORDINAL,
    OWN_CONTAINERS,
    PLANNED,
    REVISION,
    RIGHTED_AT,
    ROLE,
    SIZE,
    TIER,
    WISH,
)
from fleet_operator.pool_sizes import Sizes, written_on
from fleet_operator.render.worker import GRACE_SLACK_S
from fleet_planner.roles import ROLES, Role
from fleet_planner.types import AdapterSeen, FetchPod, ObservedPod, ObservedPool, RouterPod, RouterView
from fleet_wire import endpoints
from fleet_wire.endpoints import ENDPOINTS_KEY
from fleet_wire.unreadable import UNREADABLE

COUNT_DIGITS = 6
TIMES = 8_192
"""Texts of times that are remembered."""
WORKER = "worker"
"""Name of the container that is the worker."""
NO_NODE = frozenset({"Unschedulable", "SchedulerError"})
"""Reasons of a pod that a scheduler gave no node; SchedulerError: it failed itself, or cannot read what the pod asks for."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is known of pods from other objects."""

    serving: frozenset[str] = frozenset()
    """Uids that the routers are told to use."""
    told: frozenset[str] = frozenset()
    """Uids that they are told of at all, but for those that drain."""
    leaving: Mapping[str, str] = field(default_factory=dict)
    """Node name → why it goes away."""
    sick: Mapping[str, str] = field(default_factory=dict)
    """Node name → what is wrong with its devices."""
    accused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Node name → conditions that call its devices bad."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Pod name → requests that it runs."""


Near = tuple[str, str, tuple[str, ...], bool, bool, float | None]
"""What `Surroundings` say of one pod: why its node goes away, what is wrong with it, what conditions call it bad, whether it
serves, whether routers know it, its load."""
PodsSeen = dict[str, tuple[Object, Near, ObservedPod]]
"""By name: what pods were last seen as, and from what. The objects of the cache never change in place."""


def observe_pods(
    pods: Iterable[Object], around: Surroundings = Surroundings(), before: PodsSeen | None = None
) -> tuple[ObservedPod, ...]:
    """Worker pods (by their labels), in name order. `before` is used where nothing changed, and then says what is seen now."""
    mine = [pod for pod in pods if pod["metadata"].get("labels", {}).get(ROLE) in ROLES]
    seen = {pod["metadata"]["name"]: _seen(pod, around, before or {}) for pod in mine}
    if before is not None:
        before.clear()
        before.update(seen)
    return tuple([found for _, (_, _, found) in sorted(seen.items())])


def _seen(pod: Object, around: Surroundings, before: PodsSeen) -> tuple[Object, Near, ObservedPod]:
    meta, node = pod["metadata"], pod["spec"].get("nodeName") or ""
    name, uid = meta["name"], meta["uid"]
    told = uid in around.serving, uid in around.told
    near = *_of_node(node, around), *told, around.busy.get(name)
    known = before.get(name)
    return known if known is not None and known[0] is pod and known[1] == near else (pod, near, _pod(pod, *near))


def _of_node(node: str, around: Surroundings) -> tuple[str, str, tuple[str, ...]]:
    return around.leaving.get(node, ""), around.sick.get(node, ""), around.accused.get(node, ())


@dataclass(frozen=True, slots=True)
class Published:
    """What the routers' ConfigMap says; nothing when it cannot be read."""

    documents: Object | None = None
    """Which one: objects of the cache never change in place."""
    serving: frozenset[str] = frozenset()
    """Uids of the workers that it lets serve."""
    told: frozenset[str] = frozenset()
    """Uids of those that it names as serving, held or absent."""
    named: frozenset[str] | None = None
    """Uids of all that it names, also as draining; None: it cannot be read."""
    adapters: Mapping[str, tuple[AdapterSeen, ...]] = field(default_factory=dict)
    """By uid: adapters that the routers were told of. It holds until the workers themselves have been heard: an operator that
    starts again takes nothing away."""


def observe_published(documents: Object | None, before: Published = Published()) -> Published:
    """`before` where it is about this very object."""
    if documents is before.documents:
        return before
    found = _document(documents)
    if found is None:
        return Published(documents)
    adapters = {
        worker.uid: tuple(AdapterSeen(name, digest=digest) for name, digest in worker.adapters.items())
        for worker in found.workers
        if worker.adapters
    }
    serving = frozenset(worker.uid for worker in found.workers if worker.state == "serving")
    told = frozenset(one.uid for one in found.absent).union(one.uid for one in found.workers if one.state != "draining")
    return Published(documents, serving, told, told.union(worker.uid for worker in found.workers), adapters)


def workers_told(documents: Object | None) -> tuple[endpoints.Endpoint, ...] | None:
    """What the routers' ConfigMap says; None when it is missing or cannot be read: an edit, which is about to be undone."""
    found = _document(documents)
    return None if found is None else found.workers


def _document(documents: Object | None) -> endpoints.Endpoints | None:
    text = ((documents or {}).get("data") or {}).get(ENDPOINTS_KEY)
    try:
        return endpoints.decode(text) if text else None
    except UNREADABLE:  # no UTF-8, too deep
        return None


def observe_fetching(
    pods: Iterable[Object], node_made_at: Callable[[str], float | None] = lambda name: None
) -> tuple[FetchPod, ...]:
    """Pods that fetch the model ahead, in order of names. `node_made_at`: None where that is not known. Both times are the API
    server's: they are compared here, before any is moved to our clock."""
    found = []
    for pod in pods:
        meta, status = pod["metadata"], pod.get("status") or {}
        labels = meta.get("labels") or {}
        key = labels.get(FETCH)
        if key is not None and labels.get(ROLE) not in ROLES:
            node, made_at = (meta.get("annotations") or {}).get(FETCH_NODE, ""), _time(meta.get("creationTimestamp")) or 0.0
            found.append(
                FetchPod(
                    name=meta["name"],
                    uid=meta["uid"],
                    node=node,
                    key=key,
                    phase=_phase_of_fetch(status),
                    created_at=made_at,
                    message=str(status.get("message") or pod_words.message(*_unready(status), {})),
                    terminating="deletionTimestamp" in meta,
                    placed=bool((pod.get("spec") or {}).get("nodeName")),
                    outlived=made_at < (node_made_at(node) or 0.0),
                )
            )
    return tuple(sorted(found, key=lambda pod: pod.name))


def _phase_of_fetch(status: Mapping[str, Any]) -> str:
    """It is over when its own container ended: one that a mesh put beside it runs on, and its pod with it."""
    own: Mapping[str, Any] = next(
        (one for one in status.get("containerStatuses") or [] if one.get("name") == FETCH_CONTAINER), {}
    )
    ended = (own.get("state") or {}).get("terminated")
    if ended is None:
        return str(status.get("phase", "Pending"))
    return "Failed" if ended.get("exitCode", 0) else "Succeeded"


Containers = list[Mapping[str, Any]]


def _containers(status: Mapping[str, Any]) -> tuple[Containers, Containers]:
    """A pod's own, and those of others (a mesh, an injector): beside them, or before them, where ours wait for them still."""
    there, first = status.get("containerStatuses") or [], status.get("initContainerStatuses") or []
    beside = [one for one in there if one.get("name", WORKER) not in OWN_CONTAINERS]
    return [one for one in there if one not in beside], [*beside, *(one for one in first if not one.get("ready"))]


def _unready(status: Mapping[str, Any]) -> tuple[Containers, Containers]:
    """The same, without what others put beside them that is well: how it ended days ago is not why a pod is not ready now."""
    own, others = _containers(status)
    return own, [one for one in others if not one.get("ready")]


def _ran(status: Mapping[str, Any]) -> bool:
    """Whether anything of a pod ever did; of one that its node turned away nothing has."""
    everyone = (*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or []))
    return any(container.get("containerID") for container in everyone)


def _pod(
    pod: Object, leaving: str, sick: str, accused: tuple[str, ...], serving: bool, told: bool, busy: float | None
) -> ObservedPod:
    meta, status = pod["metadata"], pod.get("status") or {}
    labels, notes = meta["labels"], meta.get("annotations") or {}
    conditions = {c.get("type"): c for c in status.get("conditions") or []}
    ready = conditions.get("Ready", {})
    scheduled = conditions.get("PodScheduled", {})
    containers, others = _unready(status)
    everyone, ended = [*containers, *others], pod_words.of_ended(status)
    rejected = bool(ended) and not _ran(status)
    node, made_at = pod["spec"].get("nodeName"), _time(meta.get("creationTimestamp"))
    return ObservedPod(
        name=meta["name"],
        uid=meta["uid"],
        role=labels[ROLE],
        tier=labels.get(TIER, ""),
        revision=labels.get(REVISION, ""),
        ordinal=_ordinal(notes.get(ORDINAL), meta["name"]),
        ip=status.get("podIP"),
        node=node,
        phase=status.get("phase", "Pending"),
        ready=ready.get("status") == "True" and "deletionTimestamp" not in meta,
        terminating="deletionTimestamp" in meta,
        created_at=made_at or 0.0,
        ready_since=_told_at(ready, made_at) if ready.get("status") == "True" else None,
        unready_since=None if ready.get("status") == "True" else _told_at(ready, made_at) or made_at,
        message=ended or pod_words.message(containers, others, scheduled),
        unschedulable=scheduled.get("status") == "False" and scheduled.get("reason") in NO_NODE,
        gated=scheduled.get("status") == "False" and scheduled.get("reason") == "SchedulingGated",
        restarts=sum(container.get("restartCount", 0) for container in everyone),
        blocked=rejected or pod_words.is_blocked(everyone),
        rejected=rejected,
        silent=pod_words.is_silent(containers, ready) and FLIP not in notes,
        beside=pod_words.beside(containers, ready),
        crashes=sum(_crashes(container) for container in containers if container.get("name") == WORKER),
        compat=notes.get(COMPAT, ""),
        member=member_of(notes, meta["name"]),
        group=notes.get(GROUP_UID, ""),
        scheduled_at=_told_at(scheduled, made_at) if scheduled.get("status") == "True" else None,
        deletion_cost=_whole(notes.get(DELETION_COST)),
        leaving=leaving,
        sick=sick,
        accused=accused,
        serving=serving,
        told=told,
        busy=busy,
        flipping=_flipping(notes),
        flip_since=_time(notes.get(FLIP_SINCE)) or 0.0,
        flipped=FLIPPED_AT in notes,
        righted=RIGHTED_AT in notes,
        gone_by=_gone_by(pod),
        drain_s=max(0.0, pod["spec"].get("terminationGracePeriodSeconds", 0) - GRACE_SLACK_S),
    )


def _gone_by(pod: Object) -> float | None:
    """The API server writes when a pod's grace ends. What we asked to go ourselves has the time of that until it is seen."""
    meta = pod["metadata"]
    at = _time(meta.get("deletionTimestamp"))
    if at is None or "deletionGracePeriodSeconds" in meta:
        return at
    return at + float(pod["spec"].get("terminationGracePeriodSeconds", 0))


def _crashes(container: Mapping[str, Any]) -> int:
    """One that waits to be started once more has ended once more than it was started anew."""
    waiting = (container.get("state") or {}).get("waiting") or {}
    return int(container.get("restartCount", 0)) + (waiting.get("reason") == "CrashLoopBackOff")


def _flipping(notes: Mapping[str, str]) -> Role | None:
    """The role that it was told to take; None too when somebody wrote what is no such thing."""
    found: dict[str, Role] = {role: role for role in ROLES}
    return found.get(notes.get(FLIP, "")) if _time(notes.get(FLIP_SINCE)) is not None else None


def _time(text: str | None) -> float | None:
    """A time that a user may have edited."""
    try:
        return timestamp(text)
    except (ValueError, OverflowError):
        return None


def _told_at(condition: Mapping[str, Any], made_at: float | None) -> float | None:
    """When a condition became what it is, by its writer's clock; not before the pod was made, by the API server's: on a node
    whose clock is hours behind every new worker was late at once."""
    at = _time(condition.get("lastTransitionTime"))
    return at if at is None or made_at is None else max(at, made_at)


def _whole(text: str | None) -> int:
    """A number that a user may have written; 0 when it is none."""
    try:
        return int(text or 0)
    except ValueError:
        return 0


def _ordinal(text: str | None, name: str) -> int:
    """A worker's place in its pool. Where somebody edited the annotation the name has it; a name without one comes first."""
    found = (_count(part) for part in (text, name.rpartition("-")[2]))
    return next((place for place in found if place is not None), 0)


def member_of(notes: Mapping[str, str], name: str) -> int:
    """A pod's place in its worker. Only those that were made to follow a leader have one, and it ends their names: a pod to which
    somebody wrote another is a worker as before."""
    place = _count(notes.get(MEMBER)) or 0
    return place if notes.get(GROUP_UID) and name.endswith(f"-{place}") else 0


def observe_pools(pools: Iterable[Object]) -> tuple[ObservedPool, ...]:
    """WorkerPools in name order, scale targets as well."""
    found = []
    for pool in pools:
        meta, spec = pool["metadata"], pool["spec"]
        notes = meta.get("annotations") or {}
        sizes = written_on(pool) or Sizes(*(_count(notes.get(key)) for key in (PLANNED, SIZE, WISH)))
        found.append(
            ObservedPool(
                name=meta["name"],
                uid=meta["uid"],
                role=spec["role"],
                tier=spec["tier"],
                revision=spec["revision"],
                replicas=spec.get("replicas", 0),
                planned=sizes.planned,
                size=sizes.size,
                wish=sizes.wish,
            )
        )
    return tuple(sorted(found, key=lambda pool: pool.name))


def _count(text: str | None) -> int | None:
    """A count that a user may have edited; None when it is none, or more than any fleet has."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) <= COUNT_DIGITS else None


def observe_router(deployment: Object | None, pods: Iterable[Object]) -> RouterView | None:
    """The router Deployment; the message is what its pods say, or why there are none. One that is leaving, or has ended and stays
    for long (an eviction), says nothing of today."""
    if deployment is None:
        return None
    status = deployment.get("status") or {}
    alive = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    told = [_router_pod(pod) for pod in alive if (pod.get("status") or {}).get("phase") not in ENDED]
    refused = pod_words.refused(deployment)
    return RouterView(
        desired=deployment["spec"].get("replicas", 1),
        ready=status.get("readyReplicas", 0) or 0,
        message=next((f"{pod.name}: {pod.message}" for pod in told if pod.message), refused),
        silent=next((pod.name for pod in told if not pod.message), ""),
        pods=tuple(told),
        refused=refused,
    )


def _router_pod(pod: Object) -> RouterPod:
    meta, status = pod["metadata"], pod.get("status") or {}
    containers, others = _containers(status)
    everyone, ready = [*containers, *others], _condition(status, "Ready")
    ends = [_time(((one.get("lastState") or {}).get("terminated") or {}).get("finishedAt")) for one in everyone]
    return RouterPod(
        name=meta["name"],
        created_at=_time(meta.get("creationTimestamp")) or 0.0,
        ready=ready.get("status") == "True",
        message=pod_words.message(containers, others, _condition(status, "PodScheduled")),
        restarts=sum(one.get("restartCount", 0) for one in everyone),
        ended_at=max((at for at in ends if at is not None), default=None),
        pending=status.get("phase", "Pending") == "Pending",
        beside=pod_words.beside(containers, ready),
    )


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((c for c in status.get("conditions") or [] if c.get("type") == kind), {})


@lru_cache(maxsize=TIMES)
def timestamp(text: str | None) -> float | None:
    """RFC 3339 → UNIX seconds. A pod's times are read anew with each of its events, and say the same in most."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else None
