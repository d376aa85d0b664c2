"""Watches may lose an event, freeze without a word, or skip a deletion when they list anew (kopf tells no deletion then). So
every kind's versions are listed once per AUDIT_S, and what the watches did not tell is told here.

Only metadata travels, the kinds take turns, and a list that is older than what a watch has shown changes nothing. Nodes are left
out: thousands of them change all the time, and a watch of theirs that froze is opened anew after seventy seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from fleet_operator.cluster.interface import FLEET, Cluster, ClusterError, Kind, WatchEvent
from fleet_operator.names import MANAGED_BY, MANAGER
from fleet_operator.reconciler import CHILDREN, Reconciler

AUDIT_S: Final = 40.0
LOG = logging.getLogger("fleet.operator")


async def audit(cluster: Cluster, reconciler: Reconciler, namespaces: Sequence[str] = ()) -> None:
    """For ever; an API that does not answer is asked again in the next round. No namespaces: all of them."""
    while True:
        for kind in (FLEET, *CHILDREN):
            await asyncio.sleep(AUDIT_S / (1 + len(CHILDREN)))
            try:
                if missed := sum([await audit_kind(cluster, reconciler, kind, namespace) for namespace in namespaces or (None,)]):
                    LOG.info("audit of %s: the watch had not told of %d", kind.plural, missed)
            except ClusterError as error:
                LOG.warning("audit of %s: %s", kind.plural, error)


async def audit_kind(cluster: Cluster, reconciler: Reconciler, kind: Kind, namespace: str | None) -> int:
    """Tell the reconciler what the watch of this kind has not; how many objects."""
    listed = await cluster.versions(kind, namespace, None if kind == FLEET else {MANAGED_BY: MANAGER})
    changed, gone = reconciler.missed(kind, listed, () if namespace is None else (namespace,))
    for where, name in changed:
        found = await cluster.find(kind, where or None, name)
        if found is not None:  # else gone since: the watch or the next audit tells
            reconciler.feed(kind, WatchEvent("MODIFIED", found))
    for lost in gone:
        reconciler.feed(kind, WatchEvent("DELETED", lost))
    return len(changed) + len(gone)
