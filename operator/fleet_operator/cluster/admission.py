"""What the in-memory store refuses, in the words of the API server."""

from __future__ import annotations

from typing import Any, Final

import fleet_api
from fleet_operator.cluster.interface import ConflictError, InvalidError, Object
from fleet_operator.cluster.merge import clone

_MUTABLE_IN_PODS: Final = ("activeDeadlineSeconds", "terminationGracePeriodSeconds", "tolerations", "nodeName")
_DEFAULT_GRACE_S: Final = 30


def _validate(manifest: Object) -> list[str]:
    validate = getattr(fleet_api, "validate", None)
    return list(validate(manifest)) if validate else []


def admit(wanted: Object, live: Object | None) -> None:
    """Refuse what a cluster refuses: InvalidError for a bad fleet and for an edit of a pod that cannot be edited."""
    if wanted.get("kind") == "InferenceFleet":
        problems = _validate({name: value for name, value in wanted.items() if name != "status"})
        if problems:
            raise InvalidError("\n".join(problems))
    if wanted.get("kind") == "Pod" and live is not None and _fixed_part(wanted["spec"]) != _fixed_part(live["spec"]):
        raise InvalidError(
            f'Pod "{live["metadata"]["name"]}" is invalid: spec: Forbidden: pod updates may not change fields other than '
            "`spec.containers[*].image`, `spec.initContainers[*].image`, `spec.activeDeadlineSeconds`, `spec.tolerations` "
            "(only additions to existing tolerations), `spec.terminationGracePeriodSeconds`"
        )


def check_preconditions(obj: Object, live: Object | None) -> None:
    """ConflictError when `obj` names a uid or resourceVersion that is not the live one's."""
    metadata = obj.get("metadata") or {}
    what = f'Operation cannot be fulfilled on {str(obj.get("kind", "")).lower()} "{metadata.get("name")}"'
    for name in ("uid", "resourceVersion"):
        wanted = metadata.get(name)
        have = live["metadata"].get(name) if live else None
        if wanted and wanted != have:
            raise ConflictError(f"{what}: {name} mismatch: the object specified {wanted}, the existing one has {have}")


def pod_grace_s(pod: Object, asked_s: int | None) -> int:
    """How long a deleted pod may take, in seconds: 0 for one that never got a node or has ended."""
    if asked_s is not None and asked_s <= 0:
        return 0
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    spec = pod.get("spec") or {}
    if ended or not spec.get("nodeName"):
        return 0
    return int(spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)) if asked_s is None else asked_s


def _fixed_part(spec: Object) -> dict[str, Any]:
    fixed: dict[str, Any] = {name: value for name, value in clone(spec).items() if name not in _MUTABLE_IN_PODS}
    for group in ("containers", "initContainers"):
        for container in fixed.get(group) or []:
            container.pop("image", None)
    return fixed
