"""A worker that hands no KV over, or gets none, is replaced: what the routers tell, through the operator, to the pods."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_api.conditions import rfc3339
from fleet_api.quantities import parse_ratio
from fleet_operator.cluster.interface import CONFIG_MAP, EVENT, FLEET, POD, ForbiddenError
from fleet_operator.names import ROLE
from fleet_planner.ratio import within
from fleet_planner.roles import ROLES
from fleet_planner.types import Demand, KvProof, RoleLoad, TierTelemetry
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

TIER = {
    "name": "t", "accelerator": {"type": "cpu"}, "ratio": {"prefill": 1, "decode": 1, "min": "1:2", "max": "2:1"},
    "prefill": {"replicas": 3, "minReplicas": 3, "maxReplicas": 6}, "decode": {"replicas": 3, "minReplicas": 3, "maxReplicas": 6},
}  # fmt: skip
LOW, HIGH = parse_ratio("1:2"), parse_ratio("2:1")
HOUR_S = 3_600


class Clinic:
    """A world in which some workers are ill."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ill: set[str] = set()
        """Uids."""
        self.cut: set[tuple[str, str]] = set()
        """Uids of pairs."""
        self.deleted: list[tuple[float, str]] = []
        """When an ill worker went, and its uid."""
        self.decided: dict[str, float] = {}
        """By uid: when the status first said that it is replaced."""
        self.outside: list[tuple[int, int]] = []
        """What routers were told that is not inside the ratio."""
        self.doubted = False
        """One router of many alone says it."""

    async def pods(self, role: str) -> list[dict[str, Any]]:
        return [pod for pod in await self.world.store.list(POD, NAMESPACE) if pod["metadata"]["labels"].get(ROLE) == role]

    async def uid(self, role: str, number: int = 0) -> str:
        return sorted(pod["metadata"]["uid"] for pod in await self.pods(role))[number]

    async def uids(self) -> set[str]:
        return {pod["metadata"]["uid"] for role in ROLES for pod in await self.pods(role)}

    async def seconds(self, count: int, step_s: int = 1) -> None:
        for _ in range(count):
            before, leads = await self.uids(), [await self._leads(role) for role in ROLES]
            failing = {(p, d) for (p, a), (d, b) in product(*leads) if {a, b} & self.ill or (a, b) in self.cut}
            moved = {(p, d) for (p, _), (d, _) in product(*leads)} - failing if failing else set()
            loads = [RoleLoad(inflight=1, measured_at=self.world.now + step_s)] * 2
            proof = KvProof(9, 9, 9, 0, self.world.now, 0, 0)
            told = TierTelemetry(*loads, kv=proof, pairs=tuple(sorted(failing)), moved=tuple(sorted(moved)))
            self.world.load = {"t": replace(told, demand=Demand(0, 1.0, self.world.now + step_s))}
            if self.doubted:
                names = frozenset(name for pair in failing for name in pair)
                self.world.load = {"t": replace(self.world.load["t"], doubtful=names)}
            self.world.now += step_s - 1
            await self.world.step()
            self.deleted += [(self.world.now, uid) for uid in sorted((before - await self.uids()) & self.ill)]
            await self._inside()
            tier = (await self.world.store.get(FLEET, NAMESPACE, "f"))["status"]["tiers"][0]
            for one in (tier.get("healing") or {}).get("replaced", []):
                self.decided.setdefault(one["uid"], self.world.now)

    async def happen(self, what: str, role: str, number: int) -> None:
        """One of STEP."""
        user = self.world.user
        if what == "ill":
            self.ill.add(await self.uid(role, number))
        elif what == "cut":
            self.cut.add((await self.uid("prefill", number), await self.uid("decode", number)))
        elif what == "well":
            self.ill.clear()
            self.cut.clear()
        elif what == "restart":
            self.world.operator = self.world.new_operator()
        elif what in ("pause", "resume"):
            await user.patch(FLEET, NAMESPACE, "f", {"spec": {"rollout": {"paused": what == "pause"}}})
        elif what == "lose":
            await user.delete(POD, NAMESPACE, (await self.pods(role))[0]["metadata"]["name"], grace_s=0)

    async def _leads(self, role: str) -> list[tuple[str, str]]:
        meta = [pod["metadata"] for pod in await self.pods(role)]
        return [(one["name"], one["uid"]) for one in meta if one["name"].count("-") < 5]

    async def _inside(self) -> None:
        documents = await self.world.store.get(CONFIG_MAP, NAMESPACE, "f-router")
        workers = json.loads(documents["data"]["endpoints.json"])["workers"]
        serving = [worker["role"] for worker in workers if worker["state"] == "serving"]
        counts = serving.count("prefill"), serving.count("decode")
        if not within(*counts, LOW, HIGH):
            self.outside.append(counts)

    async def says(self) -> str:
        return (await self.world.condition("Disaggregating"))["reason"]

    async def told(self, reason: str) -> list[str]:
        return [event for event in await self.world.events() if event.split()[1] == reason]


