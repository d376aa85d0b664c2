"""The tokenizer that an agent gives to routers: the model's own files, or 404."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from fleet_worker.agent.agent import Agent
from tests.fleet_worker.agent.test_role import FakeEngine, play


def test_the_models_own_files_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def scenario(agent: Agent, _: FakeEngine, http: httpx.AsyncClient) -> None:
        assert (await http.get("/tokenizer")).status_code == 404  # the model is not here yet
        agent._folder = tmp_path
        (tmp_path / "tokenizer_config.json").write_text('{"a": 1}')
        (tmp_path / "model.safetensors").write_text("weights")
        assert (await http.get("/tokenizer")).json() == {"reason": "NoTokenizer"}
        (tmp_path / "tokenizer.json").write_text("{}")
        assert (await http.get("/tokenizer")).json() == {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}'}
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff")  # incident: 500, and a traceback for each router that asked
        assert (await http.get("/tokenizer")).json() == {"reason": "NoTokenizer"}

    play(scenario, monkeypatch)
