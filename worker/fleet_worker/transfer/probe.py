"""`python -m fleet_worker.transfer.probe`: one NIXL read between two processes of this pod, with the pod's own UCX settings.

Prints {"gbps": number} as its last line on stdout; which transport it took stands in UCX's tables on stderr (ucxlog.py). Memory
of the host is read, not of a device: the probe must not disturb an engine that needs all of it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from typing import Any

SIZE = 32 * 1024 * 1024
ROUNDS_S = 0.5
MOST_S = 15.0
MARK = "fleet-probe "
PR_SET_PDEATHSIG = 1
"""prctl(2)."""


def _memory() -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, SIZE)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _agent(name: str, address: int) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
    agent.register_memory([(address, SIZE, 0, "probe")], "DRAM")
    return agent


def end_with(parent: int) -> None:
    """The kernel kills this process when its parent dies: stdin is not looked at while NIXL starts, and that may hang."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        sys.exit(1)


def own() -> None:
    """Offer memory until stdin ends."""
    memory, address = _memory()
    memory[:4] = b"read"
    agent = _agent("probe-owner", address)
    print(MARK + json.dumps({"agent": agent.get_agent_metadata().hex(), "address": address}), flush=True)
    os.set_blocking(0, False)
    end = time.monotonic() + MOST_S
    while time.monotonic() < end:
        agent.get_new_notifs()
        try:
            if os.read(0, 1) == b"":
                return
        except BlockingIOError:
            continue


def read() -> float:
    """Gigabits per second of the best of a few reads; raises what NIXL raises."""
    memory, address = _memory()
    agent = _agent("probe-reader", address)
    command = [sys.executable, "-m", "fleet_worker.transfer.probe", "own", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as owner:
        if owner.stdin is None or owner.stdout is None:
            raise RuntimeError("no pipes")
        try:
            offer = next(line for line in owner.stdout if line.startswith(MARK.encode()))
            told = json.loads(offer.removeprefix(MARK.encode()))
            name = agent.add_remote_agent(bytes.fromhex(told["agent"]))
            mine = agent.get_xfer_descs([(address, SIZE, 0)], "DRAM")
            theirs = agent.get_xfer_descs([(told["address"], SIZE, 0)], "DRAM")
            best_s = _reads(agent, mine, theirs, name)
        finally:
            owner.stdin.close()
    if memory[:4] != b"read":
        raise RuntimeError("the probe read other bytes than were written")
    return SIZE * 8 / best_s / 1e9


def _reads(agent: Any, mine: Any, theirs: Any, name: Any) -> float:
    """Seconds of the fastest read; the first one makes the connection and does not count."""
    best_s, end = float("inf"), 0.0
    for round_ in range(1_000):
        begun = time.monotonic()
        transfer = agent.initialize_xfer("READ", mine, theirs, name)
        state = agent.transfer(transfer)
        while state == "PROC" and time.monotonic() - begun < MOST_S:
            state = agent.check_xfer_state(transfer)
        if state != "DONE":
            raise RuntimeError(f"a read ended as {state}")
        now = time.monotonic()
        if round_ == 0:
            end = now + ROUNDS_S
            continue
        best_s = min(best_s, now - begun)
        if now > end:
            break
    return best_s


if __name__ == "__main__":
    if sys.argv[1:2] == ["own"]:
        end_with(int(sys.argv[2]))
        own()
    else:
        print(json.dumps({"gbps": round(read(), 3)}), flush=True)