def clinic(scenario: Any, tier: dict[str, Any] = TIER, **spec: Any) -> None:
    async def whole(world: World) -> None:
        await scenario(Clinic(world))

    play(whole, tiers=[tier], **spec)


@pytest.mark.parametrize("role", ROLES)
def test_it_is_replaced_by_one_that_is_ready_first(role: str):
    async def scenario(here: Clinic) -> None:
        await here.seconds(5)
        assert await here.says() == "KvMoved"
        here.ill = {await here.uid(role)}
        await here.seconds(55)
        assert await here.says() == "WorkerPoisoned"
        assert len(await here.pods(role)) == 3
        counts = []
        for _ in range(20):
            await here.seconds(1)
            counts.append(len(await here.pods(role)))
        assert 4 in counts, "another one is made, and it is there meanwhile"
        assert min(counts) == 3
        assert [uid for _, uid in here.deleted] == sorted(here.ill)
        assert len(await here.pods(role)) == 3
        assert await here.says() == "KvMoved"
        assert len(await here.told("PoisonedReplaced")) == 1
        way = "from it to" if role == "prefill" else "to it from"
        assert f"no KV gets {way} " in (await here.told("PoisonedReplaced"))[0]
        assert any("(replaced: " in event for event in await here.told("WorkersReplaced") + await here.told("WorkersDeleted"))
        assert here.outside == []
        writes = [await here.world.touch() for _ in range(3)]
        assert writes == [[], [], []]

    clinic(scenario)


def test_its_event_comes_once_also_when_the_operator_ended_before_it_was_told():
    """Killed between the status that says it and the event: whoever is on call never heard of it."""

    async def scenario(here: Clinic) -> None:
        here.ill = {await here.uid("prefill")}
        here.world.api.refuse = lambda verb, kind, name: ForbiddenError("dead") if kind == EVENT else None
        while not here.decided:
            await here.seconds(1)
        here.world.api.refuse = lambda verb, kind, name: None
        for _ in range(3):
            here.world.operator = here.world.new_operator()
            await here.seconds(20)
            assert len(await here.told("PoisonedReplaced")) == 1
        assert len(here.deleted) == 1

    clinic(scenario)


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00Z", "soon"])
def test_a_time_in_the_status_that_no_event_can_have_is_no_failure_of_the_operator(at: str):
    """Somebody edited it: the pass ended in a ValueError, or the API refused the event's name."""

    async def scenario(here: Clinic) -> None:
        tiers = (await here.world.store.get(FLEET, NAMESPACE, "f"))["status"]["tiers"]
        one = {"worker": "w", "uid": await here.uid("decode"), "at": at, "message": "m"}
        await here.world.user.patch_status(FLEET, NAMESPACE, "f", {"tiers": [{**tiers[0], "healing": {"replaced": [one]}}]})
        for _ in range(2):
            here.world.operator = here.world.new_operator()
            await here.seconds(20)
        assert await here.told("InternalError") == []
        assert all(
            int(event["metadata"]["name"].split(".")[1], 16) > 0 for event in await here.world.store.list(EVENT, NAMESPACE)
        )
        assert (await here.world.condition("Provisioned"))["status"] == "True"

    clinic(scenario)


