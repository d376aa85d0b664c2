"""Upgrade and downgrade of the operator: a status with words of a newer version stops nothing and restarts nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_api.parse import known_status, parse_fleet
from fleet_operator.cluster.interface import FLEET, POD, POOL, Kind
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


def test_what_an_older_crd_drops_from_a_status_is_said_once_and_not_written_in_every_pass(caplog: pytest.LogCaptureFixture):
    """A second release with `crds.install: false`, or CRDs that nobody applied: 15 writes a minute that changed nothing for each
    fleet, and nobody was told that the operator forgets with its next start what it could not write down."""

    async def scenario(world: World) -> None:
        kept = world.store.patch_status

        async def pruned(kind: Kind, namespace: str, name: str, status: dict[str, Any], **more: Any) -> dict[str, Any]:
            less = {key: value for key, value in status.items() if key != "endpoint"}
            if kind == FLEET and "tiers" in less:
                less["tiers"] = [{key: value for key, value in tier.items() if key != "rollout"} for tier in less["tiers"]]
            return await kept(kind, namespace, name, less, **more)

        world.store.patch_status = pruned  # type: ignore[method-assign]
        for name in "fgh":
            await world.user.apply(manifest(name))
        status = (await world.store.get(FLEET, NAMESPACE, "f"))["status"]
        await kept(FLEET, NAMESPACE, "f", {"endpoint": None, "tiers": [{**status["tiers"][0], "rollout": None}]})
        await world.settle()
        for _ in range(3):
            world.now += 30
            assert await world.touch() == []
        told = [record.getMessage() for record in caplog.records if "older than this operator" in record.getMessage()]
        assert len(told) == 1
        assert "status.endpoint" in told[0]
        pool = await world.pool("decode")
        await world.user.patch(POD, NAMESPACE, f"{pool['metadata']['name']}-0", {"metadata": {"annotations": {"a": "b"}}})
        assert await world.step() == []
        await world.user.delete(POD, NAMESPACE, f"{pool['metadata']['name']}-0", grace_s=0)
        assert ("status", "InferenceFleet", pool["spec"]["fleet"]) in await world.step(), "what changes is written"

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
        # the CRD asks for no more than a type or a time: every pass ended in InternalError
        {"conditions": [{"type": "Custom", "lastTransitionTime": "2026-01-01T00:00:00Z"}]},
        {"tiers": [{"ratio": "1:2"}]},
        {"tiers": [{"name": "t", "zero": {"since": "2026-01-01T00:00:00Z"}, "flip": {"message": "m"}}]},
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


WELL = {"type": "Ready", "status": "True", "reason": "AllGood", "message": "m"} | {
    "lastTransitionTime": "2026-01-01T00:00:00Z",
    "observedGeneration": 1,
}
ROLLED_BACK = {"name": "t", "ratio": "1:2", "rollout": {"stable": "aaaaaaaa", "failed": "bbbbbbbb", "message": "bad"}}
MINE = {"observedGeneration": 3, "conditions": [WELL], "tiers": [ROLLED_BACK]}


@pytest.mark.parametrize(
    "newer",
    [
        {**MINE, "authentication": "oidc"},
        {**MINE, "adapters": "a"},
        {**MINE, "conditions": [WELL, {**WELL, "type": "WithinRatio", "status": "Maybe"}]},
        {**MINE, "conditions": [WELL, {"type": "WithinRatio"}]},
        {**MINE, "tiers": [{**ROLLED_BACK, "zero": {"state": "Dozing", "since": "2026-01-01T00:00:00Z"}}]},
        {**MINE, "tiers": [ROLLED_BACK, {"ratio": "1:1"}]},
        {**MINE, "tiers": [{**ROLLED_BACK, "rollout": {**ROLLED_BACK["rollout"], "percent": 12.5}}]},  # type: ignore[dict-item]
    ],
    ids=["value", "kind", "condition", "half-a-condition", "state", "tier", "number"],
)
def test_a_value_of_tomorrow_costs_its_own_field_alone(newer: dict[str, Any]):
    """Incident: after a downgrade one such value, and nothing of the status was known: a revision that had been rolled back was
    rolled out again."""
    assert {key: value for key, value in known_status({**manifest(), "status": newer}).items() if key != "adapters"} == MINE
    assert parse_fleet({**manifest(), "status": newer}).status.tiers[0].rollout.failed == "bbbbbbbb"  # type: ignore[union-attr]


WHOLE = {
    **MINE,
    "endpoint": "http://f",
    "authentication": "open",
    "adapters": [{"name": "a", "desired": 1}],
    "tiers": [
        {
            **ROLLED_BACK,
            "prefill": {"desired": 1},
            "kv": {"blocks": 1, "transport": "tcp"},
            "flip": {"failedAt": "2026-01-01T00:00:00Z"},
            "zero": {"state": "AtZero", "since": "2026-01-01T00:00:00Z"},
            "startingSince": "2026-01-01T00:00:00Z",
        }
    ],
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "type", "state", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(data=st.data())
def test_whatever_somebody_puts_into_a_status_it_can_be_read(data: st.DataObject):
    """One place of a whole status is replaced by anything, or left out."""
    status = json.loads(json.dumps(WHOLE))
    place: Any = status
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        if not (isinstance(place[key], dict | list) and place[key]) or data.draw(st.booleans()):
            break
        place = place[key]
    if data.draw(st.booleans()):
        place[key] = data.draw(ANYTHING)
    else:
        del place[key]
    kept = known_status({**manifest(), "status": status})
    assert kept, "one place is never all"
    parse_fleet({**manifest(), "status": status})
    assert known_status({**manifest(), "status": kept}) == kept


def test_a_status_that_is_broken_at_its_root_is_none():
    assert known_status({**manifest(), "status": {"conditions": {"a": 1}, "tiers": "t"}}) == {}
    assert known_status({**manifest(), "status": {"conditions": [WELL, WELL]}}) == {}  # each type once: none is the right one


@pytest.mark.parametrize("time", ["garbage", "", "2026-13-45T00:00:00Z", "2026-01-01T00:00:00", "2026-01-01T00:00:00+99:00"])
@pytest.mark.parametrize(
    ("state", "left"),
    [
        ({"flip": {"failedAt": "TIME", "message": "m"}}, {}),
        ({"zero": {"state": "Waking", "since": "TIME"}}, {}),
        ({"startingSince": "TIME"}, {}),
        (
            {"rollout": {"stable": "aaaaaaaa", "target": "bbbbbbbb", "stepSince": "TIME", "progressSince": "TIME"}},
            {"rollout": {"stable": "aaaaaaaa", "target": "bbbbbbbb"}},
        ),
    ],
    ids=["flip", "zero", "start", "rollout"],
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
