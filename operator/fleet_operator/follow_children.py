"""Watches of what the operator makes, and of nodes: one connection per kind and namespace.

kopf follows the fleets themselves. Their children change far more often, and kopf keeps a queue and a task per object to call a
handler for each; a decoded line goes straight into the cache. With uvloop that took `make bench-operator` from 5.6 to 4.6 ms of
CPU per pod event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from fleet_operator.cluster.interface import (
    FLEET,
    NODE,
    Cluster,
    ClusterError,
    ForbiddenError,
    Kind,
    Object,
    UnavailableError,
    WatchEvent,
)
from fleet_operator.health.logs import about
from fleet_operator.names import MANAGED_BY, MANAGER
from fleet_operator.together import until_first_ends

OURS: Final = {MANAGED_BY: MANAGER}
PROBE: Final = "inferencefleet-may-list"
"""No object has this name."""
LOG = logging.getLogger("fleet.operator")
AGAIN_S, AGAIN_MOST_S = 0.5, 5.0
"""How long until it is asked again what nobody answered; twice as long each time."""
Feed = Callable[[Kind, WatchEvent], None]


class Finder(Protocol):
    """The part of a `Cluster` that tells rights."""

    async def find(self, kind: Kind, namespace: str | None, name: str) -> Object | None: ...


class Patient:
    """Waits for an answer. What is decided once, at start, must not be decided by an API server that cannot say: taken for
    allowed, the first watch would be refused and end the operator."""

    def __init__(self, cluster: Finder, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._cluster = cluster
        self._sleep = sleep

    async def find(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """See `Cluster.find`."""
        pause_s = AGAIN_S
        while True:
            try:
                return await self._cluster.find(kind, namespace, name)
            except UnavailableError as error:
                wait_s = min(AGAIN_MOST_S, error.retry_after_s or pause_s)
                LOG.warning("asking for %s: %s: %s; again in %g s", kind.plural, error.reason, error, wait_s)
                await self._sleep(wait_s)
                pause_s = min(AGAIN_MOST_S, pause_s * 2)


async def follow_children(cluster: Cluster, feed: Feed, kinds: Sequence[Kind], namespaces: Sequence[str] = ()) -> None:
    """For ever: what the watches of these kinds tell goes to `feed`; SYNCED once for a kind, when all its namespaces were listed.

    ClusterError when the first list is refused for good. No namespaces: all of them."""
    where = {kind: tuple(namespaces) if namespaces and kind.namespaced else (None,) for kind in kinds}
    waiting: dict[Kind, set[str | None]] = {kind: set(found) for kind, found in where.items()}
    places = [(kind, namespace) for kind, found in where.items() for namespace in found]
    await until_first_ends(*(_follow(cluster, feed, kind, namespace, waiting[kind]) for kind, namespace in places))


async def _follow(cluster: Cluster, feed: Feed, kind: Kind, namespace: str | None, waiting: set[str | None]) -> None:
    await _allowed(cluster, kind, namespace)
    async for event in cluster.watch(kind, namespace, None if kind == NODE else OURS):
        if event.type == "SYNCED":
            waiting.discard(namespace)
            if waiting:
                continue
        feed(kind, event)


async def _allowed(cluster: Finder, kind: Kind, namespace: str | None) -> None:
    """ForbiddenError when we may not list the kind: a watch would wait for the right for ever, and say so only in its log."""
    with suppress(UnavailableError):  # the watch waits that out
        await cluster.find(kind, namespace, PROBE)


async def refused(cluster: Cluster, kind: Kind, namespaces: Sequence[str]) -> list[str]:
    """Those of the namespaces in which we may not list the kind. An API that does not answer refuses nothing."""
    found = []
    for namespace in namespaces:
        try:
            await _allowed(cluster, kind, namespace)
        except ForbiddenError:
            found.append(namespace)
        except ClusterError as error:
            LOG.debug("whether %s of namespace %s may be listed: %s", kind.plural, namespace, error, extra=about(namespace))
    return found


async def closed_to(cluster: Finder, kinds: Sequence[Kind], namespaces: Sequence[str]) -> dict[str, ForbiddenError]:
    """Namespaces in which we may not list each of the kinds, with what the API said of the first."""
    found = dict[str, ForbiddenError]()
    for namespace in namespaces:
        try:
            for kind in kinds:
                await _allowed(cluster, kind, namespace)
        except ForbiddenError as error:
            found[namespace] = error
    return found


async def follow_when_open(
    cluster: Cluster, feed: Feed, kinds: Sequence[Kind], namespace: str, again_s: float, opened: Callable[[], Awaitable[None]]
) -> None:
    """For ever: what the watches of these kinds tell of a namespace that is closed to us now, from when it is not. `opened` is
    called when each of them was listed once."""
    while await closed_to(cluster, [FLEET, *kinds], [namespace]):  # noqa: ASYNC110 - nothing tells of a right
        await asyncio.sleep(again_s)
    missing = set(kinds)

    async def follow(kind: Kind) -> None:
        async for event in cluster.watch(kind, namespace, OURS):
            if event.type != "SYNCED":
                feed(kind, event)
            elif kind in missing:
                missing.discard(kind)
                if not missing:
                    await opened()

    await until_first_ends(*(follow(kind) for kind in kinds))


async def may_read_nodes(cluster: Finder) -> bool:
    """A namespaced installation has no right to them."""
    try:
        await _allowed(cluster, NODE, None)
    except ForbiddenError:
        LOG.warning("nodes cannot be read: workers on cordoned, failing or lost nodes are replaced only after they are gone")
        return False
    return True
