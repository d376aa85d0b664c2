"""Files of volumes on a disk that takes nothing more."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fleet_operator.runtime.volumes import write_files


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A write names no file: the screen said "None: No space left on device"."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_files(tmp_path, {"a.json": b"one"})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left on device") as failed:
            write_files(tmp_path, {"a.json": b"two"})
    assert (failed.value.filename, failed.value.errno) == (str(tmp_path / "a.json"), errno.ENOSPC)
    assert (tmp_path / "a.json").read_bytes() == b"one"
    write_files(tmp_path, {"a.json": b"two"})
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]
