"""What the agent says itself never holds it up: probes, drain and its own end wait for no log collector."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fleet_worker.agent.logpump import MAX_HELD, MAX_LINE, unheld

FILLER = b"." * 4_096


@pytest.fixture
def full() -> Iterator[tuple[int, int]]:
    """A pipe (reading, writing end) that takes nothing any more, because nobody reads it."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETFL, os.O_NONBLOCK)
    try:
        while True:
            os.write(writing, FILLER)
    except BlockingIOError:
        fcntl.fcntl(writing, fcntl.F_SETFL, 0)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def all_of(reading: int, end: bytes) -> bytes:
    found = b""
    while end not in found:
        found += os.read(reading, 65_536)
    return found.lstrip(b".")


def test_a_worker_whose_log_nobody_reads_comes_to_its_end(full: tuple[int, int]):
    """Incident: print() blocked on the full pipe, and with it every probe and the process's end."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("FLEET_")}
    argv = [sys.executable, "-m", "fleet_worker"]
    ended = subprocess.run(argv, check=False, env=env, stdout=full[1], stderr=full[1], timeout=60)
    assert ended.returncode == 2


def test_what_is_said_while_nobody_reads_is_bounded_and_what_was_dropped_is_told(full: tuple[int, int]):
    reading, writing = full
    before = sys.stderr
    with unheld(writing, writing, end_s=0.1):
        for number in range(3 * MAX_HELD):
            print(f"line {number}", file=sys.stderr, flush=True)
        logging.StreamHandler().handle(logging.makeLogRecord({"msg": "as uvicorn says it"}))
    assert sys.stderr is before
    found = all_of(reading, b"as uvicorn says it\n").decode()
    lines = found.splitlines()
    assert any(line.startswith("LogDropped: ") for line in lines)
    assert lines[-2] == f"line {3 * MAX_HELD - 1}"
    assert len(lines) <= MAX_HELD + 10


def test_all_is_written_in_order_before_the_end():
    (out, for_out), (err, for_err) = os.pipe(), os.pipe()  # in one their lines would mix as they like
    with unheld(for_out, for_err):
        print("one", end=" ")
        print("line")
        print("a\nb", file=sys.stderr)
        print("ä" * MAX_LINE, file=sys.stderr)
        print("cut off", end="")
    os.close(for_out)
    os.close(for_err)
    with os.fdopen(out, "rb") as opened:
        assert opened.read().decode() == "one line\ncut off\n", "a line that was not ended is one now"
    with os.fdopen(err, "rb") as opened:
        head, middle, rest = opened.read().decode().partition("a\nb\n")
    assert (head, middle, rest.count("ä")) == ("", "a\nb\n", MAX_LINE)


def test_an_error_that_nobody_expected_is_said_before_the_end():
    reading, writing = os.pipe()
    with pytest.raises(SystemExit) as ended, unheld(writing, writing):
        raise ValueError("a bug")
    os.close(writing)
    assert ended.value.code == 1
    with os.fdopen(reading, "rb") as opened:
        assert b"ValueError: a bug\n" in opened.read()
