"""A read that NIXL refuses when it has posted a part of it: that part writes on, and no handle says until when."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fleet_worker.transfer.reader import FENCE_EVERY_S
from tests.fleet_worker.transfer.reading import Rig, reference, welcome
from tests.fleet_worker.transfer.test_nixl import Side, error_reason, wait

REFUSING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
typedef void *(*get)(void *, void *, uintptr_t, uint64_t, void *, const void *);
int gets_left = -1; /* -1: all of them */
char ucp[4096];
void *ucp_get_nbx(void *ep, void *buffer, uintptr_t count, uint64_t remote, void *rkey, const void *param) {
    if (gets_left == 0) return (void *)(intptr_t)-4; /* UCS_ERR_NO_MEMORY */
    if (gets_left > 0) gets_left--;
    return ((get)dlsym(dlopen(ucp, RTLD_NOW | RTLD_NOLOAD), "ucp_get_nbx"))(ep, buffer, count, remote, rkey, param);
}
"""


class RemoteDisconnectError(RuntimeError):
    """NIXL's, by its name."""


RemoteDisconnectError.__name__ = "nixlRemoteDisconnectError"


def refusing(rig: Rig, monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> None:
    """What each post comes to, in order; None: it is taken."""
    answers = iter(errors)

    def transfer(_: object) -> str:
        rig.agent.reads += 1
        if (error := next(answers)) is not None:
            raise error
        return "PROC"

    monkeypatch.setattr(rig.agent, "transfer", transfer)


def test_its_blocks_wait_for_a_read_behind_it(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """They were free at once, and what came late was in another request's KV."""
    refusing(rig, monkeypatch, RuntimeError("NIXL_ERR_BACKEND"), RuntimeError("NIXL_ERR_BACKEND"), None)
    rig.pull("r", reference())
    rig.peers.answer(welcome)
    now = time.monotonic()
    rig.reader.advance(now)
    assert (rig.ended(), rig.ended(lingering=True)) == ({}, {"r": "read"}), "its request need not wait"
    rig.reader.advance(now + FENCE_EVERY_S / 2)
    assert rig.agent.reads == 2, "not in each turn"
    rig.reader.advance(now + FENCE_EVERY_S)
    rig.reader.advance(now + 2 * FENCE_EVERY_S)
    assert (rig.agent.reads, rig.ended(), rig.agent.known) == (3, {}, ["engine"])
    rig.agent.state = "DONE"
    rig.reader.advance(now + 3 * FENCE_EVERY_S)
    assert (rig.ended(), rig.agent.handles, rig.reader._pulls, len(rig.done)) == ({"r": "read"}, 0, {}, 2)


@pytest.mark.parametrize("refused", [0, 1], ids=["at-once", "behind-it"])
def test_over_a_connection_that_failed_nothing_comes(rig: Rig, monkeypatch: pytest.MonkeyPatch, refused: int):
    refusing(rig, monkeypatch, *[RuntimeError("NIXL_ERR_BACKEND")] * refused, RemoteDisconnectError())
    rig.pull("r", reference())
    rig.peers.answer(welcome)
    rig.reader.advance(time.monotonic())
    assert (rig.ended(), rig.agent.handles, rig.agent.known) == ({"r": "read"}, 0, [])


def test_one_that_ends_in_an_error_is_over(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    refusing(rig, monkeypatch, RuntimeError("NIXL_ERR_BACKEND"), None)
    rig.pull("r", reference())
    rig.peers.answer(welcome)
    rig.agent.state = "ERR"
    for _ in range(2):
        rig.reader.advance(time.monotonic())
    assert (rig.ended(), rig.agent.handles, rig.agent.known) == ({"r": "read"}, 0, [])


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: UCX cannot be made to refuse here")
def test_what_a_refused_read_still_writes_is_written_into_nobodys_blocks(tmp_path: Path):
    """Over TCP, with a frozen owner: the first of two blocks came a second after the pull had ended."""
    (tmp_path / "refusing.c").write_text(REFUSING)
    library = tmp_path / "refusing.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "refusing.c", "-ldl"], check=True, timeout=60)
    argv = [sys.executable, "-c", f"from {__name__} import late; late({str(library)!r})"]
    environment = {**os.environ, "LD_PRELOAD": str(library), "UCX_TLS": "tcp,self", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(argv, check=False, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3_000:]


def late(library: str) -> None:
    """In a process of its own, over a UCX that refuses what it is told to."""
    shim = ctypes.CDLL(library)
    owner, reader = Side("127.77.0.7"), Side("127.77.0.8")
    mapped = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libucp" in line)
    (ctypes.c_char * 4096).in_dll(shim, "ucp").value = mapped.encode()
    left = ctypes.c_int.in_dll(shim, "gets_left")
    reader.connector.fetch("a", owner.grant("a", [3], 16), 0, [1])
    assert reader.finished().error is None
    given = owner.grant("b", [4, 9], 32)
    with owner.connector._owner._lock:  # its transfer thread waits here
        left.value = 1
        reader.connector.fetch("b", given, 0, [2, 20])
        told = reader.finished()
        assert (error_reason(told), told.lingers) == ("read", True)
        left.value = -1
        reader.memory[2] = 0
        time.sleep(0.2)
        assert reader.connector.finished() == []
    over = wait(reader.connector.finished)[0]
    assert (over.request_id, error_reason(over), over.lingers) == ("b", "read", False)
    assert torch.equal(reader.memory[2], owner.memory[4]), "it came late"
    reader.memory[2] = 0
    reader.connector.fetch("c", owner.grant("c", [5], 16), 0, [8])
    assert reader.finished().error is None
    assert not reader.memory[2].any(), "and no later"
    owner.connector.close()
    reader.connector.close()
