"""Upgrade and downgrade of the operator: a status with words of a newer version stops nothing and restarts nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleet_api.parse import known_status, parse_fleet
from fleet_operator.cluster.interface import FLEET, POD, POOL
from fleet_planner.reconcile import reconcile
from fleet_planner.types import Observed, Template
from tests.fleet_operator.world import NAMESPACE, World, manifest, play


async def pods(world: World) -> set[str]:
    return {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}


def test_words_of_a_newer_operator_are_left_alone():
    async def scenario(world: World) -> None:
        before, told = await pods(world), await world.events()
        status = (await world.store.get(FLEET, NAMESPACE, "f"))["status"]
        status["futureField"] = {"a": 1}
        status["tiers"][0]["futureCount"] = 3
        status["conditions"][0]["futureWord"] = "x"
        await world.user.patch_status(FLEET, NAMESPACE, "f", status)
        assert await world.step() == []
        assert await world.touch() == []
        assert (await world.condition("Accepted"))["status"] == "True"
        assert (await world.store.get(FLEET, NAMESPACE, "f"))["status"]["futureField"] == {"a": 1}
        # a restarted, older operator thinks the same
        world.operator = world.new_operator()
        assert await world.step() == []
        assert await pods(world) == before
        assert await world.events() == told

    play(scenario)


def test_words_of_a_newer_operator_about_a_pool_are_left_alone():
    """After a downgrade each pool's status was written in every pass, and never as wished."""

    async def scenario(world: World) -> None:
        name = (await world.pool("decode"))["metadata"]["name"]
        await world.user.patch_status(POOL, NAMESPACE, name, {"futureReplicas": 1})
        assert await world.step() == []
        assert await world.touch() == []
        await world.user.patch_status(POOL, NAMESPACE, name, {"readyReplicas": 9})
        assert await world.touch() == [("status", "WorkerPool", name)]
        assert (await world.pool("decode"))["status"] | {"futureReplicas": 1} == (await world.pool("decode"))["status"]

    play(scenario)


@pytest.mark.parametrize(
    "status",
    [
        None,
        {},
        "text",
        [],
        {"conditions": "x"},
        {"conditions": [{"type": 7}]},
        {"tiers": {"a": 1}},
        {"observedGeneration": "many"},
    ],
)
def test_a_status_that_is_none_of_ours_is_written_anew(status: Any):
    """Somebody, or a version of tomorrow, may have put anything there."""

    async def scenario(world: World) -> None:
        before = await pods(world)
        entry = world.store._entry(FLEET, NAMESPACE, "f")
        entry.obj = {**entry.obj, "status": status}
        assert parse_fleet(entry.obj).status.conditions == ()
        world.operator = world.new_operator()
        await world.settle()
        assert (await world.condition("Accepted"))["status"] == "True"
        assert await pods(world) == before

    play(scenario)


def test_a_spec_of_tomorrow_is_said_and_what_runs_goes_on():
    """The CRD is newer than the operator: a field that it does not know is not guessed at."""

    async def scenario(world: World) -> None:
        before = await pods(world)
        entry = world.store._entry(FLEET, NAMESPACE, "f")
        meta = entry.obj["metadata"]
        newer = {**meta, "resourceVersion": str(int(meta["resourceVersion"]) + 1_000), "generation": meta["generation"] + 1}
        entry.obj = {**entry.obj, "metadata": newer, "spec": {**entry.obj["spec"], "futureField": 1}}
        await world.step()
        accepted = await world.condition("Accepted")
        assert accepted["status"] == "False"
        assert 'unknown field "spec.futureField"' in accepted["message"]
        assert await pods(world) == before

    play(scenario)


def test_known_status_keeps_what_is_known():
    status = {"observedGeneration": 3, "tomorrow": 1, "tiers": [{"name": "t", "ratio": "1:2", "tomorrow": {}}]}
    assert known_status({**manifest(), "status": status}) == {"observedGeneration": 3, "tiers": [{"name": "t", "ratio": "1:2"}]}


@pytest.mark.parametrize("time", ["garbage", "", "2026-13-45T00:00:00Z", "2026-01-01T00:00:00", "2026-01-01T00:00:00+99:00"])
@pytest.mark.parametrize(
    ("state", "left"),
    [
        ({"flip": {"failedAt": "TIME", "message": "m"}}, {}),
        ({"zero": {"state": "Waking", "since": "TIME"}}, {}),
        (
            {"rollout": {"stable": "aaaaaaaa", "target": "bbbbbbbb", "stepSince": "TIME", "progressSince": "TIME"}},
            {"rollout": {"stable": "aaaaaaaa", "target": "bbbbbbbb"}},
        ),
    ],
    ids=["flip", "zero", "rollout"],
)
def test_a_time_in_the_status_that_is_none_stops_no_fleet(time: str, state: dict[str, Any], left: dict[str, Any]):
    """Somebody edited or restored it: every pass failed, and nobody repaired the fleet."""
    tier = json.loads(json.dumps({"name": "t", **state}).replace("TIME", time))
    condition = {"type": "Ready", "status": "True", "reason": "Ready", "message": "", "lastTransitionTime": time}
    status = {"tiers": [tier], "conditions": [condition | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    found = known_status({**manifest(), "status": status})
    if "rollout" in left and not time:
        left = {"rollout": {**left["rollout"], "stepSince": "", "progressSince": ""}}  # "": not begun
    assert found == {**status, "tiers": [{"name": "t", **left}]}
    assert known_status({**manifest(), "status": {"conditions": [condition]}}) == {"conditions": []}
    name = manifest()["spec"]["tiers"][0]["name"]
    planned = parse_fleet({**manifest(), "status": {**status, "tiers": [{**tier, "name": name}]}})
    reconcile(planned, Observed(templates={name: Template("bbbbbbbb", "c")}), 1_000.0)
