"""Which environment an engine process really gets."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from fleet_worker.agent.command import EngineCommand
from fleet_worker.agent.supervise import EngineProcess, watch_children

WRITE = "import os, pathlib; pathlib.Path(os.environ['OUT']).write_text(os.environ['KNOB'])"


async def ended(command: EngineCommand) -> int:
    engine = EngineProcess(command)
    watch_children(asyncio.get_running_loop(), engine.reap)
    engine.start()
    return await asyncio.wait_for(engine.exited, 10)


@pytest.mark.parametrize(
    ("mine", "command", "seen"),
    [
        (None, {"defaults": {"KNOB": "default"}}, "default"),
        ("users", {"defaults": {"KNOB": "default"}}, "users"),
        ("users", {"defaults": {"KNOB": "default"}, "env": {"KNOB": "ours"}}, "ours"),
    ],
    ids=["default", "the-users-wins-over-a-default", "what-we-must-set-wins"],
)
def test_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: str | None, command: dict[str, dict[str, str]], seen: str
):
    monkeypatch.setenv("OUT", str(tmp_path / "seen"))
    if mine is not None:
        monkeypatch.setenv("KNOB", mine)
    assert asyncio.run(ended(EngineCommand((sys.executable, "-c", WRITE), **command))) == 0
    assert (tmp_path / "seen").read_text() == seen
