"""Folders for UCX's shared memory: whose is left alone, whose goes, and that UCX uses them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet_worker.agent.guard import NOTED, remove
from fleet_worker.segments import PREFIX, Segments, make, sweep

HOLDER = """
import sys
from pathlib import Path
from fleet_worker.segments import make
held = make(Path(sys.argv[1]))
(held.folder / "ucx_shm_posix_1").write_bytes(b"x")
print(held.folder, flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(root: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds a folder with a segment in it, until it is killed."""
    argv = [sys.executable, "-c", HOLDER, str(root)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_what_a_killed_process_left_goes_and_what_a_living_one_has_stays(tmp_path: Path):
    with holder(tmp_path) as (living, kept), holder(tmp_path) as (killed, left):
        killed.kill()
        killed.wait()
        assert sorted(tmp_path.iterdir()) == sorted([kept, left])
        sweep(tmp_path)
        assert list(tmp_path.iterdir()) == [kept]
        assert [path.name for path in kept.iterdir()] == ["ucx_shm_posix_1"]
        assert living.poll() is None


def test_a_new_one_sweeps_first(tmp_path: Path):
    """A container that starts again finds in its pod's /dev/shm what the one before left."""
    with holder(tmp_path) as (killed, _):
        killed.kill()
        killed.wait()
    made = make(tmp_path)
    assert list(tmp_path.iterdir()) == [made.folder]
    made.close()
    assert list(tmp_path.iterdir()) == []


def other_users(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)


def linked(path: Path, _: pytest.MonkeyPatch) -> None:
    target = path.parent.parent / "elsewhere"
    target.mkdir()
    (target / "file").touch()
    path.symlink_to(target, target_is_directory=True)


def folder_with_a_folder(path: Path, _: pytest.MonkeyPatch) -> None:
    (path / "below").mkdir(parents=True)


@pytest.mark.parametrize(
    ("name", "prepare"),
    [
        ("ucx_shm_posix_1", lambda path, _: path.write_bytes(b"x")),
        ("somebodys", lambda path, _: path.mkdir()),
        (f"{PREFIX}file", lambda path, _: path.write_bytes(b"x")),
        (f"{PREFIX}link", linked),
        (f"{PREFIX}users", other_users),
        (f"{PREFIX}deep", folder_with_a_folder),
    ],
    ids=["segment", "other-name", "file", "link", "other-user", "with-a-folder"],
)
def test_what_is_not_ours_is_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, prepare):
    root = tmp_path / "shm"
    root.mkdir()
    prepare(root / name, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    sweep(root)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("call", ["os.open", "fcntl.flock"])
def test_a_sweeper_that_comes_between_making_and_locking_takes_nothing_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
):
    module, name = {"os": os, "fcntl": fcntl}[call.partition(".")[0]], call.partition(".")[2]
    genuine, swept = getattr(module, name), list[str]()

    def after_a_sweeper(*given, **named):
        if not swept:
            swept.extend(os.listdir(tmp_path))
            sweep(tmp_path)
        return genuine(*given, **named)

    monkeypatch.setattr(module, name, after_a_sweeper)
    made = make(tmp_path)
    assert (list(tmp_path.iterdir()), len(swept)) == ([made.folder], 1)
    assert made.folder.name not in swept
    made.close()


SHARES = """
import mmap, os, sys
kept = []
for name in sys.argv[1:]:
    with open(name, "a+b") as file:
        file.truncate(4096)
        kept.append(mmap.mmap(file.fileno(), 4096))
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@contextmanager
def sharing(*files: Path) -> Iterator[int]:
    """A session whose process maps these files, as vLLM's processes do; killed at the end."""
    argv = [sys.executable, "-c", SHARES, *map(str, files)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("end", ["closed", "swept", "guarded"])
def test_what_an_engines_processes_share_with_each_other_goes_with_its_folder(tmp_path: Path, end: str):
    """Killed all at once, as when their container has no memory left, none of them removes it."""
    before, mine, log, others = (tmp_path / name for name in ("psm_before", "psm_mine", "engine.log", "psm_others"))
    before.touch()
    made = make(tmp_path)
    assert made.folder is not None
    with sharing(before, mine, log) as session, sharing(others):
        made.note(session)
    if end == "closed":
        made.close()
    else:
        os.close(made.lock)
        sweep(tmp_path) if end == "swept" else remove(str(made.folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.log", "psm_before", "psm_others"]


def somebody_elses_by_now(file: Path, _: Path) -> None:
    file.unlink()
    file.with_name("first").touch()  # takes the inode, where they are given again
    file.touch()


def link_by_now(file: Path, _: Path) -> None:
    file.rename(file.with_name("first"))
    file.symlink_to("first")


def noted_with_a_way(file: Path, folder: Path) -> None:
    (folder / NOTED).write_text(f"{file.stat().st_ino} ../{file.parent.name}/{file.name}\n")


def noted_as_nonsense(_: Path, folder: Path) -> None:
    (folder / NOTED).write_bytes(b"\xff\n\n7\n")


@pytest.mark.parametrize("change", [somebody_elses_by_now, link_by_now, noted_with_a_way, noted_as_nonsense])
def test_of_what_was_noted_only_that_very_file_goes(tmp_path: Path, change: Callable[[Path, Path], None]):
    made, mine = make(tmp_path), tmp_path / "psm_mine"
    assert made.folder is not None
    with sharing(mine) as session:
        made.note(session)
    change(mine, made.folder)
    made.close()
    assert os.path.lexists(mine)
    assert not made.folder.exists()


def test_what_was_noted_stays_noted_and_what_cannot_be_is_none(tmp_path: Path):
    made, first, second = make(tmp_path), tmp_path / "psm_1", tmp_path / "sem.mp-2"
    assert made.folder is not None
    for file in (first, second):
        with sharing(file) as session:
            made.note(session)
    assert [line.partition(" ")[2] for line in (made.folder / NOTED).read_text().splitlines()] in (
        ["psm_1", "sem.mp-2"], ["sem.mp-2", "psm_1"]
    )  # fmt: skip
    made.note(1 << 30)
    made.close()
    with sharing(tmp_path / "psm_3") as session:
        made.note(session)
    Segments().note(os.getpid())
    assert [path.name for path in tmp_path.iterdir()] == ["psm_3"]


def test_a_name_that_cannot_be_written_down_ends_no_noting(tmp_path: Path):
    """It ended it for the engine's life, and was told when that ended."""
    made, odd, mine = make(tmp_path), tmp_path / os.fsdecode(b"psm_\xff"), tmp_path / "psm_mine"
    with sharing(odd, mine) as session:
        made.note(session)
    made.close()
    assert list(tmp_path.iterdir()) == [odd]


def test_where_shared_memory_is_a_link_the_files_are_found_behind_it(tmp_path: Path):
    """As /dev/shm is one to /run/shm on some machines: maps say where it leads."""
    (tmp_path / "run").mkdir()
    (tmp_path / "shm").symlink_to("run", target_is_directory=True)
    made = make(tmp_path / "shm")
    with sharing(tmp_path / "shm" / "psm_mine") as session:
        made.note(session)
    made.close()
    assert list((tmp_path / "run").iterdir()) == []


def linked_elsewhere(name: Path, victims: Path) -> None:
    name.symlink_to(victims, target_is_directory=True)


def folder_of_files(name: Path, victims: Path) -> None:
    victims.rename(name)
    linked_elsewhere(victims, name)


@pytest.mark.parametrize("plant", [linked_elsewhere, folder_of_files])
@pytest.mark.parametrize("who", ["sweeper", "owner", "guard"])
def test_what_another_user_puts_in_a_folders_place_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path, Path], None], who: str
):
    """/dev/shm is everybody's. Once a folder is gone (a sweeper was quicker, somebody cleaned up), its name is free: a link there
    had us remove the files of whatever it led to, as root all of /etc."""
    root, victims = tmp_path / "shm", tmp_path / "etc"
    root.mkdir()
    victims.mkdir()
    (victims / "passwd").write_text("root")
    genuine, owner, planted = fcntl.flock, os.fstat, list[Path]()

    def instead(path: Path) -> None:
        planted.append(path)
        remove(str(path))
        plant(path, victims)
        theirs = os.stat(path).st_ino if plant is folder_of_files else -1

        def by_owner(found: int) -> os.stat_result:
            said = owner(found)
            return os.stat_result([*said[:4], 12_345 if said.st_ino == theirs else said.st_uid, *said[5:10]])

        monkeypatch.setattr(os, "fstat", by_owner)

    def with_an_attacker(*given: int) -> None:
        if not planted:
            instead(root / f"{PREFIX}left")
        genuine(*given)

    if who == "sweeper":
        (root / f"{PREFIX}left").mkdir()
        monkeypatch.setattr(fcntl, "flock", with_an_attacker)
        sweep(root)
    else:
        made = make(root)
        assert made.folder is not None
        instead(made.folder)
        made.close() if who == "owner" else remove(str(made.folder))
    assert (victims / "passwd").read_text() == "root"
    assert os.path.lexists(planted[0])


def test_where_there_is_no_place_ucx_finds_its_own(tmp_path: Path):
    made = make(tmp_path / "none")
    assert (made, made.environment) == (Segments(), {})
    made.close()


UCX = """
import os, sys
from fleet_worker.transfer.probe import _agent, _memory
memory, address = _memory()
agent = _agent("one", address)
files = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]
print(*[path for path in files if "ucx_shm_posix_" in path], sep="\\n")
"""


def test_ucx_puts_its_segments_there(tmp_path: Path):
    """All of them, each unlinked by then, and says nothing of it."""
    made = make(tmp_path)
    environment = {**os.environ, **made.environment, "NIXL_LOG_LEVEL": "WARN"}
    done = subprocess.run([sys.executable, "-c", UCX], env=environment, capture_output=True, text=True, timeout=60, check=True)
    made.close()
    paths = done.stdout.split("\n")[:-1]
    assert len(paths) >= 2
    assert {os.path.dirname(path) for path in paths} == {str(made.folder)}, paths
    assert all(path.endswith(" (deleted)") for path in paths)
    assert "UCX" not in done.stderr
