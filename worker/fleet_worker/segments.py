"""A folder of its own in /dev/shm for what UCX shares with other processes, so that nothing of a killed engine stays there.

UCX makes a file ("ucx_shm_posix_" and a random number), writes its 4 MB, and unlinks it; peers open it through /proc/PID/fd
(uct/sm/mm/posix/mm_posix.c). Who is killed in between leaves it, and its name does not say whose it was. So every engine has a
folder (UCX_POSIX_DIR), and its agent the folder's lock, which the kernel gives up with the last process that has it: a folder
without a lock is a dead agent's. In a pod /dev/shm outlives the container; elsewhere it is everybody's.

System V segments, which UCX makes as well, are not looked after here: it has the kernel remove them with their last user before
anything is in them, so that a kill in between leaves an entry of `ipcs -m` without memory; in a pod, until that goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleet_worker.agent.guard import FOLDER, is_at, remove

ROOT: Final = Path("/dev/shm")  # noqa: S108 - what POSIX shared memory is on Linux
PREFIX: Final = "fleet-ucx-"
FOLDER_ENV: Final = "UCX_POSIX_DIR"
TRIES: Final = 8
"""For a folder that nobody sweeps between its making and its locking."""


@dataclass(frozen=True, slots=True)
class Segments:
    """One engine's folder, or `folder` None: there is no place for one, and UCX finds its own."""

    folder: Path | None = None
    lock: int = -1

    @property
    def environment(self) -> dict[str, str]:
        """What tells UCX."""
        return {} if self.folder is None else {FOLDER_ENV: str(self.folder)}

    def close(self) -> None:
        """Remove it: the engine has ended."""
        if self.folder is not None:
            remove(str(self.folder))
            os.close(self.lock)


def make(root: Path = ROOT) -> Segments:
    """A new folder that is ours as long as this process lives, or closes it; what dead ones left goes first."""
    sweep(root)
    for _ in range(TRIES):
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        except OSError:
            break
        if (lock := _locked(folder)) is not None:
            return Segments(folder, lock)
        remove(str(folder))
    return Segments()


def sweep(root: Path = ROOT) -> None:
    """Remove folders that nobody has the lock of. Another user's stay, whatever they are."""
    for folder in root.glob(f"{PREFIX}*"):
        if (lock := _locked(folder)) is not None:
            remove(str(folder))
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Its lock, as a descriptor; None when somebody has it, it is gone, or it is not ours to have."""
    try:
        found = os.open(folder, FOLDER)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if os.fstat(found).st_uid == os.geteuid():
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(found, str(folder)):  # else a sweeper was quicker
                return found
    os.close(found)
    return None
