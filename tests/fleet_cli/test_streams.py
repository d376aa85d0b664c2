"""Output that cannot be written, input that is not there: one line, the right exit code, never a traceback."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fleet_cli.errors import RunError
from fleet_cli.up.screen import PlainScreen

GOOD = {
    "apiVersion": "inferencefleet.io/v1alpha1",
    "kind": "InferenceFleet",
    "metadata": {"name": "good"},
    "spec": {"model": {"source": "file:///m"}, "tiers": [{"name": "a", "accelerator": {"type": "cpu"}}]},
}
FLEET = [sys.executable, "-m", "fleet_cli.main"]


def fleet(
    *arguments: str, close: int | None = None, stdout: int | None = subprocess.PIPE, **environment: str
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) with one standard descriptor closed."""
    shut: Callable[[], None] | None = None if close is None else lambda: os.close(close)
    done = subprocess.run(
        [*FLEET, *arguments], stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        preexec_fn=shut, env={**os.environ, **environment},
    )  # fmt: skip
    return done.returncode, done.stdout or "", done.stderr


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    return str(path)


@pytest.mark.parametrize("command", [["validate"], ["crds"], ["--help"], ["--version"]], ids=lambda c: c[0])
def test_a_full_disk_is_one_line_and_1(command: list[str], good: str):
    with open("/dev/full", "w") as full:
        code, _, said = fleet(*command, *([good] if command == ["validate"] else []), stdout=full.fileno())
    assert (code, said) == (1, "fleet: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize("command", ["validate", "crds"])
def test_a_reader_that_left_is_141_without_a_word(command: str, good: str):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        code, _, said = fleet(command, *([good] if command == "validate" else []), stdout=writing)
    finally:
        os.close(writing)
    assert (code, said) == (141, "")


def test_closed_streams(good: str):
    assert fleet("validate", good, close=1) == (0, "", "")
    assert fleet("validate", good, close=2)[:2] == (0, f"{good}: inferencefleet.inferencefleet.io/good is valid\n")
    assert fleet("validate", "none.yaml", close=2) == (2, "", "")
    assert fleet("validate", "-", close=0) == (2, "", "fleet: cannot read -: standard input is closed\n")


def test_names_that_the_encoding_does_not_have(tmp_path: Path):
    path = tmp_path / "f\u00fcr.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    code, out, said = fleet("validate", str(path), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (code, "f\\xfcr.yaml" in out, said) == (0, True, "")
    code, _, said = fleet("validate", str(tmp_path / "\u65e5.yaml"), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (code, "\\u65e5.yaml: No such file" in said, "Traceback" in said) == (2, True, False)


class Full(io.StringIO):
    """Takes `room` writes, then the disk is full until somebody makes room."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, text: str) -> int:
        if self.room <= 0 and text:
            raise OSError(28, "No space left on device")
        self.room -= 1
        return super().write(text)


def said(out: Full, *, room: int = 0, end: Exception | None = None) -> None:
    with PlainScreen(out, lambda: 0.0) as screen:
        screen.say("one")
        screen.say("two")
        out.room = room
        screen.say("three")
        if end is not None:
            raise end


def test_a_full_log_disk_does_not_stop_a_fleet_and_is_said_at_the_end():
    out = Full(room=1)
    with pytest.raises(RunError, match="cannot write to standard output: No space left on device"):
        said(out, room=5)
    assert [line.split("] ")[1] for line in out.getvalue().splitlines()] == ["one", "three"]


def test_what_went_wrong_is_more_than_a_log_that_could_not_be_written():
    with pytest.raises(RunError, match="died"):
        said(Full(room=0), end=RunError("died"))
