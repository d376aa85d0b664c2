"""Children and nodes come from watches of our own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest

from fleet_operator.cluster.interface import (
    NODE,
    POD,
    POOL,
    ForbiddenError,
    Kind,
    UnauthorizedError,
    UnavailableError,
    WatchEvent,
)
from fleet_operator.follow_children import Patient, follow_children, may_read_nodes

OURS = {"app.kubernetes.io/managed-by": "inferencefleet"}
ADDED, SYNCED = WatchEvent("ADDED", {"metadata": {"name": "a"}}), WatchEvent("SYNCED", {})


class Watched:
    """A cluster with nothing but watches; each tells its events and is then quiet."""

    def __init__(self, told: Callable[[Kind, str | None], list[WatchEvent | Exception]]) -> None:
        self._told = told
        self.asked: list[tuple[str, str | None, Mapping[str, str] | None]] = []

    async def find(self, kind: Kind, namespace: str | None, name: str) -> None:
        for event in self._told(kind, namespace):
            if isinstance(event, Exception):
                raise event

    async def watch(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> AsyncIterator[WatchEvent]:
        self.asked.append((kind.kind, namespace, labels))
        for event in self._told(kind, namespace):
            if isinstance(event, Exception):
                await asyncio.Event().wait()  # as a real one waits for a right
            else:
                yield event
        await asyncio.Event().wait()


def fed_by(watched: Watched, kinds: tuple[Kind, ...], namespaces: tuple[str, ...]) -> list[tuple[str, str]]:
    fed: list[tuple[str, str]] = []

    async def go() -> None:
        following = asyncio.create_task(
            follow_children(watched, lambda kind, event: fed.append((kind.kind, event.type)), kinds, namespaces)
        )
        for _ in range(5):
            await asyncio.sleep(0)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(go())
    return fed


def test_the_server_is_asked_for_our_objects_alone():
    watched = Watched(lambda kind, namespace: [SYNCED])
    assert fed_by(watched, (POOL, POD), ()) == [("WorkerPool", "SYNCED"), ("Pod", "SYNCED")]
    assert watched.asked == [("WorkerPool", None, OURS), ("Pod", None, OURS)]


def test_a_kind_is_complete_when_each_of_its_namespaces_was_listed():
    told = {"a": [ADDED, SYNCED], "b": [ADDED]}
    assert ("Pod", "SYNCED") not in fed_by(Watched(lambda _, namespace: list(told[namespace])), (POD,), ("a", "b"))
    told["b"].append(SYNCED)
    assert fed_by(Watched(lambda _, namespace: list(told[namespace])), (POD,), ("a", "b")) == [
        ("Pod", "ADDED"),
        ("Pod", "ADDED"),
        ("Pod", "SYNCED"),
    ]


def test_a_right_that_is_missing_ends_the_operator_with_its_own_error():
    with pytest.raises(ForbiddenError, match="pods is forbidden"):
        asyncio.run(follow_children(Watched(lambda *_: [ForbiddenError("pods is forbidden")]), lambda *_: None, (POOL, POD)))


def test_nodes_that_may_not_be_read_are_said_and_end_nothing(caplog):
    assert not asyncio.run(may_read_nodes(Watched(lambda *_: [ForbiddenError("no")])))
    assert "nodes cannot be read" in caplog.text


def test_an_api_that_is_away_is_no_missing_right():
    assert asyncio.run(may_read_nodes(Watched(lambda *_: [UnavailableError("away")])))


def test_what_is_decided_at_the_start_waits_for_an_answer():
    """Taken for allowed while the API server was away, nodes that may not be read ended a namespaced operator at their first
    watch (exit 2)."""
    told = [UnauthorizedError("not yet"), UnavailableError("away"), UnavailableError("away"), ForbiddenError("no")]
    told[2].retry_after_s = 60.0
    waited = list[float]()

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    assert not asyncio.run(may_read_nodes(Patient(Watched(lambda *_: [told.pop(0)]), wait)))
    assert (told, waited) == ([], [0.5, 1.0, 5.0])


def test_all_nodes_are_followed_whatever_the_namespaces():
    watched = Watched(lambda *_: [ADDED, SYNCED])
    assert fed_by(watched, (NODE,), ("a", "b")) == [("Node", "ADDED"), ("Node", "SYNCED")]
    assert watched.asked == [("Node", None, None)]
