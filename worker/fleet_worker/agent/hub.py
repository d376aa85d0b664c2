"""hf:// sources: into the cache once per node, with room for it, and with the bytes that the hub named.

huggingface_hub downloads each file beside its place and renames it when it is whole. Around that: one process at a time per
repository, where the disk has locks (a prefetch and a worker may meet), a look at the free space before the first byte, and
afterwards a comparison of each file with the hash that is its name in the cache. A repository that was compared once has a mark
and is not read again. The hub's list of files is kept once all of them are there: while the hub is away, what is in the cache
counts only when it holds that list.
Weights that a repository holds twice are fetched once (`weightfiles.py`), with a list of their own.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.agent.errors import ModelError
from fleet_worker.agent.filelocks import do_without, has_locks
from fleet_worker.agent.hubnames import watch_names
from fleet_worker.agent.hubwaits import bound_waits
from fleet_worker.weightfiles import OTHER_FORM, Reads, unread

HF_SCHEME: Final = "hf://"
CACHE_ENV: Final = "FLEET_MODEL_CACHE"
DEFAULT_CACHE: Final = "/models/hf"
OURS: Final = ".inferencefleet"
"""Folder of our locks and marks in the cache."""
SPARE_BYTES: Final = 64 * 1024 * 1024
"""Kept free on the cache's disk."""
LEFT, LEFT_S = re.compile(r"\.[0-9a-f]{8}\.incomplete$"), 600.0
"""How the library calls what it writes, with a name of its own for each try, and after how long without a byte that is nobody's
any more. There are file systems whose locks lock nothing: who fetches at the same time has written since."""
ORIGINAL: Final = "original/*"
"""The weights once more, in their makers' form, which no engine here reads: of gpt-oss twice 65 GB. vLLM, too, means to leave
the folder out when it fetches by itself."""
LOCK_TELL_S: Final = 10.0
OF_THE_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE})
"""What a cache's disk says; everything else that a download meets is the hub's, or the way's to it."""
XETS_OWN: Final = re.compile(r"\(os error (\d+)\)")
"""How hf_xet, which is no Python, names one: in the words of a RuntimeError."""
TOKEN_ENV: Final = "HF_TOKEN"  # noqa: S105 - the name of a variable
PASSWORD, QUERY = re.compile(r"(https?://)[^\s/@'\"]*@"), re.compile(r"(https?://[^\s?'\"]*)\?[^\s'\"]*")
NOT_WRITABLE: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
PIECE: Final = 4 * 1024 * 1024
SHA256, GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which files of a repository: those that match, without weights that are there in another form, too."""

    patterns: tuple[str, ...]
    reads: Reads = "all"

    def marks(self) -> tuple[str, str]:
        """What lists of files are called after: of this engine alone, and of all that match."""
        about = hashlib.sha256(json.dumps(list(self.patterns)).encode()).hexdigest()[:8]
        return f"{about}-{self.reads}", about


@dataclass(frozen=True, slots=True)
class Listed:
    """What the hub has; nothing: it is away."""

    names: dict[str, list[str]] = field(default_factory=dict)
    """Of the files that are wanted, under their commit."""
    missing_bytes: int = 0
    unread: frozenset[str] = frozenset()
    """What matches and is not wanted."""


def split_source(source: str) -> tuple[str, str | None]:
    """`hf://ORG/NAME@REVISION` → (ORG/NAME, REVISION)."""
    name, _, revision = source.removeprefix(HF_SCHEME).partition("@")
    return name, revision or None


def cache_folder() -> Path:
    """Where files are kept: FLEET_MODEL_CACHE, the mounted cache, or the pod's own scratch space when nothing is mounted."""
    if given := os.environ.get(CACHE_ENV):
        return Path(given)
    return Path(DEFAULT_CACHE) if Path(DEFAULT_CACHE).is_dir() else Path(tempfile.gettempdir()) / "hf"


