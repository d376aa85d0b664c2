"""When a pass looks before it writes: a status that was taken on top of the version seen says as much as a look."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fleet_operator.cluster.interface import (
    CONFIG_MAP,
    FLEET,
    POD,
    POOL,
    SERVICE,
    ClusterError,
    InvalidError,
    Kind,
    UnavailableError,
    WatchEvent,
)
from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.fleet_state import FleetState
from fleet_operator.names import FLEET as FLEET_LABEL
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

Do = Callable[[World], Awaitable[Any]]


async def born(world: World) -> None:
    """The operator sees a new fleet."""
    await world.user.apply(manifest())
    await world.look()
    world.api.writes.clear()
    world.api.looks.clear()


async def one_pass(world: World) -> list[str]:
    """Over the fleet as the operator sees it now, and only one; the reasons of what it could not do."""
    raw = world.operator._objects.fleets[NAMESPACE, "f"]
    outcome = await world.operator.reconcile_once((NAMESPACE, "f"), raw, FleetState())
    return [problem.reason for problem in outcome.problems]


def run(scenario: Do) -> None:
    asyncio.run(scenario(World()))  # type: ignore[arg-type]


def test_a_new_fleet_is_made_without_a_look():
    async def scenario(world: World) -> None:
        await born(world)
        await world.operator.drain()
        assert world.api.looks == []
        assert world.api.writes[0] == ("status", "InferenceFleet", "f")
        assert await world.workers() == {"prefill": 1, "decode": 2}
        await world.settle()
        assert world.api.looks == [("find", "InferenceFleet")]  # before the budgets: the status of that pass comes after them
        assert (await world.condition("Ready"))["status"] == "True"

    run(scenario)


def test_a_fleet_is_told_to_be_ready_when_all_of_it_is_there():
    async def scenario(world: World) -> None:
        await born(world)
        there: list[int] = []

        def spy(verb: str, kind: Kind, name: str) -> None:
            if (verb, kind) == ("status", FLEET):
                there.append(sum(write[:2] == ("create", "PodDisruptionBudget") for write in world.api.writes))

        world.api.refuse = spy
        for _ in range(6):
            world.api.writes, before = [], list(world.api.writes)
            await world.step()
            world.api.writes += before
        assert (await world.condition("Ready"))["status"] == "True"
        assert there[-1] == 2

    run(scenario)


def test_an_object_that_lost_our_labels_is_seen_again_when_they_are_back():
    async def scenario(world: World) -> None:
        before = await world.store.get(CONFIG_MAP, NAMESPACE, "f-router")
        after = await world.user.patch(CONFIG_MAP, NAMESPACE, "f-router", {"metadata": {"labels": None}})
        version = after["metadata"]["resourceVersion"]  # what a watch tells then: the object as it was, the version as it is
        last = {**before, "metadata": {**before["metadata"], "resourceVersion": version}}
        world.operator.feed(CONFIG_MAP, WatchEvent("DELETED", last))
        world.api.writes.clear()
        await world.operator.drain()
        tried = [write for write in world.api.writes if write[1] == "ConfigMap"]
        assert tried == [("create", "ConfigMap", "f-router"), ("patch", "ConfigMap", "f-router")]
        world.api.writes.clear()
        world.operator.touch((NAMESPACE, "f"))
        await world.operator.drain()
        assert world.api.writes == []

    play(scenario)


def test_the_status_of_one_pass_is_written_once():
    async def scenario(world: World) -> None:
        await born(world)
        await one_pass(world)
        assert [write for write in world.api.writes if write[0] == "status"] == [("status", "InferenceFleet", "f")]

    run(scenario)


async def edited(world: World) -> None:
    await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"engine": {"maxBatch": 3}}})


async def labelled(world: World) -> None:
    await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"labels": {"team": "a"}}})


async def deleted(world: World) -> None:
    await world.user.delete(FLEET, NAMESPACE, "f")


async def another(world: World) -> None:
    await world.user.delete(FLEET, NAMESPACE, "f")
    await world.user.apply(manifest())


@pytest.mark.parametrize(
    ("change", "goes_on"),
    [(edited, False), (labelled, True), (deleted, False), (another, False)],
    ids=["its-spec", "a-label", "gone", "another-of-its-name"],
)
def test_a_fleet_that_changed_since_it_was_seen_is_looked_at(change: Do, goes_on: bool):
    async def scenario(world: World) -> None:
        await born(world)
        await change(world)
        await one_pass(world)
        assert ("find", "InferenceFleet") in world.api.looks
        made = [write for write in world.api.writes if write[0] == "create" and write[1] != "Event"]
        assert bool(made) == goes_on

    run(scenario)


def refusing(error: ClusterError) -> Callable[[str, Kind, str], ClusterError | None]:
    return lambda verb, kind, name: error if (verb, kind) == ("status", FLEET) else None


@pytest.mark.parametrize("error", [InvalidError("no"), UnavailableError("500")], ids=["422", "500"])
def test_a_status_that_is_refused_holds_up_nothing(error: ClusterError):
    async def scenario(world: World) -> None:
        await born(world)
        asked: list[int] = []

        def refuse(verb: str, kind: Kind, name: str) -> ClusterError | None:
            found = refusing(error)(verb, kind, name)
            asked.extend([1] if found is not None else [])
            return found

        world.api.refuse = refuse
        assert await one_pass(world) == [error.reason]
        assert len(asked) == 1
        assert await world.workers() == {"prefill": 1, "decode": 2}

    run(scenario)


async def restarted_without_pods(world: World) -> None:
    """All pods go while the operator is away; it comes back and sees the fleet and nothing else."""
    for pod in await world.store.list(POD, NAMESPACE):
        await world.user.delete(POD, NAMESPACE, pod["metadata"]["name"], grace_s=0)
    world.operator = world.new_operator()
    world.operator.feed(FLEET, WatchEvent("ADDED", await world.store.get(FLEET, NAMESPACE, "f")))
    await world.operator.drain()


def test_a_pool_that_no_watch_told_makes_no_pods():
    """The list of a restarted operator may be older than the pools: then their sizes are not the spec's."""

    async def scenario(world: World) -> None:
        pool = (await world.pool("decode"))["metadata"]["name"]
        await world.user.patch(POOL, NAMESPACE, pool, {"spec": {"replicas": 4}})
        await restarted_without_pods(world)
        assert await world.store.list(POD, NAMESPACE) == []
        assert (await world.store.get(POOL, NAMESPACE, pool))["spec"]["replicas"] == 4
        world.now += 20
        await world.settle(most=30)
        assert (await world.workers())["decode"] == 4

    play(scenario)


