"""What the operator wrote is in its cache at once, not when the watch comes round to it: a pass right after a write must not
write the same again. So it is with what a write says is not there: a watch that froze may not tell of its end for long."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager

from fleet_operator.cluster.interface import EVENT, Cluster, Kind, Listed, NotFoundError, Object, WatchEvent
from fleet_operator.cluster.kinds import kind_of


class WriteThrough:
    """A `Cluster` that tells `written` the answer of each write, `leaving` what was asked to go (kind, name, uid) and `absent`
    what was to be changed or to go and is not there (kind, namespace, name)."""

    def __init__(
        self,
        cluster: Cluster,
        written: Callable[[Kind, Object], None],
        leaving: Callable[[Kind, str, str | None], None],
        absent: Callable[[Kind, str | None, str], None],
    ) -> None:
        self._cluster = cluster
        self._written = written
        self._leaving = leaving
        self._absent = absent
        self.asked = 0
        """Requests that were made, watches apart."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        """See `Cluster.get`."""
        self.asked += 1
        return await self._cluster.get(kind, namespace, name)

    async def find(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """See `Cluster.find`."""
        self.asked += 1
        return await self._cluster.find(kind, namespace, name)

    async def versions(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> Listed:
        """See `Cluster.versions`."""
        self.asked += 1
        return await self._cluster.versions(kind, namespace, labels)

    async def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        """See `Cluster.list`."""
        self.asked += 1
        return await self._cluster.list(kind, namespace, labels)

    def watch(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> AsyncIterator[WatchEvent]:
        """See `Cluster.watch`."""
        return self._cluster.watch(kind, namespace, labels)

    async def apply(self, obj: Object, *, created: bool = False) -> Object:
        """See `Cluster.apply`."""
        self.asked += 1
        made = await self._cluster.apply(obj, created=created)
        self._written(kind_of(obj), made)
        return made

    async def patch(self, kind: Kind, namespace: str | None, name: str, patch: Object) -> Object:
        """See `Cluster.patch`."""
        self.asked += 1
        with self._told_of_absence(kind, namespace, name):
            made = await self._cluster.patch(kind, namespace, name, patch)
        self._written(kind, made)
        return made

    async def create(self, obj: Object) -> Object:
        """See `Cluster.create`."""
        self.asked += 1
        made = await self._cluster.create(obj)
        kind = kind_of(obj)
        if kind != EVENT:
            self._written(kind, made)
        return made

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str | None = None, grace_s: int | None = None
    ) -> None:
        """See `Cluster.delete`; that the object is gone is for the watch to say."""
        self.asked += 1
        with self._told_of_absence(kind, namespace, name):
            await self._cluster.delete(kind, namespace, name, uid=uid, grace_s=grace_s)
        self._leaving(kind, name, uid)

    async def patch_status(
        self, kind: Kind, namespace: str | None, name: str, status: Object, *, version: str | None = None
    ) -> Object:
        """See `Cluster.patch_status`."""
        self.asked += 1
        with self._told_of_absence(kind, namespace, name):
            made = await self._cluster.patch_status(kind, namespace, name, status, version=version)
        self._written(kind, made)
        return made

    @contextmanager
    def _told_of_absence(self, kind: Kind, namespace: str | None, name: str) -> Iterator[None]:
        try:
            yield
        except NotFoundError:
            self._absent(kind, namespace, name)
            raise

    async def close(self) -> None:
        """See `Cluster.close`."""
        await self._cluster.close()
