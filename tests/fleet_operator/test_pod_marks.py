"""Somebody edits labels and annotations of ours on worker pods: no worker is lost for it, and the truth comes back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet_operator import names
from fleet_operator.cluster.interface import CONFIG_MAP, FLEET, NODE, POD, ForbiddenError, WatchEvent
from fleet_operator.names import ROLE
from fleet_operator.pod_marks import rightful
from fleet_planner.roles import ROLES
from tests.fleet_operator.test_nodes import node
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

LABELS = [names.TIER, names.ROLE, names.REVISION, names.POOL, names.NAMESPACE]
VALUES = [None, "x", "3", "decode", "prefill"]


async def workers(world: World) -> list[dict[str, Any]]:
    return [pod for pod in await world.store.list(POD, NAMESPACE) if ROLE in pod["metadata"]["labels"]]


async def served(world: World) -> dict[str, str]:
    """Uid → role of the workers that routers use."""
    document = await world.store.get(CONFIG_MAP, NAMESPACE, "f-router")
    told = json.loads(document["data"]["endpoints.json"])["workers"]
    return {worker["uid"]: worker["role"] for worker in told if worker["state"] == "serving"}


def first(pods: list[dict[str, Any]], role: str) -> str:
    return min(pod["metadata"]["name"] for pod in pods if pod["metadata"]["labels"][ROLE] == role)


async def nobody_moves(world: World, before: dict[str, str], pods: list[dict[str, Any]]) -> None:
    """In twenty passes the same workers serve, and the same pods are there."""
    for _ in range(20):
        world.now += 2
        await world.step()
        assert await served(world) == before
    assert {pod["metadata"]["uid"] for pod in await workers(world)} == {pod["metadata"]["uid"] for pod in pods}


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        *(("labels", key, value) for key in LABELS for value in VALUES),
        *(("annotations", names.COMPAT, value) for value in (None, "x")),
        *(("labels", names.FETCH, value) for value in ("x", "3")),
    ],
)
@pytest.mark.parametrize("role", ROLES)
def test_an_edited_mark_costs_no_worker_and_comes_back(role: str, where: str, key: str, value: str | None):
    """A worker with another revision's label was deleted and made anew; one with the other role's was told to routers as one of
    that role, and deleted; one with the label of a pod that fetches was to be deleted for ever; a compatibility hash that
    somebody edited was told to routers for the rest of the pod's life, and nothing was handed over any more."""

    async def scenario(world: World) -> None:
        pods = await workers(world)
        before = await served(world)
        assert sorted(before.values()) == ["decode", "decode", "prefill"]
        name = first(pods, role)
        was = (await world.store.get(POD, NAMESPACE, name))["metadata"][where].get(key)
        if was == value:
            return
        await world.user.patch(POD, NAMESPACE, name, {"metadata": {where: {key: value}}})
        await nobody_moves(world, before, pods)
        now = (await world.store.get(POD, NAMESPACE, name))["metadata"][where].get(key)
        assert now == (value if key == names.FETCH else was)
        assert (await world.condition("Ready"))["status"] == "True"
        told = f"Normal PutBack Pod {name}: undid somebody else's edit of metadata.{where}.{key}"
        assert (told in await world.events()) is (key != names.FETCH)
        assert await world.touch() == []

    play(scenario, scaling={"mode": "manual"})


GROUPED = {"name": "t", "accelerator": {"type": "cpu"}, "parallelism": {"nodes": 2}, "ratio": {"decode": 1, "min": "1:2"}}


@pytest.mark.parametrize("value", [None, "x", "3"])
@pytest.mark.parametrize(
    ("where", "key"),
    [*(("labels", key) for key in (names.GANG, names.GROUP_OF, names.MEMBER)), ("annotations", names.MEMBER)],
)
@pytest.mark.parametrize("place", [0, 1])
def test_an_edited_mark_of_a_worker_over_several_nodes_comes_back(place: int, where: str, key: str, value: str | None):
    """Without its label a leader had no name any more: its followers never found it when they started again, and nobody replaced
    them. A follower whose place was edited was taken for a worker of its own, and one that served was deleted with its leader."""

    async def scenario(world: World) -> None:
        before, pods = await served(world), await workers(world)
        pod = sorted(pods, key=lambda one: one["metadata"]["name"])[place]
        name = pod["metadata"]["name"]
        await world.user.patch(POD, NAMESPACE, name, {"metadata": {where: {key: value}}})
        await nobody_moves(world, before, pods)
        found = await world.store.get(POD, NAMESPACE, name)
        assert found["metadata"][where].get(key) == pod["metadata"][where][key]
        assert await world.touch() == []

    play(scenario, tiers=[GROUPED], scaling={"mode": "manual"})


