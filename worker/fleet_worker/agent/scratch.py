"""The agent's folder of its own below the temporary one: copies of adapters, vLLM's sockets.

In a pod /tmp outlives the container. Who is killed (no memory is left, or nothing answers any more) leaves the folder, and with
every start the adapters were there once more, until the node had no disk. So it has a lock, as the folders of `segments.py` have,
which the kernel gives up with its process: a folder without one is a dead agent's, and goes when the next one starts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from fleet_worker.agent.errors import WorkerError
from fleet_worker.segments import TRIES, locked

PREFIX: Final = "fleet-agent-"


class Scratch:
    """A new folder, ours until `cleanup` or the end of this process. Where folders cannot be locked none is swept. WorkerError
    when there is no place for one."""

    def __init__(self, root: Path | None = None) -> None:
        root = _swept() if root is None else root
        sweep(root)
        for left in reversed(range(TRIES)):
            try:
                self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=root, ignore_cleanup_errors=True)
            except OSError as error:
                raise _no_folder(root, error) from error
            self._lock = locked(Path(self.name))
            if self._lock is not None or left == 0:
                break
            self._folder.cleanup()

    @property
    def name(self) -> str:
        """Its path."""
        return self._folder.name

    def cleanup(self) -> None:
        """Remove it."""
        self._folder.cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _swept() -> Path:
    """Where temporary files go. Python tries to write there to find out, and on a full disk it cannot: what dead agents left,
    which may be what fills it, goes before that."""
    usual = Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108 - where it looks first
    sweep(usual)
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise _no_folder(usual, error) from error


def _no_folder(root: Path, error: OSError) -> WorkerError:
    free = f"where {shutil.disk_usage(root).free} bytes are free" if root.is_dir() else "which does not exist"
    return WorkerError(f"no folder for this worker's own files can be made below {root}, {free}: {error.strerror or error}")


def sweep(root: Path) -> None:
    """Remove folders that nobody has the lock of. Another user's stay."""
    for folder in root.glob(f"{PREFIX}*"):
        if (lock := locked(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
