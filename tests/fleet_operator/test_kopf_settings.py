"""kopf as we set it up: it writes nothing, and the server filters."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import kopf
from kopf._cogs.structs.references import Resource
from kopf._core.engines.indexing import OperatorIndexers
from kopf._core.reactor.inventory import ResourceMemories
from kopf._core.reactor.processing import process_resource_event

from fleet_operator.cluster.interface import FLEET, NODE, POD, Kind, WatchEvent
from fleet_operator.reconciler import CHILDREN
from fleet_operator.shell_kopf import build_registry


class Fed:
    def __init__(self) -> None:
        self.events: list[tuple[Kind, WatchEvent]] = []

    def feed(self, kind: Kind, event: WatchEvent) -> None:
        self.events.append((kind, event))


def resource(kind: Kind) -> Resource:
    group, _, version = kind.api_version.rpartition("/")
    verbs = frozenset({"list", "watch", "patch"})
    return Resource(
        group=group, version=version, plural=kind.plural, kind=kind.kind, namespaced=True, preferred=True, verbs=verbs
    )


def set_up() -> tuple[kopf.OperatorRegistry, kopf.OperatorSettings, Fed]:
    fed, settings = Fed(), kopf.OperatorSettings()
    registry = build_registry(fed, Path("unused"), (FLEET, *CHILDREN, NODE))
    for handler in registry._activities.get_all_handlers():
        if "set_up" in handler.id:
            handler.fn(settings=settings)
    return registry, settings, fed


def test_the_server_sends_only_our_objects_of_each_kind_but_every_fleet():
    _, settings, _ = set_up()
    found = {kind.kind: list(settings.watching.label_selectors.collect(resource(kind))) for kind in (FLEET, NODE, *CHILDREN)}
    assert found == {"InferenceFleet": [], "Node": []} | {
        kind.kind: ["app.kubernetes.io/managed-by=inferencefleet"] for kind in CHILDREN
    }


def test_an_event_is_fed_once_and_nothing_is_written():
    """A write would need a connection, which is not there."""
    registry, settings, fed = set_up()
    pod: dict[str, Any] = {"metadata": {"name": "p", "namespace": "ml", "uid": "u"}, "spec": {"containers": [{"name": "c"}]}}

    async def go(kind: str | None) -> None:
        await process_resource_event(
            lifecycle=kopf.lifecycles.all_at_once,
            indexers=OperatorIndexers(),
            registry=registry,
            settings=settings,
            memories=ResourceMemories(),
            memobase=kopf.Memo(),
            resource=resource(POD),
            raw_event={"type": kind, "object": pod},
            event_queue=asyncio.Queue(),
        )

    for kind in (None, "MODIFIED", "DELETED"):
        asyncio.run(go(kind))
    assert [(kind, event.type) for kind, event in fed.events] == [(POD, "ADDED"), (POD, "MODIFIED"), (POD, "DELETED")]
    assert all(event.object == pod for _, event in fed.events)
