"""The Kubernetes API as a `Cluster`: server-side apply, paged lists, watches that survive cuts and 410 Gone."""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec

from fleet_operator.cluster.field_owners import taken_over
from fleet_operator.cluster.interface import (
    FIELD_MANAGER,
    ClusterError,
    Kind,
    Listed,
    NotFoundError,
    Object,
    UnavailableError,
    WatchEvent,
)
from fleet_operator.cluster.kinds import key_of, kind_of
from fleet_operator.cluster.kube_http import Backoff, GoneError, KubeHttp, KubeLimits, configuration_from, error_of
from fleet_operator.cluster.watchers import Seen

logger = logging.getLogger(__name__)
_DEFAULTS = KubeLimits()
_APPLY = "application/apply-patch+yaml"  # JSON is YAML
_MERGE = "application/merge-patch+json"
_JSON = "application/json-patch+json"
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class _Meta(msgspec.Struct, gc=False):
    """What a list of versions needs: thousands of objects are read only for these words."""

    resourceVersion: str
    name: str = ""
    namespace: str = ""
    more: str = msgspec.field(name="continue", default="")


class _Item(msgspec.Struct, gc=False):
    metadata: _Meta


class _Page(msgspec.Struct):
    metadata: _Meta
    items: builtins.list[_Item] | None = None
    """The API server writes null when there are none."""


_VERSIONS = msgspec.json.Decoder(_Page)