def test_a_second_one_waits_for_the_budget_also_over_a_restart_of_the_operator():
    async def scenario(here: Clinic) -> None:
        here.ill = {await here.uid("prefill"), await here.uid("decode")}
        await here.seconds(90)
        assert len(here.deleted) == 1
        assert await here.says() == "HealingBudgetSpent"
        assert len(await here.told("HealingBudgetSpent")) == 1
        here.world.operator = here.world.new_operator()
        await here.seconds(340, 10)
        assert len(here.deleted) == 1
        await here.seconds(40, 10)
        assert len(here.deleted) == 2
        assert here.deleted[1][0] - here.deleted[0][0] > HOUR_S - 60
        assert await here.says() == "KvMoved"

    clinic(scenario, healing={"restartPoisoned": {"fabricPercent": 40}})


def test_one_that_never_goes_keeps_no_other_one_from_being_replaced():
    """Incident: its place in the budget was taken for as long as its pod was there, which was for ever."""

    async def scenario(here: Clinic) -> None:
        pod = (await here.pods("prefill"))[0]["metadata"]
        await here.world.user.patch(POD, NAMESPACE, pod["name"], {"metadata": {"finalizers": ["example.com/away"]}})
        here.ill = {pod["uid"]}
        await here.seconds(90)
        assert here.decided.keys() == here.ill
        await here.seconds(400, 10)
        assert pod["uid"] in await here.uids()
        here.ill = {await here.uid("decode")}
        await here.seconds(30, 10)
        assert [uid for _, uid in here.deleted] == sorted(here.ill)
        assert await here.says() == "KvMoved"

    clinic(scenario)


@pytest.mark.parametrize(
    ("spec", "ill", "says"),
    [
        pytest.param({"healing": {"restartPoisoned": {"enabled": False}}}, 1, "WorkerPoisoned", id="off"),
        pytest.param({"rollout": {"paused": True}}, 1, "WorkerPoisoned", id="paused"),
        pytest.param({"healing": {"restartPoisoned": {"after": "1h"}}}, 1, "WorkerPoisoned", id="not-yet"),
        pytest.param({}, 2, "FabricSuspected", id="two-of-six"),
        pytest.param({}, 3, "FabricSuspected", id="all-of-a-role"),
    ],
)
def test_what_is_told_and_left(spec: dict[str, Any], ill: int, says: str):
    async def scenario(here: Clinic) -> None:
        here.ill = {await here.uid("prefill", number) for number in range(ill)}
        await here.seconds(300, 2)
        assert here.deleted == []
        assert await here.says() == says
        assert await here.told("PoisonedReplaced") == []
        assert len(await here.told(says)) == 1

    clinic(scenario, **spec)


def test_one_pair_alone_is_told_and_left():
    async def scenario(here: Clinic) -> None:
        before = await here.uids()
        here.cut = {(await here.uid("prefill"), await here.uid("decode"))}
        await here.seconds(300, 2)
        assert (await here.says(), await here.uids()) == ("PairFailing", before)

    clinic(scenario)


@pytest.mark.parametrize("ill", [1, 3])
def test_what_one_router_of_many_alone_says_is_told_and_replaces_nobody(ill: int):
    async def scenario(here: Clinic) -> None:
        here.doubted, before = True, await here.uids()
        here.ill = {await here.uid("prefill", number) for number in range(ill)}
        await here.seconds(90)
        assert (await here.says(), await here.uids()) == ("PairFailing", before)
        here.doubted, here.ill = False, {await here.uid("prefill")}
        await here.seconds(90)
        assert len(here.deleted) == 1, "a second one says so, too"

    clinic(scenario)


def test_a_break_begins_the_wait_anew_and_stale_telemetry_decides_nothing():
    async def scenario(here: Clinic) -> None:
        ill = {await here.uid("prefill")}
        for _ in range(4):
            here.ill = ill
            await here.seconds(50)
            here.ill = set()
            await here.seconds(6)  # one reading
        assert here.deleted == []
        here.ill = ill
        await here.seconds(30)
        for _ in range(200):  # the routers are not read any more
            await here.world.step()
        assert ill <= await here.uids()

    clinic(scenario)


