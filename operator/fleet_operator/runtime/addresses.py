"""Loopback addresses for pods: every 127.x.y.z is local on Linux, so that each pod has its own ports.

A runtime owns whole /24 networks, one lock file each, so that two runtimes on a machine never give out one address; the
kernel drops the lock with the process, however it ends; its file goes with the next claim.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Final

_HOSTS: Final = 254
_FORGET_MOST: Final = 1_024
"""Files that are looked at when a network is claimed."""
_NETWORKS: Final = [(a, b) for a in range(16, 240) for b in range(1, 255)]


class NoAddressError(Exception):
    """Every network is taken."""


class Addresses:
    """Gives out addresses; one that came back is reused last, so that late packets meet nobody new."""

    def __init__(self, lock_dir: Path | None = None) -> None:
        self._lock_dir = lock_dir or Path(tempfile.gettempdir()) / f"inferencefleet-addresses-{os.getuid()}"
        self._locks: list[tuple[Path, int]] = []
        self._free: OrderedDict[str, None] = OrderedDict()

    def take(self) -> str:
        """A free address; NoAddressError."""
        if not self._free:
            self._claim_network()
        return self._free.popitem(last=False)[0]

    def give_back(self, address: str) -> None:
        """The address may be used again."""
        self._free[address] = None

    def close(self) -> None:
        """Give all networks back."""
        for path, lock in self._locks:
            path.unlink(missing_ok=True)  # while it is locked: nobody else can have it
            os.close(lock)
        self._locks.clear()
        self._free.clear()

    def _claim_network(self) -> None:
        self._lock_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._forget_the_dead()
        # scattered by process, so that runtimes seldom meet at one lock
        start = os.getpid() * 7919 % len(_NETWORKS)
        for index in range(len(_NETWORKS)):
            a, b = _NETWORKS[(start + index) % len(_NETWORKS)]
            path = self._lock_dir / f"127.{a}.{b}"
            if (lock := _lock(path)) is None:
                continue
            self._locks.append((path, lock))
            for host in range(1, _HOSTS + 1):
                self._free[f"127.{a}.{b}.{host}"] = None
            return
        raise NoAddressError(f"all {len(_NETWORKS)} loopback networks are in use (locks in {self._lock_dir})")

    def _forget_the_dead(self) -> None:
        """Remove the files of runtimes that were killed: the kernel dropped their locks."""
        for path in sorted(self._lock_dir.iterdir())[:_FORGET_MOST]:
            if (lock := _lock(path)) is not None:
                path.unlink(missing_ok=True)
                os.close(lock)


def _lock(path: Path) -> int | None:
    """The locked file, None when another runtime has it."""
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its owner may have removed it between open and lock: what we hold then is a file that nobody else will look at.
        if os.stat(path).st_ino == os.fstat(lock).st_ino:
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None