def test_one_pool_that_no_watch_told_is_enough():
    async def scenario(world: World) -> None:
        await world.user.delete(POOL, NAMESPACE, (await world.pool("prefill"))["metadata"]["name"])
        await restarted_without_pods(world)
        assert await world.store.list(POD, NAMESPACE) == []

    play(scenario)


# -- the routers' documents ------------------------------------------------------------------------------------------------
def test_documents_are_edited_in_place_and_lose_what_is_not_ours():
    async def scenario(world: World) -> None:
        before = await world.store.get(CONFIG_MAP, NAMESPACE, "f-router")
        await world.user.patch(CONFIG_MAP, NAMESPACE, "f-router", {"data": {"endpoints.json": "{}", "theirs": "x"}})
        assert ("patch", "ConfigMap", "f-router") in await world.touch()
        after = await world.store.get(CONFIG_MAP, NAMESPACE, "f-router")
        assert after["data"] == before["data"]
        assert after["metadata"]["uid"] == before["metadata"]["uid"]
        assert await world.touch() == []

    play(scenario)


def test_documents_that_somebody_changed_meanwhile_are_not_overwritten_from_an_old_picture():
    async def scenario(world: World) -> None:
        store: MemoryCluster = world.store
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"limits": {"maxOutputTokens": 7}}})
        await world.look()
        await world.user.patch(CONFIG_MAP, NAMESPACE, "f-router", {"metadata": {"labels": {"theirs": "x"}}})
        world.api.writes.clear()
        await world.operator.drain()
        assert '"max_output_tokens":7' not in (await store.get(CONFIG_MAP, NAMESPACE, "f-router"))["data"]["router.json"]
        world.now += 1
        await world.settle()
        found = await store.get(CONFIG_MAP, NAMESPACE, "f-router")
        assert '"max_output_tokens":7' in found["data"]["router.json"]
        assert found["metadata"]["labels"]["theirs"] == "x"
        assert await world.exists(SERVICE, "f-router")

    play(scenario)


@pytest.mark.parametrize("kind", [POD, CONFIG_MAP], ids=["deleted", "patched"])
def test_what_a_write_did_not_find_is_not_believed_to_be_there_until_the_audit(kind: Kind):
    """A watch that froze did not tell that it had gone: 40 seconds long a pod stood in the way, or documents were not made."""

    async def scenario(world: World) -> None:
        gone = (await world.store.list(kind, NAMESPACE, {FLEET_LABEL: "f"}))[0]["metadata"]
        await world.user.delete(kind, NAMESPACE, gone["name"], grace_s=0)
        world._seen.pop((kind.kind, gone["name"], gone["uid"]))  # nobody will tell
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"engine": {"maxBatch": 8}}})
        await world.settle(30)
        cached = {found["metadata"]["uid"] for found in world.operator._objects.children((NAMESPACE, "f")).values()}
        assert gone["uid"] not in cached
        assert (await world.condition("RollingOut"))["reason"] == "Complete"

    play(scenario)
