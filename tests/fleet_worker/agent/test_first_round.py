"""A worker that starts, or whose container starts again, has its adapters before it is ready; a broken one does not keep it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fleet_worker.agent import life
from fleet_worker.agent.agent import Agent
from fleet_worker.agent.errors import AdapterError
from fleet_worker.agent.identity import Identity
from fleet_worker.agent.stage import FILES
from fleet_worker.config import ADAPTERS_ENV, AdapterSettings, AdapterWish, WorkerConfig, encode_adapters


class Engine:
    """Answers at once, loads when the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked: list[str] = []
        self.both = asyncio.Event()

    async def first_token(self, model: str) -> str | None:
        return None

    async def load_adapter(self, name: str, path: str, *, inplace: bool) -> str | None:
        self.asked.append(name)
        if len(self.asked) == 2:
            self.both.set()
        await self.gate.wait()
        if name == "broken":
            raise AdapterError("BadAdapter", "it is broken")
        return None


def test_ready_means_that_every_adapter_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("good", "broken"):
        (tmp_path / name).mkdir()
        for file in FILES:
            (tmp_path / name / file).write_text(name)
    wished = [AdapterWish(name=name, source=name) for name in ("good", "broken")]
    monkeypatch.setenv(ADAPTERS_ENV, encode_adapters(wished))
    config = WorkerConfig(
        fleet="f", namespace="n", tier="t", role="decode", revision="r", compat="c", model="m", served_name="tiny",
        adapters=AdapterSettings(most=2, root=str(tmp_path)),
    )  # fmt: skip

    async def scenario() -> None:
        agent, engine = Agent(config, Identity("pod", "uid", "127.0.0.1")), Engine()
        await agent._client.close()
        agent._client = agent._adapters._engine = engine  # type: ignore[assignment]
        agent._life = life.engine_started(agent._life, 1)
        keeping = asyncio.create_task(agent._keep_adapters())
        warming = asyncio.create_task(agent._warmed_up())
        try:
            await asyncio.wait_for(engine.both.wait(), 10)
            assert not warming.done()
            assert not agent.ready()
            assert agent.live()
            engine.gate.set()
            assert await asyncio.wait_for(warming, 10)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            agent._scratch.cleanup()
        agent._life = life.engine_checked(agent._life, True, 0.0)
        assert agent.ready()
        assert {e["name"]: e["state"] for e in agent.state()["adapters"]} == {"good": "Loaded", "broken": "Failed"}  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_an_annotation_that_somebody_broke_stops_nobody(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from fleet_worker.agent.adapters import wished_at_start

    for broken in ("{", '[{"name":"a\udcff","source":"x"}]', "[" * 100_000):
        assert wished_at_start({ADAPTERS_ENV: broken}) == ()
        assert "BadAdapters: FLEET_ADAPTERS" in capsys.readouterr().err
    assert wished_at_start({}) == wished_at_start({ADAPTERS_ENV: ""}) == ()
