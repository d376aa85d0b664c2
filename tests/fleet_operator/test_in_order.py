"""A pass looks at a fleet's objects only where something of what they follow from changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fleet_operator.apply import Applier
from fleet_operator.cluster.interface import FLEET, POD, POOL, SERVICE, InvalidError
from fleet_operator.in_order import InOrder
from fleet_operator.names import GROUP_OF, REVISION, ROLE, TIER
from fleet_operator.names import POOL as POOL_LABEL
from fleet_operator.outcome import Outcome
from fleet_operator.render.gang import COSCHEDULING_LABEL
from fleet_planner.types import Problem
from tests.fleet_operator.world import NAMESPACE, World, play


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry per pass that looked."""
    found: list[str] = []
    whole = Applier._objects

    async def counted(self: Applier, work: Any, templates: Any) -> None:
        found.append(work.fleet.metadata.name)
        await whole(self, work, templates)

    monkeypatch.setattr(Applier, "_objects", counted)
    return found


async def worker(world: World) -> str:
    return next(
        pod["metadata"]["name"]
        for pod in await world.store.list(POD, NAMESPACE)
        if "inferencefleet.io/tier" in pod["metadata"]["labels"]
    )


async def restarted(world: World) -> None:
    status = {"containerStatuses": [{"name": "worker", "restartCount": 1}]}
    await world.user.patch_status(POD, NAMESPACE, await worker(world), status)


async def unready(world: World) -> None:
    status = {"conditions": [{"type": "Ready", "status": "False"}]}
    await world.user.patch_status(POD, NAMESPACE, await worker(world), status)


async def labelled(world: World) -> None:
    """Not one of ours: those are put back, and then it is as it was (pod_marks.py)."""
    labels = {"example.com/team": "x"}
    await world.user.patch(POD, NAMESPACE, await worker(world), {"metadata": {"labels": labels}})


async def annotated(world: World) -> None:
    await world.user.patch(POD, NAMESPACE, await worker(world), {"metadata": {"annotations": {"a": "b"}}})


async def claimed(world: World) -> None:
    await world.user.patch_status(POD, NAMESPACE, await worker(world), {"resourceClaimStatuses": [{"name": "c"}]})


async def service_edited(world: World) -> None:
    await world.user.patch(SERVICE, NAMESPACE, "f-router", {"spec": {"type": "NodePort"}})


async def pool_told(world: World) -> None:
    name = (await world.pool("decode"))["metadata"]["name"]
    await world.user.patch_status(POOL, NAMESPACE, name, {"readyReplicas": 9})


async def fleet_edited(world: World) -> None:
    await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"limits": {"maxOutputTokens": 100}}})


async def fleet_annotated(world: World) -> None:
    await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"annotations": {"a": "b"}}})


async def nothing(world: World) -> None:
    """A resync."""


@pytest.mark.parametrize("happens", [nothing, restarted])
def test_a_fleet_in_order_is_not_looked_at_again(happens: Callable[[World], Awaitable[None]], looks: list[str]):
    async def scenario(world: World) -> None:
        await world.touch()
        looks.clear()
        await happens(world)
        assert await world.touch() == []
        assert looks == []

    play(scenario)


@pytest.mark.parametrize(
    "happens", [unready, labelled, annotated, claimed, service_edited, pool_told, fleet_edited, fleet_annotated]
)
def test_whatever_else_changed_is_looked_at(happens: Callable[[World], Awaitable[None]], looks: list[str]):
    async def scenario(world: World) -> None:
        await world.touch()
        looks.clear()
        await happens(world)
        await world.touch()
        assert looks

    play(scenario)


def test_what_the_api_refuses_is_tried_in_every_pass():
    """A worker's annotation that a webhook refuses for a while: no word of it is said, and nothing changes when it ends."""

    async def scenario(world: World) -> None:
        world.api.refuse = lambda verb, kind, name: InvalidError("no") if (verb, kind) == ("patch", POD) else None
        adapters = [{"name": "a", "source": "file:///m/a"}]
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"model": {"adapters": adapters}}})
        for _ in range(3):
            await world.touch()
        world.api.refuse = lambda verb, kind, name: None
        assert ("patch", "Pod", await worker(world)) in await world.touch()

    play(scenario)


def test_trouble_and_groups_that_wait_are_looked_at_in_every_pass(monkeypatch: pytest.MonkeyPatch):
    """A problem may end without any news; a PodGroup is put again by time alone."""
    seen: list[Any] = []
    whole = InOrder.note
    monkeypatch.setattr(InOrder, "note", lambda self, *noted: seen.append(noted))

    async def scenario(world: World) -> None:
        await world.touch()
        spec, plan, live, outcome = seen[-1]
        labels = {GROUP_OF: "w-0", COSCHEDULING_LABEL: "w-0", TIER: "t", ROLE: "decode", REVISION: "r", POOL_LABEL: "w"}
        pod = {"metadata": {"name": "w-0", "labels": labels}, "spec": {}}
        for objects, found, remembered in (
            (live, outcome, True),
            (live, Outcome(problems=[Problem("NameConflict", "Service f-router")]), False),
            ({**live, ("Pod", "w-0"): pod}, outcome, False),
        ):
            memory = InOrder()
            whole(memory, spec, plan, objects, found)
            assert memory.holds(spec, plan, objects) is remembered

    play(scenario)
