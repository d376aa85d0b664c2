"""Somebody edits what is not theirs: any label, annotation or status of a fleet's children. The fleet goes on, and comes back."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet_operator import names
from fleet_operator.claims import short_of_claims
from fleet_operator.cluster.interface import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    NODE,
    PDB,
    POD,
    POOL,
    SERVICE,
    InvalidError,
    Kind,
    WatchEvent,
)
from fleet_operator.gangs import waiting_leaders
from fleet_operator.observe import DELETION_COST, observe_pods, observe_pools
from fleet_operator.render.revision import observe_revisions
from tests.fleet_operator.world import NAMESPACE, World, manifest

RIGHTS = Path(__file__).resolve().parents[2] / "charts/rbac/operator.yaml"
OURS = [value for name, value in vars(names).items() if isinstance(value, str) and value.startswith(f"{names.GROUP}/")]
FOUND_BY = {names.FLEET, names.MANAGED_BY}
"""Labels that the watches select by: without them an object is somebody else's."""
LABELS = sorted({*OURS, "app"} - FOUND_BY)
NOTES = sorted({*OURS, DELETION_COST})
PLAIN = "abc -1 0 1 3 007 ² 1e9 999999 prefill decode router t u [] { aaaaaaaa"
DATES = "2026-01-01T00:00:00Z 2026-13-01 0001-01-01T00:00:00 9999-12-31T23:59:59-23:59"
WORDS = st.sampled_from(["", "9" * 5_000, *PLAIN.split(), *DATES.split()])
VALUES = st.one_of(WORDS, st.none())
"""None: the key is taken away."""
KINDS = [POD, POOL, CONTROLLER_REVISION, CONFIG_MAP, DEPLOYMENT, PDB]
TIMES = st.sampled_from(["2026-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", None])
CONDITIONS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["Ready", "PodScheduled", "Odd"]), "status": st.sampled_from(["True", "False", "Unknown"])},
        optional={"reason": st.sampled_from(["Unschedulable", "SchedulingGated", "Odd"]), "lastTransitionTime": TIMES},
    ),
    max_size=3,
)
CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {"name": st.just("c"), "restartCount": st.integers(0, 2**31 - 1)},
        optional={
            "state": st.sampled_from([None, {}, {"waiting": {}}, {"waiting": {"message": "x"}}, {"terminated": {"exitCode": 1}}]),
            "lastState": st.sampled_from([None, {}, {"terminated": {"exitCode": 0}}, {"terminated": {"exitCode": 9}}]),
        },
    ),
    max_size=2,
)
STATUSES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    POD.kind: st.fixed_dictionaries(
        {},
        optional={
            "phase": st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown", ""]),
            "podIP": st.sampled_from(["", "10.9.9.9", "fd00::1", None]),
            "conditions": st.one_of(st.none(), CONDITIONS),
            "containerStatuses": st.one_of(st.none(), CONTAINERS),
            "message": st.sampled_from(["", "x", None]),
        },
    ),
    POOL.kind: st.fixed_dictionaries({"replicas": st.integers(0, 999)}, optional={"selector": st.just("x")}),
    DEPLOYMENT.kind: st.fixed_dictionaries({}, optional={"readyReplicas": st.one_of(st.none(), st.integers(0, 9))}),
    PDB.kind: st.fixed_dictionaries({}, optional={"currentHealthy": st.integers(0, 9)}),
}
PATCHES = st.one_of(
    st.tuples(st.just("labels"), st.dictionaries(st.sampled_from(LABELS), VALUES, min_size=1, max_size=3)),
    st.tuples(st.just("annotations"), st.dictionaries(st.sampled_from(NOTES), VALUES, min_size=1, max_size=3)),
)
EDITS = st.one_of(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 9), PATCHES),
    st.sampled_from([POD, POOL, DEPLOYMENT, PDB]).flatmap(
        lambda kind: st.tuples(st.just(kind), st.integers(0, 9), st.tuples(st.just("status"), STATUSES[kind.kind]))
    ),
    st.tuples(
        st.just(CONFIG_MAP),
        st.just(0),
        st.tuples(st.just("data"), st.dictionaries(st.sampled_from(["endpoints.json", "router.json", "x"]), VALUES, min_size=1)),
    ),
)


async def edit(world: World, kind: Kind, at: int, patch: tuple[str, dict[str, Any]]) -> str:
    """One edit by somebody else; the name of the object."""
    found = sorted(await world.store.list(kind, NAMESPACE), key=lambda obj: obj["metadata"]["name"])
    if not found:
        return ""
    name, (where, what) = found[at % len(found)]["metadata"]["name"], patch
    with suppress(InvalidError):  # what the API server itself refuses
        if where == "status":
            await world.user.patch_status(kind, NAMESPACE, name, what)
        else:
            await world.user.patch(kind, NAMESPACE, name, {"metadata": {where: what}} if where != "data" else {where: what})
    return name


