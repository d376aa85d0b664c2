"""Routers are told first: which workers may not be deleted yet, because routers may still send requests to them. Pure.

A worker may go when the document that the routers follow says that it drains, or does not name it. Which document that is, only
an accepted write shows. After one that was refused the last one seen counts, and every ready worker is taken to be named: another
document may have been written that this operator never saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet_operator.cluster.interface import POD, Object
from fleet_operator.names import GROUP_UID, ROLE
from fleet_operator.observe import workers_told
from fleet_planner.roles import ROLES
from fleet_planner.types import Problem
from fleet_planner.wanted import PodGone

NAMES_MOST = 3


def may_go(
    gone: Sequence[PodGone], live: Mapping[tuple[str, str], Object], accepted: Object | None, seen: Object | None
) -> list[PodGone]:
    """Of the pods to delete, those that no router is told to use. `accepted`: the routers' ConfigMap as the API answered to this
    pass's write, None when it refused; `seen`: as it was last seen. `live`: (kind, name) → object."""
    if not gone:
        return []
    named = _named(accepted if accepted is not None else seen)
    sure = accepted is not None and named is not None
    return [pod for pod in gone if not _is_told(live.get((POD.kind, pod.name)), named or frozenset(), sure=sure)]


def kept_words(gone: Sequence[PodGone], going: Sequence[PodGone], document: str) -> list[Problem]:
    """What the user is told of the workers that stay; nothing when none does."""
    kept = sorted({pod.name for pod in gone} - {pod.name for pod in going})
    if not kept:
        return []
    names = ", ".join(kept[:NAMES_MOST]) + (f" and {len(kept) - NAMES_MOST} more" if len(kept) > NAMES_MOST else "")
    words = f"{len(kept)} pods are to be deleted and stay until ConfigMap {document} can be written, which tells the routers"
    return [Problem("RoutersNotTold", f"{words}: {names}")]


def _named(documents: Object | None) -> frozenset[str] | None:
    """Uids that the routers are told to use or to hold; None when the document is missing or no document at all."""
    workers = workers_told(documents)
    return None if workers is None else frozenset(worker.uid for worker in workers if worker.state != "draining")


def _is_told(pod: Object | None, named: frozenset[str], *, sure: bool) -> bool:
    """Whether routers may use this pod, or its leader when it is one pod of a worker over several nodes."""
    if pod is None:
        return False
    meta = pod["metadata"]
    if (meta.get("labels") or {}).get(ROLE) not in ROLES:
        return False  # one that fetches a model
    mine = {meta["uid"], (meta.get("annotations") or {}).get(GROUP_UID)}
    return not named.isdisjoint(mine) or (not sure and _is_ready(pod))


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions)
