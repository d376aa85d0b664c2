"""Owner references that somebody took away: without one an object, and a pod with its GPU, outlives its fleet. They come back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet_operator.cluster.interface import CLAIM_TEMPLATE, CONTROLLER_REVISION, FLEET, POD, POOL, SERVICE, Kind
from fleet_operator.cluster.kinds import POD_GROUP_KINDS
from fleet_operator.names import APPLIED, ROLE
from fleet_operator.ownership import lost_owners, parted
from fleet_operator.reconciler import CHILDREN
from fleet_planner.roles import ROLES
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

NOBODYS: dict[str, Any] = {"metadata": {"ownerReferences": None}}
COSCHEDULED = {
    "name": "t", "accelerator": {"type": "cpu"}, "parallelism": {"nodes": 2}, "ratio": {"decode": 1, "min": "1:2"},
    "placement": {"podGroup": "coscheduling"},
}  # fmt: skip
CLAIMED = {
    "name": "t", "accelerator": {"type": "h100-sxm"},
    "kvTransfer": {"via": "dra", "dra": {"gpu": "gpu.nvidia.com", "nic": "mrdma.google.com"}},
}  # fmt: skip


async def workers(world: World) -> list[dict[str, Any]]:
    return [pod for pod in await world.store.list(POD, NAMESPACE) if pod["metadata"]["labels"].get(ROLE) in ROLES]


async def part(world: World, *kinds: Kind) -> int:
    """Somebody takes the owners of all objects of these kinds away."""
    found = [(kind, obj) for kind in kinds for obj in await world.store.list(kind, NAMESPACE)]
    for kind, obj in found:
        await world.user.patch(kind, NAMESPACE, obj["metadata"]["name"], NOBODYS)
    return len(found)


async def ownerless(world: World, *kinds: Kind) -> list[str]:
    found = [(kind, obj["metadata"]) for kind in kinds for obj in await world.store.list(kind, NAMESPACE)]
    return [f"{kind.kind} {meta['name']}" for kind, meta in found if not meta.get("ownerReferences")]


async def gone(world: World, *kinds: Kind) -> None:
    """The fleet is deleted, and with it everything of these kinds."""
    await world.user.delete(FLEET, NAMESPACE, "f")
    for _ in range(5):
        await world.step()
    assert [obj["metadata"]["name"] for kind in kinds for obj in await world.store.list(kind, NAMESPACE)] == []


@pytest.mark.parametrize("restarted", [False, True])
def test_a_worker_whose_owner_was_taken_away_does_not_outlive_its_fleet(restarted: bool):
    async def scenario(world: World) -> None:
        before = {pod["metadata"]["uid"] for pod in await workers(world)}
        assert await part(world, POD) >= 3
        if restarted:
            world.operator = world.new_operator()
        await world.settle()
        assert await ownerless(world, POD) == []
        assert {pod["metadata"]["uid"] for pod in await workers(world)} == before
        for pod in await workers(world):
            (owner,) = pod["metadata"]["ownerReferences"]
            assert (owner["uid"], owner["controller"]) == (
                (await world.pool(pod["metadata"]["labels"][ROLE]))["metadata"]["uid"],
                True,
            )
        assert await world.touch() == []
        await gone(world, POD, *CHILDREN)

    play(scenario)


def test_an_owner_that_somebody_added_stays():
    """Where it is no controller: a pod may have several owners."""

    async def scenario(world: World) -> None:
        name = (await workers(world))[0]["metadata"]["name"]
        theirs = {"apiVersion": "v1", "kind": "Service", "name": "f-router"}
        theirs["uid"] = (await world.store.get(SERVICE, NAMESPACE, "f-router"))["metadata"]["uid"]
        await world.user.patch(POD, NAMESPACE, name, {"metadata": {"ownerReferences": [theirs]}})
        await world.settle()
        owners = (await world.store.get(POD, NAMESPACE, name))["metadata"]["ownerReferences"]
        assert [owner["kind"] for owner in owners] == ["Service", "WorkerPool"]

    play(scenario)


def test_a_pod_that_somebody_else_controls_is_left_to_them():
    async def scenario(world: World) -> None:
        name = (await workers(world))[0]["metadata"]["name"]
        theirs = {"apiVersion": "v1", "kind": "Service", "name": "f-router", "controller": True}
        theirs["uid"] = (await world.store.get(SERVICE, NAMESPACE, "f-router"))["metadata"]["uid"]
        await world.user.patch(POD, NAMESPACE, name, {"metadata": {"ownerReferences": [theirs]}})
        await world.settle()
        assert (await world.store.get(POD, NAMESPACE, name))["metadata"]["ownerReferences"] == [theirs]

    play(scenario)


def test_workers_of_a_pool_that_was_deleted_without_them_are_taken_by_the_one_that_comes_after_it():
    """`kubectl delete wpool NAME --cascade=orphan`."""

    async def scenario(world: World) -> None:
        before = {pod["metadata"]["uid"] for pod in await workers(world)}
        await part(world, POD)
        for pool in await world.store.list(POOL, NAMESPACE):
            await world.user.delete(POOL, NAMESPACE, pool["metadata"]["name"])
        await world.settle(30)
        assert {pod["metadata"]["uid"] for pod in await workers(world)} == before
        assert await ownerless(world, POD) == []
        await gone(world, POD)

    play(scenario)


def test_a_pool_that_is_being_deleted_without_its_workers_gets_none_back():
    async def scenario(world: World) -> None:
        name = (await world.pool("decode"))["metadata"]["name"]
        await world.user.patch(POOL, NAMESPACE, name, {"metadata": {"finalizers": ["orphan"]}})
        await world.settle()
        await world.user.delete(POOL, NAMESPACE, name)
        await part(world, POD)
        for _ in range(5):
            await world.step()
        assert {at.split("-")[2] for at in await ownerless(world, POD)} == {"decode"}

    play(scenario)


def test_workers_of_both_revisions_get_theirs_back_while_a_rollout_is_paused():
    async def scenario(world: World) -> None:
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"rollout": {"paused": True}, "engine": {"image": "b"}}})
        await world.settle(30)
        assert await part(world, POD, *(kind for kind in CHILDREN if kind != POD)) > 10
        await world.settle(30)
        assert await ownerless(world, *CHILDREN) == []
        lost = (await workers(world))[0]["metadata"]["name"]
        await world.user.delete(POD, NAMESPACE, lost, grace_s=0)
        for _ in range(30):  # who undid edits waits before it writes again
            await world.step()
        assert len(await workers(world)) == 3
        assert (await world.condition("Provisioned"))["status"] == "True"

    play(scenario)


@pytest.mark.parametrize(
    "kind", [kind for kind in CHILDREN if kind not in (POD, CONTROLLER_REVISION)], ids=lambda kind: kind.kind
)
def test_one_that_lost_its_owner_while_its_wish_changed_is_ours_all_the_same(kind: Kind):
    """The hash of what was applied is another one then, and said of our own object that it is somebody else's."""

    async def scenario(world: World) -> None:
        world.now += 5
        before = {pod["metadata"]["uid"] for pod in await workers(world)}
        await part(world, kind)
        for obj in await world.store.list(kind, NAMESPACE):  # an operator of another version made it
            old = {"metadata": {"annotations": {APPLIED: "0" * 16}}}
            await world.user.patch(kind, NAMESPACE, obj["metadata"]["name"], old)
        await world.settle(30)
        assert await ownerless(world, kind) == []
        assert (await world.condition("Ready"))["status"] == "True"
        assert [line for line in await world.events() if "NameConflict" in line] == []
        assert {pod["metadata"]["uid"] for pod in await workers(world)} == before

    play(scenario)


