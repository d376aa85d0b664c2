"""The in-memory store: the Kubernetes API's rules that the operator relies on, in one process.

`fleet up` runs the real operator on it. What it keeps of the API: server-side apply by field ownership, generation and
resourceVersion, the status subresource, uid preconditions, finalizers, graceful pod deletion, and garbage collection by
ownerReferences (in the same step, where a cluster does it soon after). It knows no defaulting, no admission and no RBAC.
"""

from __future__ import annotations

import builtins
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from fleet_operator.cluster import merge
from fleet_operator.cluster.admission import admit, check_preconditions, pod_grace_s
from fleet_operator.cluster.interface import (
    EVENT,
    FIELD_MANAGER,
    POD,
    ConflictError,
    InvalidError,
    Kind,
    Listed,
    NotFoundError,
    Object,
    WatchEvent,
)
from fleet_operator.cluster.kinds import key_of, kind_of, selects
from fleet_operator.cluster.merge import Path, clone
from fleet_operator.cluster.watchers import Watcher

_GENERATED: Final = ("resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink", "uid")
_NO_STATUS: Final = {"ConfigMap", "Secret", "ServiceAccount", "Role", "RoleBinding", "Event", "Lease"}
_NO_GENERATION: Final = _NO_STATUS | {"Node", "Service", "PersistentVolume", "PersistentVolumeClaim"}


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bounds of the store."""

    watch_queue: int = 10_000
    """Undelivered changes per watch; a slower reader lists again, as after 410 Gone."""
    events: int = 1_000
    """Event objects; the oldest leave (a cluster forgets them after an hour)."""


@dataclass(slots=True)
class _Entry:
    obj: Object
    owners: dict[str, set[Path]] = field(default_factory=dict)


class MemoryCluster:
    """`Cluster` in memory. `writer(name)` is a handle on the same store for another field manager."""

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.time,
        new_uid: Callable[[], str] = lambda: str(uuid.uuid4()),
        limits: MemoryLimits = MemoryLimits(),
        manager: str = FIELD_MANAGER,
    ) -> None:
        self.now = now
        self._new_uid = new_uid
        self._limits = limits
        self._manager = manager
        self._kinds: dict[tuple[str, str], dict[tuple[str, str], _Entry]] = {}
        self._watchers: set[Watcher] = set()
        self._version = [0]

    def writer(self, manager: str) -> MemoryCluster:
        """A handle that reads and writes the same objects as another field manager."""
        other = MemoryCluster(now=self.now, new_uid=self._new_uid, limits=self._limits, manager=manager)
        other._kinds, other._watchers, other._version = self._kinds, self._watchers, self._version
        return other

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        """See `Cluster.get`."""
        return _copy(self._entry(kind, namespace, name).obj)

    async def find(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """See `Cluster.find`."""
        return next((obj for obj in self._list(kind, namespace, None) if obj["metadata"]["name"] == name), None)

    async def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        """See `Cluster.list`."""
        return self._list(kind, namespace, labels)

    async def versions(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> Listed:
        """See `Cluster.versions`."""
        found = self._list(kind, namespace, labels)
        return Listed({key_of(obj): obj["metadata"]["resourceVersion"] for obj in found}, str(self._version[0]))

    def watch(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> AsyncIterator[WatchEvent]:
        """See `Cluster.watch`."""
        return self._watch(kind, namespace, labels)

    async def apply(self, obj: Object, *, created: bool = False) -> Object:
        """See `Cluster.apply`; what was created is owned like what was applied."""
        kind, key = kind_of(obj), _key(kind_of(obj), obj)
        entry = self._table(kind).get(key)
        check_preconditions(obj, entry.obj if entry else None)
        wanted = _applied_fields(obj, kind)
        if entry is None:
            admit(wanted, None)
            return self._create(kind, key, wanted)
        before = entry.owners.get(self._manager, set())
        others = {path for manager, paths in entry.owners.items() if manager != self._manager for path in paths}
        merged, owned = merge.apply(entry.obj, wanted, before, others)
        self._update(kind, entry, merged, owned)
        entry.owners[self._manager] = owned
        return _copy(entry.obj)

    async def create(self, obj: Object) -> Object:
        """See `Cluster.create`."""
        kind, key = kind_of(obj), _key(kind_of(obj), obj)
        if key in self._table(kind):
            raise ConflictError(f'{kind.plural} "{key[1]}" already exists')
        return await self.apply(obj)

    async def patch(self, kind: Kind, namespace: str | None, name: str, patch: Object) -> Object:
        """Merge-patch everything but the status, as `kubectl edit` would: fields that change belong to this manager."""
        entry = self._entry(kind, namespace, name)
        wanted = merge.merge_patch(entry.obj, {key: value for key, value in patch.items() if key != "status"})
        check_preconditions(wanted, entry.obj)
        taken = merge.changed(entry.obj, wanted)
        self._update(kind, entry, wanted, taken)
        entry.owners.setdefault(self._manager, set()).update(taken)
        self._finish_when_free(kind, entry)
        return _copy(entry.obj)

    async def patch_status(
        self, kind: Kind, namespace: str | None, name: str, status: Object, *, version: str | None = None
    ) -> Object:
        """See `Cluster.patch_status`."""
        if kind.kind in _NO_STATUS:
            raise NotFoundError("the server could not find the requested resource")
        entry = self._entry(kind, namespace, name)
        if version is not None:
            check_preconditions({**entry.obj, "metadata": {**entry.obj["metadata"], "resourceVersion": version}}, entry.obj)
        patched = {**entry.obj, "status": merge.merge_patch(entry.obj.get("status", {}), status)}
        self._write(kind, entry, patched)
        return _copy(entry.obj)

    async def bind(self, namespace: str, name: str, node: str) -> Object:
        """What the scheduler does: give a pod its node; ConflictError when it has one."""
        entry = self._entry(POD, namespace, name)
        if entry.obj["spec"].get("nodeName") or entry.obj["metadata"].get("deletionTimestamp"):
            raise ConflictError(f'Operation cannot be fulfilled on pods/binding "{name}": pod {name} is already assigned')
        self._write(POD, entry, {**entry.obj, "spec": {**entry.obj["spec"], "nodeName": node}})
        return _copy(entry.obj)

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str | None = None, grace_s: int | None = None
    ) -> None:
        """See `Cluster.delete`."""
        entry = self._entry(kind, namespace, name)
        have = entry.obj["metadata"]["uid"]
        if uid is not None and uid != have:
            raise ConflictError(
                f'Operation cannot be fulfilled on {kind.plural} "{name}": the UID in the precondition ({uid}) does not match '
                f"the UID in record ({have}). The object might have been deleted and then recreated"
            )
        self._delete(kind, entry, grace_s)

    async def close(self) -> None:
        """End every watch of this store."""
        for watcher in list(self._watchers):
            watcher.close()

    # Below: the store itself. Everything is synchronous, so no task ever sees half a step.

    def _table(self, kind: Kind) -> dict[tuple[str, str], _Entry]:
        return self._kinds.setdefault((kind.api_version, kind.kind), {})

    def _entry(self, kind: Kind, namespace: str | None, name: str) -> _Entry:
        entry = self._table(kind).get((namespace or "" if kind.namespaced else "", name))
        if entry is None:
            group = kind.api_version.partition("/")[0] if "/" in kind.api_version else ""
            raise NotFoundError(f'{kind.plural}{"." + group if group else ""} "{name}" not found')
        return entry

    def _list(self, kind: Kind, namespace: str | None, labels: Mapping[str, str] | None) -> builtins.list[Object]:
        found = sorted(self._table(kind).items())
        return [
            _copy(entry.obj)
            for (where, _), entry in found
            if (namespace is None or where == namespace) and selects(labels, entry.obj)
        ]

    async def _watch(self, kind: Kind, namespace: str | None, labels: Mapping[str, str] | None) -> AsyncIterator[WatchEvent]:
        watcher = Watcher(kind, namespace, labels, self._limits.watch_queue)
        self._watchers.add(watcher)
        try:
            async for event in watcher.events(lambda: self._list(kind, namespace, labels)):
                yield event
        finally:
            self._watchers.discard(watcher)

    def _create(self, kind: Kind, key: tuple[str, str], wanted: Object) -> Object:
        metadata = {**wanted["metadata"], "uid": self._new_uid(), "creationTimestamp": self._timestamp()}
        if kind.kind not in _NO_GENERATION:
            metadata["generation"] = 1
        obj = {**wanted, "metadata": metadata}
        if kind == POD:
            obj["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        entry = _Entry(obj, {self._manager: set(merge.leaves(wanted))})
        table = self._table(kind)
        table[key] = entry
        self._announce(kind, entry)
        made = _copy(entry.obj)
        if kind == EVENT and len(table) > self._limits.events:
            self._remove(kind, table[next(iter(table))])
        if not self._has_living_owner(obj):
            self._delete(kind, entry, None)
        return made

    def _update(self, kind: Kind, entry: _Entry, wanted: Object, written: set[Path]) -> None:
        """Store a user's write: whoever else owned a field that it changes owns it no longer."""
        admit(wanted, entry.obj)
        taken = merge.changed(entry.obj, wanted) & written
        self._write(kind, entry, wanted)
        for owned in entry.owners.values():
            owned.difference_update(taken)

    def _write(self, kind: Kind, entry: _Entry, wanted: Object) -> None:
        """Store `wanted` when it differs: generation follows everything but metadata and status."""
        if wanted == entry.obj:
            return
        metadata = dict(wanted["metadata"])
        if "generation" in metadata and _meaning(wanted) != _meaning(entry.obj):
            metadata["generation"] += 1
        entry.obj = clone({**wanted, "metadata": metadata})
        self._announce(kind, entry)

    def _announce(self, kind: Kind, entry: _Entry, *, present: bool = True) -> None:
        self._version[0] += 1
        entry.obj["metadata"]["resourceVersion"] = str(self._version[0])
        for watcher in [watcher for watcher in self._watchers if watcher.kind == kind]:
            watcher.offer(_copy(entry.obj), present=present)

    def _delete(self, kind: Kind, entry: _Entry, grace_s: int | None) -> None:
        metadata = entry.obj["metadata"]
        grace = pod_grace_s(entry.obj, grace_s) if kind == POD else 0
        waits = bool(metadata.get("finalizers"))
        if grace == 0 and not waits:
            self._remove(kind, entry)
            return
        if "deletionTimestamp" in metadata and grace >= metadata.get("deletionGracePeriodSeconds", 0):
            return
        stamped = {**metadata, "deletionTimestamp": self._timestamp(grace), "deletionGracePeriodSeconds": grace}
        if "generation" in stamped:
            stamped["generation"] += 1
        entry.obj = {**entry.obj, "metadata": stamped}
        self._announce(kind, entry)

    def _finish_when_free(self, kind: Kind, entry: _Entry) -> None:
        metadata = entry.obj["metadata"]
        over = metadata.get("deletionGracePeriodSeconds", 0) == 0
        if "deletionTimestamp" in metadata and over and not metadata.get("finalizers"):
            self._remove(kind, entry)

    def _remove(self, kind: Kind, entry: _Entry) -> None:
        if self._table(kind).pop(key_of(entry.obj), None) is None:
            return
        self._announce(kind, entry, present=False)
        self._collect_garbage(entry.obj["metadata"]["uid"])

    def _collect_garbage(self, uid: str) -> None:
        for (api_version, kind_name), table in list(self._kinds.items()):
            kind = kind_of({"apiVersion": api_version, "kind": kind_name})
            for entry in list(table.values()):
                owners = entry.obj["metadata"].get("ownerReferences") or []
                if not any(owner.get("uid") == uid for owner in owners) or key_of(entry.obj) not in table:
                    continue
                if self._has_living_owner(entry.obj):
                    metadata = {**entry.obj["metadata"], "ownerReferences": [o for o in owners if o.get("uid") != uid]}
                    self._write(kind, entry, {**entry.obj, "metadata": metadata})
                else:
                    self._delete(kind, entry, None)

    def _has_living_owner(self, obj: Object) -> bool:
        """True too for an object that names no owner."""
        owners = obj["metadata"].get("ownerReferences") or []
        namespace = obj["metadata"].get("namespace")
        return not owners or any(self._is_alive(owner, namespace) for owner in owners)

    def _is_alive(self, owner: Mapping[str, Any], namespace: str | None) -> bool:
        kind = kind_of(owner)
        entry = self._table(kind).get((namespace or "" if kind.namespaced else "", owner["name"]))
        return entry is not None and entry.obj["metadata"]["uid"] == owner["uid"]

    def _timestamp(self, after_s: int = 0) -> str:
        return datetime.fromtimestamp(int(self.now()) + after_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _copy(obj: Object) -> Object:
    copied: Object = clone(obj)
    return copied


def _key(kind: Kind, obj: Object) -> tuple[str, str]:
    metadata = obj.get("metadata") or {}
    if not metadata.get("name"):
        raise InvalidError("name is required")
    if not kind.namespaced:
        return "", metadata["name"]
    if not metadata.get("namespace"):
        raise InvalidError("an empty namespace may not be set during creation")
    return metadata["namespace"], metadata["name"]


def _applied_fields(obj: Object, kind: Kind) -> Object:
    """What an apply may set: not the status where that is a subresource, not what the server generates."""
    kept = {name: value for name, value in obj.items() if name != "status" or kind.kind in _NO_STATUS}
    metadata = {name: value for name, value in obj["metadata"].items() if name not in _GENERATED and value is not None}
    fields: Object = merge.merge({}, {**kept, "metadata": metadata})
    copied: Object = clone(fields)
    return copied


def _meaning(obj: Object) -> Object:
    return {name: value for name, value in obj.items() if name not in ("metadata", "status")}
