"""The operator's clock is set by an hour: nothing is rolled back, no busy worker goes, and what waits does not wait longer."""

from __future__ import annotations

import pytest

from fleet_operator.adapters.memory import AdapterMemory
from fleet_operator.cluster.interface import FLEET, POD, UnavailableError
from fleet_operator.fleet_state import SET_LEAST_S, FleetState, clock_set_s, telemetry_at
from fleet_operator.names import REVISION
from fleet_planner.types import TierTelemetry
from tests.fleet_operator.test_capacity import MANUAL, WAIT_S, Quota, play, scale
from tests.fleet_operator.test_deletion import left, seconds
from tests.fleet_operator.test_zero import Sleeper
from tests.fleet_operator.world import NAMESPACE, World
from tests.fleet_operator.world import play as play_world
from tests.fleet_planner.test_prefetch import fleet


@pytest.mark.parametrize(
    ("before_s", "ahead_s", "set_s"),
    [(None, 3600.0, 0.0), (0.0, 0.5, 0.0), (0.0, SET_LEAST_S, SET_LEAST_S), (10.0, -3590.0, -3600.0)],
)
def test_by_how_much_a_clock_was_set(before_s: float | None, ahead_s: float, set_s: float):
    assert clock_set_s(before_s, ahead_s) == set_s


@pytest.mark.parametrize("set_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_while_a_tier_is_capped(set_s: float):
    async def go(world: World, quota: Quota) -> None:
        quota.limit = 6
        await scale(world, 8)
        await quota.seconds(5)
        kept = {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}
        world.set_clock(set_s)
        quota.tried.clear()
        assert await quota.seconds(WAIT_S - 7) == {(2, 4)}
        assert quota.tried == []
        quota.limit = None
        await quota.seconds(10)
        assert await world.workers() == {"prefill": 2, "decode": 8}
        assert kept <= {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}

    play(go, scaling=MANUAL)


@pytest.mark.parametrize("set_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_takes_no_busy_worker(set_s: float):
    """An hour later every need of the last window was old news, and half of the workers went in one pass."""

    async def go(world: World, quota: Quota) -> None:
        quota.load = (2 * 4.0, 8 * 16.0)
        await quota.seconds(10)
        assert await world.workers() == {"prefill": 2, "decode": 8}
        quota.load = (4.0, 4 * 16.0)
        await quota.seconds(20)
        kept = {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}
        world.set_clock(set_s)
        await quota.seconds(20)
        assert {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)} == kept
        await quota.seconds(45)
        assert await world.workers() == {"prefill": 1, "decode": 4}, "the window ends when it would have ended"

    play(go, scaling={"scaleDownWindow": "1m"})


@pytest.mark.parametrize("set_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_while_a_canary_comes_up_rolls_nothing_back(set_s: float):
    async def go(world: World, quota: Quota) -> None:
        kubelet = world.kubelet

        async def nobody() -> None:
            """New pods stay as they are made."""

        world.kubelet = nobody  # type: ignore[method-assign]
        old = {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"engine": {"maxBatch": 8}}})
        await quota.seconds(30)
        world.set_clock(set_s)
        await quota.seconds(20)
        status = (await world.store.get(FLEET, NAMESPACE, "f"))["status"]["tiers"][0]["rollout"]
        assert not status.get("failed")
        assert status["target"]
        pods = {pod["metadata"]["uid"]: pod for pod in await world.store.list(POD, NAMESPACE)}
        assert old < pods.keys()
        assert not any("deletionTimestamp" in pod["metadata"] for pod in pods.values())
        assert len({pod["metadata"]["labels"][REVISION] for pod in pods.values() if REVISION in pod["metadata"]["labels"]}) == 2
        await quota.seconds(20)  # the deadline is over now, and holds
        status = (await world.store.get(FLEET, NAMESPACE, "f"))["status"]["tiers"][0]["rollout"]
        assert "no progress for 1m" in status["message"]
        world.kubelet = kubelet  # type: ignore[method-assign]

    canary = {"steps": [20], "interval": "1m"}
    play(go, rollout={"canary": canary, "progressDeadline": "1m"})


