"""The folder of one `fleet up`: logs and volumes of its pods."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet_cli.errors import InputError, RunError


@contextmanager
def state_folder(chosen: Path | None) -> Iterator[Path]:
    """The chosen folder, locked, or a fresh one that is removed at the end, unless a failure makes its logs worth reading."""
    if chosen is not None:
        with _locked(chosen):
            yield chosen
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix="fleet-up-"))
    except OSError as error:
        raise RunError(
            f"no folder for logs and volumes in {error.filename or 'any temporary folder'}: {error.strerror}"
        ) from error
    try:
        yield folder
    except RunError as error:
        raise RunError(f"{error} (logs: {folder / 'logs'})") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two fleets in one folder would take each other's processes for leftovers and kill them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise InputError(f"--state {error.filename or folder}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"--state {folder} is in use by another fleet up") from error
        yield
