"""What hangs is red, and the tests behind it run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
CONFTEST = """
import sys
sys.path.insert(0, {here!r})
from tests import hanging
from tests.hanging import pytest_timeout_cancel_timer, pytest_timeout_set_timer
hanging.AGAIN_S = 1.5
"""
TESTS = """
import asyncio, time
import uvloop

def spins():
    while True:
        time.sleep(0.01)

async def in_a_callback(again):
    loop = asyncio.get_running_loop()
    def calls():
        if again:
            loop.call_soon(calls)  # as a socket that stays readable
        spins()
    loop.call_soon(calls)
    await asyncio.Event().wait()

def test_asyncio():
    asyncio.run(in_a_callback(False))

def test_asyncio_again():
    asyncio.run(in_a_callback(True))

async def waits():
    await asyncio.Event().wait()

def test_waits():
    asyncio.run(waits())

def test_behind_them():
    pass
"""
NO_END = """
def test_uvloop():
    uvloop.run(in_a_callback(True))
"""


def pytest_of(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.format(here=str(HERE)))
    (folder / "test_them.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "1", "-p", "no:cacheprovider", "test_them.py"]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        pytest.fail("it hangs")


def test_what_spins_in_a_callback_of_a_loop_is_red(tmp_path: Path):
    """The exception of its timeout was caught there and logged: the run hung for ever (a broken bound of TLS handshakes)."""
    run = pytest_of(tmp_path, TESTS)
    assert (run.returncode, "3 failed, 1 passed" in run.stdout) == (1, True), run.stdout + run.stderr


def test_what_nothing_ends_ends_the_run_and_is_told(tmp_path: Path):
    run = pytest_of(tmp_path, TESTS + NO_END)
    assert run.returncode == 1
    assert "Timeout (" in run.stderr
    assert "in test_uvloop" in run.stderr
