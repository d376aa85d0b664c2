"""A WorkerPool whose spec says another fleet, tier, role or revision than its name: somebody edited it, and it is put right."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet_operator.cluster.interface import EVENT, POD, POOL, ForbiddenError, InvalidError
from fleet_operator.names import FLEET, REVISION, ROLE, TIER
from fleet_operator.pool_names import MOST_S, as_named, named
from fleet_operator.pool_sizes import Sizes, sealed
from fleet_planner.scale_targets import EVERY_REVISION
from tests.fleet_operator.test_scale_targets import EXTERNAL, TARGETS, scale, sizes, target
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

EDITS: dict[str, dict[str, Any]] = {
    "role": {"role": "prefill"},
    "tier": {"tier": "x"},
    "fleet": {"fleet": "g"},
    "revision": {"revision": "aaaaaaaa"},
    "all": {"fleet": "g", "tier": "x", "role": "prefill", "revision": "aaaaaaaa"},
}


async def of_decode(world: World, which: str) -> dict[str, Any]:
    """The role's target, or the pool of its revision."""
    pools = await world.store.list(POOL, NAMESPACE)
    found = [pool for pool in pools if "-decode" in pool["metadata"]["name"]]
    return next(pool for pool in found if (pool["metadata"]["name"] in TARGETS) == (which == "target"))


async def uids(world: World) -> set[str]:
    return {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}


@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("which", ["target", "pool"])
def test_what_somebody_edits_is_put_right_and_costs_no_worker(which: str, edit: str, restarted: bool):
    """A target's name was taken for good. With the role of a pool all of its workers got the other role's labels, and none of
    theirs served any more."""

    async def scenario(world: World) -> None:
        before, pool = await uids(world), await of_decode(world, which)
        name = pool["metadata"]["name"]
        await world.user.patch(POOL, NAMESPACE, name, {"spec": EDITS[edit]})
        if restarted:
            world.operator = world.new_operator()
        for _ in range(4):
            await world.step()
        assert (await world.store.get(POOL, NAMESPACE, name))["spec"] == pool["spec"]
        assert await uids(world) == before
        assert (await world.condition("Ready"))["status"] == (await world.condition("Provisioned"))["status"] == "True"
        told = [line for line in await world.events() if " PutBack " in line]
        assert len(told) == 1, told
        assert all(f"spec.{part} (it said {word}, and is " in told[0] for part, word in EDITS[edit].items() if part != "revision")
        assert [await world.touch() for _ in range(2)] == [[], []]

    play(scenario, **EXTERNAL)


def test_a_target_that_says_another_role_scales_its_own_meanwhile():
    async def scenario(world: World) -> None:
        await world.user.patch(POOL, NAMESPACE, "f-t-decode", {"spec": {"role": "prefill", "replicas": 6}})
        for _ in range(4):
            await world.step()
        assert await world.workers() == {"prefill": 2, "decode": 6}
        assert await sizes(world) == (2, 6)

    play(scenario, **EXTERNAL)


def immutable(world: World) -> None:
    """As the real API server with our CRD, which the user's writer gets round: somebody made the object anew."""
    world.api.refuse = lambda verb, kind, name: (
        InvalidError("only replicas may change") if (verb, kind) == ("patch", POOL) else None
    )


@pytest.mark.parametrize("edit", EDITS)
def test_a_target_that_nobody_may_change_is_made_anew(edit: str):
    async def scenario(world: World) -> None:
        await scale(world, 4)
        await world.settle()
        before, pool = await uids(world), await target(world)
        immutable(world)
        await world.user.patch(POOL, NAMESPACE, "f-t-decode", {"spec": EDITS[edit]})
        for _ in range(4):
            await world.step()
        after = await target(world)
        assert after["spec"] == pool["spec"]
        assert after["metadata"]["uid"] != pool["metadata"]["uid"]
        assert await uids(world) == before
        assert (await world.condition("Ready"))["status"] == "True"
        assert [line for line in await world.events() if "PutBack WorkerPool f-t-decode: deleted, to be made anew" in line]
        assert [await world.touch() for _ in range(2)] == [[], []]

    play(scenario, **EXTERNAL)


def test_one_that_is_made_anew_keeps_its_wish_and_nothing_of_who_wrote_it():
    """`kubectl replace --force` of a target with another role and another size: the size was forgotten with the object."""

    async def scenario(world: World) -> None:
        immutable(world)
        marks = {"annotations": {"argocd.argoproj.io/tracking-id": "x"}, "labels": {"app.kubernetes.io/instance": "x"}}
        edit = {"metadata": marks, "spec": {"role": "prefill", "replicas": 6}}
        await world.user.patch(POOL, NAMESPACE, "f-t-decode", edit)
        for _ in range(4):
            await world.step()
        assert (await sizes(world), (await world.workers())["decode"]) == ((2, 6), 6)
        assert not [word for word in marks["annotations"] | marks["labels"] if word in str(await target(world))]
        assert [await world.touch() for _ in range(2)] == [[], []]

    play(scenario, **EXTERNAL)


