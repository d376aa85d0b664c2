"""Children that somebody else edited, deleted, or had before: put back, made again, left alone; each is told."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from fleet_operator.cluster.interface import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    FLEET,
    NETWORK_POLICY,
    PDB,
    POD,
    ROLE,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
)
from fleet_operator.reconciler import CHILDREN
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

EDITS: list[tuple[Kind, dict[str, Any]]] = [
    (SERVICE, {"spec": {"selector": {"inferencefleet.io/fleet": "other"}}}),
    (DEPLOYMENT, {"spec": {"replicas": 9}}),
    (CONFIG_MAP, {"data": {"endpoints.json": "{}"}}),
    (PDB, {"spec": {"minAvailable": 0}}),
    (ROLE, {"rules": []}),
    (SERVICE_ACCOUNT, {"metadata": {"labels": {"inferencefleet.io/fleet": "f", "inferencefleet.io/role": "x"}}}),
]


def named(kind: Kind) -> str:
    """A child of this kind that every fleet has: one router needs no budget, workers do."""
    return "f-t-decode" if kind == PDB else "f-router"


@pytest.mark.parametrize(("kind", "edit"), EDITS, ids=[kind.kind for kind, _ in EDITS])
def test_an_edited_child_is_put_back_and_told(kind: Kind, edit: dict[str, Any]):
    async def scenario(world: World) -> None:
        before = await world.store.get(kind, NAMESPACE, named(kind))
        await world.user.patch(kind, NAMESPACE, named(kind), edit)
        await world.settle()
        after = await world.store.get(kind, NAMESPACE, named(kind))
        assert _content(after) == _content(before)
        assert any(f"PutBack {kind.kind} {named(kind)}: undid somebody else's edit of" in line for line in await world.events())

    play(scenario)


ADDED: list[tuple[Kind, str, str, dict[str, Any]]] = [
    (SERVICE, "f-router", "selector", {"selector": {"rollouts-pod-template-hash": "x"}}),
    (PDB, "f-t-decode", "selector", {"selector": {"matchLabels": {"x": "y"}}}),
    (NETWORK_POLICY, "f-workers", "podSelector", {"podSelector": {"matchLabels": {"x": "y"}}}),
]


@pytest.mark.parametrize(("kind", "name", "field", "edit"), ADDED, ids=[kind.kind for kind, *_ in ADDED])
def test_a_key_that_somebody_added_to_a_selector_goes(kind: Kind, name: str, field: str, edit: dict[str, Any]):
    """It stayed, as what others add to a map does: the Service had no router behind it, workers no budget that a drain of their
    node respects, or no policy that keeps strangers out, and the fleet said that it serves."""

    async def scenario(world: World) -> None:
        before = await world.store.get(kind, NAMESPACE, name)
        await world.user.patch(kind, NAMESPACE, name, {"spec": edit})
        await world.settle()
        after = await world.store.get(kind, NAMESPACE, name)
        assert (after["spec"], after["metadata"]["uid"]) == (before["spec"], before["metadata"]["uid"])
        assert f"Normal PutBack {kind.kind} {name}: undid somebody else's edit of spec.{field}" in await world.events()

    play(scenario)


def test_whom_somebody_let_in_beside_the_fleets_own_is_not_let_in():
    """A namespaceSelector beside the pods that may reach workers: those of any namespace that call themselves so could."""

    async def scenario(world: World) -> None:
        before = await world.store.get(NETWORK_POLICY, NAMESPACE, "f-workers")
        wider = msgspec.to_builtins(before["spec"]["ingress"])
        wider[1]["from"][0]["namespaceSelector"] = {}
        await world.user.patch(NETWORK_POLICY, NAMESPACE, "f-workers", {"spec": {"ingress": wider}})
        await world.settle()
        assert (await world.store.get(NETWORK_POLICY, NAMESPACE, "f-workers"))["spec"] == before["spec"]
        told = "Normal PutBack NetworkPolicy f-workers: undid somebody else's edit of spec.ingress"
        assert told in await world.events()

    play(scenario)


def _content(obj: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in obj.items() if key not in ("metadata", "status")} | {"l": obj["metadata"]["labels"]}


@pytest.mark.parametrize("kind", [kind for kind, _ in EDITS], ids=lambda kind: kind.kind)
def test_a_deleted_child_is_made_again_and_told(kind: Kind):
    async def scenario(world: World) -> None:
        await world.user.delete(kind, NAMESPACE, named(kind))
        await world.settle()
        assert await world.exists(kind, named(kind))
        assert f"Normal PutBack {kind.kind} {named(kind)} was missing" in await world.events()

    play(scenario)


def test_somebody_elses_object_is_left_alone_and_named():
    async def scenario() -> None:
        world = World()
        labels = {"app.kubernetes.io/managed-by": "inferencefleet", "inferencefleet.io/fleet": "f"}
        theirs = {"name": "f-router", "namespace": NAMESPACE, "labels": labels}
        await world.user.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": theirs, "data": {"a": "b"}})
        await world.user.apply(manifest())
        for _ in range(4):
            await world.step()
        assert (await world.store.get(CONFIG_MAP, NAMESPACE, "f-router"))["data"] == {"a": "b"}
        assert "belongs to somebody else" in (await world.condition("Provisioned"))["message"]
        warnings = [line for line in await world.events() if line.startswith("Warning")]
        (warning,) = warnings
        assert warning.startswith(
            "Warning NameConflict ConfigMap f-router exists and belongs to somebody else, or is left of a fleet"
        )

    asyncio.run(scenario())


async def without_owner(world: World) -> list[str]:
    """Names of the fleet's own children that nobody owns; of those that it owned when it was first asked."""
    found = [child for kind in CHILDREN for child in await world.store.list(kind, NAMESPACE) if kind != POD]
    return sorted(
        f"{child['kind']} {child['metadata']['name']}" for child in found if not child["metadata"].get("ownerReferences")
    )


