"""Is what a pass was planned from still true? Asked at most once per pass, before the first thing that cannot be taken back.

A cache may be minutes old (a frozen watch, a stale list after a restart). A write to an object carries the version that it was
planned from, but creations and deletions have no such guard, and one pool's size follows from another's. So before sizes or pods
change, the fleet and all its pools are read again; what a write of the same pass has shown is not.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleet_operator.cluster.interface import FLEET, POOL, Cluster, Object
from fleet_operator.fleet_telling import FleetTelling
from fleet_operator.names import FLEET as FLEET_LABEL
from fleet_operator.ownership import is_strange


class Fresh:
    """The answers of one pass. Every method raises ClusterError when the API cannot say."""

    def __init__(self, cluster: Cluster, raw: Object, live: Mapping[tuple[str, str], Object], telling: FleetTelling) -> None:
        self._cluster = cluster
        self._raw = raw
        self._telling = telling
        self._seen = {name: _version(obj) for (kind, name), obj in live.items() if kind == POOL.kind}
        self.read: list[Object] = []
        """What was read: as new as anything that a watch will tell."""
        self.gone = False
        """There is no fleet of this name any more."""
        self._fleet: bool | None = None
        self._pools: bool | None = None

    async def fleet(self) -> bool:
        """The fleet still has this uid and generation, and nobody has deleted it since it was seen."""
        if self._fleet is None:
            self._fleet = await self._is_present_fleet()
        return self._fleet

    async def sizes(self) -> bool:
        """The fleet is as it was seen, and so are all its pools."""
        if not await self.fleet():
            return False
        if self._pools is None:
            meta = self._raw["metadata"]
            found = await self._cluster.list(POOL, meta["namespace"], {FLEET_LABEL: meta["name"]})
            self.read += found
            now = {obj["metadata"]["name"]: _version(obj) for obj in found if not is_strange(obj, self._raw)}
            self._pools = self._seen == now
        return self._pools

    @property
    def is_first(self) -> bool:
        """No pool was seen: making one shows whether that is true, for the API refuses a second one of its name."""
        return not self._seen

    def made_pool(self, *, was_there: bool) -> None:
        """A pool was made where none was seen, or there was one already."""
        if was_there:
            self._pools = False
        elif self._pools is None:
            self._pools = self.is_first

    async def _is_present_fleet(self) -> bool:
        if await self._telling.at_once():
            return True
        meta = self._raw["metadata"]
        found = await self._cluster.find(FLEET, meta["namespace"], meta["name"])
        if found is None:
            self.gone = True
            return False
        self.read.append(found)
        now = found["metadata"]
        same = now["uid"] == meta["uid"] and now.get("generation") == meta.get("generation")
        return bool(same and now.get("deletionTimestamp") == meta.get("deletionTimestamp"))


def _version(obj: Object) -> str:
    return str(obj["metadata"].get("resourceVersion"))
