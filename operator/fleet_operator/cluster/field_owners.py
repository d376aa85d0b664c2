"""Who owns which field of an object, as `metadata.managedFields` tells it (Kubernetes documentation, "Server-Side Apply"). Pure.

What a manager writes by create belongs to its Update, not to its Apply, and an apply removes only what belongs to an Apply. So an
object that was created is taken over before it is applied for the first time, as client-go's csaupgrade does for kubectl.
"""

from __future__ import annotations

from typing import Any

from fleet_operator.cluster.interface import Object


def taken_over(owners: list[Object], manager: str) -> list[Object] | None:
    """The owners after everything that `manager` wrote by create or patch belongs to its Apply; None when nothing does.

    Subresources (status, scale) are left alone: no apply of ours writes them.
    """
    written = [entry for entry in owners if _is(entry, manager, "Update")]
    if not written:
        return None
    rest = [entry for entry in owners if entry not in written]
    for entry in written:
        applied = next((of for of in rest if _is(of, manager, "Apply") and of.get("apiVersion") == entry.get("apiVersion")), None)
        fields = entry.get("fieldsV1") or {}
        if applied is None:
            rest.append({**entry, "operation": "Apply"})
        else:
            rest[rest.index(applied)] = {**applied, "fieldsV1": _union(applied.get("fieldsV1") or {}, fields)}
    return rest


def _is(entry: Object, manager: str, operation: str) -> bool:
    return entry.get("manager") == manager and entry.get("operation") == operation and not entry.get("subresource")


def _union(mine: Any, others: Any) -> Any:
    """Of two field sets: maps from a field, an item's keys or a value to the set inside it."""
    merged = dict(mine)
    for key, inside in others.items():
        merged[key] = _union(merged[key], inside) if key in merged else inside
    return merged
