"""The folder of one `fleet up`: logs and volumes of its pods.

Pods remove their volumes, which may hold a whole model each. Of a `fleet up` that was killed nobody did, and no other one has its
pods: the next one removes them, and leaves the logs. What tells is the folder's lock, which the kernel gives up with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fleet_cli.errors import InputError, RunError

PREFIX: Final = "fleet-up-"
LOCK: Final = "lock"
VOLUMES: Final = "pods"
_UID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@contextmanager
def state_folder(chosen: Path | None) -> Iterator[Path]:
    """The chosen folder, locked, or a fresh one that is removed at the end, unless a failure makes its logs worth reading."""
    if chosen is not None:
        with _locked(chosen):
            _forget_volumes(chosen)
            yield chosen
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = _held(folder)
    except OSError as error:
        raise RunError(
            f"no folder for logs and volumes in {error.filename or 'any temporary folder'}: {error.strerror}"
        ) from error
    forget_killed(folder.parent)
    try:
        yield folder
    except RunError as error:
        (folder / LOCK).unlink(missing_ok=True)
        raise RunError(f"{error} (logs: {folder / 'logs'})") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def forget_killed(root: Path) -> None:
    """Remove the volumes in folders of ours that nobody has the lock of. Those without a lock, and links, are none of ours."""
    for folder in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _forget_volumes(folder)
            finally:
                os.close(lock)


def _forget_volumes(folder: Path) -> None:
    """Of pods that are no more; what is not named like one in a folder that the user chose is the user's."""
    with contextlib.suppress(OSError):
        for volumes in [one for one in (folder / VOLUMES).iterdir() if _UID.fullmatch(one.name)]:
            shutil.rmtree(volumes, ignore_errors=True)


def _held(folder: Path) -> int:
    """The lock of a fresh folder; who sweeps may have it for a moment."""
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two fleets in one folder would take each other's processes for leftovers and kill them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise InputError(f"--state {error.filename or folder}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"--state {folder} is in use by another fleet up") from error
        yield