@pytest.mark.parametrize("which", ["target", "pool"])
def test_what_somebody_elses_policy_refuses_is_told_and_deletes_nothing(which: str):
    """An admission of the cluster answers 400 or 422, too: the target went, the HPA had none, and it refused the new one."""

    async def scenario(world: World) -> None:
        words = 'admission webhook "validate.policy.example" denied the request: no label team'
        world.api.refuse = lambda verb, kind, name: InvalidError(words) if kind == POOL and verb != "delete" else None
        name = (await of_decode(world, which))["metadata"]["name"]
        await world.user.patch(POOL, NAMESPACE, name, {"spec": {"role": "prefill"}})
        before, there = await uids(world), await world.store.get(POOL, NAMESPACE, name)
        writes = 0
        for _ in range(30):
            world.now += 20
            writes += len([at for at in await world.step() if at[:2] == ("delete", "WorkerPool")])
        assert (writes, await uids(world)) == (0, before)
        assert (await world.store.get(POOL, NAMESPACE, name))["metadata"]["uid"] == there["metadata"]["uid"]
        told = (await world.condition("Provisioned"))["message"]
        assert "spec.role (it said prefill, and is decode by its name) cannot be put back" in told
        assert words in told
        assert "kubectl delete" not in told
        world.api.refuse = lambda verb, kind, name: None
        world.now += MOST_S
        await world.settle()
        assert (await world.store.get(POOL, NAMESPACE, name))["spec"]["role"] == "decode"
        assert (await world.condition("Ready"))["status"] == "True"

    play(scenario, **EXTERNAL)


@pytest.mark.parametrize("edit", EDITS)
def test_a_pool_with_workers_that_nobody_may_change_is_told_and_keeps_them(edit: str):
    async def scenario(world: World) -> None:
        before, pool = await uids(world), await of_decode(world, "pool")
        name = pool["metadata"]["name"]
        immutable(world)
        await world.user.patch(POOL, NAMESPACE, name, {"spec": EDITS[edit]})
        for _ in range(30):
            world.now += 20
            await world.step()
        assert await uids(world) == before
        told = await world.condition("Provisioned")
        assert all(f"spec.{part} (it said {word}" in told["message"] for part, word in EDITS[edit].items())
        assert f"kubectl delete wpool {name} -n {NAMESPACE} --cascade=orphan keeps its workers" in told["message"]
        assert [line for line in await world.events() if line.startswith(f"Warning Invalid WorkerPool {name}: spec.")]
        await world.user.delete(POOL, NAMESPACE, name, grace_s=0)
        for _ in range(8):
            world.now += 20
            await world.step()
        assert (await world.condition("Ready"))["status"] == "True"
        assert (await of_decode(world, "pool"))["spec"] == pool["spec"]

    play(scenario, **EXTERNAL)


OTHERS: dict[str, dict[str, Any]] = {
    "of-another-controller": {"ownerReferences": [
        {"apiVersion": "apps/v1", "kind": "Deployment", "name": "x", "uid": "not-ours", "controller": True}]},
    "of-another-life-of-the-fleet": {"ownerReferences": [
        {"apiVersion": POOL.api_version, "kind": "InferenceFleet", "name": "f", "uid": "an-older-one", "controller": True}]},
}  # fmt: skip


@pytest.mark.parametrize("owner", OTHERS)
def test_what_is_not_ours_is_never_touched(owner: str):
    async def scenario(world: World) -> None:
        await world.user.patch(POOL, NAMESPACE, "f-t-decode", {"metadata": OTHERS[owner], "spec": {"role": "prefill"}})
        before = await world.store.get(POOL, NAMESPACE, "f-t-decode")
        for _ in range(8):
            world.now += 20
            await world.step()
        assert await world.store.get(POOL, NAMESPACE, "f-t-decode") == before
        told = await world.condition("Provisioned")
        assert (told["status"], told["reason"]) == ("False", "NameConflict")
        assert "WorkerPool f-t-decode exists and belongs to somebody else" in told["message"]

    play(scenario, **EXTERNAL)


@pytest.mark.parametrize("which", ["target", "pool"])
def test_who_writes_it_again_and_again_costs_less_and_less(which: str):
    """A GitOps tool that has the wrong word in its repository: within an hour a few writes, the fleet serves and is scaled."""

    async def scenario(world: World) -> None:
        name = (await of_decode(world, which))["metadata"]["name"]
        before, writes, calm = await uids(world), 0, 0.0
        while calm < 3_600:
            pool = await world.store.get(POOL, NAMESPACE, name)
            if pool["spec"]["role"] != "prefill":
                await world.user.patch(POOL, NAMESPACE, name, {"spec": {"role": "prefill"}})
            written = await world.step()
            writes += sum(at == ("patch", "WorkerPool", name) for at in written)
            if not 1_800 <= calm < 1_900:
                assert {at[1] for at in written} <= {"WorkerPool", EVENT.kind}, written
            world.now += 4
            calm += 5
            if calm == 1_800:
                await scale(world, 4)
        assert 8 <= writes <= 9 + 3_600 / MOST_S, writes
        assert (await world.condition("Ready"))["status"] == "True"
        assert await world.workers() == {"prefill": 2, "decode": 4}
        assert await uids(world) > before
        assert "find who writes it (kubectl get wpool" in [line for line in await world.events() if " PutBack " in line][-1]
        world.now += 2 * MOST_S
        await world.settle()
        assert (await world.store.get(POOL, NAMESPACE, name))["spec"]["role"] == "decode", "who leaves off loses"
        assert [await world.touch() for _ in range(2)] == [[], []]

    play(scenario, **EXTERNAL)


