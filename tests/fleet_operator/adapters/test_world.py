"""Adapters and prefetching through the whole operator on the in-memory store: what is written, what waits, what goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from fleet_operator.adapters.follow import AdapterFollower
from fleet_operator.cluster.interface import CONFIG_MAP, CONTROLLER_REVISION, EVENT, FLEET, NODE, POD, WatchEvent
from fleet_operator.flip.asking import Answer, Ask
from fleet_operator.names import ADAPTERS, FETCH_NODE, REVISION
from fleet_wire.endpoints import ENDPOINTS_KEY, ROUTER_CONFIG_KEY
from tests.fleet_operator.world import NAMESPACE, World, manifest

Wished = list[dict[str, str]]


class Agents:
    """Every worker's agent; a name with "bad" in it fails."""

    def __init__(self) -> None:
        self.wished: dict[str, Wished] = {}
        self.told = 0

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Ask]:
        async def ask(url: str, body: Any = None, within_s: float = 0.0) -> Answer | None:
            host = url.removeprefix("http://").split(":")[0]
            if body is not None:
                self.wished[host], self.told = body, self.told + 1
            return Answer(200, json.dumps({"adapters": [self.entry(one) for one in self.wished.get(host, [])]}).encode())

        yield ask

    @staticmethod
    def entry(one: dict[str, str]) -> dict[str, str]:
        bad = "bad" in one["name"]
        state = (
            {"state": "Failed", "reason": "BadAdapter", "message": "no"} if bad else {"state": "Loaded", "digest": one["source"]}
        )
        return {**one, **state}


def with_adapters(*names: str, **more: Any) -> dict[str, Any]:
    return manifest(model={"source": "file:///m", "adapters": [{"name": n, "source": f"file:///m/{n}"} for n in names], **more})


def listen_with(world: World, follower: AdapterFollower) -> None:
    """From now on the operator asks workers through this one."""
    world.operator.reader.sources = replace(world.operator.reader.sources, adapters=follower)


def play(scenario: Callable[[World, Agents], Awaitable[None]], first: dict[str, Any]) -> None:
    async def go() -> None:
        world, agents = World(), Agents()
        listen_with(world, AdapterFollower(agents.connect))
        await world.user.apply(first)
        await world.settle(20)
        await scenario(world, agents)

    asyncio.run(go())


async def workers(world: World) -> dict[str, dict[str, Any]]:
    found = await world.store.list(POD, NAMESPACE)
    return {
        pod["metadata"]["uid"]: pod
        for pod in found
        if pod["metadata"]["labels"]["inferencefleet.io/role"] in ("prefill", "decode")
    }


async def document(world: World, key: str) -> dict[str, Any]:
    return json.loads((await world.store.get(CONFIG_MAP, NAMESPACE, "f-router"))["data"][key])


async def status(world: World) -> dict[str, Any]:
    return (await world.store.get(FLEET, NAMESPACE, "f"))["status"]


async def several(world: World, steps: int = 12) -> None:
    for _ in range(steps):
        await world.step()


def test_adapters_come_and_go_and_no_pod_is_restarted():
    async def scenario(world: World, agents: Agents) -> None:
        await several(world)
        before = await workers(world)
        assert len(before) == 3
        told = {pod["metadata"]["annotations"][ADAPTERS] for pod in before.values()}
        assert told == {'[{"name":"a","source":"a"}]'}
        assert [w["adapters"] for w in (await document(world, ENDPOINTS_KEY))["workers"]] == [{"a": "a"}] * 3
        assert (await document(world, ROUTER_CONFIG_KEY))["adapters"] == ["a"]
        asked = agents.told
        await several(world)
        assert agents.told == asked, "nobody is told twice"

        await world.user.apply(with_adapters("b", "bad"))
        await several(world)
        after = await workers(world)
        assert after.keys() == before.keys()
        assert [w["adapters"] for w in (await document(world, ENDPOINTS_KEY))["workers"]] == [{"b": "b"}] * 3
        by_name = {one["name"]: one for one in (await status(world))["adapters"]}
        assert (by_name["b"]["loaded"], by_name["b"]["desired"], by_name["bad"]["reason"]) == (3, 3, "BadAdapter")
        assert (await world.condition("AdaptersLoaded"))["reason"] == "AdapterFailed"
        assert (await world.condition("Ready"))["status"] == "True"
        events = [event["note"] for event in await world.store.list(EVENT, NAMESPACE) if event["reason"] == "AdapterFailed"]
        assert len(events) == 1
        assert events[0].startswith("adapter bad: BadAdapter: ")

        await world.user.apply(manifest())
        await several(world)
        assert (await workers(world)).keys() == before.keys()
        assert {pod["metadata"]["annotations"][ADAPTERS] for pod in (await workers(world)).values()} == {"[]"}
        assert set(map(len, agents.wished.values())) == {0}
        assert "AdaptersLoaded" not in {condition["type"] for condition in (await status(world))["conditions"]}

    play(scenario, with_adapters("a"))


