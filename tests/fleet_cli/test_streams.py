"""Output that cannot be written, input that is not there: one line, the right exit code, never a traceback."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest
import yaml

from fleet_cli.errors import RunError
from fleet_cli.up import screen as screens
from fleet_cli.up.screen import PlainScreen
from fleet_cli.up.view import snapshot

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


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """A small one, which nobody reads yet."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with open(writing, "w") as out:
        yield reading, out
        os.close(reading)


def while_nobody_reads(work: Callable[[], None]) -> None:
    """`work`, which must not wait for a reader: the operator and the probes run in the thread that writes."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


LINES = [f"{number:04} {'x' * 90}" for number in range(100)]


def test_a_pipe_that_nobody_reads_holds_up_no_fleet_and_a_late_reader_misses_nothing(pipe: tuple[int, TextIO]):
    """`fleet up | less`: after 64 KB no probe, no operator and no signal came through any more."""
    reading, out = pipe
    screen = PlainScreen(out, lambda: 0.0)
    while_nobody_reads(lambda: [screen.say(line) for line in LINES] and None)
    found = b""
    os.set_blocking(reading, False)
    for _ in range(100):
        with contextlib.suppress(BlockingIOError):
            found += os.read(reading, 4096)
        screen.show(snapshot([], {}))
    assert [line.partition("] ")[2] for line in found.decode().splitlines()] == LINES
    assert screen.lost == ""


def test_what_nobody_ever_reads_is_bounded_and_said_at_the_end(pipe: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(screens, "LAST_WORDS_S", 0.1)
    screen, ends = PlainScreen(pipe[1], lambda: 0.0), []

    def talk() -> None:
        with screen:
            for line in LINES * 20:
                screen.say(line)

    def work() -> None:
        with pytest.raises(RunError, match="cannot write to standard output: nobody reads it"):
            talk()
        ends.append(len(screen._unsent))

    while_nobody_reads(work)
    assert ends[0] <= screens.UNSENT
