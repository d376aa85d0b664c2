"""What bears a fleet's label and belongs to somebody else: it is no worker of the fleet, and nothing of it is deleted."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest

from fleet_operator.cluster.interface import CONFIG_MAP, DEPLOYMENT, POD, POOL, Kind
from fleet_operator.names import FLEET, ROLE
from fleet_operator.names import POOL as LABEL
from fleet_operator.ownership import is_strange
from tests.fleet_operator.test_reconciler import _smuggle
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

MANUAL = {"scaling": {"mode": "manual"}}


async def two() -> World:
    """Fleets f and g."""
    world = World()
    for name in "fg":
        await world.user.apply(manifest(name, **MANUAL))
    await world.settle(20)
    return world


async def go_on(world: World, steps: int = 25) -> None:
    for _ in range(steps):
        world.now += 4
        await world.step()


async def relabel(world: World, kind: Kind, fleet: str, name: str) -> None:
    """Somebody gives it the other fleet's label, and touches it once more later: the first news may have been an end."""
    await world.user.patch(kind, NAMESPACE, name, {"metadata": {"labels": {FLEET: fleet}}})
    await go_on(world, 2)
    await world.user.patch(kind, NAMESPACE, name, {"metadata": {"labels": {"touched": "true"}}})


async def decode(world: World, kind: Kind, fleet: str = "f") -> dict[str, Any]:
    return (await world.store.list(kind, NAMESPACE, {FLEET: fleet, ROLE: "decode"}))[0]["metadata"]


async def uids(world: World) -> set[str]:
    return {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}


async def told(world: World, fleet: str) -> set[str]:
    """Workers that its routers know."""
    documents = await world.store.get(CONFIG_MAP, NAMESPACE, f"{fleet}-router")
    return {worker["name"] for worker in json.loads(documents["data"]["endpoints.json"])["workers"]}


@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
def test_a_worker_with_another_fleets_label_is_no_worker_of_that_one(restarted: bool):
    """It was one too many there, and deleted."""

    async def scenario() -> None:
        world = await two()
        before, name = await uids(world), (await decode(world, POD))["name"]
        asked = set[tuple[str, str]]()

        async def collect(fleet: Any, pods: list[dict[str, Any]], routers: list[str]) -> dict[str, Any]:
            asked.update((fleet.metadata.name, pod["metadata"]["name"]) for pod in pods)
            return {}

        world.collect = collect  # type: ignore[method-assign]
        await relabel(world, POD, "g", name)
        if restarted:
            world.operator = world.new_operator()
        await go_on(world)
        assert await uids(world) == before
        assert name not in await told(world, "g")
        assert ("g", name) not in asked
        assert (await world.condition("Ready", "g"))["status"] == "True"
        assert f"Pod {name} is this fleet's without its label" in (await world.condition("Provisioned"))["message"]
        await world.user.patch(POD, NAMESPACE, name, {"metadata": {"labels": {FLEET: "f"}}})
        await go_on(world)
        assert await uids(world) == before
        assert (await world.condition("Ready"))["status"] == "True"
        assert name in await told(world, "f")

    asyncio.run(scenario())


@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
def test_a_pool_with_another_fleets_label_is_not_deleted_by_that_one(restarted: bool):
    """All workers of a role went with it. Its own fleet puts no label back while its spec is not accepted."""

    async def scenario() -> None:
        world = await two()
        _smuggle(world.store, "f", {"tiers": []})
        before, name = await uids(world), (await decode(world, POOL))["name"]
        await relabel(world, POOL, "g", name)
        if restarted:
            world.operator = world.new_operator()
        await go_on(world)
        assert await uids(world) == before
        assert (await world.condition("Ready", "g"))["status"] == "True"
        _smuggle(world.store, "f", {"tiers": manifest()["spec"]["tiers"]})
        await go_on(world)
        assert await uids(world) == before
        assert (await world.condition("Ready"))["status"] == "True"

    asyncio.run(scenario())