async def go_on(world: World, seconds: int) -> None:
    """Time passes; a failure that nobody foresaw ends it."""
    for _ in range(seconds):
        world.now += 4
        await world.step()
        told = [str(problem) for state in world.operator._states.values() for problem in state.problems]
        assert not [words for words in told if "the operator failed" in words], told


async def start_again(world: World) -> None:
    """What a user does who made a mess of it: every worker is deleted."""
    for pod in await world.store.list(POD, NAMESPACE):
        await world.user.delete(POD, NAMESPACE, pod["metadata"]["name"], grace_s=0)


def test_an_edited_ordinal_stops_no_fleet():
    """b10: `inferencefleet.io/ordinal=abc` on one pod ended every pass of its fleet with an InternalError."""

    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest())
        await world.settle()
        await edit(world, POD, 0, ("annotations", {names.ORDINAL: "abc"}))
        pods = [pod["metadata"] for pod in await world.store.list(POD, NAMESPACE)]
        victim = next(meta["name"] for meta in pods if meta["labels"].get(names.ROLE) == "prefill")
        await world.user.delete(POD, NAMESPACE, victim, grace_s=0)
        await go_on(world, 5)
        assert await world.workers() == {"prefill": 1, "decode": 2}

    asyncio.run(scenario())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(EDITS, min_size=1, max_size=6), st.booleans())
def test_whatever_somebody_edits_the_operator_goes_on_and_the_fleet_comes_back(edits: list[Any], restarted: bool):
    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(scaling={"mode": "manual"}))
        await world.settle()
        for kind, at, patch in edits:
            await edit(world, kind, at, patch)
            await go_on(world, 2)
        if restarted:
            world.operator = world.new_operator()
        await go_on(world, 60)
        await start_again(world)
        await go_on(world, 60)
        assert (await world.condition("Ready"))["status"] == "True"
        assert min((await world.workers()).values()) >= 1

    asyncio.run(scenario())


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["a", names.TIER, "nvidia.com/gpu"]), WORDS, max_size=2),
    st.fixed_dictionaries(
        {},
        optional={
            "conditions": st.one_of(st.none(), CONDITIONS),
            "allocatable": st.dictionaries(st.sampled_from(["cpu", "nvidia.com/gpu"]), WORDS),
        },
    ),
    st.lists(st.fixed_dictionaries({}, optional={"key": WORDS, "value": st.none() | WORDS, "effect": WORDS}), max_size=2),
)
def test_whatever_a_node_says_the_operator_goes_on(marks: dict[str, str], status: dict[str, Any], taints: list[dict[str, Any]]):
    async def scenario() -> None:
        world = World()
        node = {"metadata": {"name": "node", "labels": marks}, "spec": {"taints": taints}, "status": status}
        world.operator.feed(NODE, WatchEvent("ADDED", {"apiVersion": "v1", "kind": "Node", **node}))
        await world.user.apply(manifest())
        await go_on(world, 5)

    asyncio.run(scenario())


# -- one row per place that reads what users may edit --------------------------------------------------------------------
def pod(name: str = "f-t-decode-aaaaaaaa-4", labels: dict[str, str] | None = None, **notes: str) -> dict[str, Any]:
    marks = {names.ROLE: "decode", names.TIER: "t", names.REVISION: "aaaaaaaa", names.POOL: "p", **(labels or {})}
    told = {f"{names.GROUP}/{key.replace('_', '-')}": value for key, value in notes.items()}
    return {"metadata": {"name": name, "uid": "u", "labels": marks, "annotations": told}, "spec": {}, "status": {}}


@pytest.mark.parametrize(
    ("found", "ordinal", "member"),
    [
        pytest.param(pod(ordinal="7", member="0"), 7, 0, id="as-made"),
        pytest.param(pod(ordinal="abc"), 4, 0, id="the-name-has-the-place"),
        pytest.param(pod(ordinal="-1"), 4, 0, id="negative"),
        pytest.param(pod(ordinal="²"), 4, 0, id="a-digit-that-is-no-number"),
        pytest.param(pod(ordinal="9" * 5_000), 4, 0, id="more-digits-than-python-reads"),
        pytest.param(pod("odd", ordinal="abc"), 0, 0, id="no-place-anywhere"),
        pytest.param(pod(member="3"), 4, 0, id="a-worker-of-one-pod-follows-nobody"),
        pytest.param(pod("p-4-1", ordinal="4", member="1", group_uid="x"), 4, 1, id="a-follower"),
        pytest.param(pod("p-4-1", ordinal="4", member="2", group_uid="x"), 4, 0, id="a-follower-with-another-place"),
    ],
)
def test_a_pods_place_is_read_from_what_can_be_read(found: dict[str, Any], ordinal: int, member: int):
    (seen,) = observe_pods([found])
    assert (seen.ordinal, seen.member) == (ordinal, member)


@pytest.mark.parametrize(("text", "count"), [("3", 3), ("²", None), ("-1", None), ("9" * 5_000, None), ("", None)])
def test_a_pools_counts_are_read_or_unknown(text: str, count: int | None):
    spec = {"role": "decode", "tier": "t", "revision": "aaaaaaaa", "replicas": 1}
    meta = {"name": "p", "uid": "u", "annotations": {names.PLANNED: text, names.SIZE: text}}
    (seen,) = observe_pools([{"metadata": meta, "spec": spec}])
    assert (seen.planned, seen.size) == (count, count)


