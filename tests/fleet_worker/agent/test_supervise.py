"""Which environment an engine process really gets."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from fleet_worker.agent.command import EngineCommand
from fleet_worker.agent.supervise import EngineProcess, watch_children

WRITE = "import os, pathlib; pathlib.Path(os.environ['OUT']).write_text(os.environ['KNOB'])"


ENGINE_WITH_A_CHILD = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""
TIDY_CHILD = """
import os, pathlib, time
parent = os.getppid()
print("ready", flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
time.sleep(0.3)
pathlib.Path(os.environ["OUT"]).write_text("tidied")
"""
STUBBORN_CHILD = """
import os, pathlib, time
pathlib.Path(os.environ["OUT"]).write_text(str(os.getpid()))
print("ready", flush=True)
time.sleep(60)
"""


async def stopped(child: str) -> None:
    engine = EngineProcess(EngineCommand((sys.executable, "-c", ENGINE_WITH_A_CHILD, child)))
    watch_children(asyncio.get_running_loop(), engine.reap)
    engine.start()
    for _ in range(1_000):
        if "ready" in engine.last_words():
            break
        await asyncio.sleep(0.01)
    await engine.stop(5.0)


def test_a_child_that_tidies_up_after_its_engine_is_let(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """vLLM's last process removes the shared memory of the others."""
    monkeypatch.setenv("OUT", str(tmp_path / "seen"))
    asyncio.run(stopped(TIDY_CHILD))
    assert (tmp_path / "seen").read_text() == "tidied"


def test_a_child_that_stays_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUT", str(tmp_path / "seen"))
    monkeypatch.setattr("fleet_worker.agent.supervise.LEFTOVERS_S", 0.2)
    asyncio.run(stopped(STUBBORN_CHILD))
    assert ends((tmp_path / "seen").read_text())


def ends(pid: str) -> bool:
    """A killed process needs a moment to go, and is a zombie until somebody reaps it."""
    for _ in range(1_000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


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