def fetch(source: str, progress: Callable[[str], None], patterns: Sequence[str], reads: Reads = "all") -> Path:
    """The folder with those files of an hf:// source that match; ModelError names what is in the way. `reads`: weights in another
    form than that are left out."""
    from filelock import FileLock, Timeout

    wanted = Wanted(tuple(patterns), reads)
    name, revision = split_source(source)
    cache = cache_folder()
    ours = cache / OURS
    try:
        ours.mkdir(parents=True, exist_ok=True)
        if not has_locks(ours):
            do_without()
            return _fetched(source, name, revision, cache, progress, wanted)
        lock = FileLock(ours / f"{name.replace('/', '--')[:150]}.lock")
        while True:
            try:
                with lock.acquire(timeout=LOCK_TELL_S):
                    return _fetched(source, name, revision, cache, progress, wanted)
            except Timeout:
                progress(f"waiting: another process fetches {source}")
    except OSError as error:
        if error.errno in NOT_WRITABLE and (kept := _kept(source, name, revision, cache, progress, wanted)) is not None:
            return kept
        if isinstance(error, PermissionError):
            raise ModelError(f"model cache {error.filename or cache} is not writable by user {os.geteuid()}") from error
        # full, stale ...: of the hub's own errors _fetched told
        raise ModelError(f"{source}: model cache {error.filename or cache}: {error.strerror or error}") from error


def _kept(
    source: str, name: str, revision: str | None, cache: Path, progress: Callable[[str], None], wanted: Wanted
) -> Path | None:
    """What is in a cache that cannot be written: nothing changes it here, so that no lock is needed. None unless it is whole, and
    what the hub has now, as far as that can be asked."""
    try:
        listed = _listed(name, revision, cache, wanted)
        return None if listed.missing_bytes else _local(source, name, revision, cache, progress, wanted, listed)
    except ModelError:
        raise
    except Exception:  # as in _fetched; also for what may not be read, or is not there
        return None


def _local(
    source: str, name: str, revision: str | None, cache: Path, progress: Callable[[str], None], wanted: Wanted, listed: Listed
) -> Path:
    """What is in the cache, without a word to the hub; ModelError unless it is whole, and whatever the library raises."""
    from huggingface_hub import snapshot_download

    commit = next(iter(listed.names), revision)
    folder = Path(
        snapshot_download(
            name, revision=commit, cache_dir=cache, allow_patterns=list(wanted.patterns),
            ignore_patterns=_left_out(listed, wanted), local_files_only=True,
        )
    )  # fmt: skip
    _check(source, folder, listed, cache, progress, wanted)
    return folder


def _fetched(source: str, name: str, revision: str | None, cache: Path, progress: Callable[[str], None], wanted: Wanted) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress(f"fetching {source}")
    _remove_left(cache / f"models--{name.replace('/', '--')}" / "blobs")
    listed = Listed()
    try:
        listed = _check_space(source, name, revision, cache, wanted)
        found = snapshot_download(
            name, revision=revision, cache_dir=cache, allow_patterns=list(wanted.patterns),
            ignore_patterns=_left_out(listed, wanted), max_workers=4,
        )  # fmt: skip
        folder = Path(found)
        if folder.name not in listed.names:  # the hub came back, or the branch moved, since we asked
            listed = _listed(name, revision, cache, wanted)
    except HFValidationError as error:
        raise ModelError(f"{source}: not a repository name: {error}") from error
    except HfHubHTTPError as error:
        raise ModelError(f"{source}: the hub answered: {_in_short(error)}") from error
    except (PermissionError, ModelError):
        raise
    except (LocalEntryNotFoundError, OSError) as error:
        if error.errno in OF_THE_DISK:
            raise
        if isinstance(error.__cause__, HfHubHTTPError):  # it did answer: the library's own words are of a connection
            raise ModelError(f"{source}: the hub answered: {_in_short(error.__cause__)}") from error
        raise ModelError(f"{source}: the hub cannot be reached: {_in_short(error)}") from error
    except Exception as error:  # of whatever the library is made: a connection that is cut, an answer that is no JSON
        _raise_of_disk(error, cache)
        words = f"{type(error).__name__}: {_in_short(error)}"
        if not listed.names:  # it did not even say what it has: it is away
            with contextlib.suppress(Exception):  # what it did is the cause that is told
                return _local(source, name, revision, cache, progress, wanted, listed)
        raise ModelError(f"{source}: the hub did not answer as one does: {words}") from error
    _check(source, folder, listed, cache, progress, wanted)
    return folder


