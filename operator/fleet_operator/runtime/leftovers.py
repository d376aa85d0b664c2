"""No process survives its runtime: find and kill what a dead one left.

Each container's process leads its own session and carries a mark in its environment. The state directory keeps
(pid, start time) of each leader: a restarted runtime kills the session when the leader is still that very process, and
every process that carries the mark in any case.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MARK: Final = "FLEET_RUNTIME_CONTAINER"
_PR_SET_CHILD_SUBREAPER: Final = 36
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def mark_of(state_dir: Path, pod_uid: str = "", container: str = "") -> str:
    """The value of MARK; the mark of a whole runtime is a prefix of its containers' marks."""
    return f"{state_dir.resolve()}:" + (f"{pod_uid}:" if pod_uid else "") + (f"{container};" if container else "")


def record(pids: Path, pid: int) -> Path:
    """Remember a leader; returns the file, which goes when the leader was reaped. OSError names the file."""
    path = pids / str(pid)
    try:
        pids.mkdir(parents=True, exist_ok=True)
        path.write_text(_start_time(pid))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    return path


def kill_marked(mark: str, session: int | None = None) -> int:
    """SIGKILL every process whose mark begins with `mark`, or that lives in `session`, and all that descends from those:
    a process that sets its title (vLLM's engine core) writes over its environment. Returns how many."""
    found = {pid for pid in _processes() if _carries(pid, mark) or (session is not None and _session(pid) == session)}
    return sum(_kill(pid) for pid in (found | _descendants(found)) - {os.getpid()})


def adopt_orphans() -> None:
    """From now on a process whose parents died becomes this one's child, not init's (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_orphans(pids: Path | None = None) -> int:
    """Kill and reap what containers left to us by `adopt_orphans`; returns how many.

    A child that we started lives in our session or leads its own; one that does neither lost its container's first process.
    Engines and their guards lead sessions of their own, too. What tells those from children of ours is `pids`, the records of
    the containers that run, where these are all the children that we start; None where there are others.
    """
    killed = 0
    while orphans := {pid for pid in _processes() if _orphaned(pid, pids)}:
        killed += len(orphans)
        for pid in orphans | _descendants(orphans):
            _kill(pid)
        for pid in orphans:  # then their children are ours: the next turn
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    return killed


def _orphaned(pid: int, pids: Path | None) -> bool:
    fields = _stat(pid)
    if not fields or int(fields[1]) != os.getpid() or (session := int(fields[3])) == os.getsid(0):
        return False
    return session != pid or (pids is not None and not (pids / str(pid)).exists())


def kill_leftovers(state_dir: Path) -> int:
    """Kill what an earlier runtime with this state directory left; returns how many processes."""
    killed = 0
    pids = state_dir / "pids"
    for path in sorted(pids.iterdir()) if pids.is_dir() else []:
        if (started := _recorded(path)) is None:
            continue
        if started == _start_time(int(path.name)) != "":
            killed += kill_marked("\0", int(path.name))
        path.unlink()
    return killed + kill_marked(mark_of(state_dir))


def _recorded(path: Path) -> str | None:
    """The start time in a record of ours; None: something else, in a folder that the user chose."""
    if not (path.name.isascii() and path.name.isdigit() and path.is_file()):
        return None
    content = path.read_bytes()
    return content.decode() if content.isdigit() or not content else None


def _kill(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _descendants(of: set[int]) -> set[int]:
    """Children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for pid in _processes():
        if fields := _stat(pid):
            children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    queue = list(of)
    while queue:
        below = [pid for pid in children.get(queue.pop(), ()) if pid not in found]
        found.update(below)
        queue += below
    return found


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the command name, which may hold blanks; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _start_time(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def _session(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[3]) if fields else -1


def _carries(pid: int, mark: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(entry.startswith(f"{MARK}={mark}".encode()) for entry in environment.split(b"\0"))
