"""A vLLM worker that is told another role: its engine is started anew, for that one, and nobody is misled meanwhile."""

from __future__ import annotations

import asyncio
import os

import httpx
import pytest

from fleet_worker.agent import life as rules
from fleet_worker.agent import running as running_module
from fleet_worker.agent.agent import Agent
from fleet_worker.agent.command import EngineCommand, Place
from fleet_worker.agent.life import Load
from fleet_worker.config import KvSettings, WorkerConfig
from tests.fleet_worker.agent.test_life import serving
from tests.fleet_worker.agent.test_role import FLIPPING, FakeEngine, Scenario, play, state_of

PLACE = Place("/m", "127.0.0.1")
LASTS, ENDS = ("sleep", "100"), ("sh", "-c", "echo no such role >&2; exit 3")


class FakeVllm(FakeEngine):
    """Empty. `answers`: its port is open."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Load(0, 0, None, open=0)
        self.answers = False

    async def healthy(self) -> bool:
        return self.answers


def flip(scenario: Scenario, monkeypatch: pytest.MonkeyPatch, decode: tuple[str, ...] = LASTS, **changes: object) -> list[str]:
    """A prefill worker of vLLM whose engine runs; `decode`: what one for the other role is. For which roles one was started."""
    started: list[str] = []

    def command(config: WorkerConfig, _: Place) -> EngineCommand:
        started.append(config.role)
        return EngineCommand(LASTS if config.role == "prefill" else decode)

    async def whole(agent: Agent, _: FakeEngine, http: httpx.AsyncClient) -> None:
        engine = FakeVllm()
        agent._client = engine  # type: ignore[assignment]
        agent._life = rules.engine_started(agent._life, None)
        agent._life = rules.engine_checked(agent._life, True, 0.0)
        agent._running.begin(agent._config, PLACE)
        agent._engine_answers.set()
        keeping = asyncio.create_task(agent._keep_adapters())
        try:
            await scenario(agent, engine, http)
        finally:
            ending = [task for task in (keeping, agent._change) if task is not None]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            await agent._running.stop()

    monkeypatch.setattr(running_module, "engine_command", command)
    monkeypatch.setattr(running_module, "CHECK_EVERY_S", 0.0)
    play(whole, monkeypatch, engine="vllm", kv=KvSettings(lease_s=0.0), **changes)
    return started


async def slowly(agent: Agent, phase: str) -> None:
    """Processes end and begin meanwhile."""
    for _ in range(1_000):
        if agent.state()["detail"] == phase:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(agent.state())


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_its_engine_is_started_anew_and_nothing_is_red_meanwhile(monkeypatch: pytest.MonkeyPatch):
    async def scenario(agent: Agent, engine: FakeVllm, http: httpx.AsyncClient) -> None:
        process = agent._running.process
        assert process is not None
        old = process._process.pid  # type: ignore[union-attr]
        engine.held = Load(1, 0, None, open=1)
        assert (await http.post("/role", json={"role": "decode"})).status_code == 202
        for _ in range(20):
            await asyncio.sleep(0)
        assert agent._running.process is process, "it has a request"
        assert not agent.ready()
        engine.held = Load(0, 0, None, open=0)
        await slowly(agent, "engine starting anew, for decode")
        await until_anew(agent, old)
        agent._life = rules.engine_checked(agent._life, False, 1.0)
        assert (agent.live(), agent.started(), agent.ready()) == (True, True, False)
        state = await state_of(http)
        assert (state["role"], state["phase"], state["changing_to"]) == ("prefill", "FlippingRole", "decode")
        assert gone(old)
        assert engine.first_tokens == 0
        engine.answers = True
        await slowly(agent, "")
        state = await state_of(http)
        assert (state["role"], state["phase"], state["epoch"], state["flip_problem"]) == ("decode", "Serving", 1, "")
        assert state["engine_pid"] not in (None, old)
        text = (await http.get("/metrics")).text
        assert 'fleet_agent_role_epoch{role="decode"} 1' in text
        assert "fleet_agent_engine_start_seconds " in text
        assert (agent._life.anew_since, agent._holds_any()) == (None, True)

    assert flip(scenario, monkeypatch) == ["prefill", "decode"]  # type: ignore[arg-type]


async def until_anew(agent: Agent, old: int) -> None:
    for _ in range(1_000):
        if agent.state()["engine_pid"] not in (None, old):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(agent.state())


def test_an_engine_that_ends_on_its_way_is_told_and_its_old_role_can_be_had(monkeypatch: pytest.MonkeyPatch):
    async def scenario(agent: Agent, engine: FakeVllm, http: httpx.AsyncClient) -> None:
        losing = asyncio.create_task(agent._engine_lost())
        await http.post("/role", json={"role": "decode"})
        await slowly(agent, "its engine ended (exit code 3): no such role")
        state = await state_of(http)
        assert (state["role"], state["phase"], agent.ready()) == ("prefill", "FlippingRole", False)
        assert not losing.done(), "the agent stays, to say why"
        silent = rules.engine_checked(agent._life, False, 1.0)
        assert not rules.is_live(rules.engine_checked(silent, False, 20.0), 20.0), "and is restarted when nobody asks"
        engine.answers = True
        assert (await http.post("/role", json={"role": "prefill"})).status_code == 202
        await slowly(agent, "")
        state = await state_of(http)
        assert (state["role"], state["epoch"], state["phase"]) == ("prefill", 0, "Serving")
        losing.cancel()

    assert flip(scenario, monkeypatch, ENDS) == ["prefill", "decode", "prefill"]  # type: ignore[arg-type]


def test_a_worker_that_is_to_go_while_its_engine_starts_has_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch):
    async def scenario(agent: Agent, engine: FakeVllm, http: httpx.AsyncClient) -> None:
        await http.post("/role", json={"role": "decode"})
        await slowly(agent, "engine starting anew, for decode")
        engine.held = Load(None, None, None)
        assert (await http.post("/drain")).json()["drained"] is True
        assert (await state_of(http))["phase"] == "Draining"

    flip(scenario, monkeypatch, drain_timeout_s=600.0)  # type: ignore[arg-type]


def test_an_engine_that_ends_by_itself_is_noticed_before_and_after_a_change(monkeypatch: pytest.MonkeyPatch):
    async def scenario(agent: Agent, engine: FakeVllm, http: httpx.AsyncClient) -> None:
        losing = asyncio.create_task(agent._engine_lost())
        engine.answers = True
        await http.post("/role", json={"role": "decode"})
        await slowly(agent, "")
        await asyncio.sleep(0.05)
        assert not losing.done(), "the first one was ended on purpose"
        pid = agent.state()["engine_pid"]
        assert isinstance(pid, int)
        os.kill(pid, 9)
        await asyncio.wait_for(losing, 10)

    flip(scenario, monkeypatch)  # type: ignore[arg-type]


def test_silence_is_no_fault_while_an_engine_starts_and_only_so_long():
    anew = rules.engine_anew(FLIPPING, 100.0)
    silent = rules.engine_checked(anew, False, 101.0)
    assert rules.is_live(silent, 100.0 + rules.ENGINE_START_S)
    late = rules.engine_checked(silent, False, 100.0 + rules.ENGINE_START_S)
    assert not rules.is_live(late, 100.0 + rules.ENGINE_START_S + rules.ENGINE_SILENCE_S)
    failed = rules.engine_checked(rules.flip_failed(silent, "x"), False, 200.0)
    assert not rules.is_live(failed, 200.0 + rules.ENGINE_SILENCE_S)
    assert rules.flipped(anew).anew_since is None
    assert rules.engine_started(anew, 7).phase == "FlippingRole"
    assert rules.engine_anew(serving(), 1.0).unhealthy_since is None
