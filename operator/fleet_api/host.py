"""What a worker asks of its host beside devices and weights, where its podTemplate says nothing else."""

from __future__ import annotations

from typing import Final

MIB: Final = 1024 * 1024
HOST_REQUESTS: Final = {"torch": (1, 1024 * MIB), "vllm": (2, 4096 * MIB)}
"""Cores and bytes of the host that an engine needs beside devices, cache and weights. Without any request a worker, and the GPU
that it holds, is the first that a node in need of memory evicts. No limits: the weights' size is not known here."""


def host_requests(engine: str, cache_bytes: int, *, on_cpu: bool) -> dict[str, str]:
    """cpu and memory in the API server's own spelling; on a CPU tier the KV cache lies in the host's memory."""
    cores, memory = HOST_REQUESTS[engine]
    memory += cache_bytes if on_cpu else 0
    return {"cpu": str(cores), "memory": f"{-(-memory // MIB)}Mi"}
