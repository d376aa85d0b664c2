"""The cache: fleets and their children as the watches, and our own writes, last showed them. Old news never replaces newer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator

from fleet_operator.cached import cached, same
from fleet_operator.cluster.interface import FLEET, POD, Kind, Listed, Object, WatchEvent
from fleet_operator.names import FLEET as FLEET_LABEL
from fleet_operator.work_queue import Key

GONE_MOST = 10_000
"""Uids of deleted objects that are remembered: an answer to a write may arrive after the watch said that its object is gone."""


class FleetObjects:
    """Objects by fleet."""

    def __init__(self) -> None:
        self.fleets: dict[Key, Object] = {}
        self._children: dict[Key, dict[tuple[str, str], Object]] = {}
        self._gone: OrderedDict[str, tuple[str, bool]] = OrderedDict()
        """Their versions at the end, and whether that was the end of all: one that changed its fleet begins there in another."""
        self._where: dict[str, Key] = {}
        """Fleets of children, by uid."""

    def children(self, key: Key) -> dict[tuple[str, str], Object]:
        """(kind, name) → object, of one fleet. A pass takes it as it is at its beginning."""
        return dict(self._children.get(key, {}))

    def without_fleet(self) -> Iterator[tuple[Key, Object]]:
        """Children whose labels name a fleet that is not there."""
        yield from ((key, obj) for key, found in self._children.items() if key not in self.fleets for obj in found.values())

    def fleets_on(self, nodes: set[str]) -> list[Key]:
        """Fleets with a pod on one of these nodes."""
        if not nodes:
            return []
        return [
            key
            for key, objects in self._children.items()
            if any(kind == POD.kind and obj["spec"].get("nodeName") in nodes for (kind, _), obj in objects.items())
        ]

    def take(self, kind: Kind, event: WatchEvent) -> Key | None:
        """The fleet that the event is about; None when it says nothing new or is about no fleet."""
        key = _fleet_of(kind, event.object)
        if key is None:
            return None
        holder, at = self._place(kind, key, event.object["metadata"]["name"])
        known = holder.get(at)
        if event.type == "DELETED":
            return key if self._take_deleted(key, holder, at, known, event.object) else None
        if self._is_gone(event.object) or (known is not None and not _newer(event.object, known)):
            return None
        holder[at] = kept = cached(kind, event.object)
        if kind != FLEET:
            self._children[key] = holder
            self._where.pop(known["metadata"]["uid"] if known is not None else "", None)
            self._where[event.object["metadata"]["uid"]] = key
        return None if known is not None and same(kept, known) else key

    def lost(self, kind: Kind, event: WatchEvent) -> Key | None:
        """The fleet that this object belonged to, when somebody took its label or gave it another one: it is of that fleet no
        longer. None: nothing of the kind. To be asked before `take`."""
        meta = event.object["metadata"]
        before = self._where.get(meta.get("uid", "")) if kind != FLEET else None
        if before is None or before == _fleet_of(kind, event.object):
            return None
        known = self._children[before][kind.kind, meta["name"]]
        if event.type != "DELETED" and not _newer(event.object, known):
            return None
        self._ended(meta["uid"], _version(event.object), deleted=event.type == "DELETED")
        self._drop(before, (kind.kind, meta["name"]), meta["uid"])
        return before

    def missed(self, kind: Kind, listed: Listed, within: Collection[str] = ()) -> tuple[list[Key], list[Object]]:
        """What a list shows that nobody told: (namespace, name) of objects to read again, and objects that are gone. What is
        newer than the list is left alone: the list is the older picture then. `within`: namespaces that were listed, () for all.
        """
        known = {key: found for key, found in self._of(kind) if not within or key[0] in within}
        changed = [key for key, version in listed.versions.items() if key not in known or later(version, _version(known[key]))]
        gone = [
            found for key, found in known.items() if key not in listed.versions and not later(_version(found), listed.version)
        ]
        return changed, gone

    def _of(self, kind: Kind) -> Iterator[tuple[Key, Object]]:
        """Everything of a kind, by namespace and name."""
        if kind == FLEET:
            yield from self.fleets.items()
            return
        for key, objects in self._children.items():
            yield from (((key[0], name), found) for (its, name), found in objects.items() if its == kind.kind)

    def mark_leaving(self, kind: Kind, name: str, uid: str | None, at: str) -> Key | None:
        """Somebody was asked to delete the child of this uid: it is not to be deleted twice, and not gone before the watch says
        so. What has its name by now is another one."""
        if (key := self._where.get(uid or "")) is None:
            return None
        found = self._children[key][kind.kind, name]
        if "deletionTimestamp" in found["metadata"]:
            return None
        self._children[key][kind.kind, name] = {**found, "metadata": {**found["metadata"], "deletionTimestamp": at}}
        return key

    def child(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """The child of this name, whichever fleet it belongs to."""
        found = (objects.get((kind.kind, name)) for key, objects in self._children.items() if key[0] == namespace)
        return next((child for child in found if child is not None), None)

    def unsure(self, gone: Object) -> None:
        """That it is gone was an answer to a write of ours, which may be wrong: whoever sees it again is right."""
        self._gone.pop(gone["metadata"]["uid"], None)

    def _is_gone(self, news: Object) -> bool:
        """Nothing newer than its end. A watch tells the end of an object that lost our labels, too: of that one there is news."""
        ended, deleted = self._gone.get(news["metadata"].get("uid", ""), ("", False))
        version = _version(news)
        return bool(ended) and not later(version, ended) and (deleted or version != ended)

    def _place(self, kind: Kind, key: Key, name: str) -> tuple[dict[Key, Object], Key]:
        if kind == FLEET:
            return self.fleets, key
        return self._children.get(key, {}), (kind.kind, name)

    def _take_deleted(self, key: Key, holder: dict[Key, Object], at: Key, known: Object | None, gone: Object) -> bool:
        uid = gone["metadata"].get("uid")
        self._ended(uid, _version(gone), deleted=True)
        if known is None or known["metadata"].get("uid") != uid:
            return False
        if holder is self.fleets:
            del holder[at]
        else:
            self._drop(key, at, uid)
        return True

    def _ended(self, uid: str, version: str, *, deleted: bool) -> None:
        self._gone[uid] = version, deleted
        if len(self._gone) > GONE_MOST:
            self._gone.popitem(last=False)

    def _drop(self, key: Key, at: tuple[str, str], uid: str) -> None:
        """A child is no longer of this fleet."""
        self._where.pop(uid, None)
        del self._children[key][at]
        if not self._children[key]:
            del self._children[key]


def _fleet_of(kind: Kind, obj: Object) -> Key | None:
    meta = obj["metadata"]
    name = meta["name"] if kind == FLEET else (meta.get("labels") or {}).get(FLEET_LABEL)
    return None if name is None else (meta.get("namespace", "default"), name)


def _newer(news: Object, known: Object) -> bool:
    """Versions of one kind's objects are comparable numbers (KEP-5504), also those of two that had one name after each other."""
    return later(_version(news), _version(known))


def _version(obj: Object) -> str:
    return str(obj["metadata"].get("resourceVersion"))


def later(new: str, old: str) -> bool:
    """Whether a version comes after another one; of versions that are no numbers, whether they differ."""
    return int(new) > int(old) if new.isdigit() and old.isdigit() else new != old