UID = "00000000-0000-4000-8000-00000000000f"
OURS = [{"apiVersion": POOL.api_version, "kind": "InferenceFleet", "name": "f", "uid": UID, "controller": True}]


def pool(name: str, *, labels: dict[str, str] | None = None, seal: str = "", owners: Any = OURS) -> dict[str, Any]:
    notes = {"inferencefleet.io/written": sealed(NAMESPACE, seal, Sizes(2, None, None))} if seal else {}
    meta = {"name": name, "namespace": NAMESPACE, "labels": {FLEET: "f", **(labels or {})}, "annotations": notes}
    return {"kind": "WorkerPool", "metadata": {**meta, "ownerReferences": owners}, "spec": {}}


DECODE = {TIER: "t", ROLE: "decode"}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        pytest.param(pool("f-t-decode", seal="f-t-decode"), ("t", "decode", EVERY_REVISION), id="a-target-by-its-digest"),
        pytest.param(pool("f-t-decode", labels=DECODE), ("t", "decode", EVERY_REVISION), id="a-target-by-its-labels"),
        pytest.param(pool("f-t-decode-0123abcd", seal="f-t-decode-0123abcd"), ("t", "decode", "0123abcd"), id="a-pool"),
        pytest.param(
            pool("f-t-decode-0123abcd", labels={**DECODE, REVISION: "0123abcd"}), ("t", "decode", "0123abcd"), id="by-labels"
        ),
        pytest.param(
            pool("f-x-decode-prefill", seal="f-x-decode-prefill"),
            ("x-decode", "prefill", EVERY_REVISION),
            id="a-tier-like-a-role",
        ),
        pytest.param(pool("f-t-decode-0123abcd", labels=DECODE), None, id="labels-without-its-revision"),
        pytest.param(pool("f-u-decode", seal="f-t-decode", labels=DECODE), None, id="a-copy"),
        pytest.param(pool("f-t-decode"), None, id="nothing-says-it"),
        pytest.param(pool("a-copy", seal="a-copy"), None, id="no-such-name"),
        pytest.param(pool("g-t-decode", seal="g-t-decode"), None, id="another-fleets-name"),
        pytest.param(pool("f-t-decode", seal="f-t-decode", owners=[]), None, id="nobody-owns-it"),
        pytest.param(
            pool("f-t-decode", seal="f-t-decode", owners=[{**OURS[0], "controller": False}]), None, id="nobody-controls-it"
        ),
        pytest.param(pool("f-t-decode", seal="f-t-decode", owners=[{**OURS[0], "uid": "v"}]), None, id="another-life"),
    ],
)
def test_what_a_name_says(found: dict[str, Any], told: tuple[str, str, str] | None):
    wanted = None if told is None else dict(zip(("fleet", "tier", "role", "revision"), ("f", *told), strict=True))
    assert named(found, {"metadata": {"name": "f", "uid": UID}}) == wanted


def test_the_apis_object_stays_as_it_is():
    seen = pool("f-t-decode", seal="f-t-decode") | {
        "spec": {"fleet": "f", "tier": "t", "role": "prefill", "revision": EVERY_REVISION}
    }
    live = {("WorkerPool", "f-t-decode"): seen}
    found, edited = as_named(live, {"metadata": {"name": "f", "uid": UID}})
    assert (edited, seen["spec"]["role"], live["WorkerPool", "f-t-decode"]) == ([seen], "prefill", seen)
    assert found["WorkerPool", "f-t-decode"]["spec"]["role"] == "decode"
    assert as_named(found, {"metadata": {"name": "f", "uid": UID}}) == (found, [])


def test_a_write_that_is_refused_is_told_and_tried_again():
    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(**EXTERNAL))
        await world.settle()
        await world.user.patch(POOL, NAMESPACE, "f-t-decode", {"spec": {"role": "prefill"}})
        world.api.refuse = lambda verb, kind, name: ForbiddenError("no right") if (verb, kind) == ("patch", POOL) else None
        for _ in range(3):
            await world.step()
        assert "WorkerPool f-t-decode: no right" in (await world.condition("Provisioned"))["message"]
        world.api.refuse = lambda verb, kind, name: None
        for _ in range(4):
            world.now += 15
            await world.step()
        assert (await world.store.get(POOL, NAMESPACE, "f-t-decode"))["spec"]["role"] == "decode"
        assert (await world.condition("Ready"))["status"] == "True"

    asyncio.run(scenario())
