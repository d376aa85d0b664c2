"""Names of two fleets of one namespace: which can be equal, and that nothing of another one is then written or deleted."""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict
from itertools import product
from typing import Any

import pytest

from fleet_operator.cluster.interface import FLEET, PDB, POD, POOL
from fleet_operator.names import FLEET as LABEL
from fleet_operator.names import TIER, group_service, policy_name, pool_name, router_name
from fleet_operator.ownership import name_conflict
from fleet_operator.reconciler import CHILDREN
from fleet_operator.render.revision import revision_name
from fleet_planner.prefetch import fetch_name
from fleet_planner.roles import ROLES
from fleet_planner.scale_targets import target_name
from tests.fleet_operator.world import NAMESPACE, World, manifest

WORDS = ("a", "router", "workers", "peers", "fetch", "prefill", "decode", "0", "00000000", "deadbeef")
"""Whatever stands between or behind hyphens in a name that is rendered."""
SMALL = (*WORDS, *("-".join(pair) for pair in product(WORDS, WORDS)))
REVISIONS = ("00000000", "deadbeef")


def names_of(fleet: str, tier: str) -> set[tuple[str, str]]:
    """(kind, name) of everything that is made for it. Every revision might be either."""
    found = {(kind, router_name(fleet)) for kind in ("ConfigMap", "Deployment", "Role", "RoleBinding", "ServiceAccount")}
    found |= {("Service", router_name(fleet)), ("Service", group_service(fleet)), ("NetworkPolicy", policy_name(fleet))}
    found |= {("PodDisruptionBudget", router_name(fleet)), ("Secret", f"{fleet}-peers-00000000")}
    found |= {("Pod", fetch_name(fleet, "00000000", "node"))}
    for role in ROLES:
        found |= {("PodDisruptionBudget", f"{fleet}-{tier}-{role}"), ("WorkerPool", target_name(fleet, tier, role))}
        for revision in REVISIONS:
            pool = pool_name(fleet, tier, role, revision)
            found |= {("WorkerPool", pool), ("ResourceClaimTemplate", pool), ("PodGroup", f"{pool}-0")}
            found |= {("Pod", f"{pool}-0"), ("Pod", f"{pool}-0-1"), ("ControllerRevision", revision_name(fleet, tier, revision))}
    return found


def test_names_are_equal_only_where_fleet_and_tier_make_one_word():
    """Every fleet and tier of up to two such words each: no role, no fixed suffix and no revision makes another pair meet."""
    makers = defaultdict[tuple[str, str], set[tuple[str, str]]](set)
    for fleet, tier in product(SMALL, SMALL):
        if len(fleet.split("-")) + len(tier.split("-")) <= 3:
            for at in names_of(fleet, tier):
                makers[at].add((fleet, tier))
    met = {at: pairs for at, pairs in makers.items() if len({fleet for fleet, _ in pairs}) > 1}
    assert met, "they do meet: fleet a with tier a-a, fleet a-a with tier a"
    for (kind, name), pairs in met.items():
        assert len({f"{fleet}-{tier}" for fleet, tier in pairs}) == 1, (kind, name, pairs)
    assert {kind for kind, _ in met} == {
        "ControllerRevision", "Pod", "PodDisruptionBudget", "PodGroup", "ResourceClaimTemplate", "WorkerPool",
    }  # fmt: skip


def test_what_one_fleet_makes_has_one_name_each():
    """Of one kind, whatever its tier is called."""
    for fleet, tier in product(WORDS, SMALL):
        assert len(names_of(fleet, tier)) == len(names_of("x", "y")), (fleet, tier)


EXTERNAL = {"scaling": {"mode": "external"}}
CPU = {"accelerator": {"type": "cpu"}}


def fleets() -> tuple[dict[str, Any], dict[str, Any]]:
    """Fleet g with tier a-b, and fleet g-a with tier b."""
    return (
        manifest("g", tiers=[{"name": "a-b", **CPU}], **EXTERNAL),
        manifest("g-a", tiers=[{"name": "b", **CPU}], **EXTERNAL),
    )


