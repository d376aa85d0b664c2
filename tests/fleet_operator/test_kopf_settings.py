"""kopf as we set it up: it follows fleets and writes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import kopf
from kopf._cogs.structs.references import Resource
from kopf._core.engines.indexing import OperatorIndexers
from kopf._core.reactor.inventory import ResourceMemories
from kopf._core.reactor.processing import process_resource_event

from fleet_operator.cluster.interface import FLEET, Kind, WatchEvent
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
    registry = build_registry(fed, Path("unused"))
    for handler in registry._activities.get_all_handlers():
        if "set_up" in handler.id:
            handler.fn(settings=settings)
    return registry, settings, fed


def test_an_event_is_fed_once_and_nothing_is_written():
    """A write would need a connection, which is not there."""
    registry, settings, fed = set_up()
    fleet: dict[str, Any] = {"metadata": {"name": "f", "namespace": "ml", "uid": "u"}, "spec": {"tiers": [{"name": "t"}]}}

    async def go(kind: str | None) -> None:
        await process_resource_event(
            lifecycle=kopf.lifecycles.all_at_once,
            indexers=OperatorIndexers(),
            registry=registry,
            settings=settings,
            memories=ResourceMemories(),
            memobase=kopf.Memo(),
            resource=resource(FLEET),
            raw_event={"type": kind, "object": fleet},
            event_queue=asyncio.Queue(),
        )

    for kind in (None, "MODIFIED", "DELETED"):
        asyncio.run(go(kind))
    assert [(kind, event.type) for kind, event in fed.events] == [(FLEET, "ADDED"), (FLEET, "MODIFIED"), (FLEET, "DELETED")]
    assert all(event.object == fleet for _, event in fed.events)