@pytest.mark.parametrize("label", ["g", "nobody"])
@pytest.mark.parametrize("kind", [POOL, DEPLOYMENT, CONFIG_MAP], ids=lambda kind: kind.kind)
def test_a_label_that_was_edited_while_no_operator_ran_is_put_back_and_the_fleet_goes_on(kind: Kind, label: str):
    """The answer to that very write was taken for the end of the object: the pool was missing from then on, each pass ended in a
    conflict, Ready was False and no worker was replaced."""

    async def scenario() -> None:
        world = await two()
        found = [obj["metadata"]["name"] for obj in await world.store.list(kind, NAMESPACE, {FLEET: "f"})]
        await world.user.patch(kind, NAMESPACE, found[0], {"metadata": {"labels": {FLEET: label}}})
        world.operator = world.new_operator()
        await go_on(world)
        assert (await world.store.get(kind, NAMESPACE, found[0]))["metadata"]["labels"][FLEET] == "f"
        assert (await world.condition("Ready"))["status"] == "True"
        lost = await decode(world, POD)
        await world.user.delete(POD, NAMESPACE, lost["name"], grace_s=0)
        await go_on(world)
        assert await world.workers() == {"prefill": 1, "decode": 2}
        assert (await world.condition("Ready"))["status"] == "True"

    asyncio.run(scenario())


def test_a_pod_of_somebody_elses_controller_is_no_worker_whatever_its_labels_say():
    """A worker's manifest that somebody copied into a Deployment: routers were told of it, and it or a worker was deleted, again
    and again."""

    async def scenario(world: World) -> None:
        mine = {meta["uid"] for pod in await world.store.list(POD, NAMESPACE) if (meta := pod["metadata"])["labels"].get(ROLE)}
        worker = (await world.store.list(POD, NAMESPACE, {ROLE: "decode"}))[0]
        theirs = await world.store.get(DEPLOYMENT, NAMESPACE, "f-router")
        copied = copy.deepcopy({part: worker[part] for part in ("apiVersion", "kind", "metadata", "spec")})
        for part in ("uid", "resourceVersion", "creationTimestamp"):
            copied["metadata"].pop(part)
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": theirs["metadata"]["name"], "controller": True}
        owner |= {"kind": "Deployment", "uid": theirs["metadata"]["uid"]}
        copied["metadata"] |= {"name": "a-copy", "ownerReferences": [owner]}
        del copied["spec"]["nodeName"]
        await world.user.create(copied)
        await go_on(world)
        assert "a-copy" not in await told(world, "f")
        assert {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)} > mine
        assert (await world.store.get(POD, NAMESPACE, "a-copy"))["metadata"].get("deletionTimestamp") is None

    play(scenario, **MANUAL)


@pytest.mark.parametrize("owned", [True, False], ids=["with-its-owner", "without"])
def test_a_copied_pool_sizes_nothing(owned: bool):
    """`kubectl get wpool -o yaml`, another name and number: a worker was deleted for it, and no load moved that role any more."""

    async def scenario(world: World) -> None:
        before = await uids(world)
        copied = copy.deepcopy(await world.pool("decode"))
        for part in ("uid", "resourceVersion", "generation", "creationTimestamp"):
            copied["metadata"].pop(part)
        if not owned:
            del copied["metadata"]["ownerReferences"]
        del copied["status"]
        copied["metadata"]["name"], copied["spec"]["replicas"] = "a-copy", 1
        await world.user.create(copied)
        await go_on(world)
        assert await uids(world) == before
        await world.user.patch(POOL, NAMESPACE, (await decode(world, POD))["labels"][LABEL], {"spec": {"replicas": 3}})
        await go_on(world)
        assert (await world.workers())["decode"] == 3
        assert await world.touch() == []

    play(scenario, **MANUAL)