def test_an_operator_that_starts_again_takes_nothing_away():
    async def scenario(world: World, agents: Agents) -> None:
        await several(world)
        published = await document(world, ENDPOINTS_KEY)
        world.operator = world.new_operator()  # it cannot reach an agent

        @asynccontextmanager
        async def silent() -> AsyncIterator[Ask]:
            async def ask(url: str, body: Any = None, within_s: float = 0.0) -> Answer | None:
                return None

            yield ask

        listen_with(world, AdapterFollower(silent))
        await several(world)
        assert await document(world, ENDPOINTS_KEY) == published

    play(scenario, with_adapters("a"))


def test_what_was_removed_while_no_operator_ran_is_still_unloaded():
    async def scenario(world: World, agents: Agents) -> None:
        await several(world)
        await world.user.apply(manifest())
        world.operator = world.new_operator()
        listen_with(world, AdapterFollower(agents.connect))
        await several(world, 40)
        assert set(map(len, agents.wished.values())) == {0}

    play(scenario, with_adapters("a"))


def test_a_fleet_without_adapters_asks_nobody():
    async def scenario(world: World, agents: Agents) -> None:
        asked: list[str] = []

        @asynccontextmanager
        async def listening() -> AsyncIterator[Ask]:
            asked.append("somebody")
            async with agents.connect() as ask:
                yield ask

        listen_with(world, AdapterFollower(listening))
        await several(world, 40)
        assert asked == []

    play(scenario, manifest())


def of_model(version: str, **more: Any) -> dict[str, Any]:
    """A base model on the hub, and an adapter that was made for it."""
    adapters = [{"name": "a", "source": "hf://org/adapter", "revision": version}]
    return manifest(model={"source": "hf://org/base", "revision": version, "adapters": adapters}, **more)


PAUSED = {"rollout": {"paused": True}}


def test_workers_of_the_model_before_keep_its_adapters():
    """Both in one edit: the old workers loaded the new model's adapter over their weights, and answered under it with 200."""

    async def scenario(world: World, agents: Agents) -> None:
        await several(world)
        old = await workers(world)
        hosts = {pod["status"]["podIP"] for pod in old.values()}
        before = {host: agents.wished[host] for host in hosts}
        assert {wish["source"] for told in before.values() for wish in told} == {"hf://org/adapter@v1"}
        await world.user.apply(of_model("v2", **PAUSED))
        await several(world)
        assert {host: agents.wished[host] for host in hosts} == before
        asked = agents.told
        name = next(iter(old.values()))["metadata"]["name"]
        await world.user.delete(POD, NAMESPACE, name, grace_s=0)  # who comes in its place is of the old model, too
        await several(world)
        assert {pod["metadata"]["annotations"][ADAPTERS] for pod in (await workers(world)).values()} == {
            '[{"name":"a","source":"hf://org/adapter@v1"}]'
        }
        assert agents.told == asked + 1
        await world.user.apply(of_model("v2"))
        await several(world, 40)
        assert not old.keys() & (await workers(world)).keys()
        told = [w["adapters"] for w in (await document(world, ENDPOINTS_KEY))["workers"]]
        assert told == [{"a": "hf://org/adapter@v2"}] * 3
        assert (await world.condition("AdaptersLoaded"))["reason"] == "AllLoaded"

    play(scenario, of_model("v1"))


def test_workers_whose_stored_template_is_lost_keep_their_adapters():
    """Nobody knows their model then. An operator that started after the deletion told them the adapters of the spec's model; one
    that had seen the template did so between the deletion and its own putting back."""

    async def scenario(world: World, agents: Agents) -> None:
        await several(world)
        old = await workers(world)
        hosts = {pod["status"]["podIP"] for pod in old.values()}
        before = {host: agents.wished[host] for host in hosts}
        revision = next(iter(old.values()))["metadata"]["labels"][REVISION]
        await world.user.apply(of_model("v2", **PAUSED))
        await several(world)
        await world.user.delete(CONTROLLER_REVISION, NAMESPACE, f"f-t-{revision}")
        world.operator = world.new_operator()
        listen_with(world, AdapterFollower(agents.connect))
        await several(world, 40)
        stored = {found["metadata"]["name"] for found in await world.store.list(CONTROLLER_REVISION, NAMESPACE)}
        assert f"f-t-{revision}" not in stored
        assert {host: agents.wished[host] for host in hosts} == before
        assert {pod["metadata"]["annotations"][ADAPTERS] for pod in (await workers(world)).values()} == {
            '[{"name":"a","source":"hf://org/adapter@v1"}]'
        }

    play(scenario, of_model("v1"))


