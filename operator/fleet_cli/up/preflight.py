"""What can be known to fail before anything starts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from pathlib import Path

from fleet_api.v1alpha1 import ClaimSource, FileSource, InferenceFleet, Source
from fleet_api.v1alpha1.fleet import ROLES
from fleet_api.v1alpha1.model import located
from fleet_cli.errors import InputError, RunError
from fleet_cli.up.view import size

WORKER_BYTES = 256 * 1024 * 1024
"""A worker without model and cache takes more than that for itself (torch engine: 300 MB that no other process shares)."""
MEMINFO = Path("/proc/meminfo")


def check_model(fleet: InferenceFleet, claims: Mapping[str, Path]) -> None:
    """InputError when the folder of a tier's model, or of an adapter, is not on this machine; what is inside is the worker's
    business."""
    for index, tier in enumerate(fleet.spec.tiers):
        field = "spec.model.source" if tier.model is None else f"spec.tiers[{index}].model.source"
        _check_source(field, "model", fleet.model_of(tier).location, claims)
    for index, adapter in enumerate(fleet.spec.model.adapters):
        where = located(adapter.source, adapter.revision)
        _check_source(f"spec.model.adapters[{index}].source", "adapter", where, claims)


def _check_source(field: str, what: str, source: Source, claims: Mapping[str, Path]) -> None:
    match source:
        case FileSource(path=path):
            folder = Path(path)
        case ClaimSource(claim=claim, path=path):
            if claim not in claims:
                raise InputError(f"{field}: claim {claim} has no folder on this machine: give --pvc {claim}=DIR")
            folder = claims[claim] / path
        case _:
            return
    try:
        if not folder.exists():
            raise InputError(f"{field}: {what} path {folder} does not exist")
        if not folder.is_dir():
            raise InputError(f"{field}: {what} path {folder} is not a folder")
    except OSError as error:  # a name that is too long, a folder above it that may not be entered
        raise InputError(f"{field}: {what} path {folder}: {error.strerror}") from error


def check_engine(fleet: InferenceFleet, vllm: str | None) -> None:
    """InputError when the fleet wants vLLM and this machine has none."""
    if fleet.spec.engine.type == "vllm" and vllm is None:
        raise InputError("spec.engine.type: vllm is not installed here: run `make vllm`, or set FLEET_VLLM_BIN")


def free_bytes() -> int | None:
    """Memory of this machine that new processes may take; None: it does not tell."""
    try:
        lines = MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def check_memory(fleet: InferenceFleet, free: int | None) -> None:
    """InputError when the workers that are started first do not fit into `free` bytes: engines take their whole cache at once,
    and the kernel would kill whatever it likes, a fleet or the user's editor."""
    engine = fleet.spec.engine
    workers, caches = 0, 0
    for tier in fleet.spec.tiers:
        for role, count in zip(ROLES, tier.initial, strict=True):
            workers += count
            caches += count if engine.type == "torch" or tier.device_request(role) is None else 0
    needed = workers * WORKER_BYTES + caches * engine.cache_bytes
    if free is not None and needed > free:
        raise InputError(
            f"spec.engine.cacheSize: {workers} workers, each with a cache of {engine.cache_size}, need {size(needed)}, and this "
            f"machine has {size(free)} free: give them less, or run fewer (minReplicas, replicas)"
        )


def check_port(port: int) -> None:
    """RunError when the endpoint's port cannot be bound on 127.0.0.1."""
    with socket.socket() as listener:
        # The router binds with this option too: without it a port that only lingers in TIME_WAIT would look busy.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RunError(f"port {port} on 127.0.0.1 is in use: stop what holds it or choose another with --port") from error
            raise RunError(f"port {port} on 127.0.0.1 cannot be used: {error.strerror}") from error
