"""Which CPython `make setup` takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleet_cli import interpreter
from fleet_cli.interpreter import Interpreter, chosen, found, timed


@pytest.mark.parametrize(
    ("why", "times", "taken"),
    [
        ("one alone", [0.020], 0),
        ("alike: the default stays, or every setup would make another environment", [0.020, 0.019, 0.018], 0),
        ("a build without optimisation gives way", [0.030, 0.020], 1),
        ("the fastest of several", [0.030, 0.024, 0.020], 2),
        ("the default is the fastest", [0.020, 0.030], 0),
    ],
)
def test_the_default_stays_unless_another_is_clearly_faster(why, times, taken):
    fit = [Interpreter(f"/p{i}", each) for i, each in enumerate(times)]
    assert chosen(fit) == fit[taken], why


def test_none_that_fits_is_none_chosen():
    assert chosen([]) is None


def test_each_file_is_found_once_whatever_links_lead_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(interpreter, "SYSTEM_FOLDERS", ())
    real = tmp_path / "real"
    real.write_text("#!/bin/sh\n")
    real.chmod(0o755)
    for folder, name in (("a", "python3"), ("b", "python3.11"), ("b", "python3.12")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).symlink_to(real)
    path = os.pathsep.join([str(tmp_path / "a"), "", str(tmp_path / "b"), str(tmp_path / "missing")])
    assert found(str(real), path) == [str(real)]


@pytest.mark.parametrize(
    ("why", "script"),
    [
        ("a shim that fails", "exit 127"),
        ("too old", "echo 3 10 cpython 0.02"),
        ("too new", "echo 3 14 cpython 0.02"),
        ("another implementation", "echo 3 11 pypy 0.001"),
        ("nonsense", "echo hello"),
        ("silence", "true"),
    ],
)
def test_what_cannot_run_us_is_passed_over(why, script, tmp_path):
    fake = tmp_path / "python3"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    assert timed(str(fake)) is None, why


def test_it_stands_alone_and_prints_one_that_runs():
    said = subprocess.run(
        [sys.executable, "-I", "-S", interpreter.__file__], capture_output=True, text=True, check=True, timeout=120
    )
    path = said.stdout.strip()
    assert Path(path).is_file()
    assert timed(path) is not None
