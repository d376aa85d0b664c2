"""From an adapter's source to a private copy of its two files, named by their digest.

Engines are given the copy, never the source: what was hashed is what is loaded, and vLLM, whose prefix cache knows an adapter by
its path, sees another path for another content.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.adapterstart import changes_base
from fleet_worker.agent.errors import AdapterError, ModelError
from fleet_worker.agent.hub import HF_SCHEME, fetch

FILES = ("adapter_config.json", "adapter_model.safetensors")
MOST_BYTES = 8 * 1024**3
"""Of one adapter, whatever its rank; the engine knows the exact bound."""
PIECE = 4 * 1024 * 1024
MOST_CONFIG_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy: `folder` is called by the beginning of `digest`, which the torch engine computes again."""

    folder: Path
    digest: str


def stage(source: str, root: str | None, into: Path) -> Staged:
    """Copy an adapter's files below `into`; AdapterError with the reason."""
    folder = locate(source, root)
    top = None if source.startswith(HF_SCHEME) else root  # a hub's cache is made of links
    try:
        return _copied([_inside(folder / name, top) for name in FILES], into)
    except OSError as error:
        reason = "DiskFull" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "AdapterNotReadable"
        raise AdapterError(reason, f"{source}: {error.strerror or error}") from error


def _copied(files: list[Path], into: Path) -> Staged:
    into.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=into))
    try:
        parts = [_copy(path, scratch / name) for path, name in zip(files, FILES, strict=True)]
        _check_start(scratch / FILES[0])
        digest = hashlib.sha256(b"".join(parts)).hexdigest()
        final = into / digest[:32]
        try:
            scratch.replace(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else the same content is there
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Staged(final, digest)


def _check_start(config: Path) -> None:
    """AdapterError for one that needs another base model. What is no JSON object, or far too large for one, the engine refuses in
    its own words."""
    with config.open("rb") as opened:
        raw = opened.read(MOST_CONFIG_BYTES)
    try:
        found = json.loads(raw)
    except UNREADABLE:
        return
    if isinstance(found, dict) and (why := changes_base(found)):
        raise AdapterError("BadAdapter", f"{config.name}: {why}")


def locate(source: str, root: str | None) -> Path:
    """The folder that a source names. A path may not leave `root`, not even by a symbolic link."""
    if source.startswith(HF_SCHEME):
        try:
            return fetch(source, lambda _: None, FILES)
        except ModelError as error:
            raise AdapterError("HubFailed", str(error)) from error
    if root is None:
        raise AdapterError("NoAdapterRoot", f"{source}: this worker has no folder for adapters")
    if PurePosixPath(source).is_absolute() or ".." in PurePosixPath(source).parts:
        raise AdapterError("BadSource", f"{source} is not a path below the adapter root")
    return _inside(Path(root) / source, root)


def _inside(path: Path, root: str | None) -> Path:
    """Where the path leads, links and all; AdapterError when that is outside of `root`."""
    try:
        found = Path(os.path.realpath(path))
    except ValueError as error:  # a null byte
        raise AdapterError("BadSource", f"{str(path)!r} is no path") from error
    if root is not None and not found.is_relative_to(os.path.realpath(root)):
        raise AdapterError("BadSource", f"{path} leads outside of the adapter root")
    return found


def _opened(path: Path) -> BinaryIO:
    """A file and nothing else: a pipe would be waited for, and the path is one that `_inside` looked at."""
    opened = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise AdapterError("AdapterNotReadable", f"{path} is not a file")
    return opened


def _copy(source: Path, target: Path) -> bytes:
    """sha256 of what was copied."""
    digest, size = hashlib.sha256(), 0
    try:
        opened = _opened(source)
    except FileNotFoundError as error:
        raise AdapterError("AdapterNotFound", f"{source} does not exist") from error
    except PermissionError as error:
        raise AdapterError("AdapterNotReadable", f"{source} is not readable by user {os.geteuid()}") from error
    except OSError as error:
        raise AdapterError("AdapterNotReadable", f"{source}: {error.strerror}") from error
    with opened, target.open("wb") as out:
        while piece := opened.read(PIECE):
            size += len(piece)
            if size > MOST_BYTES:
                raise AdapterError("AdapterTooLarge", f"{source} has more than {MOST_BYTES} bytes")
            digest.update(piece)
            out.write(piece)
    return digest.digest()


def prune(into: Path, keep: set[Path]) -> None:
    """Remove all other copies."""
    for path in into.iterdir() if into.is_dir() else ():
        if path not in keep and not path.name.startswith("."):
            shutil.rmtree(path, ignore_errors=True)
