"""ResourceClaimTemplates: how one is put, and which pools need theirs again, because somebody deleted it before every pod had its
claims: such a pod would wait for ever. Templates are not watched, because clusters before 1.34 have no such kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fleet_operator.cluster.interface import CLAIM_TEMPLATE, POD, Cluster, ClusterError, NotFoundError, Object
from fleet_operator.compare import contains, satisfied
from fleet_operator.names import POOL, REVISION, ROLE, TIER
from fleet_operator.outcome import Outcome
from fleet_operator.ownership import lonely, name_conflict, owned
from fleet_planner.wanted import PodWanted

MARKS: Final = frozenset({POOL, TIER, ROLE, REVISION})
"""Labels that say what a pod was made from."""


async def put_template(cluster: Cluster, wish: Object, pool: Object, outcome: Outcome) -> bool:
    """The pool's template as wished, before a pod that names it. False: somebody else's has its name, is left alone, and no pod
    may be made: it would get other devices. A patch of nothing looks at it: the operator has no right to read templates."""
    namespace, name = wish["metadata"]["namespace"], wish["metadata"]["name"]
    try:
        try:
            found = await cluster.patch(CLAIM_TEMPLATE, namespace, name, {})
        except NotFoundError:
            await cluster.create(wish)
            return True
        if not (owned(found, pool) or (lonely(found, wish, pool) and contains(found["spec"], wish["spec"]))):
            outcome.problems.append(name_conflict(found, wish))
            return False
        if not satisfied(wish, found):
            await cluster.apply(wish)
    except ClusterError as error:
        outcome.fail(f"ResourceClaimTemplate {name} (kvTransfer.via dra)", error)
    return True


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
