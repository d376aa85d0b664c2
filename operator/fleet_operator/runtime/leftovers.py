"""No process survives its runtime: find and kill what a dead one left.

Each container's process leads its own session and carries a mark in its environment. The state directory keeps
(pid, start time) of each leader: a restarted runtime kills the session when the leader is still that very process, and
every process that carries the mark in any case.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MARK: Final = "FLEET_RUNTIME_CONTAINER"


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
    """SIGKILL every process whose mark begins with `mark`, or that lives in `session`; returns how many."""
    killed = 0
    for pid in _processes():
        if pid != os.getpid() and (_carries(pid, mark) or (session is not None and _session(pid) == session)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed


def kill_leftovers(state_dir: Path) -> int:
    """Kill what an earlier runtime with this state directory left; returns how many processes."""
    killed = 0
    pids = state_dir / "pids"
    for path in sorted(pids.iterdir()) if pids.is_dir() else []:
        if path.name.isdigit() and path.read_text() == _start_time(int(path.name)) != "":
            killed += kill_marked("\0", int(path.name))
        path.unlink()
    return killed + kill_marked(mark_of(state_dir))


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
