"""Workers of two tiers change their role at the same time: what one of them does costs the other nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fleet_operator.flip.asking import Answer, Ask
from fleet_operator.flip.follow import FlipFollower
from tests.fleet_operator.test_flips import Workers, lead, pods, sized
from tests.fleet_operator.world import World, manifest

TURNS = 200
"""Of the loop: more than a proof that nobody holds up takes."""


class OneHangs(Workers):
    """The engine of one that takes a role, and is of this tier, answers nothing from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = ""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Ask]:
        async with super().connect() as plain:

            async def ask(url: str, body: dict[str, Any] | None = None, within_s: float = 0.0) -> Answer | None:
                if self.silent and url.startswith(f"http://{self.silent}:8000"):
                    await asyncio.Event().wait()
                return await plain(url, body, within_s)

            yield ask


async def tiers(world: World, **sizes: tuple[int, int]) -> None:
    found = [{**sized(*size), "name": name} for name, size in sizes.items()]
    await world.user.apply(manifest(tiers=found, scaling={"mode": "manual"}, rollout={"drainTimeout": "5s"}))


async def second(world: World) -> list[asyncio.Task[None]]:
    """As `World.step`, but nobody waits for what is read."""
    world.now += 1
    await world.look()
    readings = [asyncio.ensure_future(reading) for reading in world.operator.reader._due()]
    for _ in range(TURNS):
        await asyncio.sleep(0)
    await world.operator.drain()
    await world.kubelet()
    return readings


async def told(world: World, tier: str) -> dict[str, Any] | None:
    found = [pod for pod in (await pods(world)).values() if pod["metadata"]["labels"]["inferencefleet.io/tier"] == tier]
    return next((pod for pod in found if "inferencefleet.io/flip" in pod["metadata"]["annotations"]), None)


def test_a_proof_that_hangs_keeps_the_worker_of_another_tier_from_nothing():
    """It was not told its role before the proof of the first one was over, and was deleted when its own time was up."""

    async def scenario() -> None:
        world, workers = World(), OneHangs()
        world.flips = FlipFollower(workers.connect)
        world.operator = world.new_operator()
        await tiers(world, t=(1, 3), u=(1, 3))
        await world.settle()
        world.now += 600
        await lead(world)
        before, readings = await pods(world), list[asyncio.Task[None]]()
        await tiers(world, t=(2, 2), u=(1, 3))
        readings += await second(world)
        hangs = await told(world, "t")
        assert hangs is not None
        workers.silent = hangs["status"]["podIP"]
        for _ in range(3):
            readings += await second(world)
        await tiers(world, t=(2, 2), u=(2, 2))
        readings += await second(world)
        flips = await told(world, "u")
        assert flips is not None
        for _ in range(5):
            readings += await second(world)
        assert workers.at(flips["status"]["podIP"]).asked == ["prefill"]
        assert await told(world, "u") is None, "proven, and relabelled"
        after = await pods(world)
        assert "inferencefleet.io/flipped-at" in after[flips["metadata"]["uid"]]["metadata"]["annotations"]
        assert after.keys() == before.keys()
        for _ in range(40):
            readings += await second(world)
        assert before.keys() - (await pods(world)).keys() == {hangs["metadata"]["uid"]}, "its own time was up"
        for reading in readings:
            reading.cancel()
        await asyncio.gather(*readings, return_exceptions=True)

    asyncio.run(scenario())
