"""Which pools need their ResourceClaimTemplate again: somebody deleted it before every pod had its claims, and such a pod would
wait for ever. Templates are not watched, because clusters before 1.34 have no such kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fleet_operator.cluster.interface import POD, Object
from fleet_operator.names import POOL, REVISION, ROLE, TIER
from fleet_planner.types import PodWanted

MARKS: Final = frozenset({POOL, TIER, ROLE, REVISION})
"""Labels that say what a pod was made from."""


def short_of_claims(live: Mapping[tuple[str, str], Object]) -> list[PodWanted]:
    """One pod of each pool whose pods still wait for claims; `live`: (kind, name) → object."""
    found: dict[str, PodWanted] = {}
    for (kind, name), pod in live.items():
        if kind == POD.kind and _waits(pod):
            of = pod["metadata"]["labels"]
            found[of[POOL]] = PodWanted(name, of[POOL], of[TIER], of[ROLE], of[REVISION], 0)
    return list(found.values())


def _waits(pod: Object) -> bool:
    """It has no node, and not every claim of its template was made."""
    spec, status = pod["spec"], pod.get("status") or {}
    marked = pod["metadata"]["labels"].keys() >= MARKS  # one of which somebody took a label away is not known well enough
    if spec.get("nodeName") or "deletionTimestamp" in pod["metadata"] or not marked:
        return False
    wanted = {claim["name"] for claim in spec.get("resourceClaims") or [] if "resourceClaimTemplateName" in claim}
    return not wanted <= {claim["name"] for claim in status.get("resourceClaimStatuses") or []}
