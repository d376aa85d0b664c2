"""What the in-memory store refuses, in the words of the API server."""

from __future__ import annotations

from typing import Any, Final

from fleet_api.validate import refusal, validate
from fleet_operator.cluster.interface import ConflictError, InvalidError, Object
from fleet_operator.cluster.merge import clone

_MUTABLE_IN_PODS: Final = ("activeDeadlineSeconds", "terminationGracePeriodSeconds", "tolerations", "nodeName")
_DEFAULT_GRACE_S: Final = 30


def admit(wanted: Object, live: Object | None) -> None:
    """Refuse what a cluster refuses: InvalidError for a bad fleet or pool and for an edit of a pod that cannot be edited."""
    if wanted.get("kind") in ("InferenceFleet", "WorkerPool"):
        manifest = {name: value for name, value in wanted.items() if name != "status"}
        if problems := validate(manifest):
            raise InvalidError(refusal(manifest, problems))
    if wanted.get("kind") == "Pod" and live is not None and _fixed_part(wanted["spec"]) != _fixed_part(live["spec"]):
        raise InvalidError(
            f'Pod "{live["metadata"]["name"]}" is invalid: spec: Forbidden: pod updates may not change fields other than '
            "`spec.containers[*].image`, `spec.initContainers[*].image`, `spec.activeDeadlineSeconds`, `spec.tolerations` "
            "(only additions to existing tolerations), `spec.terminationGracePeriodSeconds`"
        )


def check_preconditions(obj: Object, live: Object | None) -> None:
    """A uid or resourceVersion in an applied object must be the live one's: InvalidError or ConflictError, as in the API."""
    metadata, kind = obj.get("metadata") or {}, str(obj.get("kind", ""))
    name, uid, version = metadata.get("name"), metadata.get("uid"), metadata.get("resourceVersion")
    have = live["metadata"] if live else {}
    if live and uid and uid != have["uid"]:
        raise InvalidError(f'{kind} "{name}" is invalid: metadata.uid: Invalid value: "{uid}": field is immutable')
    if (not live and uid) or (version and version != have.get("resourceVersion")):
        raise ConflictError(
            f'Operation cannot be fulfilled on {kind.lower()}s "{name}": the object has been modified; '
            "please apply your changes to the latest version and try again"
        )


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
