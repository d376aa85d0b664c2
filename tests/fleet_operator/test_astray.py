"""Agents that say another role than their pod's label, on the in-memory store: from what telemetry reads of them until they have
their role again, or are gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fleet_api.parse import parse_fleet
from fleet_operator.cluster.interface import POD
from fleet_operator.flip.asking import Answer, Ask
from fleet_operator.flip.follow import FlipFollower
from fleet_planner.roles import Role
from fleet_planner.types import FlipReport, TierTelemetry
from tests.fleet_operator.test_flips import Worker, Workers, finish, flipping, lead, pods, reply, resize, states
from tests.fleet_operator.world import NAMESPACE, World, manifest
from tests.fleet_planner.test_reconcile import pod as observed_pod

FLIP, RIGHTED = "inferencefleet.io/flip", "inferencefleet.io/righted-at"


class Agents(Workers):
    """Whoever is known here is read by telemetry, too."""

    def __init__(self, does: str) -> None:
        super().__init__(does)
        self.questions: Counter[str] = Counter()
        """By path of agents."""
        self.read: dict[str, Role] | None = None
        """What telemetry says instead, by pod."""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Ask]:
        async with super().connect() as ask:

            async def counted(url: str, *more: Any, **named: Any) -> Any:
                self.questions[url.rpartition(":9000/")[2] if ":9000/" in url else "engine"] += 1
                return await ask(url, *more, **named)

            yield counted

    def telemetry(self, found: list[dict[str, Any]]) -> dict[str, Role]:
        labels = {pod["metadata"]["name"]: pod for pod in found if (pod.get("status") or {}).get("podIP") in self.known}
        said = {name: self.known[pod["status"]["podIP"]].role for name, pod in labels.items()}
        return {name: role for name, role in said.items() if role != role_of(labels[name])}  # type: ignore[misc]


def role_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["labels"]["inferencefleet.io/role"])


Scenario = Callable[[World, Agents, list[dict[str, Any]]], Awaitable[None]]


def play(scenario: Scenario, does: str = "obeys", size: tuple[int, int] = (1, 3)) -> None:
    """So many prefill and decode workers that serve, with the decode workers' pods."""

    async def whole() -> None:
        world, agents = World(), Agents(does)

        async def collect(fleet: Any, found: list[dict[str, Any]], routers: list[str]) -> dict[str, TierTelemetry]:
            return {"t": TierTelemetry(astray=agents.read if agents.read is not None else agents.telemetry(found))}

        world.collect = collect  # type: ignore[method-assign]
        world.flips = FlipFollower(agents.connect)
        world.operator = world.new_operator()
        await resize(world, *size)
        await world.settle()
        found = sorted((await pods(world)).values(), key=lambda pod: str(pod["metadata"]["name"]))
        for pod in found:
            agents.known[pod["status"]["podIP"]] = Worker(role=role_of(pod))
        await scenario(world, agents, [pod for pod in found if role_of(pod) == "decode"])

    asyncio.run(whole())


def agent_of(agents: Agents, pod: dict[str, Any]) -> Worker:
    return agents.at(pod["status"]["podIP"])


async def until(world: World, holds: Callable[[], Awaitable[bool]], most: int = 20) -> None:
    for _ in range(most):
        if await holds():
            return
        await world.step()
    raise AssertionError(f"not within {most} s: {await world.events()}")


async def is_told(world: World) -> bool:
    return await flipping(world) is not None


def told(events: list[str], reason: str) -> list[str]:
    return [event for event in events if event.split()[1] == reason]


