"""spec.deletion: the finalizer is there exactly when it is asked for, and a fleet that has it ends drained or late, whatever
happens to its operator meanwhile. On the in-memory store; `e2e/test_delete.py` does it on the real plane."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet_api.v1alpha1.fleet import DRAIN
from fleet_operator.cluster.interface import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    FLEET,
    POD,
    POOL,
    SERVICE,
    ClusterError,
    ForbiddenError,
    InvalidError,
    Kind,
    UnavailableError,
    WatchEvent,
)
from fleet_operator.cluster.kinds import LEASE
from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.finalizer import same_wish
from fleet_operator.names import ROLE, TIER
from fleet_operator.reconciler import CHILDREN
from fleet_operator.territory import CLAIM, Selection, Territory
from fleet_planner.roles import ROLES
from fleet_planner.types import RoleLoad, TierTelemetry
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

WAIT = {"deletion": {"wait": "10m"}}
Write = tuple[str, str, str]


async def finalizers(world: World) -> list[str]:
    return (await world.store.get(FLEET, NAMESPACE, "f"))["metadata"].get("finalizers") or []


async def pods(world: World) -> list[dict[str, Any]]:
    """Worker pods."""
    found = await world.store.list(POD, NAMESPACE)
    return [pod for pod in found if pod["metadata"]["labels"].get(ROLE) in ROLES]


async def left(world: World) -> list[str]:
    return [obj["metadata"]["name"] for kind in (FLEET, *CHILDREN) for obj in await world.store.list(kind, NAMESPACE)]


async def read(world: World, busy: dict[str, float]) -> None:
    """What telemetry says from now on: these pods are busy, all others are idle. By (part of) names."""
    found = {pod["metadata"]["name"]: pod["metadata"]["labels"][TIER] for pod in await pods(world)}
    loads = {name: next((load for part, load in busy.items() if part in name), 0.0) for name in found}
    idle = {name: world.now for name, load in loads.items() if not load}
    role = RoleLoad(inflight=sum(loads.values()), measured_at=world.now)
    for tier in {"t", *found.values()}:
        world.load[tier] = TierTelemetry(prefill=role, decode=role, busy=loads, idle=idle)


async def seconds(world: World, count: int, busy: dict[str, float]) -> list[Write]:
    """So many, in which this is read; all that was written."""
    written: list[Write] = []
    for _ in range(count):
        await read(world, busy)
        written += await world.step()
    return written


async def until_gone(world: World, most: int = 40) -> list[Write]:
    """Of a fleet that runs nothing."""
    written: list[Write] = []
    for _ in range(most):
        written += await seconds(world, 1, {})
        if await left(world) == []:
            return written
    raise AssertionError(f"still there after {most} s: {await left(world)}; {await finalizers(world)}")


# -- on and off -----------------------------------------------------------------------------------------------------------
def test_by_default_there_is_none():
    async def scenario(world: World) -> None:
        assert await finalizers(world) == []
        await world.user.delete(FLEET, NAMESPACE, "f")
        assert FLEET.kind not in [kind for _, kind, _ in await world.step()]
        assert await world.exists(FLEET, "f") is False

    play(scenario)


def test_it_is_there_before_any_worker_and_goes_with_the_field():
    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(**WAIT))
        writes = await world.step()
        assert writes[0] == ("patch", "InferenceFleet", "f")
        await world.settle()
        assert await finalizers(world) == [DRAIN]
        assert await world.touch() == []
        await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"finalizers": ["theirs/a", DRAIN, "theirs/b"]}})
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"deletion": None}})
        await world.settle()
        assert await finalizers(world) == ["theirs/a", "theirs/b"]
        before = [pod["metadata"]["uid"] for pod in await pods(world)]
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": WAIT})
        await world.settle()
        assert await finalizers(world) == ["theirs/a", "theirs/b", DRAIN]
        assert [pod["metadata"]["uid"] for pod in await pods(world)] == before

    asyncio.run(scenario())


def test_one_that_the_operator_may_not_write_is_told_and_the_fleet_serves_on():
    """A newer operator under the rights of an older chart."""

    def refuse(verb: str, kind: Kind, name: str) -> ClusterError | None:
        return ForbiddenError("cannot patch inferencefleets") if (verb, kind) == ("patch", FLEET) else None

    async def scenario() -> None:
        world = World()
        world.api.refuse = refuse
        await world.user.apply(manifest(**WAIT))
        for _ in range(30):
            await world.step()
        assert await world.workers() == {"prefill": 1, "decode": 2}
        assert (await world.condition("Available"))["status"] == "True"
        told = await world.condition("Provisioned")
        assert told["message"] == f"finalizer {DRAIN} of InferenceFleet f: cannot patch inferencefleets"
        world.api.refuse = lambda verb, kind, name: None
        world.now += 600
        await world.touch()
        await world.settle(30)
        assert await finalizers(world) == [DRAIN]
        assert (await world.condition("Ready"))["status"] == "True"

    asyncio.run(scenario())


def test_what_somebody_else_changed_meanwhile_is_kept():
    """The list is written on top of the version that was seen."""

    async def scenario(world: World) -> None:
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": WAIT})
        world.now += 1
        await world.look()
        await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"finalizers": ["theirs/a"]}})
        await world.operator.drain()
        await world.settle()
        assert await finalizers(world) == ["theirs/a", DRAIN]

    play(scenario)


def test_fleets_of_a_namespace_of_somebody_else_are_left_alone():
    async def scenario(world: World) -> None:
        world.operator.closed.add(NAMESPACE)
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"deletion": None}})
        assert await seconds(world, 3, {}) == []
        await world.user.delete(FLEET, NAMESPACE, "f")
        assert await seconds(world, 3, {}) == []
        assert await finalizers(world) == [DRAIN]

    play(scenario, **WAIT)


# -- the end --------------------------------------------------------------------------------------------------------------
def test_busy_workers_stay_until_they_are_idle():
    async def scenario(world: World) -> None:
        await seconds(world, 8, {"decode": 1})
        assert await world.workers() == {"prefill": 1, "decode": 2}
        before = await world.events()
        await world.user.delete(FLEET, NAMESPACE, "f")
        first = await seconds(world, 1, {"decode": 1})
        kinds = [kind for _, kind, _ in first]
        assert kinds.index("ConfigMap") == min(kinds.index(kind) for kind in kinds if kind in ("ConfigMap", "Pod"))
        await seconds(world, 8, {"decode": 1})
        assert (await world.workers())["prefill"] == 0, "it waited for more than it had to"
        await seconds(world, 120, {"decode": 1})
        assert await world.workers() == {"prefill": 0, "decode": 2}
        ready = await world.condition("Ready")
        assert (ready["status"], ready["reason"]) == ("False", "Deleting")
        assert ready["message"].startswith("deleted; 0 prefill and 2 decode workers drain, until ")
        assert await world.exists(DEPLOYMENT, "f-router")
        await world.user.delete(SERVICE, NAMESPACE, "f-router")  # nothing is put back
        assert await seconds(world, 60, {"decode": 1}) == []
        assert await world.touch() == []
        await seconds(world, 20, {(await pods(world))[0]["metadata"]["name"]: 1})
        assert (await world.workers())["decode"] == 1
        await until_gone(world)
        told = [event for event in (await world.events())[len(before) :] if "WorkersDelete" not in event]
        assert len(told) == 1
        assert told[0].startswith("Normal Deleting deleted; 1 prefill and 2 decode workers drain")

    play(scenario, **WAIT)


def test_an_idle_fleet_whose_load_is_read_seldom_ends_as_soon_as_others():
    """It would take two readings: 10 min, or its whole wait with a warning that says of idle workers that they were not."""

    async def scenario(world: World) -> None:
        await seconds(world, 8, {})
        await world.user.delete(FLEET, NAMESPACE, "f")
        written = await until_gone(world, 20)
        assert [kind for verb, kind, _ in written if verb == "delete"] == ["Pod"] * 3, "each worker once"

    play(scenario, **WAIT, telemetry={"interval": "5m"})


def test_when_the_wait_is_over_it_ends_with_a_warning():
    async def scenario(world: World) -> None:
        await seconds(world, 8, {"decode": 1})
        await world.user.delete(FLEET, NAMESPACE, "f")
        await seconds(world, 590, {"decode": 1})
        assert (await world.workers())["decode"] == 2
        await seconds(world, 20, {"decode": 1})
        assert await left(world) == []
        assert [event for event in await world.events() if event.startswith("Warning DeletionLate")]

    play(scenario, **WAIT)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"resourceVersion": "9"}, True),
        ({"generation": 3}, False),
        ({"uid": "b"}, False),
        ({"finalizers": []}, False),
    ],
)
def test_nobody_is_released_by_what_was_decided_of_another_wish_or_fleet(change: dict[str, Any], same: bool):
    """A longer wait, a fleet of the same name: while a pass told what it decided."""
    meta = {"uid": "a", "generation": 2, "resourceVersion": "1", "finalizers": [DRAIN]}
    meta["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    assert same_wish({"metadata": {**meta, **change}}, {"metadata": meta}) is same


def test_nothing_new_is_made_for_what_is_lost_meanwhile():
    async def scenario(world: World) -> None:
        await seconds(world, 8, {"decode": 1})
        await world.user.delete(FLEET, NAMESPACE, "f")
        await seconds(world, 5, {"prefill": 1, "decode": 1})
        lost = next(pod for pod in await pods(world) if pod["metadata"]["labels"][ROLE] == "prefill")
        await world.user.delete(POD, NAMESPACE, lost["metadata"]["name"], grace_s=0)
        await world.user.patch(POOL, NAMESPACE, (await world.pool("decode"))["metadata"]["name"], {"spec": {"replicas": 4}})
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"engine": {"image": "new"}}})
        writes = await seconds(world, 20, {"decode": 1})
        assert [kind for verb, kind, _ in writes if verb in ("create", "apply") and kind != "Event"] == []
        assert await world.workers() == {"prefill": 0, "decode": 2}
        await until_gone(world)

    play(scenario, **WAIT)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"scaling": {"toZero": {"enabled": True, "idle": "5s"}}}, id="scale-to-zero"),
        pytest.param({"rollout": {"paused": True}}, id="paused"),
        pytest.param({"routing": {"replicas": 2}}, id="two-routers"),
    ],
)
def test_other_kinds_of_fleets_end_too(spec: dict[str, Any]):
    async def scenario(world: World) -> None:
        await seconds(world, 5, {"decode": 1})
        if "rollout" in spec:
            await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"engine": {"image": "new"}}})
            await seconds(world, 5, {"decode": 1})
        await world.user.delete(FLEET, NAMESPACE, "f")
        await seconds(world, 30, {"decode": 1})
        assert (await world.workers())["decode"] == 2
        await until_gone(world)

    play(scenario, **WAIT, **spec)


def test_a_fleet_without_workers_goes_at_once():
    async def scenario(world: World) -> None:
        for pod in await pods(world):
            await world.user.delete(POD, NAMESPACE, pod["metadata"]["name"], grace_s=0)
        await world.user.delete(FLEET, NAMESPACE, "f")
        await world.step()
        assert await left(world) == []

    play(scenario, **WAIT)


def test_it_is_cut_short_by_taking_the_field_away():
    async def scenario(world: World) -> None:
        await seconds(world, 5, {"decode": 1})
        await world.user.delete(FLEET, NAMESPACE, "f")
        await seconds(world, 5, {"decode": 1})
        assert await world.exists(FLEET, "f")
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"deletion": None}})
        await seconds(world, 2, {"decode": 1})
        assert await left(world) == []

    play(scenario, **WAIT)


def test_other_finalizers_stay_and_hold_the_fleet():
    async def scenario(world: World) -> None:
        await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"finalizers": ["theirs/a", DRAIN]}})
        await world.user.delete(FLEET, NAMESPACE, "f")
        for _ in range(30):
            await seconds(world, 1, {})
        assert await finalizers(world) == ["theirs/a"]
        assert await pods(world) == []
        assert await world.touch() == []
        await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"finalizers": None}})
        await seconds(world, 2, {})
        assert await left(world) == []

    play(scenario, **WAIT)


def test_with_cascade_orphan_the_workers_stay():
    """The garbage collector takes the owner off first; the operator may see it before or after that."""

    async def scenario(world: World) -> None:
        await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"finalizers": [DRAIN, "orphan"]}})
        await world.user.delete(FLEET, NAMESPACE, "f")
        await seconds(world, 5, {})
        assert await finalizers(world) == ["orphan"]
        assert await world.workers() == {"prefill": 1, "decode": 2}

    async def late(world: World) -> None:
        await world.user.delete(FLEET, NAMESPACE, "f")
        for kind in (POOL, CONFIG_MAP, DEPLOYMENT, SERVICE, CONTROLLER_REVISION):
            for obj in await world.store.list(kind, NAMESPACE):
                await world.user.patch(kind, NAMESPACE, obj["metadata"]["name"], {"metadata": {"ownerReferences": None}})
        writes = await seconds(world, 5, {})
        assert [write for write in writes if write[1] != "Event"] == [("patch", "InferenceFleet", "f")]
        assert not await world.exists(FLEET, "f")
        assert await world.workers() == {"prefill": 1, "decode": 2}

    play(scenario, **WAIT)
    play(late, **WAIT)


def test_a_spec_that_this_operator_cannot_read_does_not_hold_it(monkeypatch: pytest.MonkeyPatch):
    """A field of a newer version: nobody knows how to end it, so it ends as one without a finalizer does."""

    async def scenario(world: World) -> None:
        await seconds(world, 5, {"decode": 1})
        monkeypatch.setattr("fleet_operator.cluster.memory.admit", lambda wanted, live: None)  # the newer CRD has it
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"fromTheFuture": 1}})
        await seconds(world, 2, {"decode": 1})
        assert (await world.condition("Accepted"))["reason"] == "Invalid"
        assert await finalizers(world) == [DRAIN]
        await world.user.delete(FLEET, NAMESPACE, "f")
        await seconds(world, 2, {"decode": 1})
        assert await left(world) == []

    play(scenario, **WAIT)


def test_a_namespace_that_goes_is_not_held():
    """Nothing can be made there any more, and everything in it is deleted: what it has, and the fleet."""

    def refuse(verb: str, kind: Kind, name: str) -> ClusterError | None:
        words = f"unable to create new content in namespace {NAMESPACE} because it is being terminated"
        return ForbiddenError(words) if verb in ("create", "apply") else None

    async def scenario(world: World) -> None:
        await seconds(world, 5, {"decode": 1})
        world.api.refuse = refuse
        for kind in (CONFIG_MAP, FLEET, *(kind for kind in CHILDREN if kind not in (CONFIG_MAP, POD)), POD):
            for obj in await world.store.list(kind, NAMESPACE):
                await world.user.delete(kind, NAMESPACE, obj["metadata"]["name"])
            await seconds(world, 1, {"decode": 1})
        await seconds(world, 3, {"decode": 1})
        assert await left(world) == []

    play(scenario, **WAIT)


def test_a_stale_picture_without_workers_releases_nothing():
    async def scenario(world: World) -> None:
        await world.user.delete(FLEET, NAMESPACE, "f")
        old = await world.store.get(FLEET, NAMESPACE, "f")
        world.operator = world.new_operator()
        world.operator.feed(FLEET, WatchEvent("ADDED", old))
        await world.operator.drain()
        assert await finalizers(world) == [DRAIN]
        await until_gone(world)

    play(scenario, **WAIT)


def test_a_claim_that_goes_with_its_namespace_leaves_the_fleets_to_their_operator():
    class Terminating(MemoryCluster):
        terminating = False

        async def apply(self, obj: dict[str, Any], *, created: bool = False) -> dict[str, Any]:
            if self.terminating:
                raise ForbiddenError(f"unable to create new content in namespace {NAMESPACE} because it is being terminated")
            return await super().apply(obj, created=created)

    async def scenario() -> None:
        store = Terminating()
        mine = Territory(store, store, "one/a", Selection())
        mine.owns(NAMESPACE)
        await mine.claim_all()
        store.terminating = True
        await store.delete(LEASE, NAMESPACE, CLAIM)
        await mine.check_owned()
        await mine.claim_all()
        assert mine.owns(NAMESPACE)
        other = Territory(store, store, "one/a", Selection(("elsewhere",)))
        other.owns(NAMESPACE)
        await other.claim_all()
        assert not other.owns(NAMESPACE)

    asyncio.run(scenario())


# -- an operator that dies ------------------------------------------------------------------------------------------------
class Killed:
    """Kills at the k-th write of an ending: before it, or after it."""

    def __init__(self, world: World, number: int, *, after: bool) -> None:
        self.world, self.number, self.after, self.count = world, number, after, 0
        for verb in ("apply", "create", "patch", "delete", "patch_status"):
            setattr(world.api, verb, self._killing(getattr(world.api, verb)))

    def _killing(self, write: Any) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            self.count += 1
            mine = self.count == self.number
            if mine and not self.after:
                raise asyncio.CancelledError
            made = await write(*args, **options)
            if mine:
                raise asyncio.CancelledError
            return made

        return call


async def ended_though_killed(world: World, number: int, *, after: bool) -> int:
    """Deletes it while one decode worker is busy for 8 s, kills the operator at that write, starts another one; how many writes
    there were."""
    await seconds(world, 6, {"decode": 1})
    killed = Killed(world, number, after=after)
    await world.user.delete(FLEET, NAMESPACE, "f")
    busy_until, uids = world.now + 8, {pod["metadata"]["uid"] for pod in await pods(world)}
    for _ in range(60):
        busy = {"decode": 1.0} if world.now < busy_until else {}
        try:
            await seconds(world, 1, busy)
        except asyncio.CancelledError:
            world.operator = world.new_operator()
        there = await pods(world)
        assert {pod["metadata"]["uid"] for pod in there} <= uids, "a worker was made"
        roles = [pod["metadata"]["labels"][ROLE] for pod in there if "deletionTimestamp" not in pod["metadata"]]
        assert "decode" in roles or world.now > busy_until, "a busy worker was deleted"
        if await left(world) == []:
            return killed.count
    raise AssertionError(f"killed at {number}: still there: {await left(world)}")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_write_it_ends_all_the_same(after: bool):
    counts: list[int] = []

    async def undisturbed(world: World) -> None:
        counts.append(await ended_though_killed(world, 0, after=after))

    play(undisturbed, **WAIT)
    assert counts[0] >= 6  # the document, the status, its event, two workers, the finalizer
    for number in range(1, counts[0] + 1):

        async def scenario(world: World, number: int = number) -> None:
            await ended_though_killed(world, number, after=after)

        play(scenario, **WAIT)


@pytest.mark.parametrize("error", [UnavailableError("500"), InvalidError("no"), ForbiddenError("no")])
def test_a_release_that_fails_is_tried_again(error: ClusterError):
    async def scenario(world: World) -> None:
        await world.user.delete(FLEET, NAMESPACE, "f")
        world.api.refuse = lambda verb, kind, name: error if (verb, kind) == ("patch", FLEET) else None
        for _ in range(60):
            await seconds(world, 1, {})
        assert (await finalizers(world), await pods(world)) == ([DRAIN], [])
        assert f"Warning {error.reason} finalizer {DRAIN} of InferenceFleet f: {error}" in await world.events()
        world.api.refuse = lambda verb, kind, name: None
        world.now += 600
        await world.touch()
        await seconds(world, 3, {})
        assert await left(world) == []

    play(scenario, **WAIT)
