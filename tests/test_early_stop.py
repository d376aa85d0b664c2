"""SIGTERM while a process still imports: as the first of its container it would not hear one that nobody listens to, and would go
on to the end of its grace period (the drain's, of a worker)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HALT = """
import importlib.abc, os, sys, time


class Halt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["HALT_AT"]:
            print("imports", flush=True)
            time.sleep(60)
        return None


sys.meta_path.insert(0, Halt())
"""


@pytest.mark.parametrize(
    ("module", "halt_at"),
    [
        ("fleet_worker", "fleet_worker.agent.agent"),
        ("fleet_operator", "fleet_operator.process"),
        ("fleet_router", "fleet_router.process"),
    ],
)
def test_a_process_that_is_told_to_stop_before_it_has_begun_ends(tmp_path: Path, module: str, halt_at: str):
    (tmp_path / "sitecustomize.py").write_text(HALT)
    env = {**os.environ, "HALT_AT": halt_at, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    argv = [sys.executable, "-m", module, *(["--follow", "dir:/nowhere"] if module == "fleet_router" else [])]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"imports\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