def test_without_surge_it_goes_first():
    async def scenario(here: Clinic) -> None:
        here.ill = {await here.uid("prefill")}
        most = 0
        for _ in range(70):
            await here.seconds(1)
            pods = [pod for pod in await here.pods("prefill") if "deletionTimestamp" not in pod["metadata"]]
            most = max(most, len(pods))
        assert (most, len(here.deleted), here.outside) == (3, 1, [])

    clinic(scenario, rollout={"maxSurgeGpus": 0, "maxUnavailable": 1})


class Crowded(World):
    """Six workers find a node, and no more."""

    async def kubelet(self) -> None:
        pods = [pod for pod in await self.store.list(POD, NAMESPACE) if pod["metadata"]["labels"].get(ROLE) in ROLES]
        free = 6 - sum("nodeName" in pod["spec"] for pod in pods)
        self.late = {pod["metadata"]["name"] for pod in [pod for pod in pods if "nodeName" not in pod["spec"]][max(0, free) :]}
        for pod in [pod for pod in pods if pod["metadata"]["name"] in self.late]:
            full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/6 nodes are available"}
            if "deletionTimestamp" in pod["metadata"]:
                await self.user.delete(POD, NAMESPACE, pod["metadata"]["name"], grace_s=0)
            else:
                await self.user.patch_status(POD, NAMESPACE, pod["metadata"]["name"], {"phase": "Pending", "conditions": [full]})
        await super().kubelet()


def test_without_room_it_goes_first_after_a_while():
    async def scenario() -> None:
        world = Crowded()
        spec = {"scaling": {"capacityWait": "60s"}, "healing": {"restartPoisoned": {"after": "0s"}}}
        await world.user.apply(manifest(tiers=[TIER], **spec))
        await world.settle()
        here = Clinic(world)
        here.ill = {await here.uid("prefill")}
        await here.seconds(50)
        assert (len(await here.pods("prefill")), here.deleted) == (4, []), "the other one waits for a node"
        await here.seconds(40)
        assert [uid for _, uid in here.deleted] == sorted(here.ill)
        assert (len(await here.pods("prefill")), here.outside) == (3, [])
        assert await here.says() == "KvMoved"

    asyncio.run(scenario())


def test_of_several_nodes_all_pods_go_and_come():
    async def scenario(here: Clinic) -> None:
        leaders = [pod for pod in await here.pods("prefill") if pod["metadata"]["name"].count("-") < 5]
        uid = leaders[0]["metadata"]["uid"]
        mine = {
            pod["metadata"]["uid"]
            for pod in await here.pods("prefill")
            if pod["metadata"]["name"].startswith(leaders[0]["metadata"]["name"])
        }
        assert len(mine) == 2
        here.ill = {uid}
        await here.seconds(80)
        assert not mine & await here.uids()
        assert len(await here.pods("prefill")) == 6
        assert here.outside == []

    gpu = {**TIER, "parallelism": {"nodes": 2}}
    clinic(scenario, gpu)


def test_nothing_is_deleted_before_the_decision_is_written():
    async def scenario(here: Clinic) -> None:
        here.ill = {await here.uid("prefill")}
        await here.seconds(5)
        here.world.api.refuse = lambda verb, kind, name: ForbiddenError("no") if (verb, kind) == ("status", FLEET) else None
        await here.seconds(150)
        assert (here.deleted, len(await here.pods("prefill"))) == ([], 3)
        here.world.api.refuse = lambda verb, kind, name: None
        await here.seconds(60)
        assert len(here.deleted) == 1

    clinic(scenario)


def test_a_clock_that_is_set_buys_no_second_one():
    async def scenario(here: Clinic) -> None:
        here.ill = {await here.uid("prefill"), await here.uid("decode")}
        await here.seconds(90)
        here.world.set_clock(2 * HOUR_S)
        await here.seconds(120)
        here.world.set_clock(-4 * HOUR_S)
        await here.seconds(120)
        assert len(here.deleted) == 1

    clinic(scenario, healing={"restartPoisoned": {"fabricPercent": 40}})


