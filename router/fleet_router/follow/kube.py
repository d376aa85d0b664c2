"""Follow one ConfigMap through the Kubernetes API: list, then watch.

Rights that it needs: get, list and watch on that one ConfigMap. Errors keep the last good documents.

A watch may freeze without a word (a connection that is half open, a proxy that passes nothing on) or lose an event. So the API
server is asked for bookmarks, of which one comes each minute, and a watch that is silent for longer is made anew; and the
version of the ConfigMap is asked for every AUDIT_S at most, beside the watch. A thousand routers make 29 such requests a
second, each of one object's metadata, of less than a kilobyte whatever the fleet's size; they come at times of their own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import msgspec

from fleet_router.follow.documents import Documents, parse
from fleet_router.follow.kube_http import JSON, ApiServer, get_lines
from fleet_wire.unreadable import UNREADABLE

BACKOFF_FIRST_S = 0.2
BACKOFF_MOST_S = 5.0
METADATA = f"{JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
PROBLEMS = (OSError, EOFError, TimeoutError, *UNREADABLE, asyncio.LimitOverrunError)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long what takes."""

    watch_s: int = 300
    """The API server is asked to end a watch then."""
    silence_s: float = 70.0
    """One that said nothing for so long is dead: a bookmark comes each minute."""
    answer_s: float = 10.0
    """Silence in the middle of a list."""
    audit_s: float = 40.0
    """Longest time between two looks at the version; the shortest is three quarters of it."""
    late_s: float = 1.0
    """What the watch has for telling of a version that an audit saw before it."""


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Item(msgspec.Struct):
    """A ConfigMap, or what else an event is about; a page of something else in its place is a ValueError."""

    data: dict[str, str] | None = None
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class _Version(msgspec.Struct, rename="camel"):
    resource_version: str


class _Page(msgspec.Struct):
    metadata: _Version
    items: tuple[_Item, ...] | None = None


class _Event(msgspec.Struct):
    type: str
    object: _Item


async def follow_kube(
    namespace: str, name: str, apply: Callable[[Documents], None], failed: Callable[[str], None], same: Callable[[], None],
    server: ApiServer, pace: Pace = Pace(),
) -> None:  # fmt: skip
    """Call `apply` with every version of the ConfigMap, `failed` with every problem, `same` whenever the last version is the one
    that was applied; for ever."""
    follower = _Follower(namespace, name, apply, failed, same, server, pace)
    backoff_s = BACKOFF_FIRST_S
    while True:
        try:
            version = await follower.list()
            backoff_s = BACKOFF_FIRST_S
            await _first_ends(follower.watch(version), follower.audit())
            await asyncio.sleep(BACKOFF_FIRST_S)  # an API server that ends every watch at once must not be asked in a loop
        except PROBLEMS as error:
            failed(f"{type(error).__name__}: {error}")
            await asyncio.sleep(backoff_s)
            backoff_s = min(BACKOFF_MOST_S, backoff_s * 2)


class _Follower:
    """One ConfigMap: what the API server told of it last."""

    def __init__(
        self, namespace: str, name: str, apply: Callable[[Documents], None], failed: Callable[[str], None],
        same: Callable[[], None], server: ApiServer, pace: Pace,
    ) -> None:  # fmt: skip
        self._path = f"/api/v1/namespaces/{namespace}/configmaps"
        self._only = {"fieldSelector": f"metadata.name={name}"}
        self._apply, self._failed, self._same = apply, failed, same
        self._server, self._pace = server, pace
        self._told = ""
        """Version of the ConfigMap that was delivered last, good or bad."""
        self._good = False
        """It could be read."""

    async def list(self) -> str:
        """Deliver what is there now; the version to watch from."""
        page = await self._page(JSON)
        for item in page.items or ():
            self._deliver(item)
        return page.metadata.resource_version

    async def watch(self, version: str) -> None:
        """Until the API server ends it, or says that the version is too old (410)."""
        async with aclosing(self._events(version)) as events:
            async for event in events:
                if event.type == "ERROR":
                    return
                if event.type in ("ADDED", "MODIFIED"):
                    self._deliver(event.object)

    async def audit(self) -> None:
        """Until the watch has missed something. One that is deleted is not: the last documents are kept then."""
        while True:
            await asyncio.sleep(self._pace.audit_s * random.uniform(0.75, 1.0))  # noqa: S311 - no secret
            try:
                if await self._missed():
                    return self._failed("the watch had not told of the last change: listed again")
            except PROBLEMS as error:
                self._failed(f"audit: {type(error).__name__}: {error}")

    async def _missed(self) -> bool:
        """Whether there is a version of which the watch does not tell, now or in a moment; `same` where there is none."""
        known = self._told
        there = {item.metadata.resource_version for item in (await self._page(METADATA)).items or ()}
        if there <= {known}:
            if there and self._good:
                self._same()
            return False
        await asyncio.sleep(self._pace.late_s)
        return self._told == known

    def _deliver(self, item: _Item) -> None:
        self._told, self._good = item.metadata.resource_version, False
        try:
            self._apply(parse(item.data or {}))
            self._good = True
        except ValueError as error:
            self._failed(str(error))

    async def _page(self, accept: str) -> _Page:
        target = f"{self._path}?{urlencode(self._only)}"
        body = b"".join([line async for line in get_lines(self._server, target, self._pace.answer_s, accept)])
        return msgspec.json.decode(body, type=_Page)

    async def _events(self, version: str) -> AsyncGenerator[_Event, None]:
        asked = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version, "timeoutSeconds": self._pace.watch_s}
        target = f"{self._path}?{urlencode({**self._only, **asked})}"
        try:
            async with aclosing(get_lines(self._server, target, self._pace.silence_s)) as lines:
                async for line in lines:
                    if line.strip():
                        yield msgspec.json.decode(line, type=_Event)
        except TimeoutError as error:
            raise TimeoutError(f"the watch said nothing for {self._pace.silence_s:g} s") from error


async def _first_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Whichever comes first; the others end with it, and its error is ours."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
