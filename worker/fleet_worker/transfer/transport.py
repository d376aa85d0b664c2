"""Which transport UCX may use, and which one it says it uses. Asked for and in use are two different facts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fleet_worker.config import TransportName, ucx_transports
from fleet_worker.transfer.base import KvTransferError

INFINIBAND = Path("/sys/class/infiniband")


def has_rdma_device(devices: Path = INFINIBAND) -> bool:
    """A host channel adapter is visible in this pod."""
    return devices.is_dir() and any(devices.iterdir())


def ucx_environment(transport: TransportName, required: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """UCX variables for the asked transport; what the pod's environment says stays."""
    allow = ucx_transports(transport, required=required)
    return {} if allow is None or "UCX_TLS" in environment else {"UCX_TLS": allow}


def check_asked(transport: str, required: bool) -> None:
    """KvTransferError when a required transport cannot be had here."""
    if required and transport == "rdma" and not has_rdma_device():
        raise KvTransferError("transport", "kvTransfer requires rdma, but no RDMA device is visible in this pod")


def in_use(environment: Mapping[str, str] | None = None, devices: Path = INFINIBAND) -> str:
    """Best transport that UCX can be using between two pods: rdma only with a device and permission, else shm on one host
    unless the allow list leaves it out, else tcp."""
    allowed = (environment if environment is not None else os.environ).get("UCX_TLS", "all").split(",")
    anything = "all" in allowed
    if has_rdma_device(devices) and (anything or any(name in allowed for name in ("rc", "dc", "ud", "ib"))):
        return "rdma"
    if anything or any(name in allowed for name in ("sm", "shm", "posix", "sysv", "cma")):
        return "shm"
    return "tcp"
