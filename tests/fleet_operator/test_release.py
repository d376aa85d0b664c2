"""A fleet whose finalizer nobody takes off any more: its user finds what to do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet_api.v1alpha1.fleet import DRAIN
from fleet_operator.cluster.interface import FLEET, PDB, POD, ForbiddenError
from tests.fleet_operator.test_deletion import read
from tests.fleet_operator.world import NAMESPACE, World, manifest, play


def test_the_status_names_the_finalizer_before_anybody_needs_to_know_it():
    """Of a fleet that no operator watches any more nobody says anything: what was said before has to do."""

    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(deletion={"wait": "10m"}))
        await world.settle()
        accepted = await world.condition("Accepted")
        assert DRAIN in accepted["message"]
        assert "without one kubectl edit" in accepted["message"]
        world.new_operator()  # it watches others
        await world.user.delete(FLEET, NAMESPACE, "f")
        assert (await world.condition("Accepted"))["message"] == accepted["message"]
        await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"finalizers": []}})
        assert await world.exists(FLEET, "f") is False

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({}, id="never-ours"),
        pytest.param({"deletion": {"wait": "10m"}}, id="drained-by-us-first"),
        pytest.param({"tiers": []}, id="refused"),
    ],
)
def test_one_that_others_keep_does_not_say_that_it_is_looked_after(spec: dict[str, Any]):
    """What runs of it goes on, and who lost a worker of it waited for one that nobody made, of a fleet that said Ready."""

    async def scenario(world: World) -> None:
        await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"finalizers": ["theirs/a", "theirs/b"]}})
        entry = world.store._entry(FLEET, NAMESPACE, "f")  # past admission
        world.store._write(FLEET, entry, {**entry.obj, "spec": {**entry.obj["spec"], **spec}})
        await world.settle()
        await world.user.delete(FLEET, NAMESPACE, "f")
        world.now += 700
        await world.settle()
        ready, available = await world.condition("Ready"), await world.condition("Available")
        assert (ready["status"], ready["reason"]) == ("False", "HeldByFinalizer")
        assert available["status"] == "Unknown"
        assert "theirs/a, theirs/b" in ready["message"]
        assert "its disruption budgets let no drain of a node end" in ready["message"]
        assert await world.store.list(PDB, NAMESPACE)  # it may serve on, and nobody would replace who is evicted
        found = (await world.store.get(FLEET, NAMESPACE, "f"))["status"]["conditions"]
        assert [c["type"] for c in found if c["status"] == "True" and c["type"] != "Accepted"] == []
        for pod in await world.store.list(POD, NAMESPACE):
            await world.user.delete(POD, NAMESPACE, pod["metadata"]["name"], grace_s=0)
        assert [kind for _, kind, _ in await world.step()] == []
        assert await world.touch() == []
        world.operator = world.new_operator()
        assert await world.touch() == []
        assert sum("Normal HeldByFinalizer" in event for event in await world.events()) == 1

    play(scenario)


def test_one_that_goes_while_that_is_said_is_no_failure():
    async def scenario(world: World) -> None:
        await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"finalizers": ["theirs/a"]}})
        await world.user.delete(FLEET, NAMESPACE, "f")
        await world.look()
        await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"finalizers": None}})
        await world.operator.drain()
        assert [event for event in await world.events() if event.startswith("Warning")] == []

    play(scenario)


def test_its_time_is_over_when_it_is_over_though_another_look_was_to_come_later():
    """The pace after failures asked for a look in 15 s, and with that the one that was due before was forgotten."""

    async def scenario(world: World) -> None:
        world.api.refuse = lambda verb, kind, name: ForbiddenError("not now") if (verb, kind) == ("delete", POD) else None
        deleted_at = world.now
        await world.user.delete(FLEET, NAMESPACE, "f")
        for _ in range(45):
            await read(world, busy={"decode": 1.0})
            await world.step()
        assert len(await world.store.list(POD, NAMESPACE)) == 3
        world.now = deleted_at + 50
        await world.touch()
        world.now = deleted_at + 61
        await world.operator.drain()
        assert not await world.exists(FLEET, "f")

    play(scenario, deletion={"wait": "60s"})
