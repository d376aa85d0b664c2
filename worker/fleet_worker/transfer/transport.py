"""Which transport UCX may use, and which one it says it uses. Asked for and in use are two different facts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fleet_worker.config import RDMA_TRANSPORTS, TransportName, ucx_transports
from fleet_worker.transfer.base import KvTransferError

INFINIBAND = Path("/sys/class/infiniband")
PCI = Path("/sys/bus/pci/devices")
NVIDIA = "0x10de"
DISPLAY = "0x03"
"""First byte of a PCI device's class: display and 3D controllers."""
TCP_SEGMENT = "256k"
"""Bytes that UCX sends at once over TCP, instead of 8 KiB. Measured on an H100's host (UCX 1.23, other PID namespace, as pods
are; blocks of 64 KiB): 3.0 GB/s of host memory instead of 1.4, 1.5 GB/s of GPU memory instead of 0.4. A peer with smaller
segments is sent its own size."""


def has_rdma_device(devices: Path = INFINIBAND) -> bool:
    """A host channel adapter is visible in this pod."""
    return devices.is_dir() and any(devices.iterdir())


def has_nvidia_gpu(devices: Path = PCI) -> bool:
    """The node has an NVIDIA GPU, whether or not this container was given it: so NIXL looks for them."""
    return any(_reads(at / "vendor") == NVIDIA and _reads(at / "class").startswith(DISPLAY) for at in _entries(devices))


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _reads(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def taken_by_nixl(allowed: str, nvidia: bool) -> str:
    """An allow list of UCX_TLS that NIXL takes: on a node with NVIDIA GPUs it refuses one without CUDA's memory, also in a
    container that has none of them (nixl 1.5.1: "NVIDIA GPU(s) are present, but this setting does not enable CUDA memory
    support"). Where CUDA is not, naming it costs a warning of UCX."""
    names = [name.strip() for name in allowed.split(",")]
    touches = "all" in names or names[0].startswith("^") or any(name.startswith("cuda") for name in names)
    return allowed if touches or not nvidia else f"{allowed},cuda_copy"


def ucx_environment(
    transport: TransportName, required: bool, environment: Mapping[str, str], nvidia: bool | None = None
) -> dict[str, str]:
    """UCX variables for the asked transport; what the pod's environment says stays, but for what NIXL does not take. `nvidia`:
    the node has such GPUs; None: look."""
    allow = environment.get("UCX_TLS") or ucx_transports(transport, required=required)
    if allow is None:
        return {}
    allow = taken_by_nixl(allow, has_nvidia_gpu() if nvidia is None else nvidia)
    return {} if allow == environment.get("UCX_TLS") else {"UCX_TLS": allow}


def ucx_defaults(environment: Mapping[str, str], nvidia: bool) -> dict[str, str]:
    """What makes UCX faster, where the pod's environment does not say otherwise. `nvidia`: this container was given such a GPU.

    Without NVLink UCX leaves cuda_ipc out of reads, and takes TCP (openucx/ucx#7566, undone in ai-dynamo/nixl#2208): 0.6 GB/s
    instead of 1,130 between two processes on one H100 that see each other's PID namespace."""
    allowed = environment.get("UCX_TLS", "all").split(",")
    over_tcp = "tcp" in allowed or "all" in allowed
    found = {"UCX_TCP_TX_SEG_SIZE": TCP_SEGMENT, "UCX_TCP_RX_SEG_SIZE": TCP_SEGMENT} if over_tcp else {}
    return found | ({"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"} if nvidia else {})


def check_asked(transport: str, required: bool) -> None:
    """KvTransferError when a required transport cannot be had here."""
    if required and transport == "rdma" and not has_rdma_device():
        raise KvTransferError("transport", "kvTransfer requires rdma, but no RDMA device is visible in this pod")


def cannot_begin(error: Exception, environment: Mapping[str, str]) -> KvTransferError:
    """NIXL says no more than NIXL_ERR_BACKEND of a UCX that finds no usable transport, such as with a device that is not here."""
    said = ", ".join(f"{name}={environment[name]}" for name in ("UCX_TLS", "UCX_NET_DEVICES") if environment.get(name))
    words = f"NIXL cannot begin ({error or type(error).__name__}) with {said or 'every transport and device'}"
    return KvTransferError("transport", f"{words}: UCX's own lines in the log say why")


def in_use(environment: Mapping[str, str] | None = None, devices: Path = INFINIBAND) -> str:
    """Best transport that UCX can be using between two pods: rdma only with a device and permission, else shm on one host
    unless the allow list leaves it out, else tcp."""
    allowed = (environment if environment is not None else os.environ).get("UCX_TLS", "all").split(",")
    anything = "all" in allowed
    if has_rdma_device(devices) and (anything or any(name in allowed for name in (*RDMA_TRANSPORTS, "ib"))):
        return "rdma"
    if anything or any(name in allowed for name in ("sm", "shm", "posix", "sysv", "cma")):
        return "shm"
    return "tcp"