def test_a_pool_with_another_controller_keeps_its_size():
    async def scenario(world: World) -> None:
        name, theirs = (await world.pool("decode"))["metadata"]["name"], await world.store.get(DEPLOYMENT, NAMESPACE, "f-router")
        await world.user.patch(POOL, NAMESPACE, name, {"spec": {"replicas": 5}})
        await go_on(world)
        before = await uids(world)
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "f-router", "controller": True}
        owner["uid"] = theirs["metadata"]["uid"]
        await world.user.patch(POOL, NAMESPACE, name, {"metadata": {"ownerReferences": [owner]}})
        await go_on(world)
        assert await uids(world) == before
        assert f"WorkerPool {name} exists and belongs to somebody else" in (await world.condition("Provisioned"))["message"]

    play(scenario, tiers=[{"name": "t", "accelerator": {"type": "cpu"}, "decode": {"maxReplicas": 8}}], **MANUAL)


G = {"metadata": {"name": "g", "namespace": NAMESPACE, "uid": "u"}}


def owned(kind: str, name: str, uid: str = "x", **more: Any) -> dict[str, Any]:
    return {"ownerReferences": [{"kind": kind, "name": name, "uid": uid, "controller": True, **more}]}


def pod(name: str = "p", **meta: Any) -> dict[str, Any]:
    marks = {ROLE: "decode", "inferencefleet.io/tier": "t", "inferencefleet.io/revision": "r", **meta.pop("labels", {})}
    return {"kind": "Pod", "metadata": {"name": name, "labels": marks, **meta}}


def pool(name: str, fleet: str = "g", **meta: Any) -> dict[str, Any]:
    spec = {"fleet": fleet, "tier": "t", "role": "decode", "revision": "r"}
    return {"kind": "WorkerPool", "metadata": {"name": name, **meta}, "spec": spec}


@pytest.mark.parametrize(
    ("obj", "strange"),
    [
        pytest.param(pod(**owned("WorkerPool", "g-t-decode-r")), False, id="of-our-pool"),
        pytest.param(pod(**owned("WorkerPool", "g-t-prefill-r")), False, id="of-our-other-pool-in-a-flip"),
        pytest.param(pod("g-t-prefill-r-0", **owned("ReplicaSet", "x")), False, id="ours-by-its-name"),
        pytest.param(pod(**owned("WorkerPool", "f-t-decode-r")), True, id="of-another-fleets-pool"),
        pytest.param(
            pod("g-b-t-decode-r-0", **owned("WorkerPool", "g-b-t-decode-r")), True, id="of-a-fleet-whose-name-begins-so"
        ),
        pytest.param(pod(**owned("ReplicaSet", "g-t-decode-r")), True, id="of-another-controller"),
        pytest.param(pod(**owned("Service", "s", controller=False)), False, id="nobody-controls-it"),
        pytest.param(pod(), False, id="nobody-owns-it"),
        pytest.param(pod(labels={ROLE: "router"}, **owned("ReplicaSet", "x")), False, id="a-router"),
        pytest.param(pool("g-t-decode-r", **owned("InferenceFleet", "g", "u")), False, id="our-pool"),
        pytest.param(pool("g-t-decode-r"), False, id="a-pool-that-lost-its-owner"),
        pytest.param(pool("g-t-decode-r", **owned("Deployment", "x")), False, id="a-pool-with-another-owner"),
        pytest.param(pool("f-t-decode-r", "f", **owned("InferenceFleet", "f", "v")), True, id="another-fleets-pool"),
        pytest.param(pool("a-copy", **owned("InferenceFleet", "g", "u")), True, id="a-copy"),
        pytest.param({"kind": "ConfigMap", "metadata": {"name": "c", **owned("InferenceFleet", "f", "v")}}, False, id="by-name"),
    ],
)
def test_what_only_looks_like_a_fleets(obj: dict[str, Any], strange: bool):
    assert is_strange(obj, G) is strange