@pytest.mark.parametrize(("key", "value"), [(names.FETCH, None), (names.FETCH, "x"), (names.ROLE, None), (names.ROLE, "decode")])
@pytest.mark.parametrize("phase", ["Pending", "Succeeded"])
def test_a_pod_that_fetches_and_lost_its_label_has_it_again(phase: str, key: str, value: str | None):
    """It was not known any more, and its name was taken: the fleet was not Ready, "already exists", until somebody deleted it."""

    async def scenario() -> None:
        world = World()
        world.operator.feed(NODE, WatchEvent("ADDED", node("node")))
        cache = {"type": "nodeLocal", "path": "/cache"}
        await world.user.apply(manifest(model={"source": "hf://org/name", "revision": "1", "cache": cache}))
        await world.settle()
        (pod,) = await world.store.list(POD, NAMESPACE, {ROLE: "fetch"})
        name = pod["metadata"]["name"]
        await world.user.patch_status(POD, NAMESPACE, name, {"phase": phase})
        await world.step()
        await world.user.patch(POD, NAMESPACE, name, {"metadata": {"labels": {key: value}}})
        for _ in range(5):
            await world.step()
        found = await world.store.get(POD, NAMESPACE, name)
        assert (found["metadata"]["uid"], found["metadata"]["labels"]) == (pod["metadata"]["uid"], pod["metadata"]["labels"])
        assert "exists" not in (await world.condition("Provisioned"))["message"].replace("every object exists", "")
        assert f"Normal PutBack Pod {name}: undid somebody else's edit of metadata.labels.{key}" in await world.events()
        assert (await world.condition("ModelCached"))["reason"] == ("Cached" if phase == "Succeeded" else "Prefetching")

    asyncio.run(scenario())


def test_all_marks_of_all_workers_at_once():
    async def scenario(world: World) -> None:
        before = await served(world)
        for pod in await workers(world):
            lost = {"metadata": {"labels": dict.fromkeys(LABELS), "annotations": {names.COMPAT: "0"}}}
            await world.user.patch(POD, NAMESPACE, pod["metadata"]["name"], lost)
        for _ in range(20):
            await world.step()
            assert await served(world) == before

    play(scenario, scaling={"mode": "manual"})


def test_what_the_api_refuses_is_told_and_believed_all_the_same():
    """Nobody is deleted because a right is missing."""

    async def scenario(world: World) -> None:
        before, name = await served(world), first(await workers(world), "prefill")
        refused = ForbiddenError("cannot patch pods")
        world.api.refuse = lambda verb, kind, _: refused if (verb, kind) == ("patch", POD) else None
        await world.user.patch(POD, NAMESPACE, name, {"metadata": {"labels": {ROLE: "decode"}}})
        for _ in range(20):
            world.now += 2
            await world.step()
            assert await served(world) == before
        assert (await world.condition("Provisioned"))["message"] == f"Pod {name}: cannot patch pods"

    play(scenario, scaling={"mode": "manual"})


def test_a_deleted_fleet_that_drains_writes_none_and_ends():
    async def scenario(world: World) -> None:
        name = first(await workers(world), "prefill")
        await world.user.patch(POD, NAMESPACE, name, {"metadata": {"labels": {ROLE: None}}})
        await world.user.delete(FLEET, NAMESPACE, "f")
        written = []
        for _ in range(30):
            written += await world.step()
        assert ("patch", "Pod", name) not in written
        assert ("delete", "Pod", name) in written, "it was not known as a worker"

    play(scenario, deletion={"wait": "20s"})


def test_a_pod_whose_pool_is_not_the_fleets_is_taken_as_it_says():
    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest())
        await world.settle()
        found = [*await world.store.list(POD, NAMESPACE), await world.pool("decode"), await world.pool("prefill")]
        live = {(obj["kind"], obj["metadata"]["name"]): obj for obj in found}
        raw = await world.store.get(FLEET, NAMESPACE, "f")
        name = first(await workers(world), "prefill")
        pod = live["Pod", name]
        pod["metadata"]["labels"][ROLE] = "decode"
        assert [edited["metadata"]["name"] for edited, _ in rightful(live, raw)[1]] == [name]
        assert rightful(live, {"metadata": {"uid": "another"}}) == (live, [])
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        assert rightful(live, raw)[1] == []

    asyncio.run(scenario())
