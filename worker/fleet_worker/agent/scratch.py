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

from fleet_worker.segments import TRIES, locked

PREFIX: Final = "fleet-agent-"


class Scratch:
    """A new folder, ours until `cleanup` or the end of this process. Where folders cannot be locked none is swept."""

    def __init__(self, root: Path | None = None) -> None:
        root = Path(tempfile.gettempdir()) if root is None else root
        sweep(root)
        for left in reversed(range(TRIES)):
            self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=root, ignore_cleanup_errors=True)
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


def sweep(root: Path) -> None:
    """Remove folders that nobody has the lock of. Another user's stay."""
    for folder in root.glob(f"{PREFIX}*"):
        if (lock := locked(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