def test_a_worker_that_lost_its_role_is_drained_told_proven_and_serves_again():
    async def scenario(world: World, agents: Agents, decodes: list[dict[str, Any]]) -> None:
        uid, before = decodes[0]["metadata"]["uid"], await pods(world)
        agent = agent_of(agents, decodes[0])
        agent.role = "prefill"  # its container began anew between the proof and the label
        await until(world, lambda: is_told(world))
        assert (await states(world))[uid] == "draining"
        assert agent.asked == [], "routers first"
        found = await world.condition("WithinRatio")
        assert (found["status"], found["reason"]) == ("True", "RoleMismatch")
        assert f"{decodes[0]['metadata']['name']}: a decode worker whose agent says prefill" in found["message"]
        await finish(world)
        after = await pods(world)
        assert after.keys() == before.keys()
        assert (agent.asked, agent.role) == (["decode"], "decode")
        marks = after[uid]["metadata"]["annotations"]
        assert (FLIP in marks, RIGHTED in marks, "inferencefleet.io/flipped-at" in marks) == (False, True, False)
        assert after[uid]["metadata"]["labels"] == before[uid]["metadata"]["labels"]
        assert set((await states(world)).values()) == {"serving"}
        assert (await world.condition("WithinRatio"))["reason"] == "InRatio"
        events = await world.events()
        assert len(told(events, "RoleMismatch")) == 1
        assert "decode again in" in told(events, "Flipped")[0]
        assert await world.touch() == []

    play(scenario)


def test_an_operator_that_begins_half_way_goes_on():
    async def scenario(world: World, agents: Agents, decodes: list[dict[str, Any]]) -> None:
        agent_of(agents, decodes[0]).role = "prefill"
        await until(world, lambda: is_told(world))
        world.operator = world.new_operator()
        await finish(world)
        assert {pod["metadata"]["uid"] for pod in decodes} < (await pods(world)).keys()
        assert set((await states(world)).values()) == {"serving"}
        assert agent_of(agents, decodes[0]).asked == ["decode"]

    play(scenario)


@pytest.mark.parametrize(
    ("does", "why"),
    [("hangs", "not done within"), ("keeps", "409 EngineKeepsRole"), ("lies", "other tokens than its partner's")],
)
def test_a_worker_that_does_not_take_its_role_is_replaced(does: str, why: str):
    async def scenario(world: World, agents: Agents, decodes: list[dict[str, Any]]) -> None:
        before = (await pods(world)).keys()
        agent_of(agents, decodes[0]).role = "prefill"
        await until(world, lambda: is_told(world))
        for _ in range(50):
            await world.step()
        assert before - (await pods(world)).keys() == {decodes[0]["metadata"]["uid"]}
        assert await world.workers() == {"prefill": 1, "decode": 3}
        events = await world.events()
        assert [why in event for event in told(events, "FlipFailed")] == [True]
        assert set((await states(world)).values()) == {"serving"}

    play(scenario, does)


def test_several_are_told_one_after_the_other_and_none_of_them_serves_meanwhile():
    async def scenario(world: World, agents: Agents, decodes: list[dict[str, Any]]) -> None:
        lost = {pod["metadata"]["uid"] for pod in decodes[:2]}
        for pod in decodes[:2]:
            agent_of(agents, pod).role = "prefill"
        await until(world, lambda: is_told(world))
        assert {uid for uid, state in (await states(world)).items() if state == "draining"} == lost
        while not agent_of(agents, decodes[1]).asked:
            assert (await states(world))[decodes[1]["metadata"]["uid"]] == "draining"
            await world.step()
            await flipping(world)  # asserts that it is one at most
        await finish(world)
        assert [agent_of(agents, pod).asked for pod in decodes] == [["decode"], ["decode"], *[[] for _ in decodes[2:]]]
        assert set((await states(world)).values()) == {"serving"}

    play(scenario, size=(3, 8))


@pytest.mark.parametrize("first", [0, 1], ids=["at-once", "one-is-heard-before-the-others"])
def test_where_all_agents_of_a_role_say_another_one_all_serve_on_and_none_is_replaced(first: int):
    """A bad image. One after the other was told in vain, deleted and made again, and none of them served."""

    async def scenario(world: World, agents: Agents, decodes: list[dict[str, Any]]) -> None:
        before = (await pods(world)).keys()
        for pod in decodes[:first]:
            agent_of(agents, pod).role = "prefill"
            await until(world, lambda: is_told(world))
        for pod in decodes:
            agent_of(agents, pod).role = "prefill"
        for second in range(700):
            if second == 300:
                world.operator = world.new_operator()
            await world.step()
            serving = list((await states(world)).values()).count("serving")
            assert serving == 4 or second < 10 * first, second
        assert (await pods(world)).keys() == before
        assert await flipping(world) is None
        found = await world.condition("WithinRatio")
        assert (found["reason"], "3 of 3 say so at once" in found["message"]) == ("AgentsSuspected", True)
        for pod in decodes:
            agent_of(agents, pod).role = "decode"
        await finish(world)
        assert (await world.condition("WithinRatio"))["reason"] == "InRatio"

    play(scenario, "hangs")


