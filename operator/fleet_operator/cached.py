"""What is kept of an object: without the parts that nobody here reads, names of fields shared. A pod of 7 KB of JSON would take
30 KB as dicts, and an operator may hold ten thousand.

Nothing that is compared with a wish may be left out: pods are made and deleted, never changed, so most of them may go.
"""

from __future__ import annotations

from sys import intern
from typing import Any, Final

from fleet_operator.cluster.interface import PDB, POD, SERVICE, Kind, Object

STATUS_NOT_KEPT: Final = frozenset({PDB.kind, SERVICE.kind})
"""A budget's status follows every pod of it, and nobody here reads it."""
NOT_KEPT_OF_PODS: Final = frozenset({"containers", "initContainers", "volumes", "tolerations", "securityContext"})


def cached(kind: Kind, found: Object) -> Object:
    """A copy that may be kept; `found` stays as it is."""
    apart = {"metadata", "spec", "status"} if kind.kind in STATUS_NOT_KEPT else {"metadata", "spec"}
    out = {intern(key): _compact(value) for key, value in found.items() if key not in apart}
    out.setdefault("apiVersion", kind.api_version)
    out.setdefault("kind", kind.kind)
    out["metadata"] = {intern(key): _compact(value) for key, value in found["metadata"].items() if key != "managedFields"}
    if "spec" in found:
        out["spec"] = _pod_spec(found["spec"]) if kind == POD else _compact(found["spec"])
    return out


def _pod_spec(spec: Object) -> Object:
    out = {intern(key): _compact(value) for key, value in spec.items() if key not in NOT_KEPT_OF_PODS}
    if spec.get("hostNetwork"):  # its ports are its own: routers must be told
        out["containers"] = [_compact({"name": c["name"], "ports": c.get("ports") or []}) for c in spec.get("containers") or []]
    return out


def same(mine: Object, others: Object) -> bool:
    """Whether two kept objects differ in nothing but their version."""
    if {key: value for key, value in mine.items() if key != "metadata"} != {k: v for k, v in others.items() if k != "metadata"}:
        return False
    first, second = ({k: v for k, v in obj["metadata"].items() if k != "resourceVersion"} for obj in (mine, others))
    return first == second


def _compact(value: Any) -> Any:
    if isinstance(value, dict):
        return {intern(key): _compact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_compact(item) for item in value]
    return value