async def part(world: World) -> int:
    """Somebody takes the owner away of everything that the fleet owns."""
    count = 0
    for kind in CHILDREN:
        for child in await world.store.list(kind, NAMESPACE):
            if any(owner["kind"] == FLEET.kind for owner in child["metadata"].get("ownerReferences") or []):
                await world.user.patch(kind, NAMESPACE, child["metadata"]["name"], {"metadata": {"ownerReferences": None}})
                count += 1
    return count


@pytest.mark.parametrize("restarted", [False, True])
def test_an_owner_that_somebody_took_away_is_put_back(restarted: bool):
    """Else the object outlives the fleet, and until then nothing of it is written any more."""

    async def scenario(world: World) -> None:
        before = await world.workers()
        assert await part(world) >= 8
        if restarted:
            world.operator = world.new_operator()
        await world.settle(30)
        assert await without_owner(world) == []
        assert await world.workers() == before
        assert (await world.condition("Ready"))["status"] == "True"
        assert [line for line in await world.events() if "NameConflict" in line] == []
        assert await world.touch() == []

    play(scenario)


def test_what_is_orphaned_on_purpose_is_left_so():
    """`kubectl delete --cascade=orphan`: the garbage collector takes owners away while the fleet is still there, deleted."""

    async def scenario(world: World) -> None:
        await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"finalizers": ["orphan"]}})
        await world.settle()
        await world.user.delete(FLEET, NAMESPACE, "f")  # the operator has not seen it when it sees the first of these
        seen = world.operator._objects.fleets
        old = dict(seen)
        await part(world)
        await world.look()
        seen.update(old)
        world.operator.touch((NAMESPACE, "f"))
        await world.operator.drain()
        for _ in range(5):
            await world.step()
        assert len(await without_owner(world)) >= 8

    play(scenario)


def test_who_deleted_a_fleet_without_its_children_is_told_what_to_delete():
    """Incident: after `kubectl delete --cascade=orphan` and another apply, the condition said that 12 objects belong to somebody
    else. Whoever follows its words has a fleet that serves."""

    async def scenario(world: World) -> None:
        for kind in CHILDREN:
            for child in await world.store.list(kind, NAMESPACE):
                if child["metadata"]["ownerReferences"][0]["kind"] == FLEET.kind:
                    orphan = {"metadata": {"ownerReferences": None}}
                    await world.user.patch(kind, NAMESPACE, child["metadata"]["name"], orphan)
        await world.user.delete(FLEET, NAMESPACE, "f")
        await world.user.apply(manifest())
        for _ in range(4):
            await world.step()
        told = (await world.condition("Ready"))["message"]
        assert "ConfigMap f-router" in told
        assert (
            "deleted with --cascade=orphan: then delete it and all else with label inferencefleet.io/fleet=f in namespace ml"
            in told
        )
        for kind in CHILDREN:
            for child in await world.store.list(kind, NAMESPACE, {"inferencefleet.io/fleet": "f"}):
                await world.user.delete(kind, NAMESPACE, child["metadata"]["name"], grace_s=0)
        for _ in range(90):
            await world.step()
        assert (await world.condition("Ready"))["status"] == "True"

    play(scenario)


def test_what_garbage_collection_has_not_taken_yet_of_a_fleet_of_this_name_is_somebody_elses_to_nobody():
    """Incident: after `kubectl replace --force`, and whenever GitOps deletes a fleet and makes it anew, a Warning said of an
    object of the one before that it belongs to somebody else, and to delete it or to give the fleet another name."""

    async def scenario(world: World) -> None:
        (revision,) = await world.store.list(CONTROLLER_REVISION, NAMESPACE)
        held = [(CONFIG_MAP, "f-router"), (CONTROLLER_REVISION, revision["metadata"]["name"])]
        for kind, name in held:
            await world.user.patch(kind, NAMESPACE, name, {"metadata": {"finalizers": ["example.com/slow"]}})
        await world.user.delete(FLEET, NAMESPACE, "f")
        await world.user.apply(manifest())
        await world.step()
        assert [line for line in await world.events() if "NameConflict" in line] == []
        for _ in range(20):
            await world.step()
        told = await world.condition("Provisioned")
        assert told["reason"] == "NameConflict", "it lasts"
        assert "ConfigMap f-router exists and belongs to somebody else: to a fleet f that was deleted" in told["message"]
        for kind, name in held:
            await world.user.patch(kind, NAMESPACE, name, {"metadata": {"finalizers": []}})
        for _ in range(90):
            await world.step()
        assert (await world.condition("Ready"))["status"] == "True"

    play(scenario)


def test_an_object_of_another_owner_is_told_without_a_word_of_orphans():
    async def scenario() -> None:
        world = World()
        await world.user.apply(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "f-router", "namespace": NAMESPACE}}
        )
        await world.user.apply(manifest())
        for _ in range(4):
            await world.step()
        words = "ConfigMap f-router exists and belongs to somebody else: delete or rename it, or give this fleet another name"
        assert (await world.condition("Provisioned"))["message"] == words

    asyncio.run(scenario())
