"""What a `fleet up` that was killed left: its logs stay, its volumes go with the next one."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from fleet_cli.errors import RunError
from fleet_cli.up.state import LOCK, state_folder

POD = "0f8fad5b-d9cb-469f-a165-70867728950e"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def used(folder: Path, *, lock: bool = True) -> tuple[Path, Path]:
    """A folder with a model in a pod's volume, and a log."""
    weights, log = folder / "pods" / POD / "model" / "model.safetensors", folder / "logs" / "operator.log"
    for file in (weights, log, *([folder / LOCK] if lock else [])):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    return weights, log


def test_volumes_of_a_killed_one_go_with_the_next_and_logs_stay(root: Path):
    """Each kill (no memory was left) kept a copy of the model for every worker in the temporary folder, for ever."""
    weights, log = used(root / "fleet-up-killed")
    with state_folder(None):
        assert not weights.exists()
        assert log.exists()


def test_volumes_in_a_chosen_folder_go_and_what_is_the_users_stays(root: Path):
    weights, log = used(root / "state")
    own = root / "state" / "pods" / "mine" / "notes.txt"
    own.parent.mkdir()
    own.write_text("x")
    with state_folder(root / "state"):
        assert (weights.exists(), log.exists(), own.exists()) == (False, True, True)


def test_volumes_of_those_that_run_and_of_others_stay(root: Path):
    running, _ = used(root / "fleet-up-running")
    older, _ = used(root / "fleet-up-older", lock=False)
    elsewhere, _ = used(root / "elsewhere")
    (root / "fleet-up-link").symlink_to(root / "elsewhere")
    lock = os.open(root / "fleet-up-running" / LOCK, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with state_folder(None) as mine:
        weights, _ = used(mine)
        with state_folder(None):
            assert all(one.exists() for one in (running, older, elsewhere, weights))
    os.close(lock)
    assert not mine.exists()


def test_logs_that_explain_a_failure_are_left_without_a_lock(root: Path):
    with pytest.raises(RunError), state_folder(None) as folder:
        raise RunError("died")
    assert list(folder.iterdir()) == []
