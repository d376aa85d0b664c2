"""What UCX itself says about the transport of reads: the tables that it logs under UCX_PROTO_INFO=y. Pure.

A table starts with the name of an endpoint configuration ("intra-node cfg#1"), then the operation ("remote memory read by
ucp_get*"), then rows of size range, method and lanes ("0..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 and ..."). Only reads
between processes count: hand-off pulls blocks. Recorded from UCX 1.23, as it comes with nixl 1.5.1; GPU memory's on an H100.

A NIC that cannot reach the memory reads nothing by itself: UCX then says "software emulation" beside its lanes
(openucx/ucx#10950), each byte goes through the CPUs of both sides, and it is RDMA by name only.
"""

from __future__ import annotations

import re
from typing import Literal

Transport = Literal["tcp", "emulated", "rdma", "shm"]
"""emulated: over an RDMA NIC, by the CPUs."""
TABLE = re.compile(r"^\[[0-9.]+\] \[[^\]]*?:(\d+) *:\d+\]\s+([|+].*)$")
LANE = re.compile(r"\b([a-z][a-z0-9_]*)/[A-Za-z0-9]")
ENDPOINT = re.compile(r"(self|intra-node|inter-node) cfg#\d+")
RDMA = ("rc", "dc", "ud", "ib", "srd", "gga", "gaudi")
MEMORY = ("cma", "sysv", "posix", "xpmem", "knem", "cuda_ipc", "rocm_ipc", "sm", "mm")
SLOWEST_FIRST: tuple[Transport, ...] = ("tcp", "emulated", "rdma", "shm")
EMULATED_READ = re.compile(r"\| *(\d+\.\.)?inf *\| *software emulation ")
"""Of blocks of any size: a few bytes may go by hand where blocks do not."""


def kind_of(lane: str) -> Transport | None:
    """The transport of one UCX lane such as rc_mlx5; None for one that moves nothing between processes (cuda_copy)."""
    if lane == "tcp":
        return "tcp"
    if any(lane == name or lane.startswith(f"{name}_") for name in MEMORY):
        return "shm"
    return "rdma" if any(lane == name or lane.startswith(f"{name}_") for name in RDMA) else None


def kinds_of(row: str) -> frozenset[Transport]:
    """The transports of one row of a table about reads."""
    found = frozenset(kind for lane in LANE.findall(row) if (kind := kind_of(lane)) is not None)
    by_hand: frozenset[Transport] = frozenset({"emulated"})
    return (found - {"rdma"}) | by_hand if EMULATED_READ.match(row) and "rdma" in found else found


class UcxReport:
    """Collects the lanes of reads; lines of several processes may be mixed."""

    def __init__(self) -> None:
        self._at: dict[str, tuple[bool, bool]] = {}
        """Process → (its table is about another process, about reads)."""
        self._seen: frozenset[Transport] = frozenset()

    def feed(self, line: str) -> bool:
        """Take one line of the log; whether it was part of a table."""
        found = TABLE.match(line)
        if found is None:
            return False
        process, row = found[1], found[2]
        between, reads = self._at.get(process, (False, False))
        endpoint = ENDPOINT.search(row)
        if endpoint is not None:
            self._at[process] = (endpoint[1] != "self", False)
        elif "remote memory read by" in row:
            self._at[process] = (between, True)
        elif between and reads:
            self._seen |= kinds_of(row)
        return True

    @property
    def transport(self) -> Transport | None:
        """The slowest that any read took since the start; None before the first read."""
        return next((kind for kind in SLOWEST_FIRST if kind in self._seen), None)