def _raise_of_disk(error: Exception, cache: Path) -> None:
    """The OSError that stands in Xet's words, if it is the disk's."""
    for found in XETS_OWN.findall(str(error)):
        if (number := int(found)) in OF_THE_DISK:
            raise OSError(number, os.strerror(number), str(cache)) from error


def _remove_left(blobs: Path) -> None:
    """What fetches wrote that were killed on the way (a pod was deleted, a node had no memory): nobody goes on from there, and
    with each one less of the disk was left. For the space that is looked at next."""
    for part in blobs.rglob("*.incomplete"):
        with contextlib.suppress(OSError):  # somebody was quicker, or it may not be removed
            if LEFT.search(part.name) and time.time() - part.stat().st_mtime > LEFT_S:
                part.unlink()


def _left_out(listed: Listed, wanted: Wanted) -> list[str]:
    """What the library does not look for. While the hub is away that is all that may have been left out before: our own list says
    what has to be there."""
    return [ORIGINAL, *(map(glob.escape, sorted(listed.unread)) if listed.names else OTHER_FORM[wanted.reads])]


def _check(
    source: str, folder: Path, listed: Listed, cache: Path, progress: Callable[[str], None], wanted: Wanted
) -> None:  # fmt: skip
    """ModelError unless the folder holds the hub's files with the hub's bytes. While the hub is away a list of all that match is
    good, too: an older worker, or one of another engine, left it."""
    repository = cache / OURS / f"{folder.parent.parent.name[:150]}-{folder.name}"
    own, every = (repository.with_name(f"{repository.name}-{about}.files") for about in wanted.marks())
    names = listed.names.get(folder.name)
    mark = own if listed.unread or (names is None and own.is_file()) else every
    _check_whole(source, folder, names, mark)
    progress(f"comparing {source}")
    _compare(source, folder, repository.with_name(f"{repository.name}.compared"))


def _check_space(source: str, name: str, revision: str | None, cache: Path, wanted: Wanted) -> Listed:
    """The hub's list; ModelError when what is missing does not fit. A hub that cannot be asked is no reason: all may be there."""
    listed = _listed(name, revision, cache, wanted)
    needed, free = listed.missing_bytes, shutil.disk_usage(cache).free
    if needed + SPARE_BYTES > free and needed:
        raise ModelError(f"{source}: {needed} bytes are missing, and {cache} has {free} free: the disk is too small")
    return listed


def _listed(name: str, revision: str | None, cache: Path, wanted: Wanted) -> Listed:
    """What the hub has, and what of it is missing here."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    bound_waits()
    _watch_its_log()
    watch_names()
    try:
        files = snapshot_download(
            name, revision=revision, cache_dir=cache, allow_patterns=list(wanted.patterns), ignore_patterns=ORIGINAL, dry_run=True
        )
    except (LocalEntryNotFoundError, OSError) as error:
        if type(error).__name__.endswith(("NotFoundError", "HTTPError")) and not isinstance(error, LocalEntryNotFoundError):
            raise
        return Listed()
    if not files:
        raise ModelError(f"{HF_SCHEME}{name}: the repository holds none of {', '.join(wanted.patterns)}")
    return _of_those([(file.commit_hash, file.filename, file.file_size if file.will_download else 0) for file in files], wanted)


def _of_those(files: Iterable[tuple[str, str, int | None]], wanted: Wanted) -> Listed:
    """(commit, name, bytes that are missing) of each file that matches."""
    rows = list(files)
    left_out = unread([name for _, name, _ in rows], wanted.reads)
    names: dict[str, list[str]] = {}
    for commit, name, _ in rows:
        if name not in left_out:
            names.setdefault(commit, []).append(name)
    return Listed(names, sum(size or 0 for _, name, size in rows if name not in left_out), left_out)


def _check_whole(source: str, folder: Path, names: list[str] | None, mark: Path) -> None:
    """ModelError unless every file of the hub's list is there; the list is remembered for when the hub (names: None) is away."""
    remembered = _remembered(mark)
    if names is None:
        if remembered is None:
            raise ModelError(
                f"{source}: the hub cannot be reached, and {folder} was never fetched whole: what is there may be a part of it; "
                "let it be fetched once, or give the folder's path as the source"
            )
        names = remembered
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ModelError(f"{source}: {len(missing)} files of {len(names)} are missing in {folder}, the first is {missing[0]}")
    if remembered != (wanted := sorted(names)):
        _remember(mark, json.dumps(wanted))