@pytest.mark.parametrize("does", ["hangs", "keeps"])
def test_the_only_one_of_its_role_is_replaced_once_and_then_serves_on_whatever_its_agent_says(does: str):
    async def scenario(world: World, agents: Agents, decodes: list[dict[str, Any]]) -> None:
        seen, out = set[str](), 0
        for second in range(1_500):
            if second in (400, 800):
                world.operator = world.new_operator()
            found = {pod["metadata"]["uid"]: pod for pod in (await pods(world)).values() if role_of(pod) == "decode"}
            for pod in found.values():
                if (address := (pod.get("status") or {}).get("podIP")) and pod["metadata"]["uid"] not in seen:
                    agents.known[address] = Worker(role="prefill")
                    seen.add(pod["metadata"]["uid"])
            await world.step()
            out += "serving" not in [state for uid, state in (await states(world)).items() if uid in found]
        assert len(seen) == 2
        assert out < 90, "while it had its time, and while the other one started"
        assert (await world.condition("WithinRatio"))["reason"] == "AgentsSuspected"
        assert len(told(await world.events(), "FlipFailed")) == 1

    play(scenario, does, size=(1, 1))


def test_one_that_loses_its_role_once_more_is_replaced():
    async def scenario(world: World, agents: Agents, decodes: list[dict[str, Any]]) -> None:
        agent_of(agents, decodes[0]).role = "prefill"
        await until(world, lambda: is_told(world))
        await finish(world)
        agent_of(agents, decodes[0]).role = "prefill"
        for _ in range(12):
            await world.step()
        assert decodes[0]["metadata"]["uid"] not in await pods(world)
        assert await world.workers() == {"prefill": 1, "decode": 3}
        assert "again after it was told its role" in told(await world.events(), "FlipFailed")[0]

    play(scenario)


@pytest.mark.parametrize("phase", ["Serving", "FlippingRole"])
def test_whoever_says_its_own_role_when_asked_is_left_alone_and_asked_seldom(phase: str):
    """Telemetry says otherwise for ever."""

    async def scenario(world: World, agents: Agents, decodes: list[dict[str, Any]]) -> None:
        agents.read = {decodes[0]["metadata"]["name"]: "prefill"}
        agent_of(agents, decodes[0]).phase = phase
        for _ in range(60):
            assert await world.step() == []
        assert 5 <= agents.questions["state"] <= 13
        assert set(agents.questions) == {"state"}

    play(scenario)


def test_nobody_is_asked_whose_agent_tells_telemetry_no_role():
    async def scenario(world: World, agents: Agents, decodes: list[dict[str, Any]]) -> None:
        agents.read = {}
        agent_of(agents, decodes[0]).role = "prefill"
        for _ in range(30):
            assert await world.step() == []
        assert agents.questions == {}

    play(scenario)


def test_a_flip_of_which_somebody_takes_the_mark_off_the_pod_leaves_no_worker_astray():
    """Its agent went on, and ended in a role that nobody remembered: routers sent it what it could not do, for ever."""

    async def scenario(world: World, agents: Agents, decodes: list[dict[str, Any]]) -> None:
        await lead(world)
        before = await pods(world)
        await resize(world, 2, 2)
        await until(world, lambda: is_told(world))
        moving = await flipping(world)
        assert moving is not None
        marks = {"annotations": {FLIP: None, "inferencefleet.io/flip-since": None}}
        await world.user.patch(POD, NAMESPACE, moving["metadata"]["name"], {"metadata": marks})
        await resize(world, 1, 3)
        agent_of(agents, moving).role = "prefill"
        await until(world, lambda: is_told(world))
        assert (await world.condition("WithinRatio"))["reason"] == "RoleMismatch"
        await finish(world)
        assert (await pods(world)).keys() == before.keys()
        assert agent_of(agents, moving).asked[-1:] == [agent_of(agents, moving).role] == ["decode"]
        assert set((await states(world)).values()) == {"serving"}

    play(scenario)


