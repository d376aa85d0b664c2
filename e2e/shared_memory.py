"""What is in /dev/shm and belongs to nobody who lives."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from fleet_worker.segments import PREFIX, ROOT


def ownerless() -> set[str]:
    """Names in there, without the folders that a worker's agent, or the guard of a killed one, has the lock of: other fleets may
    run on this machine, and a guard removes its folder before it ends."""
    return {path.name for path in ROOT.iterdir() if not (path.name.startswith(PREFIX) and _is_held(path))}


def _is_held(folder: Path) -> bool:
    try:
        found = os.open(folder, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):  # just removed, or another user's
        return True
    try:
        fcntl.flock(found, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return not folder.exists()
    except BlockingIOError:
        return True
    finally:
        os.close(found)