def _remember(mark: Path, text: str) -> None:
    """For the next start; where nothing can be written it looks again."""
    written = mark.with_suffix(".part")
    try:
        written.write_text(text)
        written.replace(mark)  # a list that is cut off would say that little is enough
    except OSError as error:
        # a model that is here needs no room; ENOENT: not even our folder could be made
        if error.errno not in {*NOT_WRITABLE, errno.ENOSPC, errno.EDQUOT, errno.ENOENT}:
            raise


def _remembered(mark: Path) -> list[str] | None:
    """The list in a mark; None when there is none, or one that a broken disk left, which says nothing."""
    try:
        found = json.loads(mark.read_bytes())
    except (FileNotFoundError, *UNREADABLE):
        return None
    return found if isinstance(found, list) and found and all(isinstance(name, str) for name in found) else None


def _compare(source: str, folder: Path, mark: Path) -> None:
    """Every file has the content that its name in the cache says; a wrong one is removed, so that the next try fetches it. Of one
    that was compared its size still says whether it is whole: a disk may lose its end (a node without power) and keep the mark.
    Older workers left no sizes."""
    blobs = {str(path.relative_to(folder)): _blob(path) for path in folder.rglob("*") if path.is_file()}
    listed = "\n".join(sorted(f"{name} {blob.name}" for name, blob in blobs.items()))
    sized = "\n".join(sorted(f"{blob.stat().st_size} {name}" for name, blob in blobs.items()))
    sizes = mark.with_suffix(".sizes")
    told = sizes.read_bytes() if sizes.is_file() else None
    is_known = mark.is_file() and mark.read_bytes() == listed.encode() and told in (None, sized.encode())
    for name, blob in () if is_known else blobs.items():
        if not _is_right(blob):
            raise ModelError(f"{source}: {name} has other bytes than the hub's hash {blob.name} says: it {_removed(blob)}")
    if told != sized.encode():
        _remember(sizes, sized)
    if not is_known:
        _remember(mark, listed)


def _blob(path: Path) -> Path:
    """What a snapshot's file leads to, which is called by the hub's hash: one link away. Behind another one the library may keep
    it for all repositories, under a hash of Xet's that is no sha256."""
    return path.parent / path.readlink() if path.is_symlink() else path


def _removed(blob: Path) -> str:
    try:
        for lies in (blob.resolve(), blob):  # left in the library's store, it would be linked to once more
            lies.unlink(missing_ok=True)
    except OSError as error:
        return f"cannot be removed ({error.strerror})"
    return "was removed"


def _is_right(blob: Path) -> bool:
    """A blob is called by its sha256 (large files) or by git's sha1; anything else says nothing."""
    if SHA256.fullmatch(blob.name):
        digest = hashlib.sha256()
    elif GIT_SHA1.fullmatch(blob.name):
        digest = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False)
    else:
        return True
    with blob.open("rb") as opened:
        while piece := opened.read(PIECE):
            digest.update(piece)
    return digest.hexdigest() == blob.name


def _in_short(error: Exception) -> str:
    """The hub's words in one line: the cause stands in the second one of several."""
    return _without_secrets(" ".join(str(error).split()))[:300] or type(error).__name__


def _without_secrets(words: str) -> str:
    """Without what opens a hub: the token, a mirror's password, the query of a signed address."""
    words = QUERY.sub(r"\1?...", PASSWORD.sub(r"\1", words))
    # as huggingface_hub sends it: without line ends and the spaces around
    if token := "".join(os.environ.get(TOKEN_ENV, "").splitlines()).strip():
        words = words.replace(token, "***")
    return words


class _Plain(logging.Filter):
    """huggingface_hub's own log, which has whole addresses in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = _without_secrets(record.getMessage()), ()
        return True


_PLAIN: Final = _Plain()


def _watch_its_log() -> None:
    """Once the library is imported, which makes its handler."""
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_PLAIN)  # the same one again is none more