def test_a_status_that_somebody_edited_stops_nothing():
    async def scenario(here: Clinic) -> None:
        bad = {"replaced": [{"worker": "x", "uid": "y", "at": "never"}, {"worker": "x"}]}
        status = (await here.world.store.get(FLEET, NAMESPACE, "f"))["status"]
        tiers = [{**status["tiers"][0], "healing": bad}]
        await here.world.user.patch_status(FLEET, NAMESPACE, "f", {"tiers": tiers})
        here.ill = {await here.uid("prefill")}
        await here.seconds(80)
        assert len(here.deleted) == 1

    clinic(scenario)


@pytest.mark.parametrize(
    ("spec", "named", "gone"),
    [
        pytest.param({}, "all", 1, id="all"),
        pytest.param({"rollout": {"maxSurgeGpus": 0, "maxUnavailable": 1}}, "all", 1, id="all-without-surge"),
        pytest.param({"healing": {"restartPoisoned": {"perHour": 2}}}, "all", 2, id="all-two-in-an-hour"),
        pytest.param({"healing": {"restartPoisoned": {"enabled": False}}}, "all", 0, id="off"),
        pytest.param({}, "nobody", 0, id="an-empty-uid-is-no-name"),
    ],
)
def test_a_status_that_somebody_wrote_replaces_no_more_than_the_budget_one_at_a_time(spec: dict[str, Any], named: str, gone: int):
    async def scenario(here: Clinic) -> None:
        await here.seconds(5)
        before, most = await here.uids(), 0
        entries = [{"worker": "x", "uid": uid, "at": rfc3339(here.world.now), "message": "m"} for uid in sorted(before)]
        entries = entries if named == "all" else [{**entries[0], "uid": ""}]
        status = (await here.world.store.get(FLEET, NAMESPACE, "f"))["status"]
        tiers = [{**status["tiers"][0], "healing": {"replaced": entries}}]
        await here.world.user.patch_status(FLEET, NAMESPACE, "f", {"tiers": tiers})
        for _ in range(60):
            await here.seconds(1)
            most = max(most, len(await here.uids()))
            assert most <= 7
        assert len(before - await here.uids()) == gone
        await here.seconds(400, 10)
        assert len(before - await here.uids()) == gone, "nor later"
        assert here.outside == []

    clinic(scenario, **spec)


def test_switched_off_what_was_decided_is_left_also_when_the_status_says_it():
    async def scenario(here: Clinic) -> None:
        here.ill = {await here.uid("prefill")}
        while not here.decided:
            await here.seconds(1)
        await here.world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"healing": {"restartPoisoned": {"enabled": False}}}})
        await here.seconds(60)
        assert (here.deleted, len(await here.pods("prefill"))) == ([], 3)
        assert "is off, delete that pod" in (await here.world.condition("Disaggregating"))["message"]
        await here.world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"healing": {"restartPoisoned": {"enabled": True}}}})
        await here.seconds(60)
        assert len(here.deleted) == 1

    clinic(scenario)


STEP = st.tuples(
    st.sampled_from(["ill", "well", "cut", "restart", "pause", "resume", "wait", "lose"]),
    st.integers(0, 5),
    st.integers(1, 30),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(STEP, min_size=3, max_size=14), st.integers(1, 2))
def test_never_more_than_the_budget_in_any_hour_and_never_outside_the_ratio(steps: list[tuple[str, int, int]], per_hour: int):
    """Of all that may be told in any order, whatever else happens to operator and workers."""

    async def scenario() -> None:
        world = World()
        healing = {"restartPoisoned": {"perHour": per_hour, "after": "10s", "fabricPercent": 50}}
        await world.user.apply(manifest(tiers=[TIER], healing=healing))
        await world.settle()
        here = Clinic(world)
        for what, number, long in steps:
            before = len(here.decided)
            await here.happen(what, ROLES[number % 2], number // 2)
            await here.seconds(long, 1 + 40 * (what == "wait"))
            assert what != "pause" or len(here.decided) == before
        times = sorted(here.decided.values())
        assert all(sum(at <= other < at + HOUR_S for other in times) <= per_hour for at in times), times
        assert here.outside == [] or "lose" in {what for what, _, _ in steps}

    asyncio.run(scenario())