@pytest.mark.parametrize(
    ("tier", "kind"),
    [
        pytest.param(CLAIMED, CLAIM_TEMPLATE, id="claims"),
        pytest.param(COSCHEDULED, POD_GROUP_KINDS["coscheduling"], id="pod-groups"),
    ],
)
def test_what_workers_need_beside_their_pods_is_theirs_again_with_their_next_life(tier: dict[str, Any], kind: Kind):
    """It said that somebody else has the name, and the worker was never made again."""

    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(tiers=[tier]))
        await world.settle(20)
        assert await part(world, kind) >= 2
        lost = (await workers(world))[0]["metadata"]
        await world.user.delete(POD, NAMESPACE, lost["name"], grace_s=0)
        await world.settle(30)
        assert (await world.condition("Ready"))["status"] == "True"
        for pod in await workers(world):
            await world.user.delete(POD, NAMESPACE, pod["metadata"]["name"], grace_s=0)
        await world.settle(30)
        assert await ownerless(world, kind) == []
        await gone(world, POD, kind)

    asyncio.run(scenario())


def test_a_pod_group_without_owner_goes_with_its_worker():
    async def scenario() -> None:
        world, kind = World(), POD_GROUP_KINDS["coscheduling"]
        await world.user.apply(manifest(tiers=[COSCHEDULED]))
        await world.settle(20)
        await part(world, kind)
        await world.user.apply(manifest(tiers=[{**COSCHEDULED, "parallelism": {"nodes": 1}, "placement": None}]))
        for _ in range(30):
            await world.step()
        assert await world.store.list(kind, NAMESPACE) == []
        assert len(await workers(world)) == 2

    asyncio.run(scenario())


