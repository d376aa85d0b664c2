"""Ends what an engine leaves when its agent is killed: `python -I -S guard.py [FOLDER] < pipe`, started before the engine.

The kernel ends everything with an agent that is PID 1. Elsewhere (`fleet up`, a pod with a shared process namespace) it ends the
engine's first process alone: vLLM's engine core looks after no parent, and its workers only once they are loaded. The agent holds
the pipe's other end and writes one line, the engine's session and when that began; when the pipe ends, so does the session, and
the folder of its shared memory goes (`segments.py`). Standard library alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator

GONE_S = 30.0
"""Seconds within which a killed process is gone: a big one has memory to give back first."""
LOOK_EVERY_S = 0.05
STARTED = 19
"""Place of a process's start in its stat file, behind its name (proc(5))."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""How a folder is opened, and nothing else, nor a link to one."""
NOTED = "noted"
"""File in there: `INODE NAME` a line."""
MOST_LOOKS = 100
"""At a folder that is to be empty: one more for each file that somebody who is not dead yet makes meanwhile."""


def started_at(pid: int) -> str:
    """When a process began, in the kernel's ticks: with its number that tells it from every other one. Empty: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[STARTED]
    except (OSError, IndexError):
        return ""


def kill_session(session: int, since: str = "") -> bool:
    """SIGKILL to all processes of a session and all below them; whether there was one that is not dead yet. `since`: when its
    first process began. An engine may have ended long ago: then its number may be somebody else's."""
    if since and started_at(session) not in ("", since):
        return False
    found = members(session)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def members(session: int) -> set[int]:
    """All processes of a session that are not dead yet, and all below them."""
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
    return found


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
    """Remove a folder of files, if it is ours; what cannot be removed stays. A name in /dev/shm that is free anybody may take:
    files go by the folder that was opened, and a link or another user's folder in its place is left alone."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, FOLDER)
        try:
            if os.fstat(opened).st_uid == os.geteuid():
                _remove_noted(os.path.dirname(folder), opened)
                _remove(folder, opened)
        finally:
            os.close(opened)


def _remove_noted(root: str, opened: int) -> None:
    """What the engine had beside its folder (`segments.Segments.note`), where it is still that very file. A name with a way in it
    is none of a file of `root`."""
    try:
        with open(os.open(NOTED, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=opened), encoding="utf-8") as file:
            noted = [line.rstrip("\n").partition(" ") for line in file]
    except (OSError, UnicodeDecodeError):
        return
    for inode, _, name in noted:
        path = os.path.join(root, name)
        with contextlib.suppress(OSError):
            found = os.lstat(path)
            if "/" not in name and stat.S_ISREG(found.st_mode) and (found.st_uid, str(found.st_ino)) == (os.geteuid(), inode):
                os.unlink(path)


def _remove(folder: str, opened: int) -> None:
    for _ in range(MOST_LOOKS):
        for name in os.listdir(opened):
            with contextlib.suppress(FileNotFoundError):  # UCX does so itself
                os.unlink(name, dir_fd=opened)
        try:
            return os.rmdir(folder) if is_at(opened, folder) else None
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                return None
    return None


def is_at(opened: int, folder: str) -> bool:
    """That folder is still at its place, and no other one."""
    try:
        return os.path.samestat(os.fstat(opened), os.lstat(folder))
    except OSError:
        return False


def main() -> None:
    """Wait for the end of stdin, then for the end of the session; remove what it shared."""
    session, _, since = sys.stdin.readline().strip().partition(" ")
    sys.stdin.read()
    end = time.monotonic() + GONE_S
    while session and kill_session(int(session), since) and time.monotonic() < end:
        time.sleep(LOOK_EVERY_S)
    for folder in sys.argv[1:]:
        remove(folder)


if __name__ == "__main__":
    main()
