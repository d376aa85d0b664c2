"""Scale to zero as the operator does it, on the in-memory store: what is written, what stays, and who is listened to."""

from __future__ import annotations

import asyncio
import json

from fleet_operator.cluster.interface import CONFIG_MAP, FLEET, PDB, POD, POOL
from fleet_planner.types import Demand, RoleLoad, TierTelemetry
from fleet_wire import endpoints
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

SCALING = {"toZero": {"enabled": True, "idle": "10s"}}


class Sleeper:
    """A world whose routers can be heard."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.held = 0
        self.asked: list[list[str]] = []
        self.answering = True
        world.listen = self.listen  # type: ignore[method-assign]

    async def listen(self, routers: list[str]) -> Demand | None:
        self.asked.append(routers)
        return Demand(self.held, None, self.world.now) if self.answering else None

    async def seconds(self, count: int) -> None:
        for _ in range(count):
            load = RoleLoad(inflight=0.0, measured_at=self.world.now)
            self.world.load = {"t": TierTelemetry(load, load, demand=Demand(self.held, 0.0, self.world.now))}
            await self.world.step()

    async def hear(self) -> None:
        operator = self.world.operator
        await asyncio.gather(*operator.reader.listen_due())


async def document(world: World) -> endpoints.Endpoints:
    data = (await world.store.get(CONFIG_MAP, NAMESPACE, "f-router"))["data"]
    return endpoints.decode(data[endpoints.ENDPOINTS_KEY])


async def asleep(world: World) -> Sleeper:
    sleeper = Sleeper(world)
    world.operator = world.new_operator()
    await world.look()
    await sleeper.seconds(20)
    assert await world.workers() == {"prefill": 0, "decode": 0}
    return sleeper


def test_no_pod_is_left_and_the_pools_say_zero():
    async def go(world: World) -> None:
        await asleep(world)
        assert [pool["spec"]["replicas"] for pool in await world.store.list(POOL, NAMESPACE)] == [0, 0]
        roles = [pod["metadata"]["labels"]["inferencefleet.io/role"] for pod in await world.store.list(POD, NAMESPACE)]
        assert set(roles) <= {"router"}
        told = await document(world)
        assert (told.workers, [zero.tier for zero in told.at_zero]) == ((), ["t"])
        budgets = [b for b in await world.store.list(PDB, NAMESPACE) if b["metadata"]["name"] != "f-router"]
        assert [budget["spec"]["minAvailable"] for budget in budgets] == [0, 0]
        assert (await world.condition("Ready"))["reason"] == "AtZero"
        assert any("Resized tier t: 1 prefill and 2 decode → 0 prefill and 0 decode" in event for event in await world.events())
        assert not any(event.startswith("Warning") for event in await world.events())

    play(go, scaling=SCALING, tiers=[{"name": "t", "accelerator": {"type": "cpu"}, "decode": {"minReplicas": 2}}])


def test_at_zero_nothing_is_written():
    async def go(world: World) -> None:
        sleeper = await asleep(world)
        for _ in range(20):
            await sleeper.seconds(1)
            assert world.api.writes == []

    play(go, scaling=SCALING)


def test_a_held_request_wakes_within_the_pass_that_hears_of_it():
    async def go(world: World) -> None:
        sleeper = await asleep(world)
        await sleeper.hear()
        assert len(sleeper.asked) == 1
        sleeper.held = 1
        await sleeper.hear()
        await world.operator.drain()  # no telemetry was read in between
        assert await world.workers() == {"prefill": 1, "decode": 1}
        assert [zero.tier for zero in (await document(world)).at_zero] == ["t"]
        await world.look()
        await world.operator.drain()
        count = len(sleeper.asked)
        await sleeper.hear()
        assert len(sleeper.asked) == count  # a fleet that wakes is read with its telemetry
        await world.kubelet()
        await sleeper.seconds(3)
        assert {worker.state for worker in (await document(world)).workers} == {"serving"}
        sleeper.held = 0
        await sleeper.seconds(1)
        assert (await document(world)).at_zero == ()
        assert (await world.condition("Ready"))["reason"] == "AllGood"

    play(go, scaling=SCALING)


async def asked_again_after_a_pause(sleeper: Sleeper, world: World) -> None:
    for _ in range(5):
        await sleeper.hear()
    assert len(sleeper.asked) == 1
    world.now += 2
    await sleeper.hear()
    assert len(sleeper.asked) == 2


def test_a_silent_router_is_asked_again_after_a_pause():
    async def go(world: World) -> None:
        sleeper = await asleep(world)
        sleeper.answering = False
        await asked_again_after_a_pause(sleeper, world)

    play(go, scaling=SCALING)


def test_a_question_that_breaks_is_asked_again_and_ends_no_other():
    """It went up through the readings of all fleets, and the operator ended."""

    async def go(world: World) -> None:
        sleeper = await asleep(world)

        async def breaks(routers: list[str]) -> Demand | None:
            sleeper.asked.append(routers)
            raise RuntimeError("nobody foresaw this")

        world.operator.reader.hearing._listen = breaks
        await asked_again_after_a_pause(sleeper, world)

    play(go, scaling=SCALING)


def test_an_operator_that_starts_anew_finds_the_fleet_at_zero_and_listens():
    async def go(world: World) -> None:
        sleeper = await asleep(world)
        world.operator = world.new_operator()
        await world.look()
        await sleeper.seconds(3)
        assert await world.workers() == {"prefill": 0, "decode": 0}
        await sleeper.hear()
        assert len(sleeper.asked) == 1

    play(go, scaling=SCALING)


def test_a_fleet_that_is_deleted_at_zero_is_not_listened_to():
    async def go(world: World) -> None:
        sleeper = await asleep(world)
        await world.user.delete(FLEET, NAMESPACE, "f")
        await world.look()
        await world.operator.drain()
        await sleeper.hear()
        assert sleeper.asked == []

    play(go, scaling=SCALING)


def test_the_routers_bounds_are_those_of_the_spec():
    async def go(world: World) -> None:
        data = (await world.store.get(CONFIG_MAP, NAMESPACE, "f-router"))["data"]
        assert json.loads(data["router.json"])["hold"] == {"requests": 7, "bytes": 8 * 2**20, "time_s": 90.0}

    play(go, limits={"hold": {"requests": 7, "size": "8Mi", "time": "90s"}})


def test_a_fleet_of_the_same_name_is_another_one_also_when_nobody_told_the_end_of_the_first():
    """Made anew while its watch was cut, a fleet inherited the rest of the one before: it went to zero before it ever served."""

    async def go(world: World) -> None:
        sleeper = await asleep(world)
        await world.user.delete(FLEET, NAMESPACE, "f")
        await world.user.apply(manifest(scaling=SCALING))
        await sleeper.seconds(5)
        assert await world.workers() == {"prefill": 1, "decode": 2}

    play(go, scaling=SCALING)