@pytest.mark.parametrize(
    ("answer", "before", "heard"),
    [
        pytest.param(reply(200, role="prefill", phase="Serving"), None, FlipReport("prefill", "Serving"), id="its-word"),
        pytest.param(reply(200, phase="Serving"), None, None, id="an-agent-that-says-none"),
        pytest.param(reply(404), None, None, id="an-agent-without-a-state"),
        pytest.param(reply(200, role="router", phase="Serving"), None, None, id="a-role-that-nobody-knows"),
        pytest.param(Answer(200, b"prefill"), None, None, id="garbage"),
        pytest.param(reply(200, role="prefill", phase="Serving", uid="uid-v"), None, None, id="another-pod-has-its-address"),
        pytest.param(
            reply(200, role="prefill", phase="Serving", uid="uid-w"), None, FlipReport("prefill", "Serving"), id="by-its-uid"
        ),
        pytest.param(None, None, None, id="silence"),
        pytest.param(None, FlipReport("prefill", "Serving"), FlipReport("prefill", "Serving"), id="silence-takes-no-word-back"),
        pytest.param(
            reply(200, role="decode", phase="Serving"),
            FlipReport("prefill", "Serving"),
            FlipReport("decode", "Serving"),
            id="new",
        ),
    ],
)
def test_what_a_doubtful_worker_says_and_nobody_else_is_asked(
    answer: Answer | None, before: FlipReport | None, heard: FlipReport | None
):
    asked: list[str] = []

    @asynccontextmanager
    async def connect() -> AsyncIterator[Ask]:
        async def ask(url: str, body: Any = None, within_s: float = 0.0) -> Answer | None:
            asked.append(url)
            return answer

        yield ask

    workers = [observed_pod(name, "decode", 0, ip=name) for name in ("w", "v")]
    known = {"uid-w": before} if before is not None else {}
    hear = FlipFollower(connect).hear(workers, {}, known, {"uid-w", "uid-of-one-that-is-gone"})
    assert asyncio.run(hear) == ({"uid-w": heard} if heard is not None else {})
    assert asked == ["http://w:9000/state"]


@pytest.mark.parametrize(("uid", "asked"), [("uid-d", ["prefill"]), ("uid-e", []), ("", ["prefill"])])
def test_no_pod_is_told_the_role_of_another_one_that_had_its_address(uid: str, asked: list[str]):
    """A node that began anew gives its pods other addresses: what was meant for d changed e, perhaps of another fleet."""
    workers = Workers()
    workers.known = {"w": Worker(role="decode", uid=uid)}
    one = observed_pod("d", "decode", 0, flipping="prefill", ip="w")
    asyncio.run(FlipFollower(workers.connect).follow(parse_fleet(manifest()), [one], {}, {}, {one.uid}))
    assert workers.at("w").asked == asked


def test_a_doubtful_worker_that_does_not_answer_keeps_no_other_from_its_flip():
    """Hundreds of them, each asked for 2 s, took longer than a flip may."""

    async def scenario(world: World, agents: Agents, decodes: list[dict[str, Any]]) -> None:
        silent, answers = decodes[2], asyncio.Event()
        await lead(world)
        agents.read = {silent["metadata"]["name"]: "prefill"}
        connect = agents.connect

        @asynccontextmanager
        async def hanging() -> AsyncIterator[Ask]:
            async with connect() as ask:

                async def slow(url: str, *more: Any, **named: Any) -> Any:
                    if silent["status"]["podIP"] in url:
                        await answers.wait()
                    return await ask(url, *more, **named)

                yield slow

        world.operator.reader.sources.flips._connect = hanging
        (state,) = world.operator._states.values()
        while not state.doubtful:
            await world.step()
        waits = asyncio.create_task(world.operator.reader.read_due())
        await asyncio.sleep(0)
        assert state.doubting
        await resize(world, 2, 2)
        await until(world, lambda: is_told(world))
        moving = await flipping(world)
        assert moving is not None
        await finish(world)
        assert agent_of(agents, moving).role == "prefill"
        assert not waits.done()
        answers.set()
        await waits

    play(scenario)
