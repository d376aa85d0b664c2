"""A condition that calls most nodes of a fleet bad, with the whole operator: it is not believed, and nothing is done for it."""

from __future__ import annotations

import asyncio

import pytest

from fleet_operator.cluster.interface import NODE, POD, WatchEvent
from tests.fleet_operator.test_nodes import node, told
from tests.fleet_operator.world import NAMESPACE, World, manifest


class Spread(World):
    """A node for each pod."""

    numbers = 0

    @property
    def node(self) -> str:
        self.numbers += 1
        return f"n{self.numbers - 1}"

    @node.setter
    def node(self, name: str) -> None:
        """It has none in particular."""

    async def call(self, count: int, *, by_taint: bool = False) -> None:
        """So many of the first twenty nodes bad, of both roles in turn, the others well; the last two have one of each."""
        for number in range(20):
            bad = number * 11 % 20 < count
            said = {"taints": ("nvidia.com/gpu-xid",)} if bad and by_taint else {"GPUXIDError": str(bad)}
            self.operator.feed(NODE, WatchEvent("MODIFIED", node(f"n{number}", **said)))
        await self.look()
        await self.operator.drain()

    async def alive(self) -> set[str]:
        """Names of pods that do not go."""
        pods = [pod["metadata"] for pod in await self.store.list(POD, NAMESPACE)]
        return {meta["name"] for meta in pods if "deletionTimestamp" not in meta}

    async def says(self) -> tuple[str, int, int]:
        """Reason of WithinRatio, how many serve, how many are held."""
        states = list((await told(self)).values())
        return (await self.condition("WithinRatio"))["reason"], states.count("serving"), states.count("held")


async def twenty() -> Spread:
    """Twenty workers at rest, each on a node of its own."""
    world = Spread()
    sizes = {role: {"minReplicas": count, "maxReplicas": count} for role, count in (("prefill", 8), ("decode", 12))}
    await world.user.apply(manifest(tiers=[{"name": "t", "accelerator": {"type": "cpu"}, **sizes}]))
    await world.settle()
    assert await world.says() == ("InRatio", 20, 0)
    return world


def test_a_condition_that_calls_most_nodes_bad_is_not_believed():
    """A detector that was upgraded called 18 of 20 nodes bad: a tenth of the fleet had all of the load, and eighteen workers that
    were well were replaced."""

    async def scenario() -> None:
        world = await twenty()
        before = await world.alive()
        await world.call(18)
        assert await world.says() == ("DevicesSuspected", 20, 0)
        said = await world.condition("WithinRatio")
        assert said["status"] == "True"
        assert "18 of 20 nodes have condition GPUXIDError=True" in said["message"]
        assert any(event.startswith("Warning DevicesSuspected tier t: ") for event in await world.events())
        await world.settle()
        assert await world.alive() == before
        await world.call(0)
        assert (await world.says(), await world.alive()) == (("InRatio", 20, 0), before)

    asyncio.run(scenario())


def test_taints_that_call_most_nodes_bad_are_believed():
    async def scenario() -> None:
        world = await twenty()
        await world.call(18, by_taint=True)
        assert (await world.says())[0] == "DevicesFailing"
        assert len(await world.alive()) == 38

    asyncio.run(scenario())


@pytest.mark.parametrize("came", [0, 5, 11], ids=["none-came", "some-came", "all-came"])
def test_nodes_that_are_called_bad_one_after_the_other_are_believed_until_they_are_too_many(came: int):
    """Those made meanwhile go, none that was there before; what is undone is not done again until less is said."""

    async def scenario() -> None:
        world = await twenty()
        before = await world.alive()
        for count in range(1, 12):
            await world.call(count)
            assert (await world.says())[0] == "DevicesFailing"
        made = await world.alive() - before
        assert len(made) == 11
        world.late = set(sorted(made)[came:])
        await world.kubelet()
        await world.call(12)
        await world.kubelet()
        for _ in range(5):
            assert await world.says() == ("DevicesSuspected", 20, 0)
            assert await world.alive() == before
            await world.step()
        await world.call(11)
        assert (await world.says())[0] == "DevicesFailing"
        assert len(await world.alive()) == 31
        world.late = set()
        await world.settle()
        assert await world.says() == ("InRatio", 20, 0)
        assert len(await world.alive() & before) == 9

    asyncio.run(scenario())
