"""A folder of its own in /dev/shm for what UCX shares with other processes, so that nothing of a killed engine stays there.

UCX makes a file ("ucx_shm_posix_" and a random number), writes its 4 MB, and unlinks it; peers open it through /proc/PID/fd
(uct/sm/mm/posix/mm_posix.c). Who is killed in between leaves it, and its name does not say whose it was. So every engine has a
folder (UCX_POSIX_DIR), and its agent the folder's lock, which the kernel gives up with the last process that has it: a folder
without a lock is a dead agent's. In a pod /dev/shm outlives the container; elsewhere it is everybody's.

vLLM's processes share memory with each other as Python's multiprocessing does it ("psm_" and a random number, hundreds of MB):
their last one removes that, unless all are killed at once, as when a container has no memory left. In a pod it then counted
against those that came after, and again with each of them. No folder of ours can be asked for there, so that its names are noted
in the engine's, and go with that: those that its processes map, and that were not there before it.

System V segments, which UCX makes as well, are not looked after here: it has the kernel remove them with their last user before
anything is in them, so that a kill in between leaves an entry of `ipcs -m` without memory; in a pod, until that goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleet_worker.agent.guard import FOLDER, NOTED, is_at, members, remove

ROOT: Final = Path("/dev/shm")  # noqa: S108 - what POSIX shared memory is on Linux
PREFIX: Final = "fleet-ucx-"
FOLDER_ENV: Final = "UCX_POSIX_DIR"
SHARED: Final = ("psm_", "sem.mp-")
"""How names begin that Python's multiprocessing makes."""
MAPS_FIELDS: Final = 6
"""Of a line of /proc/PID/maps that has a file (proc(5))."""
TRIES: Final = 8
"""For a folder that nobody sweeps between its making and its locking."""


@dataclass(frozen=True, slots=True)
class Segments:
    """One engine's folder, or `folder` None: there is no place for one, and UCX finds its own."""

    folder: Path | None = None
    lock: int = -1
    others: frozenset[str] = frozenset()
    """Names that were there before it."""

    @property
    def environment(self) -> dict[str, str]:
        """What tells UCX."""
        return {} if self.folder is None else {FOLDER_ENV: str(self.folder)}

    def note(self, session: int) -> None:
        """What processes of this session share with each other: it goes with the folder. What cannot be read, or written, is not
        noted; who is noted once stays so."""
        if self.folder is None:
            return
        root, file = os.path.realpath(self.folder.parent), self.folder / NOTED
        with contextlib.suppress(OSError, UnicodeError):
            known = set(file.read_text().splitlines()) if file.exists() else set[str]()
            inodes = {inode for pid in members(session) for inode in _mapped(pid, root)}
            there = [
                (one.name, str(one.inode())) for one in os.scandir(root) if one.name.startswith(SHARED) and one.name.isprintable()
            ]
            mine = {f"{inode} {name}" for name, inode in there if inode in inodes and name not in self.others}
            if not mine <= known:
                (fresh := file.with_suffix(".new")).write_text("".join(f"{line}\n" for line in sorted(known | mine)))
                fresh.replace(file)

    def close(self) -> None:
        """Remove it: the engine has ended."""
        if self.folder is not None:
            remove(str(self.folder))
            os.close(self.lock)


def make(root: Path = ROOT) -> Segments:
    """A new folder that is ours as long as this process lives, or closes it; what dead ones left goes first."""
    sweep(root)
    others = frozenset(path.name for path in root.glob("*") if path.name.startswith(SHARED))
    for _ in range(TRIES):
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        except OSError:
            break
        if (lock := locked(folder)) is not None:
            return Segments(folder, lock, others)
        remove(str(folder))
    return Segments()


def sweep(root: Path = ROOT) -> None:
    """Remove folders that nobody has the lock of. Another user's stay, whatever they are."""
    for folder in root.glob(f"{PREFIX}*"):
        if (lock := locked(folder)) is not None:
            remove(str(folder))
            os.close(lock)


def _mapped(pid: int, root: str) -> Iterator[str]:
    """Inodes of the files of `root` that this process maps, whatever their names were then: glibc makes a semaphore under another
    one, and links it to its own."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            if len(fields) == MAPS_FIELDS and os.path.dirname(fields[5].rstrip("\n")) == root:
                yield fields[4]


def locked(folder: Path) -> int | None:
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
