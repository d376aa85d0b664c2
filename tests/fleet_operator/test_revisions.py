"""Revisions on the in-memory store: what restarts a pod, what does not, what is kept, and that history can be returned to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleet_api.parse import parse_fleet
from fleet_operator.cluster.interface import CONFIG_MAP, CONTROLLER_REVISION, FLEET, POD, ForbiddenError
from fleet_operator.names import REVISION
from fleet_operator.render.revision import RESTARTED_AT, observe_revisions, revision_inputs, template_of
from fleet_operator.settings import Platform
from fleet_wire.endpoints import ENDPOINTS_KEY
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

TIER = {"name": "t", "accelerator": {"type": "cpu"}}


def inputs(**spec: Any) -> dict[str, Any]:
    fleet = parse_fleet(manifest(**spec))
    return revision_inputs(fleet, fleet.spec.tiers[0])


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"slo": {"ttft": {"p99": "1s"}}}, id="slo"),
        pytest.param({"scaling": {"mode": "manual"}}, id="scaling"),
        pytest.param({"routing": {"replicas": 3, "policy": "leastLoad"}}, id="routing"),
        pytest.param({"telemetry": {"interval": "9s"}}, id="telemetry"),
        pytest.param({"rollout": {"maxUnavailable": 1, "paused": True, "canary": {"steps": [5]}}}, id="rollout"),
        pytest.param({"limits": {"maxInputTokens": 100}}, id="input-limit"),
        pytest.param({"tiers": [{**TIER, "prefill": {"minReplicas": 2}, "decode": {"warm": 1}}]}, id="sizes"),
        pytest.param({"tiers": [{**TIER, "ratio": {"decode": 3}}]}, id="ratio"),
        pytest.param({"engine": {"type": "torch", "maxBatch": 32}}, id="defaults-written-out"),
        pytest.param({"model": {"source": "file:///m", "adapters": [{"name": "a", "source": "file:///m/a"}]}}, id="an-adapter"),
    ],
)
def test_no_pod_is_restarted_for(spec: dict[str, Any]):
    assert inputs(**spec) == inputs()


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"model": {"source": "file:///other"}}, id="model"),
        pytest.param({"model": {"source": "file:///m", "servedName": "x"}}, id="served-name"),
        pytest.param({"engine": {"maxBatch": 8}}, id="engine"),
        pytest.param({"model": {"source": "file:///m", "adapterRoot": "file:///a"}}, id="adapter-root"),
        pytest.param({"model": {"source": "file:///m", "maxSimultaneousAdapters": 2}}, id="room-for-adapters"),
        pytest.param({"model": {"source": "file:///m", "maxAdapterRank": 8}}, id="rank-of-adapters"),
        pytest.param({"limits": {"maxOutputTokens": 8}}, id="output-limit"),
        pytest.param({"rollout": {"drainTimeout": "9s"}}, id="drain-timeout"),
        pytest.param({"tiers": [{**TIER, "accelerator": {"type": "h100"}}]}, id="accelerator"),
        pytest.param({"tiers": [{**TIER, "kvTransfer": {"transport": "tcp"}}]}, id="transport"),
    ],
)
def test_pods_are_made_anew_for(spec: dict[str, Any]):
    assert inputs(**spec) != inputs()


def test_how_nodes_fetch_restarts_no_pod():
    def cached(**more: Any) -> dict[str, Any]:
        return inputs(model={"source": "hf://o/n", "cache": {"type": "nodeLocal", "path": "/c", **more}})

    assert cached(prefetch={"parallel": 2}) == cached()


@pytest.mark.parametrize(
    ("spec", "how"),
    [
        pytest.param({}, (True, False), id="torch-as-it-runs"),
        pytest.param({"engine": {"type": "vllm"}}, (True, True), id="vllm-with-its-engine-started-anew"),
    ],
)
def test_workers_can_change_their_role_when_only_the_role_differs(spec: dict[str, Any], how: tuple[bool, bool]):
    fleet = parse_fleet(manifest(**spec))
    found = template_of(fleet, fleet.spec.tiers[0], {}, Platform())
    assert (found.flippable, found.starts_anew) == how


def test_vllm_workers_that_were_started_otherwise_cannot():
    tier = {"name": "t", "accelerator": {"type": "h100-sxm"}, "decode": {"args": ["--max-num-batched-tokens=256"]}}
    fleet = parse_fleet(manifest(engine={"type": "vllm"}, tiers=[tier]))
    found = template_of(fleet, fleet.spec.tiers[0], {}, Platform())
    assert (found.flippable, found.starts_anew) == (False, False)


def test_pods_that_differ_in_more_than_the_role_cannot(monkeypatch: pytest.MonkeyPatch):
    from fleet_operator.render import revision

    real = revision.pod_spec

    def odd(fleet: Any, tier: Any, role: str, *more: Any) -> dict[str, Any]:
        return {**real(fleet, tier, role, *more), "nodeSelector": {"role": role}}  # type: ignore[arg-type]

    monkeypatch.setattr(revision, "pod_spec", odd)
    fleet = parse_fleet(manifest())
    assert not template_of(fleet, fleet.spec.tiers[0], {}, Platform()).flippable


def test_whether_workers_can_change_their_role_is_kept_with_the_revision_and_older_ones_cannot():
    async def scenario(world: World) -> None:
        (stored,) = await world.store.list(CONTROLLER_REVISION, NAMESPACE)
        assert [t.flippable for t in observe_revisions([stored])["t"].values()] == [True]
        del stored["data"]["flippable"]
        assert [t.flippable for t in observe_revisions([stored])["t"].values()] == [False]

    play(scenario)


def test_a_vllm_fleet_of_an_operator_that_knew_no_flips_of_it_is_left_as_it_is():
    """Its pods may have an agent that knows none either."""

    async def scenario(world: World) -> None:
        (stored,) = await world.store.list(CONTROLLER_REVISION, NAMESPACE)
        assert stored["data"]["startsAnew"] is True
        theirs = {name: value for name, value in stored["data"].items() if name != "startsAnew"} | {"flippable": False}
        before = await pods(world)
        await world.user.delete(CONTROLLER_REVISION, NAMESPACE, stored["metadata"]["name"])
        meta = {key: stored["metadata"][key] for key in ("name", "namespace", "labels", "annotations", "ownerReferences")}
        await world.user.create({**stored, "metadata": meta, "data": theirs})
        world.operator = world.new_operator()
        await world.settle()
        (kept,) = await world.store.list(CONTROLLER_REVISION, NAMESPACE)
        assert kept["data"] == theirs
        assert await pods(world) == before, "no pod is restarted"
        (template,) = observe_revisions([kept])["t"].values()
        assert (template.flippable, template.starts_anew) == (False, False)

    play(scenario, engine={"type": "vllm"})


async def revisions(world: World) -> dict[str, int]:
    return {obj["metadata"]["name"]: obj["revision"] for obj in await world.store.list(CONTROLLER_REVISION, NAMESPACE)}


async def pods(world: World) -> dict[str, str]:
    found = await world.store.list(POD, NAMESPACE)
    return {pod["metadata"]["name"]: pod["metadata"]["labels"].get("inferencefleet.io/revision", "") for pod in found}


def test_another_version_of_the_operator_restarts_nothing_and_makes_the_same_pods():
    async def scenario(world: World) -> None:
        before = await pods(world)
        world.operator = world.new_operator()
        world.operator._platform = Platform(worker_image="registry.example/worker:9", drain_most_s=5)
        world.operator._applier._platform = world.operator._platform
        await world.look()
        assert await world.touch() == []
        assert await pods(world) == before
        victim = next(name for name in before if "decode" in name)
        old = await world.store.get(POD, NAMESPACE, victim)
        await world.user.delete(POD, NAMESPACE, victim)
        await world.settle()
        (new,) = set(await pods(world)) - set(before)
        again = await world.store.get(POD, NAMESPACE, new)
        assert again["spec"]["containers"] == old["spec"]["containers"]

    play(scenario)


def test_a_rollout_goes_through_and_back_to_a_stored_revision():
    async def scenario(world: World) -> None:
        first = await revisions(world)
        await world.user.apply(manifest(engine={"maxBatch": 8}))
        await world.settle(20)
        second = await revisions(world)
        assert len(second) == 2
        assert len(set((await pods(world)).values())) == 1
        assert (await world.condition("RollingOut"))["reason"] == "Complete"
        await world.user.apply(manifest())
        await world.settle(20)
        assert await revisions(world) == second
        assert {f"f-t-{revision}" for revision in (await pods(world)).values() if revision} == set(first)

    play(scenario)


def test_restarted_at_is_a_new_revision():
    async def scenario(world: World) -> None:
        before = await pods(world)
        again = manifest()
        again["metadata"]["annotations"] = {RESTARTED_AT: "2026-11-21T00:00:00Z"}
        await world.user.apply(again)
        await world.settle(20)
        assert set(before).isdisjoint(await pods(world))

    play(scenario)


def test_the_history_is_bounded_and_never_forgets_what_runs():
    async def scenario(world: World) -> None:
        for batch in range(1, 6):
            await world.user.apply(manifest(engine={"maxBatch": batch}, rollout={"historyLimit": 2}))
            await world.settle(20)
        kept = await revisions(world)
        assert sorted(kept.values()) == [4, 5, 6]
        assert {f"f-t-{revision}" for revision in (await pods(world)).values() if revision} <= set(kept)

    play(scenario)


def test_a_canary_gets_its_share_in_the_routers_document():
    async def scenario(world: World) -> None:
        canary = {"steps": [20], "interval": "1m"}
        await world.user.apply(manifest(engine={"maxBatch": 8}, rollout={"canary": canary}))
        for _ in range(4):
            await world.step()
        document = json.loads((await world.store.get(CONFIG_MAP, NAMESPACE, "f-router"))["data"][ENDPOINTS_KEY])
        (split,) = document["splits"]
        assert (split["tier"], split["percent"]) == ("t", 20)
        assert {w["revision"] for w in document["workers"]} > {split["revision"]}
        status = (await world.store.get(FLEET, NAMESPACE, "f"))["status"]["tiers"][0]["rollout"]
        assert (status["target"], status["percent"]) == (split["revision"], 20)
        assert "0 of 20 requests" in status["message"] or "step lasts" in status["message"]

    play(scenario)


def test_routers_know_the_name_under_which_workers_of_the_revision_before_serve():
    """servedName is edited at once, workers are replaced one by one: the old ones answer 404 to the new name."""

    async def names(world: World) -> tuple[str, set[str]]:
        data = (await world.store.get(CONFIG_MAP, NAMESPACE, "f-router"))["data"]
        workers = json.loads(data["endpoints.json"])["workers"]
        return json.loads(data["router.json"])["served_name"], {worker["model"] for worker in workers}

    async def scenario(world: World) -> None:
        assert await names(world) == ("f", {""})
        model = {"source": "file:///m", "servedName": "llama"}
        await world.user.apply(manifest(model=model, rollout={"paused": True}))
        await world.settle(20)
        assert await names(world) == ("llama", {"f"})
        await world.user.apply(manifest(model=model))
        await world.settle(40)
        assert await names(world) == ("llama", {""})

    play(scenario)


async def held_back(world: World) -> tuple[str, dict[str, Any]]:
    """A paused fleet whose spec asks for another revision than the one that serves; that one, and its stored template."""
    await world.user.apply(manifest(model={"source": "file:///m", "servedName": "other"}, rollout={"paused": True}))
    await world.settle(20)
    stable, *_ = {revision for revision in (await pods(world)).values() if revision}
    return stable, await world.store.get(CONTROLLER_REVISION, NAMESPACE, f"f-t-{stable}")


async def lose_a_worker(world: World) -> None:
    await world.user.delete(POD, NAMESPACE, next(name for name in await pods(world) if "decode" in name))


def test_the_template_of_the_revision_that_serves_is_stored_again_when_somebody_deletes_it():
    """Incident: while a rollback or a pause held, the spec asked for another one, and a lost worker stayed away for ever."""

    async def scenario(world: World) -> None:
        stable, stored = await held_back(world)
        router = await world.store.get(CONFIG_MAP, NAMESPACE, "f-router")
        await world.user.delete(CONTROLLER_REVISION, NAMESPACE, f"f-t-{stable}")
        await world.step()
        again = await world.store.get(CONTROLLER_REVISION, NAMESPACE, f"f-t-{stable}")
        assert {part: again[part] for part in ("revision", "data")} == {part: stored[part] for part in ("revision", "data")}
        assert again["metadata"]["labels"] == stored["metadata"]["labels"]
        assert again["metadata"]["ownerReferences"] == stored["metadata"]["ownerReferences"]
        assert await world.store.get(CONFIG_MAP, NAMESPACE, "f-router") == router  # its workers keep their old name in it
        await lose_a_worker(world)
        await world.settle()
        assert await world.workers() == {"prefill": 1, "decode": 2}
        assert (await world.condition("Provisioned"))["status"] == "True"
        assert not await world.touch()

    play(scenario)


def test_no_worker_is_made_from_a_template_that_could_not_be_stored_again():
    async def scenario(world: World) -> None:
        stable, _ = await held_back(world)
        forbidden = ForbiddenError("no")
        world.api.refuse = lambda verb, kind, name: forbidden if kind == CONTROLLER_REVISION and verb == "create" else None
        await world.user.delete(CONTROLLER_REVISION, NAMESPACE, f"f-t-{stable}")
        await lose_a_worker(world)
        for _ in range(3):
            await world.step()
        assert await world.workers() == {"prefill": 1, "decode": 1}
        assert "ControllerRevision" in (await world.condition("Provisioned"))["message"]
        world.api.refuse = lambda verb, kind, name: None
        for _ in range(60):
            await world.step()
        assert await world.workers() == {"prefill": 1, "decode": 2}

    play(scenario)


def test_a_template_that_no_operator_saw_is_asked_for_in_words_and_comes_back_with_its_spec():
    async def scenario(world: World) -> None:
        stable, stored = await held_back(world)
        await world.user.delete(CONTROLLER_REVISION, NAMESPACE, f"f-t-{stable}")
        world.operator = world.new_operator()
        await world.settle()
        assert (await world.condition("Provisioned"))["status"] == "True"  # nothing is missing yet
        await lose_a_worker(world)
        for _ in range(5):
            await world.step()
        told = await world.condition("Provisioned")
        assert told["reason"] == "ApplyFailed"
        assert f"ControllerRevision f-t-{stable} was deleted" in told["message"]
        assert "apply the spec of that revision again" in told["message"]
        await world.user.apply(manifest(rollout={"paused": True}))
        await world.settle(40)
        assert await world.workers() == {"prefill": 1, "decode": 2}
        assert (await world.store.get(CONTROLLER_REVISION, NAMESPACE, f"f-t-{stable}"))["data"] == stored["data"]

    play(scenario)


def test_a_template_of_the_history_that_somebody_deletes_stays_away():
    async def scenario(world: World) -> None:
        first = set(await revisions(world))
        await world.user.apply(manifest(engine={"maxBatch": 8}))
        await world.settle(20)
        for name in first:
            await world.user.delete(CONTROLLER_REVISION, NAMESPACE, name)
        await world.settle()
        assert first.isdisjoint(await revisions(world))

    play(scenario)


def test_a_template_that_another_operator_forgot_stays_forgotten():
    """Its namespace was another installation's for a while, which rolled the fleet on."""

    async def scenario(world: World) -> None:
        stable, _ = await held_back(world)
        first, seen = world.operator, world._seen
        world.operator = world.new_operator()
        model = {"source": "file:///m", "servedName": "other"}
        for batch in (1, 2):
            await world.user.apply(manifest(model=model, engine={"maxBatch": batch}, rollout={"historyLimit": 1}))
            await world.settle(40)
        kept = await revisions(world)
        assert f"f-t-{stable}" not in kept
        world.operator, world._seen = first, seen
        written = [write for _ in range(5) for write in await world.step()]
        assert not [write for write in written if write[1] == "ControllerRevision"]
        assert await revisions(world) == kept

    play(scenario)


