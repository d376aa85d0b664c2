"""The loop on the in-memory store: fix point, healing, refusal, one fleet's failure, missing telemetry."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from fleet_api.conditions import rfc3339
from fleet_api.v1alpha1.status import Condition, FleetStatus, RoleStatus, TierStatus
from fleet_operator.cluster.interface import (
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    FLEET,
    POD,
    POOL,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    ForbiddenError,
    InvalidError,
    UnavailableError,
    WatchEvent,
)
from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.health.passes import Unmeasured
from fleet_operator.reconciler import CHILDREN, Reconciler, is_restless
from fleet_operator.settings import Platform
from fleet_planner.types import KvProof
from tests.fleet_operator.world import NAMESPACE, World, manifest, play


def test_a_new_fleet_is_ready_and_then_nothing_is_written():
    async def scenario(world: World) -> None:
        assert await world.workers() == {"prefill": 1, "decode": 2}
        assert (await world.condition("Ready"))["status"] == "True"
        for kind in (CONFIG_MAP, DEPLOYMENT, ROLE, ROLE_BINDING, SERVICE, SERVICE_ACCOUNT):
            assert await world.exists(kind, "f-router"), kind.kind
        told = await world.events()
        assert await world.touch() == []
        world.now += 3_600  # events are told again after five minutes only if something changes
        assert await world.touch() == []
        assert await world.events() == told

    play(scenario)


def test_a_field_that_leaves_the_spec_leaves_the_status_too_and_then_nothing_is_written():
    """A merge patch removes nothing by itself: the old word would stay, and every pass would try again."""

    async def scenario(world: World) -> None:
        await world.user.apply(manifest(engine={"image": "example.com/worker:a"}))
        await world.settle(40)
        await world.user.apply(manifest())
        await world.settle(40)
        assert "image" not in (await world.store.get(FLEET, NAMESPACE, "f"))["status"]["resolved"]["engine"]
        assert await world.touch() == []

    play(scenario)


def test_a_restarted_operator_writes_and_tells_nothing():
    async def scenario(world: World) -> None:
        told = await world.events()
        world.operator = world.new_operator()
        assert await world.touch() == []
        assert await world.events() == told

    play(scenario)


def test_a_restarted_operator_does_not_repeat_what_went_wrong_before():
    async def scenario(world: World) -> None:
        victim = (await world.pool("prefill"))["metadata"]["name"] + "-0"
        lost = {"type": "Ready", "status": "False", "lastTransitionTime": "1970-01-12T13:46:40Z"}
        await world.user.patch_status(POD, NAMESPACE, victim, {"conditions": [lost]})
        await world.settle()
        told = await world.events()
        assert "Warning WorkersLost tier t: 0 prefill and 2 decode workers are serving" in told[-2:]
        world.operator = world.new_operator()
        assert await world.touch() == []
        assert await world.events() == told

    play(scenario)


def test_nothing_is_done_before_every_kind_was_listed():
    async def scenario(world: World) -> None:
        world.operator = world.new_operator()
        await world.look()  # objects came, but no watch said that it has shown them all
        world.api.writes.clear()
        working = asyncio.create_task(world.operator.work())
        for _ in range(20):
            await asyncio.sleep(0)
        working.cancel()
        assert world.api.writes == []

    async def fresh() -> None:
        world = World()
        await world.user.apply(manifest())
        await scenario(world)

    asyncio.run(fresh())


class Turns(Unmeasured):
    """In which turn of the loop each pass began."""

    def __init__(self) -> None:
        self.now = 0
        self.began_at: list[int] = []

    def began(self) -> int:
        self.began_at.append(self.now)
        return 0

    async def count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.now += 1


def test_many_fleets_without_work_leave_the_loop_to_others():
    """A pass that writes nothing never waits: a thousand of them would hold up every answer that another fleet waits for."""

    async def scenario() -> None:
        world, turns = World(), Turns()
        operator = Reconciler(world.api, Platform(), world, passes=turns)
        for number in range(50):
            await world.user.apply(manifest(f"f{number}"))
        for fleet in await world.store.list(FLEET, NAMESPACE):
            operator.feed(FLEET, WatchEvent("ADDED", fleet))
        for kind in (FLEET, *CHILDREN):
            operator.feed(kind, WatchEvent("SYNCED", {}))
        counting, working = asyncio.create_task(turns.count()), asyncio.create_task(operator.work())
        for _ in range(1_000):
            await asyncio.sleep(0)
            if len(turns.began_at) >= 50:
                break
        counting.cancel()
        working.cancel()
        await asyncio.gather(counting, working, return_exceptions=True)
        assert len(turns.began_at) >= 50
        assert len(set(turns.began_at)) == len(turns.began_at)

    asyncio.run(scenario())


def test_a_deleted_pod_comes_back():
    async def scenario(world: World) -> None:
        victim = next(pod for pod in await world.store.list(POD, NAMESPACE) if "decode" in pod["metadata"]["name"])
        await world.user.delete(POD, NAMESPACE, victim["metadata"]["name"])
        await world.settle()
        assert await world.workers() == {"prefill": 1, "decode": 2}
        assert victim["metadata"]["uid"] not in {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}
        assert any("WorkersCreated tier t: 1 decode worker:" in line for line in await world.events())

    play(scenario)


def test_a_failed_pod_is_replaced():
    async def scenario(world: World) -> None:
        victim = (await world.store.list(POD, NAMESPACE))[0]["metadata"]["name"]
        await world.user.patch_status(POD, NAMESPACE, victim, {"phase": "Failed", "conditions": []})
        await world.settle()
        assert await world.workers() == {"prefill": 1, "decode": 2}
        assert any(f"WorkersReplaced tier t: 1 decode worker: {victim} (its phase is Failed)" in e for e in await world.events())

    play(scenario)


def test_a_scaled_pool_is_followed_inside_the_ratio_and_told():
    async def scenario(world: World) -> None:
        name = (await world.pool("decode"))["metadata"]["name"]
        await world.user.patch(POOL, NAMESPACE, name, {"spec": {"replicas": 8}})
        await world.settle()
        assert await world.workers() == {"prefill": 2, "decode": 8}
        resized = [line for line in await world.events() if line.startswith("Normal Resized")]
        assert len(resized) == 1
        assert "1 prefill and 2 decode → 2 prefill and 8 decode; scaled by a user to 1 prefill and 8 decode" in resized[0]

    play(scenario)


def test_a_new_template_rolls_and_rests():
    async def scenario(world: World) -> None:
        before = {pod["metadata"]["name"] for pod in await world.store.list(POD, NAMESPACE)}
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"engine": {"maxBatch": 8}}})
        await world.settle(most=30)
        after = {pod["metadata"]["name"] for pod in await world.store.list(POD, NAMESPACE)}
        assert not before & after
        assert await world.workers() == {"prefill": 1, "decode": 2}
        assert len(await world.store.list(POOL, NAMESPACE)) == 2
        assert any(line.startswith("Normal RevisionChanged tier t:") for line in await world.events())
        assert await world.touch() == []

    play(scenario)


def test_an_invalid_spec_leaves_what_runs_alone_and_says_so():
    async def scenario(world: World) -> None:
        pods = await world.store.list(POD, NAMESPACE)
        _smuggle(world.store, "f", {"tiers": []})
        await world.settle()
        accepted = await world.condition("Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "Invalid")
        assert "spec.tiers" in accepted["message"]
        assert await world.store.list(POD, NAMESPACE) == pods
        assert [line for line in await world.events() if line.startswith("Warning Invalid spec.tiers")]
        assert await world.touch() == []
        fleet = await world.store.get(FLEET, NAMESPACE, "f")
        ready = await world.condition("Ready")
        generation = fleet["metadata"]["generation"]
        assert (ready["status"], ready["reason"], ready["observedGeneration"]) == ("False", "NotAccepted", generation)
        assert ready["message"].startswith("spec refused, what runs goes on unattended: spec.tiers")
        assert fleet["status"]["observedGeneration"] == generation
        _smuggle(world.store, "f", {"tiers": manifest()["spec"]["tiers"]})
        await world.settle()
        ready = await world.condition("Ready")
        assert (ready["status"], ready["observedGeneration"]) == ("True", generation + 1)
        assert await world.store.list(POD, NAMESPACE) == pods
        warnings = [line.split()[1] for line in await world.events() if line.startswith("Warning")]
        assert warnings == ["Invalid"]  # once, by the condition that has the cause

    play(scenario)


def test_a_fleet_that_was_never_accepted_says_that_it_is_not_ready():
    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest())
        _smuggle(world.store, "f", {"tiers": []})
        await world.settle()
        ready = await world.condition("Ready")
        assert (ready["status"], ready["reason"]) == ("False", "NotAccepted")
        assert await world.store.list(POD, NAMESPACE) == []

    asyncio.run(scenario())


def _smuggle(store: MemoryCluster, name: str, spec: dict[str, Any]) -> None:
    """A spec past admission, as one that was stored before a rule existed."""
    entry = store._entry(FLEET, NAMESPACE, name)
    store._write(FLEET, entry, {**entry.obj, "spec": {**entry.obj["spec"], **spec}})


def test_a_fleet_that_cannot_be_written_holds_up_no_other():
    async def scenario() -> None:
        world = World()
        world.api.refuse = lambda verb, kind, name: (
            ForbiddenError("quota exceeded") if name.startswith("bad") and kind != EVENT else None
        )
        for name in ("bad", "good"):
            await world.user.apply(manifest(name))
        for _ in range(4):
            await world.step()
        assert await world.workers("good") == {"prefill": 1, "decode": 2}
        assert (await world.condition("Ready", "good"))["status"] == "True"
        assert await world.workers("bad") == {"prefill": 0, "decode": 0}
        warnings = [line for line in await world.events() if line.startswith("Warning")]
        assert len(warnings) == 1
        assert warnings[0].startswith("Warning Forbidden ConfigMap bad-router: quota exceeded;")
        world.api.refuse = lambda verb, kind, name: None
        world.now += 10  # what was written in vain rests, whoever touches it meanwhile
        await world.touch()
        await world.settle()
        assert await world.workers("bad") == {"prefill": 1, "decode": 2}
        assert (await world.condition("Provisioned", "bad"))["status"] == "True"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "error", [UnavailableError("no answer"), InvalidError("spec.containers: wrong")], ids=["away", "invalid"]
)
def test_what_the_api_refuses_is_in_the_status_until_it_works(error: Any):
    async def scenario(world: World) -> None:
        world.api.refuse = lambda verb, kind, name: error if kind == POD else None
        name = (await world.pool("decode"))["metadata"]["name"]
        await world.user.patch(POOL, NAMESPACE, name, {"spec": {"replicas": 3}})
        for _ in range(3):
            await world.step()
        failed = await world.condition("Provisioned")
        assert (failed["status"], failed["reason"]) == ("False", "ApplyFailed")
        assert str(error) in failed["message"]
        assert await world.workers() == {"prefill": 1, "decode": 2}
        world.api.refuse = lambda verb, kind, name: None
        await world.touch()
        await world.settle()
        assert await world.workers() == {"prefill": 1, "decode": 3}
        assert (await world.condition("Provisioned"))["status"] == "True"

    play(scenario)


def test_events_that_cannot_be_written_change_nothing():
    async def scenario() -> None:
        world = World()
        world.api.refuse = lambda verb, kind, name: ForbiddenError("events is forbidden") if kind == EVENT else None
        await world.user.apply(manifest())
        await world.settle()
        assert (await world.condition("Ready"))["status"] == "True"
        assert await world.events() == []

    asyncio.run(scenario())


def test_load_grows_the_fleet_and_missing_telemetry_holds_it():
    async def scenario(world: World) -> None:
        world.measure(prefill=8, decode=60)
        await world.settle_with_telemetry()
        assert await world.workers() == {"prefill": 2, "decode": 4}
        world.load = {}
        for _ in range(200):  # longer than scaling.scaleDownWindow
            await world.step()
        assert await world.workers() == {"prefill": 2, "decode": 4}
        fresh = await world.condition("TelemetryFresh")
        assert (fresh["status"], fresh["reason"]) == ("Unknown", "NoData")
        world.operator = world.new_operator()  # a restart without telemetry is no reason to shrink either
        await world.settle()
        assert await world.workers() == {"prefill": 2, "decode": 4}

    play(scenario, telemetry={"interval": "1s"})


def test_a_telemetry_source_that_hangs_costs_its_own_fleet_only(monkeypatch: pytest.MonkeyPatch):
    async def scenario(world: World) -> None:
        other = manifest()
        other["metadata"]["name"] = "other"
        await world.user.apply(other)
        await world.settle()
        asked: list[str] = []
        hang = asyncio.Event()

        async def collect(fleet: Any, *_: Any) -> dict[str, Any]:
            asked.append(fleet.metadata.name)
            if fleet.metadata.name == "f":
                await hang.wait()
            return {}

        monkeypatch.setattr(world, "collect", collect)
        world.now += 60
        first = asyncio.ensure_future(world.operator.reader.read_due())
        for _ in range(5):  # turns of the loop until both have begun
            await asyncio.sleep(0)
        assert sorted(asked) == ["f", "other"]
        for _ in range(2):
            world.now += 60
            await world.operator.reader.read_due()
        assert sorted(asked) == ["f", "other", "other", "other"]
        hang.set()
        await first
        world.now += 60
        await world.operator.reader.read_due()
        assert asked.count("f") == 2

    play(scenario)


def test_a_fleet_that_is_going_is_left_to_garbage_collection():
    async def scenario(world: World) -> None:
        await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"finalizers": ["test/hold"]}})
        await world.user.delete(FLEET, NAMESPACE, "f")
        await world.user.delete(SERVICE, NAMESPACE, "f-router")
        await world.step()
        assert not await world.exists(SERVICE, "f-router")
        await world.user.patch(FLEET, NAMESPACE, "f", {"metadata": {"finalizers": None}})
        for _ in range(3):
            await world.step()
        assert await world.store.list(POD, NAMESPACE) == []
        assert await world.touch() == []

    play(scenario)


def test_a_restart_does_not_unsay_what_telemetry_said():
    async def scenario(world: World) -> None:
        proof = KvProof(transfers=3, blocks=30, bytes=300, failed=0, measured_at=world.now)
        world.measure(prefill=1, decode=1)
        world.load = {"t": replace(world.load["t"], kv=proof)}
        for _ in range(8):
            await world.step()
        told = (await world.store.get(FLEET, NAMESPACE, "f"))["status"]
        assert (await world.condition("Disaggregating"))["status"] == "True"
        world.operator = world.new_operator()
        world.api.writes.clear()
        await world.look()
        await world.operator.drain()  # a pass before the first reading
        assert world.api.writes == []
        assert (await world.store.get(FLEET, NAMESPACE, "f"))["status"] == told
        world.load = {}
        for _ in range(8):  # read, and nothing is known: now it is news
            await world.step()
        assert (await world.condition("TelemetryFresh"))["status"] == "Unknown"
        assert (await world.condition("Disaggregating"))["status"] == "Unknown"

    play(scenario)


@pytest.mark.parametrize(
    ("ready", "serving", "condition", "restless"),
    [
        (2, 2, ("RollingOut", "False"), False),
        (1, 1, ("RollingOut", "False"), True),
        (3, 2, ("RollingOut", "False"), True),
        (2, 1, ("RollingOut", "False"), True),
        (2, 2, ("RollingOut", "True"), True),
        (2, 2, ("CapacityLimited", "True"), True),
        (2, 2, ("TelemetryFresh", "Unknown"), False),
    ],
    ids=["at-rest", "starting", "leaving", "held-back", "rollout", "no-room", "no-telemetry"],
)
def test_only_a_fleet_with_something_under_way_is_looked_at_without_news(
    ready: int, serving: int, condition: tuple[Any, Any], restless: bool
):
    role = RoleStatus(desired=2, ready=ready, serving=serving)
    said = Condition(
        type=condition[0], status=condition[1], reason="R", message="m", observed_generation=1, last_transition_time=rfc3339(0)
    )
    at_rest = RoleStatus(desired=1, ready=1, serving=1)
    tier = TierStatus(name="t", prefill=at_rest, decode=role, ratio="1:2", revision="r")
    assert is_restless(FleetStatus(tiers=(tier,), conditions=(said,))) is restless


def test_what_was_written_is_not_written_again_while_the_watch_lags():
    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest())
        await world.look()
        await world.operator.drain()
        made = [write for write in world.api.writes if write[1] != EVENT.kind]
        assert len(made) == len(set(made)) + 1  # the fleet's status says first what is to come, then what was made
        world.api.writes.clear()
        for _ in range(3):
            world.operator.touch((NAMESPACE, "f"))
            await world.operator.drain()  # the watch still shows an empty namespace
        assert world.api.writes == []

    asyncio.run(scenario())


def test_a_worker_is_told_to_go_once_while_the_watch_lags():
    async def scenario(world: World) -> None:
        await world.user.apply(manifest(tiers=[{"name": "other", "accelerator": {"type": "cpu"}}]))
        while not [write for write in world.api.writes if write[:2] == ("delete", "Pod")]:
            await world.kubelet()  # its successors are ready, and the watch shows them
            await world.look()
            await world.operator.drain()
        for _ in range(3):
            world.operator.touch((NAMESPACE, "f"))
            await world.operator.drain()
        gone = [write for write in world.api.writes if write[0] == "delete" and write[1] == "Pod"]
        assert len(gone) == len(set(gone)) == 3

    play(scenario)


def test_a_defect_in_one_fleets_pass_does_not_end_the_operator(caplog: pytest.LogCaptureFixture):
    async def scenario(world: World) -> None:
        world.operator = world.new_operator()  # nothing rests yet
        whole, seen = world.operator.reconcile_once, list[str]()

        async def broken(key, raw, state):
            seen.append(key[1])
            if key[1] == "f":
                raise KeyError("a defect")
            return await whole(key, raw, state)

        world.operator.reconcile_once = broken
        await world.user.apply(manifest("g"))
        await world.look()
        for kind in (FLEET, *CHILDREN):
            world.operator.feed(kind, WatchEvent("SYNCED", {}))
        world.operator.touch((NAMESPACE, "f"))
        working = asyncio.create_task(world.operator.work())
        for _ in range(500):
            await asyncio.sleep(0)
        assert {"f", "g"} <= set(seen)
        assert not working.done()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    play(scenario)
    assert "fleet=ml/f could not be reconciled" in caplog.text