def test_an_adapter_alone_changes_on_workers_of_every_revision():
    async def scenario(world: World, agents: Agents) -> None:
        await several(world)
        before = await workers(world)
        model = {**of_model("v1")["spec"]["model"], "adapters": [{"name": "a", "source": "hf://org/adapter", "revision": "v3"}]}
        await world.user.apply(manifest(model=model, engine={"maxBatch": 7}, **PAUSED))  # a rollout that waits, of this model
        await several(world)
        assert (await workers(world)).keys() == before.keys()
        assert {wish["source"] for told in agents.wished.values() for wish in told} == {"hf://org/adapter@v3"}

    play(scenario, of_model("v1"))


# -- prefetching ------------------------------------------------------------------------------------------------------------
CACHED = {"source": "hf://org/name", "tokenSecretRef": {"name": "hf"}, "cache": {"type": "nodeLocal", "path": "/cache"}}


def node(name: str, **spec: Any) -> dict[str, Any]:
    ready = [{"type": "Ready", "status": "True"}]
    return {
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"zone": "a"}}, "spec": spec,
        "status": {"conditions": ready, "allocatable": {"cpu": "4"}},
    }  # fmt: skip


async def fetchers(world: World) -> dict[str, dict[str, Any]]:
    found = await world.store.list(POD, NAMESPACE)
    return {
        p["metadata"]["annotations"][FETCH_NODE]: p for p in found if p["metadata"]["labels"]["inferencefleet.io/role"] == "fetch"
    }


def test_nodes_fetch_first_and_workers_follow():
    async def scenario() -> None:
        world = World()
        for name in ("n1", "n2"):
            world.operator.feed(NODE, WatchEvent("ADDED", node(name)))
        world.operator.feed(NODE, WatchEvent("ADDED", node("n3", unschedulable=True)))
        await world.user.apply(manifest(model=CACHED))
        await several(world, 4)
        found = await fetchers(world)
        assert (set(found), await workers(world)) == ({"n1", "n2"}, {})
        assert (await world.condition("ModelCached"))["message"] == "0 of 2 nodes have the model"
        spec = found["n1"]["spec"]
        (container,) = spec["containers"]
        assert container["command"] == ["fleet-worker", "fetch"]
        assert {e["name"]: e.get("value") for e in container["env"]} == {
            "FLEET_FETCH": "hf://org/name@main", "FLEET_FETCH_WEIGHTS": "shards", "HOME": "/tmp", "HF_TOKEN": None,
            "FLEET_MODEL_CACHE": "/models/hf",
        }  # fmt: skip
        assert spec["volumes"][0] == {"name": "model", "hostPath": {"path": "/cache", "type": "DirectoryOrCreate"}}
        assert "nvidia.com/gpu" not in json.dumps(container)
        for pod in found.values():
            await world.user.patch_status(POD, NAMESPACE, pod["metadata"]["name"], {"phase": "Succeeded"})
        await several(world, 6)
        assert len(await workers(world)) == 3
        assert (await world.condition("ModelCached"))["reason"] == "Cached"
        assert set(await fetchers(world)) == {"n1", "n2"}, "what succeeded stays as the record of it"
        assert {r["kind"] for pod in (await fetchers(world)).values() for r in pod["metadata"]["ownerReferences"]} == {
            "InferenceFleet"
        }
        await world.user.delete(FLEET, NAMESPACE, "f")
        await world.kubelet()
        assert await fetchers(world) == {}

    asyncio.run(scenario())


def test_without_nodes_that_can_be_read_nobody_waits():
    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(model=CACHED))
        await world.settle(20)
        assert len(await workers(world)) == 3
        assert (await world.condition("ModelCached"))["reason"] == "NodesUnknown"

    asyncio.run(scenario())


@pytest.mark.parametrize("phase", ["Pending", "Failed"])
def test_a_clock_ahead_of_the_apis_does_not_make_what_fetches_anew_in_every_pass(phase: str):
    """After a restart nobody knows that it is ahead: by it a pod was two minutes old when it was made, and had failed."""

    async def scenario() -> None:
        world = World()
        world.set_clock(300.0)
        world.operator = world.new_operator()
        world.operator.feed(NODE, WatchEvent("ADDED", node("n1")))
        await world.user.apply(manifest(model=CACHED))
        made = []
        for _ in range(130):
            made += [name for verb, kind, name in await world.touch() if (verb, kind) == ("create", "Pod") and "-fetch-" in name]
            there = [pod["metadata"]["name"] for pod in (await fetchers(world)).values()]
            for name in there:
                await world.user.patch_status(POD, NAMESPACE, name, {"phase": phase})
            for (kind, name), pod in world.operator._objects.children((NAMESPACE, "f")).items():
                if kind == POD.kind and "-fetch-" in name and name not in there:  # it came and went between two looks
                    world.operator.feed(POD, WatchEvent("DELETED", pod))
        assert len(made) == 2  # after two minutes it is tried again

    asyncio.run(scenario())
