"""SIGTERM: what runs is drained within its bound, once, whether or not preStop came before it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from filelock import FileLock

from fleet_worker.agent import agent as agent_module
from fleet_worker.agent import life as rules
from fleet_worker.agent.agent import Agent
from fleet_worker.agent.alone import alone
from fleet_worker.agent.errors import ModelError
from fleet_worker.agent.identity import Identity
from fleet_worker.agent.life import Life, Load
from fleet_worker.config import CONFIG_ENV, POD_IP_ENV, POD_NAME_ENV, POD_UID_ENV, KvSettings, Ports, WorkerConfig, encode
from tests.fleet_worker.agent.test_command import config
from tests.fleet_worker.agent.test_role import FakeEngine, play, until


async def some_steps() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("prestop", [False, True], ids=["no-preStop", "preStop-still-waits"])
def test_a_stream_is_not_cut_by_sigterm(monkeypatch: pytest.MonkeyPatch, prestop: bool):
    """The hook got a 503, and SIGTERM cut every stream."""

    async def scenario(agent: Agent, engine: FakeEngine, http: httpx.AsyncClient) -> None:
        engine.held = Load(1, 0, 0)
        hook = asyncio.create_task(http.get("/drain")) if prestop else None
        await some_steps()
        agent.ask_to_stop()
        await some_steps()
        assert (agent.state()["phase"], agent.ready(), agent._stop.is_set()) == ("Draining", False, False)
        drained = agent._drained
        engine.held = Load(0, 0, 0)
        await until(agent._stop.is_set)
        assert agent._drained is drained, "drained twice"
        if hook is not None:
            assert (await hook).json()["drained"] is True

    play(scenario, monkeypatch)


def test_after_preStop_nothing_is_waited_for_again(monkeypatch: pytest.MonkeyPatch):
    """Its time counts in the grace period, and is used up."""

    async def scenario(agent: Agent, engine: FakeEngine, http: httpx.AsyncClient) -> None:
        engine.held = Load(1, 0, 0)
        assert (await http.get("/drain")).json()["drained"] is False
        agent.ask_to_stop()
        await some_steps()
        assert agent._stop.is_set()

    play(scenario, monkeypatch, drain_timeout_s=0.001)


@pytest.mark.parametrize("silent_s", [rules.ENGINE_SILENCE_S - 5, rules.ENGINE_SILENCE_S + 5])
def test_a_stuck_engine_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, silent_s: float):
    """The kubelet restarts such a worker: its drain would take the whole of drainTimeout, an hour maybe, for nothing."""

    async def scenario(agent: Agent, engine: FakeEngine, _: httpx.AsyncClient) -> None:
        engine.held = Load(1, 0, 0)
        agent._life = rules.engine_checked(agent._life, False, time.monotonic() - silent_s)
        agent.ask_to_stop()
        await some_steps()
        assert agent._stop.is_set() is (silent_s > rules.ENGINE_SILENCE_S)
        engine.held = Load(0, 0, 0)
        await until(agent._stop.is_set)

    play(scenario, monkeypatch)


def test_a_second_sigterm_ends_now(monkeypatch: pytest.MonkeyPatch):
    async def scenario(agent: Agent, engine: FakeEngine, _: httpx.AsyncClient) -> None:
        engine.held = Load(1, 0, 0)
        agent.ask_to_stop()
        await some_steps()
        assert not agent._stop.is_set()
        agent.ask_to_stop()
        assert agent._stop.is_set()
        for task in (agent._ending, agent._drained):
            assert task is not None
            task.cancel()
        await asyncio.gather(agent._ending, agent._drained, return_exceptions=True)  # type: ignore[arg-type]

    play(scenario, monkeypatch)


@pytest.mark.parametrize(
    "life", [Life(), rules.engine_started(Life(), 7), rules.failed(Life(), "gone")], ids=lambda life: life.phase
)
def test_before_the_first_request_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch, life: Life):
    """A pod that was deleted while its model was fetched stayed for the whole time of a drain: no engine said it was empty."""

    async def scenario(agent: Agent, engine: FakeEngine, http: httpx.AsyncClient) -> None:
        engine.held = Load(None, None, None)
        agent._life = life
        agent.ask_to_stop()
        assert agent._stop.is_set()
        assert (await asyncio.wait_for(http.get("/drain"), 10)).json()["drained"] is True

    play(scenario, monkeypatch)


def test_a_drain_before_the_engine_is_there_stays_one():
    draining = rules.engine_started(rules.drain_asked(Life(), 1.0), 42)
    assert not rules.is_ready(rules.engine_checked(draining, True, 2.0))
    assert (draining.phase, draining.engine_pid) == ("Draining", 42)


def test_the_signal_means_that(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rules, "NOTICE_S", 0.0)
    monkeypatch.setattr(agent_module, "DRAIN_POLL_S", 0.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def whole() -> int:
        agent, engine = Agent(config(ports=Ports(agent=port)), Identity("p", "u", "127.0.0.1")), FakeEngine()
        await agent._client.close()
        agent._client = engine  # type: ignore[assignment]
        agent._life = rules.engine_checked(rules.engine_started(Life(), 1), True, 0.0)
        agent._prepare_and_watch = agent._stop.wait  # type: ignore[method-assign, assignment]
        engine.held = Load(1, 0, 0)
        running = asyncio.create_task(agent.run())
        await some_steps()
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: agent.state()["phase"] == "Draining")
        await some_steps()
        assert not running.done()
        engine.held = Load(0, 0, 0)
        return await asyncio.wait_for(running, 10)

    assert asyncio.run(whole()) == 0


def preparing(tmp_path: Path, port: int, **change: Any) -> subprocess.Popen[bytes]:
    """A worker process that does not come to its engine."""
    made = config(ports=Ports(agent=port), **change)
    env = {**os.environ, CONFIG_ENV: encode(made), POD_NAME_ENV: "p", POD_UID_ENV: "u", POD_IP_ENV: "127.0.0.1"}
    env |= {"FLEET_MODEL_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen([sys.executable, "-c", WORKER], env=env, stderr=subprocess.DEVNULL)


WORKER = """
import asyncio, sys
from fleet_worker.agent import fabric, hub
from fleet_worker.__main__ import main
hub.LOCK_TELL_S = 0.1
fabric.PROBE = (sys.executable, "-c", "import time; time.sleep(40)")
sys.argv = ["fleet-worker"]
sys.exit(main())
"""


def said(port: int) -> str:
    try:
        return str(httpx.get(f"http://127.0.0.1:{port}/state", trust_env=False).json()["detail"])
    except httpx.HTTPError:
        return ""


@pytest.mark.parametrize(
    ("change", "busy_with"),
    [
        ({"model": "hf://acme/tiny"}, "waiting: another process fetches hf://acme/tiny"),
        ({"kv": KvSettings(transport="tcp")}, "proving transport tcp"),
    ],
    ids=["fetching", "proving"],
)
def test_a_worker_that_prepares_ends_when_it_is_told(tmp_path: Path, change: dict[str, Any], busy_with: str):
    """Incident: the thread that fetched was waited for, and the probe's time too: the pod stayed until it was killed."""
    (tmp_path / ".inferencefleet").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with FileLock(tmp_path / ".inferencefleet" / "acme--tiny.lock"):
        worker = preparing(tmp_path, port, **change)
        try:
            end = time.monotonic() + 60
            while said(port) != busy_with:
                assert time.monotonic() < end
                time.sleep(0.05)
            worker.terminate()
            assert worker.wait(15) == 0
        finally:
            worker.kill()
            worker.wait()


