"""Annotations that an API server reads when a pod is made (core/validation of Kubernetes 1.36) and refuses it for. They belong to
no revision: with a bad one not even a lost worker comes back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fleet_api.structure import quoted
from fleet_api.unmakeable_affinity import NONE

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
MIRROR = "kubernetes.io/config.mirror"
APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
SECCOMP_POD = "seccomp.security.alpha.kubernetes.io/pod"
SECCOMP = "container.seccomp.security.alpha.kubernetes.io/"
CONTAINER = "worker"
"""The one container that a worker pod is made with."""
_DEFAULTS = ("runtime/default", "docker/default")
_COST = re.compile(r"0|-[0-9]+|[1-9][0-9]*")
_INT32 = 2**31


def read_findings(annotations: Mapping[str, str], field: str) -> Iterator[str]:
    """Of a podTemplate's annotations, those that say what cannot be."""
    for name, value in annotations.items():
        if why := _wrong(name, value):
            yield f"{field}[{name}]: Invalid value: {quoted(value)}: {why}: {NONE}"


def _wrong(name: str, value: str) -> str:
    """Why a pod with this annotation is refused; empty when it is not."""
    if name == DELETION_COST:
        fits = _COST.fullmatch(value) is not None and -_INT32 <= int(value) < _INT32
        return "" if fits else "must be a whole number of 32 bits"
    if name == MIRROR:
        return "only a kubelet's own pods have it"
    if name.startswith(APPARMOR) and name != APPARMOR + CONTAINER:
        return f"there is no such container: it is called {CONTAINER}"
    if name.startswith(APPARMOR):
        fits = value in ("", "runtime/default", "unconfined") or value.startswith("localhost/")
        return "" if fits else "must be runtime/default, unconfined or localhost/ and a name"
    if name == SECCOMP_POD:
        return "" if value in _DEFAULTS else "must be runtime/default, as the pod's own field is"
    if name.startswith(SECCOMP):
        path = value.removeprefix("localhost/")
        local = path != value and not path.startswith("/") and ".." not in path.split("/")
        return (
            "" if local or value in (*_DEFAULTS, "unconfined") else "must be runtime/default, unconfined or localhost/ and a path"
        )
    return ""
