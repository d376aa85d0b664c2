"""`make bench-kv`: a KV hand-off with everything that makes it safe (lease, digests, confirmation) against a bare NIXL READ.

Two processes, each with a pool of its own registered with NIXL, as two torch workers have. Rounds alternate between the two;
both are warmed up; both move the same bytes in the same run. Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

BLOCK_BYTES = 64 * 1024
BLOCKS = 1_024
ROUNDS = 31
WARMUP_S = 3.0
"""Both sides run for this long before anything counts: the first hand-off also makes connections, and a virtual machine that was
idle gives its cores only after a while."""


def side(host: str) -> tuple[Any, Any, Any]:
    """(memory, connector, bare agent) of one process."""
    os.environ["NIXL_LOG_LEVEL"] = "WARN"
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    from fleet_worker.transfer.base import KvPool
    from fleet_worker.transfer.nixl import NixlConnector
    from fleet_worker.transfer.owner import TransferSettings

    memory = torch.randint(0, 255, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
    connector = NixlConnector(TransferSettings(host, 5600, "bench"), KvPool(memory.data_ptr(), BLOCK_BYTES, BLOCKS, 16))
    bare = nixl_agent(f"bare-{host}", nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
    bare.register_memory([(memory.data_ptr(), memory.numel(), 0, "kv")], "DRAM")
    return memory, connector, bare


def owner(pipe: Connection) -> None:
    """The prefill side: grants on request, drives its bare agent meanwhile."""
    import msgspec

    memory, connector, bare = side("127.80.0.1")
    pipe.send((bare.get_agent_metadata(), memory.data_ptr()))
    while True:
        if pipe.poll(0.001):
            asked = pipe.recv()
            if asked is None:
                break
            pipe.send(msgspec.json.encode(connector.grant("bench", list(range(BLOCKS)), BLOCKS * 16, "bench")))
        connector.released()
        bare.get_new_notifs()
    connector.close()


def hand_off(connector: Any, reference: Any) -> tuple[float, float]:
    """(seconds as the engine sees it, seconds as the connector counts it)."""
    begun = time.perf_counter()
    connector.fetch("bench", reference, 0, list(range(BLOCKS)))
    while not (found := connector.finished()):
        time.sleep(0.0002)
    assert found[0].error is None, found[0].error
    return time.perf_counter() - begun, found[0].seconds


def bare_read(agent: Any, name: str, local: int, remote: int) -> float:
    """Seconds of one READ of the same bytes in one descriptor."""
    size = BLOCKS * BLOCK_BYTES
    begun = time.perf_counter()
    mine, theirs = (agent.get_xfer_descs([(address, size, 0)], "DRAM") for address in (local, remote))
    handle = agent.initialize_xfer("READ", mine, theirs, name)
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    assert state == "DONE", state
    agent.release_xfer_handle(handle)
    return time.perf_counter() - begun


def measure() -> dict[str, Any]:
    """All rounds."""
    import msgspec

    from fleet_wire.kv import KvReference

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=owner, args=(theirs,))
    process.start()
    memory, connector, bare = side("127.80.0.2")
    metadata, remote = ours.recv()
    found = bare.add_remote_agent(metadata)
    name = found.decode() if isinstance(found, bytes) else found
    safe, raw, setup_us = [], [], 0.0
    begun, number = time.monotonic(), 0
    while len(safe) < ROUNDS:
        ours.send("grant")
        reference = msgspec.json.decode(ours.recv(), type=KvReference)
        seconds, _ = hand_off(connector, reference)
        bare_seconds = bare_read(bare, name, memory.data_ptr(), remote)
        if number == 0:
            setup_us = seconds * 1e6
        number += 1
        if time.monotonic() - begun > WARMUP_S:
            safe.append(seconds)
            raw.append(bare_seconds)
    ours.send(None)
    process.join()
    connector.close()
    size = BLOCKS * BLOCK_BYTES / 1e9
    ratio = statistics.median(r / s for r, s in zip(raw, safe, strict=True))
    return {
        "gbps": round(size / statistics.median(safe), 3), "raw_gbps": round(size / statistics.median(raw), 3),
        "vs_raw": round(ratio, 3), "setup_us": round(setup_us), "bytes": BLOCKS * BLOCK_BYTES, "rounds": ROUNDS, "errors": 0,
    }  # fmt: skip


def main() -> None:
    """Print the table and the JSON line."""
    figures = measure()
    print(f"{'hand-off of 64 MiB':32}{'GB/s':>8}")
    print(f"{'ours: lease, digests, proof':32}{figures['gbps']:>8}")
    print(f"{'bare NIXL READ':32}{figures['raw_gbps']:>8}")
    print(f"{'ratio (median of pairs)':32}{figures['vs_raw']:>8}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