@pytest.mark.parametrize("set_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_is_no_time_in_which_nobody_asked(set_s: float):
    async def go(world: World, _: Quota) -> None:
        sleeper = Sleeper(world)
        await sleeper.seconds(20)
        world.set_clock(set_s)
        await sleeper.seconds(20)
        assert await world.workers() == {"prefill": 1, "decode": 2}
        await sleeper.seconds(30)
        assert await world.workers() == {"prefill": 0, "decode": 0}

    play(go, scaling={"toZero": {"enabled": True, "idle": "1m"}})


def test_a_clock_that_was_set_back_keeps_nobody_from_asking_for_adapters():
    memory = AdapterMemory(again_at=3_605.0)
    assert memory.due(fleet(), 5.0)


@pytest.mark.parametrize("set_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_makes_no_reading_stale(set_s: float):
    """Every fleet was told that its load is unknown, and a moment later that it is known."""

    async def go(world: World, quota: Quota) -> None:
        quota.load = (4.0, 4 * 16.0)
        await quota.seconds(10)
        assert (await world.condition("TelemetryFresh"))["status"] == "True"
        told = await world.events()
        world.set_clock(set_s)
        for _ in range(3):
            await world.touch()
            assert (await world.condition("TelemetryFresh"))["status"] == "True"
        assert await world.events() == told
        world.now += 60
        await world.touch()
        assert (await world.condition("TelemetryFresh"))["status"] == "Unknown", "what does grow old is stale"

    play(go, scaling={"scaleDownWindow": "1m"})


@pytest.mark.parametrize("set_s", [-40.0, -3600.0, 40.0])
def test_a_clock_that_is_set_during_an_outage_makes_no_fleet_wait_longer(set_s: float):
    """Incident: half a minute back, and a fleet whose API call had failed was not looked at for as long again."""

    async def go(world: World) -> None:
        away = UnavailableError("away")
        world.api.refuse = lambda verb, kind, name: away
        victim = next(pod["metadata"]["name"] for pod in await world.store.list(POD, NAMESPACE))
        await world.user.delete(POD, NAMESPACE, victim, grace_s=0)
        await world.step()
        world.api.refuse = lambda verb, kind, name: None
        world.set_clock(set_s)
        for _ in range(3):
            await world.step()
        assert await world.workers() == {"prefill": 1, "decode": 2}

    play_world(go)


def test_a_clock_that_is_set_moves_when_a_worker_was_read_idle():
    """Else one that was idle before the fleet was deleted would seem to have been so after it."""
    state = FleetState(telemetry={"t": TierTelemetry(idle={"p": 100.0})}, telemetry_ahead_s=0.0)
    assert telemetry_at(state, 3600.0)["t"].idle == {"p": 3700.0}
    assert telemetry_at(state, 0.0)["t"].idle == {"p": 100.0}


def test_a_clock_that_is_set_moves_since_when_latencies_are_measured():
    """As it does since when workers are ready: which of the two was first decides whether a missed objective is theirs."""
    state = FleetState(telemetry={"t": TierTelemetry(latencies_since=100.0)}, telemetry_ahead_s=0.0)
    assert [telemetry_at(state, set_s)["t"].latencies_since for set_s in (3600.0, 0.0)] == [3700.0, 100.0]


@pytest.mark.parametrize("ahead_s", [0.0, 120.0])
def test_a_clock_ahead_of_the_apis_leaves_an_autoscaler_its_time(ahead_s: float):
    """By it a worker had waited for two minutes when it was made: it was given up before any node could come, time and again."""

    async def go(world: World, quota: Quota) -> None:
        kubelet = world.kubelet

        async def nowhere() -> None:
            """A scheduler finds no node for those that are new."""
            for pod in [pod for pod in await world.store.list(POD, NAMESPACE) if not pod["spec"].get("nodeName")]:
                no_node = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
                await world.user.patch_status(POD, NAMESPACE, pod["metadata"]["name"], {"conditions": [no_node]})

        world.set_clock(ahead_s)
        world.operator = world.new_operator()
        await quota.seconds(5)
        world.kubelet = nowhere  # type: ignore[method-assign]
        await scale(world, 4)
        await quota.seconds(WAIT_S // 2)
        world.kubelet = kubelet  # type: ignore[method-assign]
        await quota.seconds(5)
        assert await world.workers() == {"prefill": 1, "decode": 4}
        assert not [one for one in await world.events() if "BackedOut" in one]
        world.kubelet = nowhere  # type: ignore[method-assign]
        await scale(world, 8)
        await quota.seconds(2 * WAIT_S)
        assert (await world.condition("CapacityLimited"))["reason"] == "BackedOut", "no node came in its time"

    play(go, scaling=MANUAL)


@pytest.mark.parametrize("ahead_s", [0.0, 120.0])
def test_a_clock_ahead_of_the_apis_leaves_a_deleted_fleets_streams_their_time(ahead_s: float):
    """By it the fleet was deleted two minutes ago, and its wait of two minutes was over: all streams were cut."""

    async def go(world: World) -> None:
        world.set_clock(ahead_s)
        world.operator = world.new_operator()
        busy = {"prefill": 1.0, "decode": 1.0}
        await seconds(world, 5, busy)
        await world.user.delete(FLEET, NAMESPACE, "f")
        await seconds(world, 110, busy)
        assert (await world.condition("Available"))["reason"] == "Deleting"
        assert await world.workers() == {"prefill": 1, "decode": 2}
        await seconds(world, 15, busy)
        assert await left(world) == [], "its time is over"

    play_world(go, deletion={"wait": "2m"})
