"""What a pod that is not ready says of itself, in the kubelet's and the scheduler's words. Pure."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from fleet_operator.cluster.interface import Object

WORDS_MOST: Final = 500
BLOCKED: Final = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "RegistryUnavailable",
        "RunContainerError",
        "SignatureValidationFailed",
    }
)
"""The kubelet's reasons why a container waits that has nothing to wait for: it tries again for ever, until somebody mends it."""
ORDINARY: Final = frozenset({"Error", "Completed", "ContainerCannotRun"})
"""Reasons of an end that say less than its words; others (OOMKilled) say what the words do not."""
BY_SIGNAL: Final = 128
"""An exit code above it is this and the number of the signal that ended the process."""
BEGINNING: Final = frozenset({"ContainerCreating", "PodInitializing", "CrashLoopBackOff"})
"""Reasons to wait that explain nothing."""


def is_blocked(containers: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one of them cannot be started as things are."""
    return any(_waiting(container).get("reason") in BLOCKED for container in containers)


def of_ended(status: Mapping[str, Any]) -> str:
    """Why the kubelet ended a pod, or turned it away; empty for one that goes on, or that ended by itself."""
    if status.get("phase") != "Failed" or not status.get("reason"):
        return ""
    return ": ".join(str(status[part]) for part in ("reason", "message") if status.get(part))[:WORDS_MOST]


def is_silent(containers: Sequence[Mapping[str, Any]], ready: Mapping[str, Any]) -> bool:
    """Whether a pod that was ready is not any more though its own containers run on; `ready`: its condition. Both times are the
    node's: one that was never ready became unready before its containers began, or with them."""
    if beside(containers, ready):
        return False
    begun = [((container.get("state") or {}).get("running") or {}).get("startedAt") for container in containers]
    fell_at = ready.get("lastTransitionTime")
    return ready.get("status") == "False" and bool(fell_at and begun and all(at and at < fell_at for at in begun))


def beside(containers: Sequence[Mapping[str, Any]], ready: Mapping[str, Any]) -> str:
    """What keeps a pod from being ready whose own containers are, in the kubelet's words: a container that others put beside
    them, or a readiness gate. Empty: nothing, or they are not. `ready`: its condition."""
    mine = bool(containers) and all(container.get("ready") for container in containers)
    return str(ready.get("message") or "")[:WORDS_MOST] if mine and ready.get("status") == "False" else ""


def message(containers: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], scheduled: Mapping[str, Any]) -> str:
    """The most telling words of a pod that is not ready; `scheduled`: its condition. `others`: what is put before or beside its
    own containers, each of which is named."""
    if words := _of_containers(containers):
        return words
    for container in others:
        if words := _of_containers([container]):
            return f"{container.get('name')}: {words}"
    return str(scheduled.get("message", ""))[-WORDS_MOST:] if scheduled.get("status") == "False" else ""


def _of_containers(containers: Sequence[Mapping[str, Any]]) -> str:
    for container in containers:
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            ended = state.get("terminated")
            if ended and ended.get("exitCode", 0) != 0:
                return last_words(ended)
    for container in containers:
        waiting = _waiting(container)
        reason = str(waiting.get("reason") or "")
        if words := str(waiting.get("message") or ("" if reason in BEGINNING else reason)):
            return words[-WORDS_MOST:]
    return ""


def refused(deployment: Object) -> str:
    """Why no further pod of it can be made; empty when the API server takes them."""
    conditions = (deployment.get("status") or {}).get("conditions") or []
    failed = (c for c in conditions if (c.get("type"), c.get("status")) == ("ReplicaFailure", "True"))
    return next((words for c in failed if (words := str(c.get("message", ""))[-WORDS_MOST:])), "")


def _waiting(container: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (container.get("state") or {}).get("waiting") or {}
    return found


def last_words(ended: Mapping[str, Any]) -> str:
    """Of a container that ended: its own, behind what the kernel or the kubelet did to it. Who is killed says nothing of it: its
    last line is whatever it said before, of which it did not die."""
    words, reason = _end_of(str(ended.get("message") or "").strip()), str(ended.get("reason") or "")
    done = reason if reason and reason not in ORDINARY else _killed(ended.get("exitCode", 0))
    return ": ".join(part for part in (done, words) if part) or reason or f"exit code {ended.get('exitCode')}"


def _end_of(words: str) -> str:
    """Its last whole lines, where there are more than are told: the end of a log is often taken for its message."""
    end = words[-WORDS_MOST:]
    cut = len(words) > WORDS_MOST and words[-WORDS_MOST - 1] != "\n"
    return end.partition("\n")[2] if cut and "\n" in end else end


def _killed(code: int) -> str:
    """The signal that an exit code tells of; empty when it tells of none."""
    with contextlib.suppress(ValueError):
        return f"exit code {code} ({signal.Signals(code - BY_SIGNAL).name})"
    return ""
