"""No file and no port left on the router's own host: that is nobody else's failure."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import sys
from typing import Any

import pytest

from fleet_router import metrics
from fleet_router.follow.liveness import alive
from tests.fleet_router.rig import LONG, Rig, run

CODE = """
import resource
from fleet_router.__main__ import files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))
files()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def without_room(monkeypatch: pytest.MonkeyPatch, rig: Rig, error: OSError) -> None:
    """No connection to a worker can be made."""
    loop = asyncio.get_running_loop()
    connect, ports = loop.create_connection, {worker.port for worker in (*rig.prefill, *rig.decode)}

    async def create_connection(factory: Any, host: Any = None, port: Any = None, **more: Any) -> Any:
        if port in ports:
            raise error
        return await connect(factory, host, port, **more)

    monkeypatch.setattr(loop, "create_connection", create_connection)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ECONNREFUSED])
@pytest.mark.parametrize("prompt", ["short", LONG], ids=["decode", "prefill"])
def test_workers_that_we_cannot_connect_to_for_want_of_room_stay_in(prompt: str, number: int, monkeypatch: pytest.MonkeyPatch):
    """Incident: with all files of the router open, each worker that it would have connected to was put out as one that refuses,
    and stayed out when there was room again."""
    refused = number == errno.ECONNREFUSED

    async def go(rig: Rig) -> None:
        with monkeypatch.context() as patch:
            without_room(patch, rig, OSError(number, os.strerror(number)))
            status, body = await rig.post({"model": "m", "prompt": prompt})
            assert (status, b"the router has no file or port left" in body) == (503, not refused)
            assert (rig.context.metrics.of("t", "r").errors > 0) == refused
            there = await asyncio.gather(*(alive(worker.endpoint) for worker in rig.context.table.workers.values()))
            assert set(there) == {not refused}
        if not refused:
            assert (await rig.post({"model": "m", "prompt": prompt}))[0] == 200

    run(go)


def test_what_the_process_takes_is_told_without_a_file_left():
    """Incident: /metrics was 500, and a bug of ours, when it was needed most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        found = metrics.process_lines()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (line,) = [line for line in found if line.startswith("process_resident_memory_bytes")]
    assert int(line.split()[1]) > 1_000_000


@pytest.mark.parametrize(("hard", "most"), [(900, 900), (64, 64)])
def test_a_router_takes_all_the_files_that_it_may_have(hard: int, most: int):
    """Incident: it takes 2,048 clients, and began with the 1,024 files that systemd gives."""
    told = subprocess.run([sys.executable, "-c", CODE.format(hard=hard)], capture_output=True, text=True, check=True, timeout=30)
    assert int(told.stdout) == most
