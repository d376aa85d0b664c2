"""UCX's own tables: which lanes reads between processes take. Lines as UCX 1.23 printed them, RDMA ones with its lane names."""

from __future__ import annotations

import pytest

from fleet_worker.transfer.ucxlog import UcxReport, kind_of


def table(endpoint: str, operation: str, *rows: str, process: int = 7) -> list[str]:
    head = f"[1795246979.342115] [vm:{process:<5}:0]   "  # UCX fills up to five places
    return [
        f"{head}+--------+-------------+-----------+",
        f"{head}| reader {endpoint}                 |",
        f"{head}| {operation} |",
        f"{head}| Range  | Description |  Config   |",
        *(f"{head}| 0..inf | {row} |" for row in rows),
    ]


READ = "remote memory read by ucp_get*(multi) into host memory from host"
GPUS = "remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[1]"
"""As an H100 said it, and its rows with tcp and cuda_ipc; srd's is of openucx/ucx#10950."""
STAGED = "cuda_copy, fenced write to remote, frag host, cuda_copy, frag host"
TCP = table("intra-node cfg#1", READ, "software emulation | tcp/lo")


@pytest.mark.parametrize(
    ("lines", "transport"),
    [
        ([], None),
        (TCP, "tcp"),
        (table("intra-node cfg#1", READ, "zero-copy   | cma/memory"), "shm"),
        (table("inter-node cfg#2", READ, "zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1"), "rdma"),
        (table("inter-node cfg#2", READ.replace("host", "cuda"), "zero-copy | dc_mlx5/mlx5_0:1"), "rdma"),
        (table("inter-node cfg#2", READ, "zero-copy | srd/rdmap0s6:1"), "rdma"),
        (table("intra-node cfg#1", READ, "copy-out | cuda_copy/cuda"), None),
        (table("self cfg#0", READ, "zero-copy | tcp/lo"), None),
        (table("inter-node cfg#1", "active message by ucp_am_send* from host memory", "zero-copy | tcp/eth0"), None),
        (TCP + table("inter-node cfg#2", READ, "zero-copy | rc_mlx5/mlx5_0:1"), "tcp"),
        (table("inter-node cfg#3", GPUS, "software emulation | srd/rdmap135s0:1"), "emulated"),
        (table("inter-node cfg#3", GPUS, "zero-copy | rc_mlx5/mlx5_0:1", "software emulation | rc_mlx5/mlx5_0:1"), "emulated"),
        (TCP + table("inter-node cfg#3", GPUS, "software emulation | srd/rdmap135s0:1"), "tcp"),
        (
            [
                line.replace("0..inf", "0..1651")
                for line in table("inter-node cfg#3", GPUS, "software emulation | srd/rdmap1s0:1")
            ],
            "rdma",
        ),
        (table("intra-node cfg#2", GPUS, "software emulation | tcp/lo"), "tcp"),
        (table("intra-node cfg#2", GPUS, "zero-copy   | cuda_ipc/cuda"), "shm"),
        (table("intra-node cfg#1", GPUS, f"(?) rndv using pipeline {STAGED} | 52% on tcp/lo and 48% on tcp/eth0"), "tcp"),
    ],
)
def test_the_slowest_lane_of_reads_counts(lines: list[str], transport: str | None):
    report = UcxReport()
    assert all(report.feed(line) for line in lines)
    assert report.transport == transport


def test_lines_of_two_processes_may_be_mixed():
    ours, theirs = table("self cfg#0", READ, "zero-copy | tcp/lo"), table("inter-node cfg#1", READ, "x | rc_mlx5/m:1", process=8)
    report = UcxReport()
    for pair in zip(ours, theirs, strict=True):
        assert all(map(report.feed, pair))
    assert report.transport == "rdma"


@pytest.mark.parametrize("line", ["", "ERROR: no memory", "[12:00] | tcp/lo |", "| remote memory read by ucp_get | tcp/lo |"])
def test_other_lines_are_nobodys_table(line: str):
    assert not UcxReport().feed(line)


def test_kinds():
    assert [kind_of(lane) for lane in ("tcp", "rc_verbs", "cuda_ipc", "posix", "gdr_copy")] == ["tcp", "rdma", "shm", "shm", None]
