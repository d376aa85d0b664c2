"""Who watches the in-memory store: bounded queues, and the arithmetic of catching up after a gap (used by both stores)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fleet_operator.cluster.interface import Kind, Object, WatchEvent
from fleet_operator.cluster.kinds import key_of, selects

Key = tuple[str, str]


@dataclass(slots=True)
class Seen:
    """What one watcher was told about: key to (uid, resourceVersion, last object)."""

    objects: dict[Key, Object] = field(default_factory=dict)

    def events(self, obj: Object, *, present: bool) -> list[WatchEvent]:
        """What to tell the watcher about `obj`; nothing for news that it has already heard.

        An object that was deleted and made again while nobody listened is told as DELETED, then ADDED.
        """
        key = key_of(obj)
        known = self.objects.get(key)
        if not present:
            self.objects.pop(key, None)
            return [WatchEvent("DELETED", obj)] if known is not None else []
        self.objects[key] = remembered(obj)
        if known is None:
            return [WatchEvent("ADDED", obj)]
        if known["metadata"].get("uid") != obj["metadata"].get("uid"):
            return [WatchEvent("DELETED", known), WatchEvent("ADDED", obj)]
        same = known["metadata"].get("resourceVersion") == obj["metadata"].get("resourceVersion")
        return [] if same else [WatchEvent("MODIFIED", obj)]

    def catch_up(self, objects: Iterable[Object]) -> list[WatchEvent]:
        """The events that turn what the watcher knows into `objects`, a complete list."""
        listed = list(objects)
        gone = self.objects.keys() - {key_of(obj) for obj in listed}
        events = [WatchEvent("DELETED", self.objects.pop(key)) for key in sorted(gone)]
        for obj in listed:
            events += self.events(obj, present=True)
        return events


def remembered(obj: Object) -> Object:
    """The part of an object that a watcher keeps: enough to report its deletion, small enough for thousands."""
    metadata = obj["metadata"]
    wanted = ("name", "namespace", "uid", "resourceVersion", "labels", "ownerReferences")
    return {
        "apiVersion": obj.get("apiVersion"),
        "kind": obj.get("kind"),
        "metadata": {name: metadata[name] for name in wanted if name in metadata},
    }


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
        seen = Seen()
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
