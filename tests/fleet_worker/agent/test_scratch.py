"""The agent's folder: what a killed one left goes with the next start, what a living one has stays."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet_worker.agent.agent import Agent
from fleet_worker.agent.errors import WorkerError
from fleet_worker.agent.identity import Identity
from tests.fleet_worker.agent.test_command import config

AGENT = """
import sys
from pathlib import Path
from fleet_worker.agent.agent import Agent
from fleet_worker.agent.identity import Identity
from tests.fleet_worker.agent.test_command import config
agent = Agent(config(), Identity("p", "u", "127.0.0.1"))
(copy := Path(agent._scratch.name) / "adapters" / "0123").mkdir(parents=True)
(copy / "adapter_model.safetensors").write_bytes(b"x")
print(agent._scratch.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """/tmp of these agents."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@contextmanager
def running() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """An agent in a process of its own that has a copy of an adapter, until it is killed."""
    with subprocess.Popen([sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_killed_agents_copies_go_when_the_next_one_starts_and_a_living_ones_stay(temporary: Path):
    """With every container that was killed the pod's /tmp held all adapters once more."""
    with running() as (living, kept), running() as (killed, left):
        killed.kill()
        killed.wait()
        assert sorted(temporary.iterdir()) == sorted([kept, left])
        agent = Agent(config(), Identity("p", "u", "127.0.0.1"))
        assert sorted(temporary.iterdir()) == sorted([kept, Path(agent._scratch.name)])
        assert (kept / "adapters" / "0123" / "adapter_model.safetensors").exists()
        agent._scratch.cleanup()
        assert list(temporary.iterdir()) == [kept]
        assert living.poll() is None


def test_where_nothing_can_be_locked_there_is_a_folder_all_the_same(temporary: Path, monkeypatch: pytest.MonkeyPatch):
    def refuses(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refuses)
    agent = Agent(config(), Identity("p", "u", "127.0.0.1"))
    assert list(temporary.iterdir()) == [Path(agent._scratch.name)]
    agent._scratch.cleanup()
    assert list(temporary.iterdir()) == []


def test_another_users_folder_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch):
    theirs = temporary / "fleet-agent-theirs"
    theirs.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    agent = Agent(config(), Identity("p", "u", "127.0.0.1"))
    assert theirs.exists()
    agent._scratch.cleanup()


def test_a_disk_that_a_killed_agent_filled_has_room_again_for_the_next_one(temporary: Path, monkeypatch: pytest.MonkeyPatch):
    """Python finds no temporary folder on a full disk, as it tries to write there: the agent ended before it had looked for what
    the one before had left, with every start of the container."""
    find = tempfile.gettempdir

    def found() -> str:
        if any(temporary.iterdir()):
            raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/']")
        return find()

    (temporary / "fleet-agent-dead/adapters").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "gettempdir", found)
    agent = Agent(config(), Identity("p", "u", "127.0.0.1"))
    assert list(temporary.iterdir()) == [Path(agent._scratch.name)]
    agent._scratch.cleanup()


@pytest.mark.parametrize("at", ["gettempdir", "TemporaryDirectory"])
def test_who_finds_no_room_for_its_folder_says_so(temporary: Path, monkeypatch: pytest.MonkeyPatch, at: str):
    """It was a traceback, of which the fleet's status told the end: No usable temporary directory found."""

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(temporary))

    monkeypatch.setattr(tempfile, at, full)
    with pytest.raises(
        WorkerError, match=f"no folder .* below {temporary}, where [0-9]+ bytes are free: No space left on device"
    ):
        Agent(config(), Identity("p", "u", "127.0.0.1"))