def test_what_a_fetch_tells_is_noted_between_two_steps_of_the_agents(monkeypatch: pytest.MonkeyPatch):
    """The fetch's thread put a life back that it had read before a drain began: the worker became ready after its preStop hook
    had been told that it was drained, and its SIGTERM then waited for no stream."""
    threads, noted = [], rules.noted

    def fetched(_: WorkerConfig, progress: Callable[[str], None]) -> Path:
        progress("fetching")
        return Path("/m")

    def watched(life: Life, detail: str) -> Life:
        threads.append(threading.current_thread())
        return noted(life, detail)

    async def scenario(agent: Agent, _: FakeEngine, __: httpx.AsyncClient) -> None:
        assert await agent._prepared() == Path("/m")
        assert (threads, agent.state()["detail"]) == ([threading.current_thread()], "fetching")

    monkeypatch.setattr(agent_module, "prepare_for", fetched)
    monkeypatch.setattr(rules, "noted", watched)
    play(scenario, monkeypatch)


def test_work_that_is_left_alone_gives_what_it_found():
    def broken() -> None:
        raise ModelError("no such folder")

    assert asyncio.run(alone(max, 1, 2)) == 2
    with pytest.raises(ModelError, match="no such folder"):
        asyncio.run(alone(broken))


@pytest.mark.parametrize("ended", [5, 6, None], ids=["idle", "one-came-and-went", "did-not-say"])
def test_a_prefill_that_nobody_saw_running_keeps_its_lease(monkeypatch: pytest.MonkeyPatch, ended: int | None):
    """vLLM counts no leases. A prefill of some milliseconds fits between two looks: the worker was idle for long, and was gone
    before the KV was read."""

    async def scenario(agent: Agent, engine: FakeEngine, _: httpx.AsyncClient) -> None:
        engine.held = Load(0, 0, None, 5)
        await agent._observe()
        agent._busy_at = time.monotonic() - 60
        engine.held = Load(0, 0, None, ended)
        agent.ask_to_stop()
        await some_steps()
        assert agent._stop.is_set() is (ended != 6)
        agent.ask_to_stop()

    play(scenario, monkeypatch, engine="vllm")
