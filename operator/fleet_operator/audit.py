"""Watches may lose an event, freeze without a word, or skip a deletion when they list anew (kopf tells no deletion then). So
every kind's versions are listed once per AUDIT_S, and what the watches did not tell is told here.

Only metadata travels, the kinds take turns, and a list that is older than what a watch has shown changes nothing. Nodes are
among them where the operator may read them: a cordon that nobody told would leave workers on a node that goes away.

Lists are asked of etcd itself and never go back, unless it was restored from a backup. Then everything in the caches is of a
future that there is no more, and no watch tells anything until versions have come as far again: the process begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from fleet_operator.cluster.interface import FLEET, NODE, Cluster, ClusterError, Kind, WatchEvent
from fleet_operator.names import FLEET as FLEET_LABEL
from fleet_operator.names import MANAGED_BY, MANAGER
from fleet_operator.reconciler import Reconciler

AUDIT_S: Final = 40.0
BACK_TIMES: Final = 3
"""Lists in a row that are older than one before: no single answer that came late is a backup."""
LOG = logging.getLogger("fleet.operator")


class RestoredError(ClusterError):
    """What was seen of the cluster is not what it is any more."""

    reason = "Restored"
    retry = False


class Newest:
    """Versions of lists, by what was listed."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Kind, str | None], tuple[int, int]] = {}
        """The newest, and how many in a row were older."""

    def look(self, kind: Kind, namespace: str | None, version: str) -> None:
        """One list; RestoredError."""
        if not version.isdigit():
            return
        newest, older = self._seen.get((kind, namespace), (0, 0))
        older = older + 1 if int(version) < newest else 0
        self._seen[kind, namespace] = max(newest, int(version)), older
        if older >= BACK_TIMES:
            words = f"was etcd restored from a backup? Lists of {kind.plural} have version {version}, and had {newest}"
            raise RestoredError(f"{words}: what was seen since then is no more, everything is listed anew")


async def audit(cluster: Cluster, reconciler: Reconciler, kinds: Sequence[Kind], namespaces: Sequence[str] = ()) -> None:
    """For ever, or until RestoredError; an API that does not answer is asked again in the next round. `kinds`: what is watched.
    No namespaces: all."""
    newest = Newest()
    while True:
        for kind in kinds:
            await asyncio.sleep(AUDIT_S / len(kinds))
            for namespace in namespaces if namespaces and kind.namespaced else (None,):
                try:  # a namespace that was taken from us does not keep the others from being looked at
                    if missed := await audit_kind(cluster, reconciler, kind, namespace, newest):
                        LOG.info("audit of %s: the watch had not told of %d", kind.plural, missed)
                except RestoredError:
                    raise
                except ClusterError as error:
                    LOG.warning("audit of %s: %s", kind.plural, error)


async def audit_kind(
    cluster: Cluster, reconciler: Reconciler, kind: Kind, namespace: str | None, newest: Newest | None = None
) -> int:
    """Tell the reconciler what the watch of this kind has not; how many objects. One that has our label and no fleet's is not
    kept, so it is found each time: nobody missed it."""
    listed = await cluster.versions(kind, namespace, None if kind in (FLEET, NODE) else {MANAGED_BY: MANAGER})
    if newest is not None:
        newest.look(kind, namespace, listed.version)
    changed, gone = reconciler.missed(kind, listed, () if namespace is None else (namespace,))
    missed = len(changed) + len(gone)
    for where, name in changed:
        found = await cluster.find(kind, where or None, name)
        if found is not None:  # else gone since: the watch or the next audit tells
            reconciler.feed(kind, WatchEvent("MODIFIED", found))
            missed -= kind not in (FLEET, NODE) and FLEET_LABEL not in (found["metadata"].get("labels") or {})
    for lost in gone:
        reconciler.feed(kind, WatchEvent("DELETED", lost))
    return missed
