"""What is kept of an object: without the parts that nobody here reads, names of fields shared. A pod of 7 KB of JSON would take
30 KB as dicts, and an operator may hold ten thousand.

Nothing that is compared with a wish may be left out: pods are made and deleted, never changed, so their containers may go.
"""

from __future__ import annotations

from sys import intern
from typing import Any, Final

from fleet_operator.cluster.interface import POD, Kind, Object

NOT_KEPT_OF_PODS: Final = frozenset({"containers", "initContainers", "volumes", "tolerations", "securityContext"})


def cached(kind: Kind, found: Object) -> Object:
    """A copy that may be kept; `found` stays as it is."""
    out = {intern(key): _compact(value) for key, value in found.items() if key not in {"metadata", "spec"}}
    out.setdefault("apiVersion", kind.api_version)
    out.setdefault("kind", kind.kind)
    out["metadata"] = {intern(key): _compact(value) for key, value in found["metadata"].items() if key != "managedFields"}
    if "spec" in found:
        left_out = NOT_KEPT_OF_PODS if kind == POD else frozenset[str]()
        out["spec"] = {intern(key): _compact(value) for key, value in found["spec"].items() if key not in left_out}
    if kind == POD and found.get("spec", {}).get("hostNetwork"):  # its ports are its own: routers must be told
        containers = found["spec"].get("containers") or []
        out["spec"]["containers"] = [_compact({"name": c["name"], "ports": c.get("ports") or []}) for c in containers]
    return out


def _compact(value: Any) -> Any:
    if isinstance(value, dict):
        return {intern(key): _compact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_compact(item) for item in value]
    return value
