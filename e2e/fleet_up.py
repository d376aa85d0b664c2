"""`fleet up` in the background, and who belongs to it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UP = [sys.executable, "-m", "fleet_cli.main", "up"]
READY_S, END_S = 180, 90


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def marked(state: Path) -> list[str]:
    """Command lines of processes that a runtime with this state folder started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"={state.resolve()}:".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def gone(state: Path, within_s: float = 10) -> bool:
    deadline = time.monotonic() + within_s
    while marked(state) and time.monotonic() < deadline:
        time.sleep(0.05)
    return marked(state) == []


class Running:
    """`fleet up` in the background; `lines` grows as it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def until(self, pattern: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"{pattern} was never printed:\n{''.join(self.lines)}")

    def end(self, within_s: float = END_S) -> int:
        assert self.process.stdout is not None
        self.lines += self.process.stdout.readlines()
        return self.process.wait(within_s)


@contextmanager
def running(*args: str) -> Iterator[Running]:
    process = subprocess.Popen([*UP, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield Running(process)
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
