"""A process whose runtime has no room for it is not left alone; logs that cannot be written cost nothing but lines."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from fleet_operator.runtime import process
from fleet_operator.runtime.logs import ContainerLog
from fleet_operator.runtime.process import start

SLEEP = ["/bin/sleep", "1000"]


def test_a_process_that_cannot_be_recorded_is_ended_and_the_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pids").write_text("a file where a folder belongs")
    begun: list[subprocess.Popen[bytes]] = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            begun.append(self)

    monkeypatch.setattr(process.subprocess, "Popen", Watched)

    async def go() -> None:
        log = ContainerLog(tmp_path / "x.log", 100)
        with pytest.raises(FileExistsError) as refused:
            start(SLEEP, os.environ, Path("/"), log, message_bytes=10, mark="no such mark", pids=tmp_path / "pids")
        log.close()
        assert str(tmp_path / "pids") in str(refused.value)

    asyncio.run(go())
    assert [popen.returncode for popen in begun] == [-9]


def test_a_log_on_a_full_disk_loses_lines_only(tmp_path: Path):
    log = ContainerLog(tmp_path / "x.log", 10)
    log.write(b"12345")
    real, log._file = log._file, Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115 - closed below
    log.write(b"67")
    log._file.close()
    log._file = real
    log.write(b"89")
    (tmp_path / "x.log").rename(tmp_path / "gone")
    tmp_path.chmod(0o500)
    log.write(b"rotates, but cannot")
    tmp_path.chmod(0o700)
    (tmp_path / "x.log.1").unlink(missing_ok=True)
    log.write(b"again")
    log.close()
    assert (tmp_path / "gone").read_bytes() == b"1234589"
    assert (tmp_path / "x.log").read_bytes().endswith(b"again")
