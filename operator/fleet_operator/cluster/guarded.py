"""A `Cluster` whose writes pass guards: each may refuse one (not the leader, not our namespace), bound it or count it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fleet_operator.cluster.interface import Cluster, Kind, Listed, Object, WatchEvent
from fleet_operator.cluster.kinds import key_of, kind_of

Send = Callable[[], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Write:
    """One write that is about to happen."""

    verb: Literal["apply", "create", "patch", "delete", "patch_status"]
    kind: Kind
    namespace: str
    """Empty for what lives in no namespace."""
    name: str


class Guard(Protocol):
    """Calls `send` or raises a ClusterError instead."""

    async def guard(self, write: Write, send: Send) -> Any:
        """What `send` returns."""
        ...


class GuardedCluster:
    """Reads go straight through, writes pass the guards: the first one given is asked first."""

    def __init__(self, cluster: Cluster, *guards: Guard) -> None:
        self._cluster = cluster
        self._guards = guards

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        """See `Cluster.get`."""
        return await self._cluster.get(kind, namespace, name)

    async def find(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """See `Cluster.find`."""
        return await self._cluster.find(kind, namespace, name)

    async def versions(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> Listed:
        """See `Cluster.versions`."""
        return await self._cluster.versions(kind, namespace, labels)

    async def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        """See `Cluster.list`."""
        return await self._cluster.list(kind, namespace, labels)

    def watch(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> AsyncIterator[WatchEvent]:
        """See `Cluster.watch`."""
        return self._cluster.watch(kind, namespace, labels)

    async def apply(self, obj: Object, *, created: bool = False) -> Object:
        """See `Cluster.apply`, and what the guards raise."""
        write = Write("apply", kind_of(obj), *key_of(obj))
        made: Object = await self._passed(write, lambda: self._cluster.apply(obj, created=created))
        return made

    async def patch(self, kind: Kind, namespace: str | None, name: str, patch: Object) -> Object:
        """See `Cluster.patch`, and what the guards raise."""
        write = Write("patch", kind, namespace or "", name)
        made: Object = await self._passed(write, lambda: self._cluster.patch(kind, namespace, name, patch))
        return made

    async def create(self, obj: Object) -> Object:
        """See `Cluster.create`, and what the guards raise."""
        made: Object = await self._passed(Write("create", kind_of(obj), *key_of(obj)), lambda: self._cluster.create(obj))
        return made

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str | None = None, grace_s: int | None = None
    ) -> None:
        """See `Cluster.delete`, and what the guards raise."""
        write = Write("delete", kind, namespace or "", name)
        await self._passed(write, lambda: self._cluster.delete(kind, namespace, name, uid=uid, grace_s=grace_s))

    async def patch_status(
        self, kind: Kind, namespace: str | None, name: str, status: Object, *, version: str | None = None
    ) -> Object:
        """See `Cluster.patch_status`, and what the guards raise."""
        write, cluster = Write("patch_status", kind, namespace or "", name), self._cluster
        made: Object = await self._passed(write, lambda: cluster.patch_status(kind, namespace, name, status, version=version))
        return made

    async def close(self) -> None:
        """See `Cluster.close`."""
        await self._cluster.close()

    async def _passed(self, write: Write, send: Send) -> Any:
        for guard in reversed(self._guards):
            send = _behind(guard, write, send)
        return await send()


def _behind(guard: Guard, write: Write, send: Send) -> Send:
    return lambda: guard.guard(write, send)