@pytest.mark.parametrize("lost", [names.POOL, names.TIER, names.ROLE, names.REVISION])
def test_a_pod_that_lost_a_label_is_passed_over_where_it_is_asked_for_its_pool(lost: str):
    waits = pod(labels={names.GROUP_OF: "p-4", "scheduling.x-k8s.io/pod-group": "p-4"})
    waits["spec"]["resourceClaims"] = [{"name": "c", "resourceClaimTemplateName": "x"}]
    assert (len(short_of_claims({("Pod", "a"): waits})), len(waiting_leaders({("Pod", "a"): waits}))) == (1, 1)
    del waits["metadata"]["labels"][lost]
    assert (short_of_claims({("Pod", "a"): waits}), waiting_leaders({("Pod", "a"): waits})) == ([], [])


def test_a_worker_over_several_nodes_whose_name_was_edited_is_passed_over():
    waits = pod(labels={names.GROUP_OF: "odd", "scheduling.x-k8s.io/pod-group": "odd"})
    assert waiting_leaders({("Pod", "a"): waits}) == []


@pytest.mark.parametrize("lost", ["compat", "gpus", "nodes", "pods"])
def test_a_stored_template_that_is_not_whole_is_none(lost: str):
    data = {"compat": "c", "gpus": [0, 0], "nodes": [1, 1], "pods": {"prefill": {}, "decode": {}}}
    marks = {names.TIER: "t", names.REVISION: "aaaaaaaa"}
    assert observe_revisions([{"metadata": {"labels": marks}, "data": data}]).keys() == {"t"}
    del data[lost]
    assert observe_revisions([{"metadata": {"labels": marks}, "data": data}]) == {}


@pytest.mark.parametrize(("key", "value"), [(names.FLEET, None), (names.FLEET, "g"), (names.MANAGED_BY, None)])
def test_a_pod_that_lost_the_labels_it_is_found_by_is_told(key: str, value: str | None):
    """Its name is taken for good, and nothing said why there was one worker less."""

    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(scaling={"mode": "manual"}))
        await world.settle()
        name = await edit(world, POD, 0, ("labels", {key: value}))
        if key == names.MANAGED_BY:  # the watch selects by it: to the operator this is a deletion
            world.operator.feed(POD, WatchEvent("DELETED", world._seen.pop(await seen(world, name))))
            world.look = still  # type: ignore[method-assign]
        await go_on(world, 6)
        told = await world.condition("Provisioned")
        assert (told["status"], told["reason"]) == ("False", "NameConflict")
        assert f"Pod {name} is this fleet's without its label {key}=" in told["message"]
        assert "set it again, or delete the Pod; where it is lost again, an admission webhook or a policy" in told["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", [POOL, CONTROLLER_REVISION, CONFIG_MAP, DEPLOYMENT, PDB, SERVICE], ids=lambda kind: kind.kind)
def test_whatever_else_lost_its_label_gets_it_again(kind: Kind):
    """A pool did not: that the API has one where none is seen was taken for news that had not come yet, for ever."""

    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(scaling={"mode": "manual"}))
        await world.settle()
        workers = {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}
        name = await edit(world, kind, 0, ("labels", {names.FLEET: None}))
        asked, stored = set[tuple[str, str]](), await world.store.get(kind, NAMESPACE, name)
        world.api.refuse = lambda verb, written, _: asked.add((written.kind, verb))
        await go_on(world, 12)
        found = await world.store.get(kind, NAMESPACE, name)
        assert found["metadata"]["labels"][names.FLEET] == "f"
        needed = {NEEDED[verb] for written, verb in asked if written == kind.kind}
        assert needed
        if kind is CONTROLLER_REVISION:  # e2e of 2026-11-22: `data` is immutable, and an apply says it in another order
            assert found["data"] == stored["data"]
            assert ("ControllerRevision", "apply") not in asked
        assert needed - granted(kind) == set(), "no Role of the chart lets it"
        assert {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)} == workers
        assert (await world.condition("Ready"))["status"] == "True"

    asyncio.run(scenario())


NEEDED = {"apply": "patch", "patch": "patch", "create": "create", "delete": "delete", "status": "patch"}


def granted(kind: Kind) -> set[str]:
    """Verbs of the operator's Role, as `make chart` writes it out."""
    (role,) = (o for o in yaml.safe_load_all(RIGHTS.read_text()) if o["kind"] == "ClusterRole")
    group = kind.api_version.rpartition("/")[0]
    return {
        verb
        for rule in role["rules"]
        if group in rule["apiGroups"] and kind.plural in rule["resources"]
        for verb in rule["verbs"]
    }


async def still() -> None:
    """No watch tells anything."""


async def seen(world: World, name: str) -> tuple[str, str, str]:
    return next(key for key in world._seen if key[:2] == ("Pod", name))
