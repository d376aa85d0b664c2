"""A worker that is told another role: what it answers, when it changes, what stops it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import msgspec
import pytest

from fleet_worker.agent import agent as agent_module
from fleet_worker.agent import life as rules
from fleet_worker.agent.admin import build_app
from fleet_worker.agent.agent import Agent
from fleet_worker.agent.errors import ConfigError
from fleet_worker.agent.identity import Identity, read_identity
from fleet_worker.agent.life import Life, Load
from fleet_worker.agent.role import MAX_BODY_BYTES, Verdict, judge, parse_role
from fleet_worker.config import Role
from tests.fleet_worker.agent.test_command import GOOD_ENV, config
from tests.fleet_worker.agent.test_life import serving

WARMING = rules.engine_started(Life(), 1)
FLIPPING = rules.flip_asked(serving())
FLIP_FAILED = rules.flip_failed(FLIPPING, "not empty within 30 s")
DRAINING = rules.drain_asked(serving(), 1.0)


@pytest.mark.parametrize(
    ("life", "changing_to", "asked", "verdict"),
    [
        pytest.param(serving(), None, "prefill", Verdict(200), id="has-it"),
        pytest.param(serving(), None, "decode", Verdict(202, begin=True), id="begins"),
        pytest.param(FLIPPING, "decode", "decode", Verdict(202), id="asked-again"),
        pytest.param(FLIPPING, "decode", "prefill", Verdict(409, "FlippingRole"), id="back-half-way"),
        pytest.param(FLIP_FAILED, "decode", "decode", Verdict(202, begin=True), id="failed-and-tried-again"),
        pytest.param(FLIP_FAILED, "decode", "prefill", Verdict(202, begin=True), id="failed-and-back"),
        pytest.param(WARMING, None, "decode", Verdict(409, "NotServing"), id="too-early"),
        pytest.param(WARMING, None, "prefill", Verdict(200), id="will-have-it"),
        pytest.param(DRAINING, None, "decode", Verdict(409, "Draining"), id="too-late"),
        pytest.param(DRAINING, None, "prefill", Verdict(409, "Draining"), id="too-late-for-its-own"),
        pytest.param(rules.failed(serving(), "x"), None, "decode", Verdict(409, "Failed"), id="engine-gone"),
    ],
)
def test_what_is_answered(life: Life, changing_to: Role | None, asked: Role, verdict: Verdict):
    assert judge(life, "prefill", changing_to, asked) == verdict


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"role":"router"}', b'{"role":"decode","now":true}', b"[]", b'{"role":1}', b"\xff"]
)
def test_bad_bodies_are_refused(body: bytes):
    with pytest.raises(msgspec.DecodeError):
        parse_role(body)


def test_phases_of_a_flip():
    assert (rules.is_ready(FLIPPING), rules.is_started(FLIPPING), rules.is_live(FLIPPING, 9.0)) == (False, True, True)
    assert not rules.is_ready(rules.engine_checked(FLIPPING, True, 9.0)), "a healthy engine does not end it"
    done = rules.flipped(FLIPPING)
    assert (done.phase, done.epoch, rules.is_ready(done)) == ("Serving", 1, True)
    assert rules.flipped(rules.drain_asked(FLIPPING, 1.0)).phase == "Draining", "a drain is for good"
    stuck = rules.flip_failed(FLIPPING, "not empty")
    assert (stuck.phase, stuck.flip_problem, rules.is_ready(stuck)) == ("FlippingRole", "not empty", False)


class FakeEngine:
    """What the agent hears of its engine."""

    def __init__(self) -> None:
        self.held = Load(0, 0, 0)
        self.problem: str | None = None
        self.first_tokens = 0

    async def load(self) -> Load:
        return self.held

    async def metrics(self) -> str | None:
        return None

    async def first_token(self, _: str) -> str | None:
        self.first_tokens += 1
        return self.problem

    async def close(self) -> None: ...


Scenario = Callable[[Agent, FakeEngine, httpx.AsyncClient], Awaitable[None]]


def play(scenario: Scenario, monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """An agent that serves as a prefill worker, its time made short."""
    monkeypatch.setattr(rules, "NOTICE_S", 0.0)
    monkeypatch.setattr(agent_module, "DRAIN_POLL_S", 0.0)

    async def whole() -> None:
        agent, engine = Agent(config(**changes), Identity("p", "u", "127.0.0.1")), FakeEngine()
        await agent._client.close()
        agent._client, agent._life = engine, serving()  # type: ignore[assignment]
        transport = httpx.ASGITransport(build_app(agent))
        async with httpx.AsyncClient(transport=transport, base_url="http://agent") as http:
            await scenario(agent, engine, http)
        agent._scratch.cleanup()

    asyncio.run(whole())


async def until(check: Callable[[], bool]) -> None:
    for _ in range(1000):
        if check():
            return
        await asyncio.sleep(0)
    raise AssertionError("not reached")


async def state_of(http: httpx.AsyncClient) -> dict[str, object]:
    return (await http.get("/state")).json()


def test_a_worker_empties_itself_gives_a_token_and_then_has_the_new_role(monkeypatch: pytest.MonkeyPatch):
    async def scenario(agent: Agent, engine: FakeEngine, http: httpx.AsyncClient) -> None:
        engine.held = Load(1, 0, 1)
        first = await http.post("/role", json={"role": "decode"})
        assert (first.status_code, first.json()["changing_to"]) == (202, "decode")
        assert (await http.get("/ready")).status_code == 503
        for _ in range(20):
            await asyncio.sleep(0)
        again = await http.post("/role", json={"role": "decode"})
        assert (again.status_code, again.json()["role"], again.json()["phase"]) == (202, "prefill", "FlippingRole")
        assert engine.first_tokens == 0
        assert "fleet_agent_flipping 1" in (await http.get("/metrics")).text
        engine.held = Load(0, 0, 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not agent.ready(), "an unread lease of the old role"
        engine.held = Load(0, 0, 0)
        await until(agent.ready)
        assert engine.first_tokens == 1
        state = await state_of(http)
        assert (state["role"], state["epoch"], state["changing_to"], state["flip_problem"]) == ("decode", 1, None, "")
        assert 'fleet_agent_role_epoch{role="decode"} 1' in (await http.get("/metrics")).text
        assert (await http.post("/role", json={"role": "decode"})).status_code == 200

    play(scenario, monkeypatch)


def test_a_fault_of_our_own_fails_the_change_and_it_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    """The task was gone, and every later request for it was told that it is on its way."""

    async def scenario(agent: Agent, engine: FakeEngine, http: httpx.AsyncClient) -> None:
        sound = engine.first_token

        async def broken(_: str) -> str | None:
            raise ZeroDivisionError("odd")

        engine.first_token = broken  # type: ignore[method-assign]
        await http.post("/role", json={"role": "decode"})
        await until(lambda: agent._change is not None and agent._change.done())
        assert agent.state()["flip_problem"] == "ZeroDivisionError: odd"
        engine.first_token = sound  # type: ignore[method-assign]
        assert (await http.post("/role", json={"role": "decode"})).status_code == 202
        await until(agent.ready)
        assert agent.state()["role"] == "decode"

    play(scenario, monkeypatch)


def test_a_vllm_worker_over_several_nodes_keeps_its_role(monkeypatch: pytest.MonkeyPatch):
    """Its engine was started as a producer or a consumer of KV: after a change it was called decode, and could read nothing."""

    async def scenario(agent: Agent, _: FakeEngine, http: httpx.AsyncClient) -> None:
        assert (await http.post("/role", json={"role": "prefill"})).status_code == 200
        refused = await http.post("/role", json={"role": "decode"})
        assert (refused.status_code, refused.json()["reason"], refused.json()["role"]) == (409, "EngineKeepsRole", "prefill")
        assert agent.ready()

    play(scenario, monkeypatch, engine="vllm", nodes=2)


@pytest.mark.parametrize(
    ("held", "problem", "why"),
    [
        pytest.param(Load(1, 0, 0), None, "not empty within", id="streams-do-not-end"),
        pytest.param(Load(0, 0, 0), "HTTP 500", "no first token: HTTP 500", id="a-broken-engine"),
    ],
)
def test_a_change_that_cannot_be_made_is_told_and_the_worker_stays_out(
    monkeypatch: pytest.MonkeyPatch, held: Load, problem: str | None, why: str
):
    async def scenario(agent: Agent, engine: FakeEngine, http: httpx.AsyncClient) -> None:
        engine.held, engine.problem = held, problem
        await http.post("/role", json={"role": "decode"})
        await until(lambda: bool(agent.state()["flip_problem"]))
        state = await state_of(http)
        assert why in str(state["flip_problem"])
        assert (state["role"], state["phase"], agent.ready()) == ("prefill", "FlippingRole", False)

    play(scenario, monkeypatch, drain_timeout_s=0.001)


@pytest.mark.parametrize(("asked", "epoch"), [("decode", 1), ("prefill", 0)], ids=["tried-again", "back"])
def test_after_a_change_that_failed_either_role_can_be_had(monkeypatch: pytest.MonkeyPatch, asked: Role, epoch: int):
    """It answered 202 for ever with nothing under way, and 409 to its old role."""

    async def scenario(agent: Agent, engine: FakeEngine, http: httpx.AsyncClient) -> None:
        engine.problem = "HTTP 500"
        await http.post("/role", json={"role": "decode"})
        await until(lambda: bool(agent.state()["flip_problem"]))
        engine.problem = None
        if asked == "prefill":
            engine.held = Load(1, 0, 1)  # what runs may go on
        assert (await http.post("/role", json={"role": asked})).status_code == 202
        await until(agent.ready)
        state = await state_of(http)
        assert (state["role"], state["epoch"], state["changing_to"], state["flip_problem"]) == (asked, epoch, None, "")
        assert engine.first_tokens == 2, "nobody depends on an engine that gave none"

    play(scenario, monkeypatch)


def test_a_drain_ends_a_change_and_is_for_good(monkeypatch: pytest.MonkeyPatch):
    async def scenario(agent: Agent, engine: FakeEngine, http: httpx.AsyncClient) -> None:
        engine.held = Load(1, 0, 0)
        await http.post("/role", json={"role": "decode"})
        drained = asyncio.create_task(http.post("/drain"))
        await until(lambda: agent.state()["phase"] == "Draining")
        engine.held = Load(0, 0, 0)
        assert (await drained).json()["drained"] is True
        state = await state_of(http)
        assert (state["role"], state["phase"], state["flip_problem"]) == ("prefill", "Draining", "")
        refused = await http.post("/role", json={"role": "decode"})
        assert (refused.status_code, refused.json()["reason"]) == (409, "Draining")

    play(scenario, monkeypatch)


def test_bodies_are_bounded_and_checked(monkeypatch: pytest.MonkeyPatch):
    async def scenario(agent: Agent, _: FakeEngine, http: httpx.AsyncClient) -> None:
        assert (await http.post("/role", content=b" " * (MAX_BODY_BYTES + 1))).status_code == 413
        assert (await http.post("/role", json={"role": "boss"})).status_code == 400
        assert (await http.get("/role")).status_code == 405
        assert agent.ready()

    play(scenario, monkeypatch)


def test_after_a_restart_the_label_says_the_role():
    given, _ = read_identity({**GOOD_ENV, "FLEET_ROLE": "decode"})
    assert (given.role, read_identity(GOOD_ENV)[0].role) == ("decode", "prefill")
    with pytest.raises(ConfigError, match="FLEET_ROLE"):
        read_identity({**GOOD_ENV, "FLEET_ROLE": "boss"})


@pytest.mark.parametrize("path", ["/role", "/adapters"])
@pytest.mark.parametrize("body", [b'{"role":"\xff"}', b'[{"name":"\xff","source":"x"}]', b"[" * 10_000, b"\xff"])
def test_a_body_that_cannot_be_read_is_400(monkeypatch: pytest.MonkeyPatch, path: str, body: bytes):
    """Incident: bytes that are no UTF-8 were a 500."""

    async def scenario(_: Agent, __: FakeEngine, http: httpx.AsyncClient) -> None:
        answer = await http.post(path, content=body[:1024])
        assert (answer.status_code, answer.json()["reason"]) == (400, "BadRequest")

    play(scenario, monkeypatch)
