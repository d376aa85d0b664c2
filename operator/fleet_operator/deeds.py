"""What a write is called when it is told: whose pod it was, what it undid. Pure."""

from __future__ import annotations

from fleet_operator.cluster.interface import Object
from fleet_operator.compare import difference
from fleet_operator.names import APPLIED, MEMBER
from fleet_operator.names import ROLE as ROLE_LABEL
from fleet_operator.names import TIER as TIER_LABEL


def member_of(pod: Object | None) -> int:
    """Place of a pod in its worker; what somebody else wrote there counts as the first."""
    text = (pod["metadata"].get("labels") or {}).get(MEMBER, "") if pod is not None else ""
    return int(text) if text.isascii() and text.isdigit() else 0


def worker_of(pod: Object | None) -> tuple[str, str]:
    """(tier, role) of a worker pod, empty words for anything else."""
    labels = (pod["metadata"].get("labels") or {}) if pod is not None else {}
    return labels.get(TIER_LABEL, ""), labels.get(ROLE_LABEL, "")


def undone(wish: Object, found: Object | None) -> str:
    """Where somebody edited what we applied; empty when it is our wish that changed."""
    applied = ((found or {}).get("metadata", {}).get("annotations") or {}).get(APPLIED)
    return difference(found, wish) if applied == wish["metadata"]["annotations"][APPLIED] else ""


def planned_from(wish: Object, found: Object | None) -> Object:
    """The wish with the version that it was planned from: refused when the object has changed since."""
    if found is None:
        return wish
    return {**wish, "metadata": {**wish["metadata"], "resourceVersion": found["metadata"]["resourceVersion"]}}
