"""Pure: the status of a pod, in the kubelet's shape, from what its containers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ContainerView:
    """One container as the runtime sees it."""

    name: str
    image: str
    state: Object
    """{"waiting": …}, {"running": …} or {"terminated": …}."""
    last_state: Object
    restarts: int
    ready: bool
    started: bool
    container_id: str = ""
    ended: bool = False
    """It exited and will not start again."""


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod as the runtime sees it."""

    ip: str | None
    host_ip: str
    start_time: str
    init: Sequence[ContainerView]
    containers: Sequence[ContainerView]
    message: str = ""
    """What is wrong with the pod and none of its containers' doing."""


def pod_status(pod: PodView, before: Mapping[str, Any], now: str) -> Object:
    """The whole status; conditions keep their lastTransitionTime from `before` while their status stays."""
    phase = pod_phase(pod)
    status: Object = {
        "phase": phase,
        "hostIP": pod.host_ip,
        "startTime": pod.start_time,
        "conditions": _conditions(pod, phase, before, now),
        "containerStatuses": [_container_status(view) for view in pod.containers],
    }
    if pod.init:
        status["initContainerStatuses"] = [_container_status(view) for view in pod.init]
    if pod.message or before.get("message"):
        status["message"] = pod.message or None  # a patch takes it away by null
    if pod.ip:
        status |= {"podIP": pod.ip, "podIPs": [{"ip": pod.ip}]}
    return status


def pod_phase(pod: PodView) -> str:
    """Pending until every container has started once; Succeeded or Failed when all have ended for good."""
    if any(view.ended and _exit_code(view) != 0 for view in pod.init):
        return "Failed"
    if pod.containers and all(view.ended for view in pod.containers):
        return "Failed" if any(_exit_code(view) for view in pod.containers) else "Succeeded"
    never_started = [view for view in pod.containers if "waiting" in view.state and not view.last_state]
    return "Pending" if never_started else "Running"


def _conditions(pod: PodView, phase: str, before: Mapping[str, Any], now: str) -> list[Object]:
    initialized = all(view.ended and _exit_code(view) == 0 for view in pod.init)
    unready = [view.name for view in pod.containers if not view.ready]
    names = f"[{' '.join(unready)}]"
    ready = (not unready, "ContainersNotReady", f"containers with unready status: {names}")
    if phase in ("Succeeded", "Failed"):
        ready = (False, "PodCompleted" if phase == "Succeeded" else "PodFailed", "")
    wanted: list[tuple[str, bool, str, str]] = [
        ("PodScheduled", True, "", ""),
        ("PodReadyToStartContainers", pod.ip is not None, "", ""),
        ("Initialized", initialized, "ContainersNotInitialized", "init containers have not finished"),
        ("ContainersReady", *ready),
        ("Ready", *ready),
    ]
    known = {condition["type"]: condition for condition in before.get("conditions") or []}
    return [_condition(known.get(name), name, holds, reason, message, now) for name, holds, reason, message in wanted]


def _condition(old: Mapping[str, Any] | None, name: str, holds: bool, reason: str, message: str, now: str) -> Object:
    status = "True" if holds else "False"
    since = old["lastTransitionTime"] if old and old["status"] == status and old.get("lastTransitionTime") else now
    condition: Object = {"type": name, "status": status, "lastTransitionTime": since}
    if not holds:
        condition |= {key: text for key, text in (("reason", reason), ("message", message)) if text}
    return condition


def _container_status(view: ContainerView) -> Object:
    status: Object = {
        "name": view.name,
        "image": view.image,
        "imageID": "",
        "state": view.state,
        "lastState": view.last_state,
        "ready": view.ready,
        "started": view.started,
        "restartCount": view.restarts,
    }
    if view.container_id:
        status["containerID"] = view.container_id
    return status


def _exit_code(view: ContainerView) -> int:
    return int(view.state.get("terminated", {}).get("exitCode", 0))