class KubeCluster:
    """`Cluster` on a real API server; make it with `connect`."""

    def __init__(self, http: KubeHttp, limits: KubeLimits = _DEFAULTS, manager: str = FIELD_MANAGER) -> None:
        self._http = http
        self._limits = limits
        self._manager = manager

    @classmethod
    async def connect(
        cls,
        kubeconfig: Path | None,
        *,
        limits: KubeLimits = _DEFAULTS,
        manager: str = FIELD_MANAGER,
        context: str | None = None,
        trace: aiohttp.TraceConfig | None = None,
    ) -> KubeCluster:
        """Credentials from `kubeconfig`, or from the pod's service account when None; `trace` sees the connections. Nothing is
        sent yet."""
        return cls(KubeHttp(await configuration_from(kubeconfig, context), limits, trace), limits, manager)

    def writer(self, manager: str) -> KubeCluster:
        """A handle with the same connections that writes as another field manager."""
        return KubeCluster(self._http, self._limits, manager)

    @property
    def access(self) -> KubeAccess:
        """How processes of this machine reach the same API server."""
        return KubeAccess(self._http)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        """See `Cluster.get`."""
        return _object_of(await self._http.request("GET", _path(kind, namespace, name)), kind)

    async def find(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """See `Cluster.find`. The API server reads one key for it, past its cache."""
        page = await self._http.request("GET", _path(kind, namespace), {"fieldSelector": f"metadata.name={name}"})
        return next(iter(_page_of(page, kind)[0]), None)

    async def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        """See `Cluster.list`."""
        backoff = Backoff(self._limits)
        while True:
            objects: dict[tuple[str, str], Object] = {}
            try:
                async for page, _ in self._pages(kind, namespace, labels):
                    objects |= {key_of(found): found for found in page}
            except GoneError as error:
                if not objects:
                    raise
                await backoff.pause(error)  # the list took longer than its version is kept
                continue
            return [objects[key] for key in sorted(objects)]

    def watch(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> AsyncIterator[WatchEvent]:
        """See `Cluster.watch`. An error of the first list that trying again cannot help is raised."""
        return self._watch(kind, namespace, labels)

    async def apply(self, obj: Object, *, created: bool = False) -> Object:
        """See `Cluster.apply`."""
        kind = kind_of(obj)
        query = {"fieldManager": self._manager, "force": "true", "fieldValidation": "Strict"}
        namespace, name = key_of(obj)
        if created:
            obj = await self._taken_over(kind, obj)
        return _object_of(await self._http.request("PATCH", _path(kind, namespace, name), query, obj, _APPLY), kind)

    async def _taken_over(self, kind: Kind, wish: Object) -> Object:
        """The wish with the version that its object has when all that we ever wrote of it belongs to our applies."""
        namespace, name = key_of(wish)
        query = {"fieldSelector": f"metadata.name={name}"}
        page = await self._http.request("GET", _path(kind, namespace), query, accept=_METADATA)
        meta: Object = next((item["metadata"] for item in page.get("items") or []), {})
        owners = taken_over(meta.get("managedFields") or [], self._manager)
        if owners is None or meta["resourceVersion"] != wish["metadata"]["resourceVersion"]:
            return wish  # nothing to take over, or somebody was faster: the apply will be refused
        patch = [
            {"op": "replace", "path": "/metadata/managedFields", "value": owners},
            {"op": "replace", "path": "/metadata/resourceVersion", "value": meta["resourceVersion"]},
        ]
        query = {"fieldManager": self._manager}
        made = await self._http.request("PATCH", _path(kind, namespace, name), query, patch, _JSON)
        return {**wish, "metadata": {**wish["metadata"], "resourceVersion": made["metadata"]["resourceVersion"]}}

    async def create(self, obj: Object) -> Object:
        """See `Cluster.create`."""
        kind = kind_of(obj)
        query = {"fieldManager": self._manager, "fieldValidation": "Strict"}
        namespace, _ = key_of(obj)
        return _object_of(await self._http.request("POST", _path(kind, namespace), query, obj), kind)

    async def patch(self, kind: Kind, namespace: str | None, name: str, patch: Object) -> Object:
        """Merge-patch everything but the status, as `kubectl edit` would."""
        query = {"fieldManager": self._manager}
        return _object_of(await self._http.request("PATCH", _path(kind, namespace, name), query, patch, _MERGE), kind)

    async def patch_status(
        self, kind: Kind, namespace: str | None, name: str, status: Object, *, version: str | None = None
    ) -> Object:
        """See `Cluster.patch_status`."""
        query = {"fieldManager": self._manager}
        path = f"{_path(kind, namespace, name)}/status"
        patch: Object = {"status": status} if version is None else {"metadata": {"resourceVersion": version}, "status": status}
        return _object_of(await self._http.request("PATCH", path, query, patch, _MERGE), kind)

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str | None = None, grace_s: int | None = None
    ) -> None:
        """See `Cluster.delete`."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        await self._http.request("DELETE", _path(kind, namespace, name), None, options)

    async def close(self) -> None:
        """Close all connections, also those of `writer` handles."""
        await self._http.close()

    async def versions(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> Listed:
        """Versions of all objects, without their contents, and the version of the list."""
        found: dict[tuple[str, str], str] = {}
        query = _selector(labels) | {"limit": self._limits.page}
        while True:
            page: _Page = await self._http.request("GET", _path(kind, namespace), query, accept=_METADATA, decoder=_VERSIONS)
            found.update({(of.namespace, of.name): of.resourceVersion for of in (item.metadata for item in page.items or ())})
            if not page.metadata.more:
                return Listed(found, page.metadata.resourceVersion)
            query = {**query, "continue": page.metadata.more}

    async def _pages(
        self, kind: Kind, namespace: str | None, labels: Mapping[str, str] | None
    ) -> AsyncGenerator[tuple[builtins.list[Object], str], None]:
        """All objects page by page, each with the version of the list; GoneError when the continue token expires half way."""
        path, query = _path(kind, namespace), _selector(labels) | {"limit": self._limits.page}
        while True:
            objects, version, more = _page_of(await self._http.request("GET", path, query), kind)
            yield objects, version
            if not more:
                return
            query = {**query, "continue": more}

    async def _watch(self, kind: Kind, namespace: str | None, labels: Mapping[str, str] | None) -> AsyncIterator[WatchEvent]:
        seen, backoff, version, synced = Seen(kind), Backoff(self._limits), "", False
        while True:
            try:
                if not version:
                    async for event, version in self._caught_up(kind, namespace, labels, seen):  # noqa: B007
                        if event.type != "SYNCED" or not synced:
                            yield event
                    synced = True
                async with aclosing(self._changes(kind, namespace, labels, version)) as changes:
                    async for change, obj in changes:
                        backoff.reset()
                        version = obj["metadata"]["resourceVersion"]
                        for event in [] if change == "BOOKMARK" else seen.events(obj, present=change != "DELETED"):
                            yield event
                # a server that ends every watch at once must not make us spin
                await asyncio.sleep(self._limits.backoff_base_s)
            except GoneError as error:
                version = ""
                await backoff.pause(error)  # one that knows none of its versions would be listed without end
            except ClusterError as error:
                if not synced and not error.retry:
                    raise
                logger.warning("watch of %s interrupted: %s", kind.plural, error)
                version = "" if isinstance(error, NotFoundError) else version
                await backoff.pause(error)

    async def _caught_up(
        self, kind: Kind, namespace: str | None, labels: Mapping[str, str] | None, seen: Seen
    ) -> AsyncGenerator[tuple[WatchEvent, str], None]:
        """The events that turn what was told into what is there, at last SYNCED with the version of the list. Page by page: ten
        thousand pods are not to be in memory at once."""
        listed: set[tuple[str, str]] = set()
        began = ""
        async for page, began in self._pages(kind, namespace, labels):  # noqa: B007 - of any page
            listed |= {key_of(obj) for obj in page}
            for event in [event for obj in page for event in seen.events(obj, present=True)]:
                yield event, ""
        for event in seen.rest(listed):
            yield event, ""
        yield WatchEvent("SYNCED", {}), began

    async def _changes(
        self, kind: Kind, namespace: str | None, labels: Mapping[str, str] | None, version: str
    ) -> AsyncGenerator[tuple[str, Object], None]:
        """One watch connection: (type, object) until the server ends it; an ERROR event becomes the named error."""
        query = _selector(labels) | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": self._limits.watch_s,
        }
        async with aclosing(self._http.lines(_path(kind, namespace), query)) as lines:
            async for line in lines:
                yield _event_of(line, kind)


class KubeAccess:
    """`ApiAccess` of the process runtime: where the API server is, and tokens for pods."""

    def __init__(self, http: KubeHttp) -> None:
        self._http = http
        self.url = str(http.configuration.host)
        ca_file = http.configuration.ssl_ca_cert
        self.ca_file = Path(ca_file) if ca_file else None

    async def token(self, namespace: str, service_account: str, audience: str | None, expires_s: int, pod: Object) -> str:
        """A token bound to `pod` (TokenRequest)."""
        metadata = pod["metadata"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        spec: Object = {"expirationSeconds": expires_s, "boundObjectRef": bound}
        if audience:
            spec["audiences"] = [audience]
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"/api/v1/namespaces/{quote(namespace)}/serviceaccounts/{quote(service_account)}/token"
        answer = await self._http.request("POST", path, None, body)
        return str(answer["status"]["token"])


def _path(kind: Kind, namespace: str | None, name: str | None = None) -> str:
    root = "/api" if "/" not in kind.api_version else "/apis"
    where = f"/namespaces/{quote(namespace)}" if namespace and kind.namespaced else ""
    return f"{root}/{kind.api_version}{where}/{kind.plural}" + (f"/{quote(name, safe='')}" if name else "")


def _selector(labels: Mapping[str, str] | None) -> dict[str, str | int]:
    if not labels:
        return {}
    return {"labelSelector": ",".join(f"{name}={value}" for name, value in sorted(labels.items()))}


def _event_of(line: Object, kind: Kind) -> tuple[str, Object]:
    """One line of a watch; the named error of an ERROR event, UnavailableError for what is no event (a proxy's words)."""
    try:
        said, obj = line["type"], line["object"]
        if said != "ERROR":
            str(obj["metadata"]["resourceVersion"])
            return str(said), _slim(obj, kind)
        error = error_of(int(obj.get("code") or 500), str(obj.get("message")).encode())
    except (KeyError, TypeError, ValueError, AttributeError) as odd:
        raise UnavailableError(f"a line of the watch is no event: {type(odd).__name__}: {odd}") from odd
    raise error


def _page_of(page: Object, kind: Kind) -> tuple[builtins.list[Object], str, str]:
    """Objects of one page, the version of the list, the token of the next page; UnavailableError for what is no page."""
    try:
        meta = page["metadata"]
        return [_slim(item, kind) for item in page.get("items") or []], str(meta["resourceVersion"]), meta.get("continue") or ""
    except (KeyError, TypeError, AttributeError) as odd:
        raise UnavailableError(f"not a list of an API server: {type(odd).__name__}: {odd}") from odd


def _object_of(answer: Object, kind: Kind) -> Object:
    """The object of an answer; UnavailableError for what is none (a proxy's words)."""
    try:
        str(answer["metadata"]["name"])
        return _slim(answer, kind)
    except (KeyError, TypeError, AttributeError) as odd:
        raise UnavailableError(f"not an object of an API server: {type(odd).__name__}: {odd}") from odd


def _slim(obj: Object, kind: Kind) -> Object:
    """Without managedFields, half of an object's bytes that nobody here reads; items of lists get their kind back."""
    obj["metadata"].pop("managedFields", None)
    obj.setdefault("apiVersion", kind.api_version)
    obj.setdefault("kind", kind.kind)
    return obj