def test_a_template_of_somebody_else_that_goes_is_not_made_again():
    async def scenario(world: World) -> None:
        stable, stored = await held_back(world)
        name = f"f-t-{stable}"
        await world.user.delete(CONTROLLER_REVISION, NAMESPACE, name)
        world.operator = world.new_operator()
        theirs = {key: stored["metadata"][key] for key in ("name", "namespace", "labels")}
        await world.user.apply({**stored, "metadata": theirs})
        await world.settle()
        await world.user.delete(CONTROLLER_REVISION, NAMESPACE, name)
        await lose_a_worker(world)
        for _ in range(5):
            await world.step()
        assert name not in await revisions(world)
        assert f"ControllerRevision {name} was deleted" in (await world.condition("Provisioned"))["message"]

    play(scenario)


@pytest.mark.parametrize(
    "made_up",
    [
        pytest.param({"gpus": 4}, id="gpus"),
        pytest.param({"gpus": ["1", "1"]}, id="words"),
        pytest.param({"gpus": [1, -1]}, id="less-than-none"),
        pytest.param({"nodes": [1]}, id="one-role"),
        pytest.param({"compat": None}, id="compat"),
        pytest.param({"pods": {"prefill": {}}}, id="pods"),
        pytest.param({"inputs": "these"}, id="inputs"),
        pytest.param({"inputs": {"model": "that"}}, id="model"),
    ],
)
def test_a_template_that_somebody_made_by_hand_and_wrongly_is_none(made_up: dict[str, Any]):
    """It ended each pass of its fleet."""

    async def scenario(world: World) -> None:
        await world.user.apply(manifest(scaling={"mode": "manual"}))
        await world.settle()
        (stored,) = await world.store.list(CONTROLLER_REVISION, NAMESPACE)
        meta = {**{key: stored["metadata"][key] for key in ("namespace", "ownerReferences")}, "name": "f-t-byhand"}
        meta["labels"] = {**stored["metadata"]["labels"], REVISION: "byhand"}
        await world.user.create({**stored, "metadata": meta, "data": {**stored["data"], **made_up}})
        await world.settle()
        assert not [event for event in await world.events() if "InternalError" in event]
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"limits": {"maxOutputTokens": 99}}})
        await world.settle()
        assert (await world.condition("RollingOut"))["reason"] == "Complete"

    play(scenario)