# -- the rule -------------------------------------------------------------------------------------------------------------
OWNER = {"metadata": {"name": "f", "namespace": NAMESPACE, "uid": "u", "creationTimestamp": "2026-01-01T00:00:10Z"}}
MARKS = {"app.kubernetes.io/managed-by": "inferencefleet", "inferencefleet.io/fleet": "f"}


def child(at: str, applied: str | None = "b", **meta: Any) -> dict[str, Any]:
    notes = {APPLIED: applied} if applied is not None else {}
    return {"metadata": {"labels": MARKS, "annotations": notes, "creationTimestamp": at, **meta}}


@pytest.mark.parametrize(
    ("found", "owner", "ours"),
    [
        pytest.param(child("2026-01-01T00:00:10Z", "a"), OWNER, True, id="its-wish-is-the-same"),
        pytest.param(child("2026-01-01T00:00:00Z", "a"), OWNER, True, id="its-wish-is-the-same-and-clocks-differ"),
        pytest.param(child("2026-01-01T00:00:10Z"), OWNER, True, id="made-in-the-owners-second"),
        pytest.param(child("2026-01-01T00:00:09Z"), OWNER, False, id="left-of-one-before-it"),
        pytest.param(child("2026-01-01T00:00:11Z", None), OWNER, False, id="somebody-made-it"),
        pytest.param(child("2026-01-01T00:00:11Z", labels={}), OWNER, False, id="without-our-labels"),
        pytest.param(
            child("2026-01-01T00:00:11Z", labels={**MARKS, "inferencefleet.io/fleet": "g"}), OWNER, False, id="anothers"
        ),
        pytest.param(child("yesterday"), OWNER, False, id="no-time"),
        pytest.param(child("2026-01-01T00:00:11Z", "a", ownerReferences=[{"uid": "x"}]), OWNER, False, id="it-has-an-owner"),
        pytest.param(
            child("2026-01-01T00:00:11Z", "a"),
            {"metadata": {**OWNER["metadata"], "deletionTimestamp": "2026-01-01T00:00:20Z"}},
            False,
            id="its-owner-is-deleted-and-may-leave-it-on-purpose",
        ),
        pytest.param(
            child("2026-01-01T00:00:11Z", "a"), {"metadata": {**OWNER["metadata"], "uid": "v"}}, False, id="not-this-owner"
        ),
        pytest.param(None, OWNER, False, id="none"),
    ],
)
def test_what_lost_its_owner_is_told_from_what_is_somebody_elses(found: dict[str, Any] | None, owner: dict[str, Any], ours: bool):
    wish = {"metadata": {"labels": MARKS, "annotations": {APPLIED: "a"}, "ownerReferences": [{"uid": "u"}]}}
    assert parted(found, wish, owner) is ours


@pytest.mark.parametrize(
    ("change", "back"),
    [
        ({}, True),
        ({"labels": {"inferencefleet.io/role": "decode"}}, False),
        ({"labels": {"inferencefleet.io/role": "router", "inferencefleet.io/pool": "p"}}, False),
        ({"labels": {"inferencefleet.io/role": "decode", "inferencefleet.io/pool": "another"}}, False),
        ({"labels": {"inferencefleet.io/fetch": "k"}}, True),
        ({"deletionTimestamp": "2026-01-01T00:00:20Z"}, False),
        ({"ownerReferences": [{"uid": "x", "controller": True}]}, False),
        ({"ownerReferences": [{"uid": "x"}]}, True),
        ({"ownerReferences": [{"uid": "pool"}]}, False),
    ],
)
def test_a_pod_is_given_back_to_whom_its_labels_name(change: dict[str, Any], back: bool):
    pool = {"apiVersion": "a", "kind": "WorkerPool", "metadata": {"name": "p", "uid": "pool"}}
    labels = {"inferencefleet.io/role": "decode", "inferencefleet.io/pool": "p"}
    pod = {"metadata": {"name": "x", "uid": "1", "resourceVersion": "2", "labels": labels, **change}}
    found = lost_owners({("Pod", "x"): pod, ("WorkerPool", "p"): pool}, {"p": pool}, {**OWNER, "apiVersion": "a", "kind": "b"})
    assert [one["metadata"]["name"] for one, _ in found] == ["x"] * back
    going = {"p": {**pool, "metadata": {**pool["metadata"], "deletionTimestamp": "2026-01-01T00:00:20Z"}}}
    assert lost_owners({("Pod", "x"): pod}, going, going["p"]) == []