async def everything(world: World, fleet: str) -> dict[tuple[str, str], dict[str, Any]]:
    """All of this fleet, less what changes by itself."""
    found = {}
    for kind in CHILDREN:
        for obj in await world.store.list(kind, NAMESPACE, {LABEL: fleet}):
            one = copy.deepcopy(obj)
            one.pop("status", None)
            found[kind.kind, one["metadata"]["name"]] = one
    return found


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
def test_nothing_of_the_one_that_was_first_is_touched(first: int, restarted: bool):
    """Its budgets and scale targets stay as they are, whatever becomes of the other one, which serves and says with whom it
    collides; once the first is gone the other one is whole."""

    async def scenario() -> None:
        world, both = World(), fleets()
        mine, other = both[first], both[1 - first]
        names = [one["metadata"]["name"] for one in (mine, other)]
        await world.user.apply(mine)
        await world.settle(20)
        before = await everything(world, names[0])
        await world.user.apply(other)
        for _ in range(30):
            world.now += 4
            await world.step()
        if restarted:
            world.operator = world.new_operator()
        for _ in range(10):
            world.now += 4
            await world.step()
        assert await everything(world, names[0]) == before
        assert (await world.condition("Ready", names[0]))["status"] == "True"
        told = await world.condition("Provisioned", names[1])
        assert (told["status"], told["reason"]) == ("False", "NameConflict")
        for kind in (PDB, POOL):
            words = f"{kind.kind} g-a-b-prefill belongs to fleet {names[0]} and is left alone"
            assert words in told["message"] or kind == POOL, told["message"]
        assert "fleet g with tier a-b" in told["message"]
        assert "fleet g-a with tier b" in told["message"]
        assert "NotProvisioned" in (await world.condition("Ready", names[1]))["reason"]
        assert await world.workers(names[1]) == {"prefill": 1, "decode": 2}, "it serves all the same"
        await world.user.delete(FLEET, NAMESPACE, names[1])
        await world.settle(30)
        assert await everything(world, names[0]) == before, "nothing of it went with the other one"
        assert await world.store.list(POD, NAMESPACE, {LABEL: names[1]}) == []

    asyncio.run(scenario())


def test_when_the_first_goes_the_other_one_is_whole():
    async def scenario() -> None:
        world, (mine, other) = World(), fleets()
        await world.user.apply(mine)
        await world.settle(20)
        await world.user.apply(other)
        for _ in range(20):
            world.now += 4
            await world.step()
        pods = {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE, {LABEL: "g-a"})}
        await world.user.delete(FLEET, NAMESPACE, "g")
        for _ in range(60):
            world.now += 4
            await world.step()
        assert (await world.condition("Ready", "g-a"))["status"] == "True"
        budgets = {one["metadata"]["name"]: one["metadata"]["labels"] for one in await world.store.list(PDB, NAMESPACE)}
        assert {labels[LABEL] for labels in budgets.values()} == {"g-a"}
        assert {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE, {LABEL: "g-a"})} == pods

    asyncio.run(scenario())


def there(fleet: str = "g", tier: str | None = "a-b", manager: str = "inferencefleet") -> dict[str, Any]:
    marks = {LABEL: fleet, "app.kubernetes.io/managed-by": manager, **({TIER: tier} if tier else {})}
    owner = {"kind": "InferenceFleet", "name": fleet, "uid": "1", "controller": True}
    return {"metadata": {"name": "g-a-b-decode", "labels": marks, "ownerReferences": [owner]}}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (there(), "fleet g with tier a-b and fleet g-a with tier b give it the same name"),
        (there(tier=None), "belongs to somebody else"),
        (there(tier="x"), "belongs to somebody else"),
        (there("g-a", "b"), "belongs to somebody else"),
        (there(manager="helm"), "belongs to somebody else"),
    ],
)
def test_only_two_fleets_are_told_as_two_fleets(found: dict[str, Any], words: str):
    meta = {"name": "g-a-b-decode", "namespace": "ml", "labels": {LABEL: "g-a", TIER: "b"}}
    assert words in name_conflict(found, {"kind": "PodDisruptionBudget", "metadata": meta}).message
