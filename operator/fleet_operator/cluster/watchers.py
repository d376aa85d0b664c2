"""Who watches the in-memory store: bounded queues, and the arithmetic of catching up after a gap (used by both stores)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Set
from sys import intern
from typing import NamedTuple

from fleet_operator.cluster.interface import Kind, Object, WatchEvent
from fleet_operator.cluster.kinds import key_of, selects

Key = tuple[str, str]


class _Told(NamedTuple):
    """What a watcher keeps of an object: enough to report its deletion, small enough for tens of thousands."""

    uid: str | None
    version: str | None
    labels: Mapping[str, str]

    def gone(self, key: Key, like: Kind) -> Object:
        """The object, as far as anybody may still ask about it."""
        namespace, name = key
        metadata = {"name": name, "uid": self.uid, "resourceVersion": self.version, "labels": dict(self.labels)}
        place = {"namespace": namespace} if namespace else {}
        return {"apiVersion": like.api_version, "kind": like.kind, "metadata": {**metadata, **place}}


class Seen:
    """What one watcher was told about."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._told: dict[Key, _Told] = {}

    def events(self, obj: Object, *, present: bool) -> list[WatchEvent]:
        """What to tell the watcher about `obj`; nothing for news that it has already heard.

        An object that was deleted and made again while nobody listened is told as DELETED, then ADDED.
        """
        key = key_of(obj)
        known = self._told.get(key)
        if not present:
            self._told.pop(key, None)
            return [WatchEvent("DELETED", obj)] if known is not None else []
        self._told[key] = now = _told(obj)
        if known is None:
            return [WatchEvent("ADDED", obj)]
        if known.uid != now.uid:
            return [WatchEvent("DELETED", known.gone(key, self._kind)), WatchEvent("ADDED", obj)]
        return [] if known.version == now.version else [WatchEvent("MODIFIED", obj)]

    def rest(self, listed: Set[Key]) -> list[WatchEvent]:
        """What is gone, because a complete list does not have it."""
        return [WatchEvent("DELETED", self._told.pop(key).gone(key, self._kind)) for key in sorted(self._told.keys() - listed)]

    def catch_up(self, objects: Iterable[Object]) -> list[WatchEvent]:
        """The events that turn what the watcher knows into `objects`, a complete list."""
        listed = {key_of(obj): obj for obj in objects}
        events = self.rest(listed.keys())
        for obj in listed.values():
            events += self.events(obj, present=True)
        return events


def _told(obj: Object) -> _Told:
    meta = obj["metadata"]
    labels = {intern(name): intern(value) for name, value in (meta.get("labels") or {}).items()}
    return _Told(meta.get("uid"), meta.get("resourceVersion"), labels)


class Watcher:
    """One open watch on the in-memory store."""

    def __init__(self, kind: Kind, namespace: str | None, labels: Mapping[str, str] | None, bound: int) -> None:
        self.kind = kind
        self._namespace = namespace
        self._labels = labels
        self._bound = bound
        self._queue: deque[tuple[Object, bool]] = deque()
        self._wake = asyncio.Event()
        self._overflowed = False
        self._closed = False

    def offer(self, obj: Object, *, present: bool) -> None:
        """Tell the watcher; one that lags behind by more than its bound loses its queue and lists again."""
        if self._namespace is not None and (obj["metadata"].get("namespace") or "") != self._namespace:
            return
        if len(self._queue) >= self._bound:
            self._overflowed = True
            self._queue.clear()
        if not self._overflowed:
            self._queue.append((obj, present and selects(self._labels, obj)))
        self._wake.set()

    def close(self) -> None:
        """End the iteration."""
        self._closed = True
        self._wake.set()

    async def events(self, listing: Callable[[], list[Object]]) -> AsyncIterator[WatchEvent]:
        """ADDED for what is there, SYNCED, then changes until closed."""
        seen = Seen(self.kind)
        for event in seen.catch_up(listing()):
            yield event
        yield WatchEvent("SYNCED", {})
        while not self._closed:
            await self._wake.wait()
            self._wake.clear()
            if self._overflowed:
                self._overflowed = False
                for event in seen.catch_up(listing()):
                    yield event
            while self._queue:
                obj, present = self._queue.popleft()
                for event in seen.events(obj, present=present):
                    yield event
