"""File systems without locks: Lustre has none unless it is mounted with them, and its flock says ENOSYS. filelock takes files
that stand for locks there, which nobody removes for a pod that was killed with one: each later one waited for it, for ever. And
huggingface_hub, which makes the file of its store's lock itself, waits for that one after each file that comes by Xet.

Nobody needs them: who fetches writes under a name of its own, and renames what is whole. Two at once load twice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

STORE: Final = "HF_HUB_DISABLE_SHARED_BLOBS"
"""Of the library's constants: its store of all repositories' files is not safe without a lock."""


def has_locks(folder: Path) -> bool:
    """Whether files can be locked there; of a folder where none can be made: as far as we know."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno != errno.ENOSYS
    return True


def do_without() -> None:
    """The library, from here on, in this process: it has one cache."""
    from huggingface_hub import constants, file_download

    # images of vLLM bring a version of their own, which may have neither
    for owner, name, instead in ((constants, STORE, True), (file_download, "WeakFileLock", _no_lock)):
        if hasattr(owner, name):
            setattr(owner, name, instead)
        else:
            logging.getLogger(__name__).warning("huggingface_hub has no %s: it may wait for a lock of a pod that is gone", name)


def _no_lock(*_: Any, **__: Any) -> AbstractContextManager[None]:
    return contextlib.nullcontext()
