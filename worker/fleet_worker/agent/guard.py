"""Ends what an engine leaves when its agent is killed: `python -I -S guard.py [FOLDER] < pipe`, started before the engine.

The kernel ends everything with an agent that is PID 1. Elsewhere (`fleet up`, a pod with a shared process namespace) it ends the
engine's first process alone: vLLM's engine core looks after no parent, and its workers only once they are loaded. The agent holds
the pipe's other end and writes one number, the engine's session; when the pipe ends, so does the session, and the folder of its
shared memory goes (`segments.py`). Standard library alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Iterator

GONE_S = 30.0
"""Seconds within which a killed process is gone: a big one has memory to give back first."""
LOOK_EVERY_S = 0.05
MOST_LOOKS = 100
"""At a folder that is to be empty: one more for each file that somebody who is not dead yet makes meanwhile."""


def kill_session(session: int) -> bool:
    """SIGKILL to all processes of a session and all below them; whether there was one that is not dead yet."""
    below: dict[int, list[int]] = {}
    queue = []
    for pid, parent, its_session in _living():
        below.setdefault(parent, []).append(pid)
        if its_session == session:
            queue.append(pid)
    found: set[int] = set()
    while queue:
        if (pid := queue.pop()) not in found:
            found.add(pid)
            queue += below.get(pid, ())
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def _living() -> Iterator[tuple[int, int, int]]:
    """(pid, parent, session) of every process but zombies."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent, _, session = file.read().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # gone meanwhile
            continue
        if state not in "ZX":
            yield int(name), int(parent), int(session)


def remove(folder: str) -> None:
    """Remove a folder of files; what cannot be removed stays."""
    for _ in range(MOST_LOOKS):
        try:
            for name in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):  # UCX does so itself
                    os.unlink(os.path.join(folder, name))
            return os.rmdir(folder)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                return None
    return None


def main() -> None:
    """Wait for the end of stdin, then for the end of the session; remove what it shared."""
    told = sys.stdin.readline().strip()
    sys.stdin.read()
    end = time.monotonic() + GONE_S
    while told and kill_session(int(told)) and time.monotonic() < end:
        time.sleep(LOOK_EVERY_S)
    for folder in sys.argv[1:]:
        remove(folder)


if __name__ == "__main__":
    main()
