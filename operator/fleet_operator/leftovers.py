"""Pods of fleets that are gone, which nobody owns: told, and never deleted.

A fleet takes its workers with it by their owner references. Where somebody takes one away while no operator runs (one that runs
puts it back), and then deletes the fleet, the pod stays with its devices. It cannot be told from one that `kubectl delete wpool
--cascade=orphan` left on purpose. `kubectl delete ifleet --cascade=orphan` leaves pools without an owner and pods with theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from fleet_operator.cluster.interface import POD, Object
from fleet_operator.fleet_objects import FleetObjects
from fleet_operator.health.logs import about
from fleet_operator.names import FLEET

ENDED: Final = frozenset({"Succeeded", "Failed"})
LOG = logging.getLogger("fleet.operator")


class Leftovers:
    """`owns`: whether fleets of a namespace are ours."""

    def __init__(self, objects: FleetObjects, owns: Callable[[str], bool]) -> None:
        self._objects = objects
        self._owns = owns
        self._told: frozenset[str] = frozenset()
        """Uids."""

    def found(self) -> list[Object]:
        """Those pods. Only a cache that was filled once can tell."""
        children = [obj for (namespace, _), obj in self._objects.without_fleet() if self._owns(namespace)]
        return [obj for obj in children if obj["kind"] == POD.kind and _stays(obj)]

    def tell(self) -> None:
        """One line for each that was not told before."""
        found = {pod["metadata"]["uid"]: pod["metadata"] for pod in self.found()}
        for meta in (meta for uid, meta in found.items() if uid not in self._told):
            namespace, fleet = meta["namespace"], meta["labels"][FLEET]
            LOG.warning(
                "pod=%s/%s has no owner and its fleet %s is gone: it stays, with its devices, until somebody deletes it",
                namespace, meta["name"], fleet, extra=about(namespace, fleet),
            )  # fmt: skip
        self._told = frozenset(found)


def _stays(pod: Object) -> bool:
    meta, phase = pod["metadata"], (pod.get("status") or {}).get("phase")
    return not meta.get("ownerReferences") and "deletionTimestamp" not in meta and phase not in ENDED
