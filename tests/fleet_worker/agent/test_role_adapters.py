"""Adapters of a vLLM worker whose engine is started anew for another role: what is asked for meanwhile, and what is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleet_worker.agent.agent import Agent
from fleet_worker.agent.errors import AdapterError
from fleet_worker.agent.stage import FILES
from fleet_worker.config import AdapterSettings
from tests.fleet_worker.agent.test_role import until
from tests.fleet_worker.agent.test_role_vllm import FakeVllm, flip, slowly

STARTING = "engine starting anew, for decode"


class Engines:
    """One vLLM after the other, as its adapter routes answer. `open`: those of the engine of now do."""

    def __init__(self) -> None:
        self.loaded = dict[str, str]()
        self.calls = list[str]()
        self.open = True
        self.slow: asyncio.Event | None = None

    async def load_adapter(self, name: str, path: str, *, inplace: bool) -> str | None:
        self.calls.append(name)
        mine = self.loaded
        if self.slow is not None:
            await self.slow.wait()
        if not self.open or mine is not self.loaded:
            raise AdapterError("EngineSilent", "its connection was closed")
        if name in mine:
            raise AdapterError("BadAdapter", f"The lora adapter '{name}' has already been loaded.")
        mine[name] = path
        return None

    async def unload_adapter(self, name: str) -> None:
        self.loaded.pop(name, None)

    def ended(self) -> None:
        self.loaded, self.open = {}, False


async def told(http: httpx.AsyncClient, *names: str) -> None:
    said = await http.post("/adapters", json=[{"name": name, "source": name} for name in names])
    assert said.status_code == 200


def states(agent: Agent) -> dict[str, str]:
    entries: Any = agent.state()["adapters"]
    return {entry["name"]: entry["state"] for entry in entries}


async def patiently(agent: Agent, expected: dict[str, str]) -> None:
    """Files are copied in a thread."""
    for _ in range(2_000):
        if states(agent) == expected:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(states(agent))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for file in FILES:
            (tmp_path / name / file).write_text(name)
    return tmp_path


def play_flip(root: Path, scenario: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def whole(agent: Agent, engine: FakeVllm, http: httpx.AsyncClient) -> None:
        engines = Engines()
        agent._adapters._engine = engines
        await told(http, "a")
        await patiently(agent, {"a": "Loaded"})
        stop = agent._running.begin_anew

        async def begun_anew(config: Any) -> int:
            engines.ended()
            return await stop(config)

        monkeypatch.setattr(agent._running, "begin_anew", begun_anew)
        await scenario(agent, engine, engines, http)

    flip(whole, monkeypatch, adapters=AdapterSettings(most=4, root=str(root)))  # type: ignore[arg-type]


def test_what_is_asked_for_while_it_starts_waits_and_is_there_before_it_serves(root: Path, monkeypatch: pytest.MonkeyPatch):
    """It was told as loaded while no engine was there; what came then failed, and was the fleet's AdapterFailed."""

    async def scenario(agent: Agent, engine: FakeVllm, engines: Engines, http: httpx.AsyncClient) -> None:
        await http.post("/role", json={"role": "decode"})
        await slowly(agent, STARTING)
        await until(lambda: not engines.open)
        assert states(agent) == {"a": "Loading"}
        await told(http, "a", "b")
        await asyncio.sleep(0.1)
        assert (states(agent), engines.calls) == ({"a": "Loading", "b": "Loading"}, ["a"]), "nobody is asked meanwhile"
        engines.open = engine.answers = True
        await slowly(agent, "")
        assert agent.state()["phase"] == "Serving"
        assert states(agent) == {"a": "Loaded", "b": "Loaded"}
        assert engines.loaded.keys() == {"a", "b"}
        assert sorted(engines.calls) == ["a", "a", "b"]

    play_flip(root, scenario, monkeypatch)


def test_one_that_was_asked_for_again_after_it_gave_no_token_has_its_adapters(root: Path, monkeypatch: pytest.MonkeyPatch):
    """The second time its engine is there already. It had no adapter, and its agent told of those that the one before had."""

    async def scenario(agent: Agent, engine: FakeVllm, engines: Engines, http: httpx.AsyncClient) -> None:
        engine.problem = "HTTP 500"
        engine.answers = True
        await http.post("/role", json={"role": "decode"})
        await slowly(agent, "no first token: HTTP 500")
        assert states(agent) == {"a": "Loading"}, "it serves nothing"
        engine.problem, engines.open = None, True
        assert (await http.post("/role", json={"role": "decode"})).status_code == 202
        await slowly(agent, "")
        assert agent.state()["role"] == "decode"
        assert (states(agent), engines.loaded.keys()) == ({"a": "Loaded"}, {"a"})

    play_flip(root, scenario, monkeypatch)


@pytest.mark.parametrize("ends", ["before", "after"], ids=["before-the-next-answers", "when-the-next-serves"])
def test_what_the_engine_before_says_of_an_adapter_is_nothing_to_the_next(root: Path, monkeypatch: pytest.MonkeyPatch, ends: str):
    """It was asked to load one, and ended."""

    async def scenario(agent: Agent, engine: FakeVllm, engines: Engines, http: httpx.AsyncClient) -> None:
        engines.slow = asyncio.Event()
        await told(http, "a", "b")
        await until_called(engines, ["a", "b"])
        slow, engines.slow = engines.slow, None
        await http.post("/role", json={"role": "decode"})
        await slowly(agent, STARTING)
        await until(lambda: not engines.open)
        if ends == "before":
            slow.set()
        engines.open = engine.answers = True
        if ends == "after":
            await patiently(agent, {"a": "Loaded", "b": "Loading"})
            slow.set()
        await slowly(agent, "")
        assert states(agent) == {"a": "Loaded", "b": "Loaded"}
        assert engines.loaded.keys() == {"a", "b"}
        assert agent._adapters._failed == {}

    play_flip(root, scenario, monkeypatch)


async def until_called(engines: Engines, calls: list[str]) -> None:
    for _ in range(2_000):
        if engines.calls == calls:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(engines.calls)
