"""The transport that was asked for against the one in use: a probe before the engine starts, the engine's own word after."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.agent.command import ucx_told
from fleet_worker.agent.supervise import die_with, end_guard, start_guard
from fleet_worker.config import KvSettings
from fleet_worker.segments import make
from fleet_worker.transfer.transport import has_rdma_device, ucx_environment
from fleet_worker.transfer.ucxlog import Transport, UcxReport

PROBE = (sys.executable, "-m", "fleet_worker.transfer.probe")
PROBE_TIMEOUT_S = 45.0
OWN_STATUS = Path("/proc/self/status")
IPC_LOCK = 14
"""Bit of CAP_IPC_LOCK (linux/capability.h)."""
UNTOLD = "UCX's tables (UCX_PROTO_INFO) do not say by which transport it read"
AGAIN_S = 15.0
"""A required transport that is not there is looked for again: a NIC may come up late."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """What the probe found. `transport` None: it did not run, or nothing worked, and `error` says why."""

    transport: Transport | None = None
    gbps: float | None = None
    error: str = ""


def probe_environment(settings: KvSettings, environment: Mapping[str, str], nvidia: bool | None = None) -> dict[str, str]:
    """The pod's UCX settings, without shared memory where rdma is asked for: between two processes of one pod it would win.
    `nvidia`: as ucx_environment has it."""
    chosen = {**environment, **ucx_environment(settings.transport, settings.required, environment, nvidia)}
    allowed = chosen.get("UCX_TLS", "all")
    if settings.transport == "rdma":
        allowed = ",".join(name for name in allowed.split(",") if name not in ("sm", "shm", "posix", "sysv", "cma"))
    return {**ucx_told(chosen), **environment, "UCX_TLS": allowed, "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": "stderr"}


async def probe(settings: KvSettings) -> Fabric:
    """Run the probe in a process of its own, which ends with its caller's patience; it never raises."""
    with contextlib.closing(make()) as shared:
        guarding = start_guard(shared)  # of an agent that is killed meanwhile
        try:
            return await _probed({**shared.environment, **probe_environment(settings, os.environ)})
        finally:
            end_guard(guarding)


async def _probed(env: Mapping[str, str]) -> Fabric:
    process = await asyncio.create_subprocess_exec(
        *PROBE, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        preexec_fn=die_with(os.getpid()),
    )  # fmt: skip
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            out, err = await process.communicate()
    except TimeoutError:
        return Fabric(error=f"the probe did not end within {PROBE_TIMEOUT_S:.0f} s")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return found(out.decode(errors="replace"), err.decode(errors="replace"))


def found(out: str, err: str) -> Fabric:
    """The probe's two streams → what it found."""
    report, words = UcxReport(), ""
    for line in err.splitlines():
        if not report.feed(line) and line.strip():
            words = line.strip()
    try:
        gbps = float(json.loads(out.strip().rpartition("\n")[2])["gbps"])
    except (*UNREADABLE, KeyError, TypeError):
        return Fabric(error=f"no read succeeded: {words[:200]}")
    return Fabric(report.transport, gbps)


def fits(asked: str, used: Transport | None) -> bool:
    """Whether `used` is what was asked for; memory of the same node is nearer than the NIC, not a fallback."""
    return asked in ("auto", used) or (asked == "rdma" and used == "shm")


def told(asked: str, probed: Fabric, engine: Transport | None) -> str | None:
    """What the worker tells: the engine's word, the probe's before that, "none" when nothing worked, None when neither spoke.

    An engine whose only peers so far were on its own node says nothing about the NIC: there the probe's word stands.
    """
    before = "none" if probed.error else probed.transport
    if engine is None or (engine == "shm" and asked == "rdma" and before is not None):
        return before
    return engine


def problem(settings: KvSettings, fabric: Fabric) -> str | None:
    """Why the probe's finding is not what was asked for, with what a person can check; None when it is."""
    if settings.transport == "auto" or (fabric.transport is not None and fits(settings.transport, fabric.transport)):
        return None
    used = f"{fabric.transport} is in use" if fabric.transport is not None else fabric.error or UNTOLD
    hint = f" ({rdma_hint()})" if settings.transport == "rdma" else ""
    return f"kvTransfer asks for {settings.transport}, but {used}{hint}"


def rdma_hint() -> str:
    """What keeps UCX from RDMA most often."""
    device = "an RDMA device is visible" if has_rdma_device() else "no RDMA device is visible"
    lockable = lockable_bytes()
    if lockable is None:
        return f"{device}, lockable memory is unlimited"
    advice = "set LimitMEMLOCK=infinity for the container runtime, or podTemplate.runAsUser: 0"
    return f"{device}, lockable memory is {lockable} bytes and IPC_LOCK is not in effect: {advice}"


def limited_to(settings: KvSettings) -> int | None:
    """What is told of `lockable_bytes`, where it matters: RDMA is asked for, its device is here, and something limits it."""
    return lockable_bytes() if settings.transport == "rdma" and has_rdma_device() else None


def lockable_bytes(status: Path = OWN_STATUS) -> int | None:
    """How much memory this process may lock for a NIC, bytes (RLIMIT_MEMLOCK); None when nothing limits it, because the limit is
    infinite or the process has IPC_LOCK in effect (getrlimit(2), capabilities(7)). `status` is that of /proc."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or _may_lock(status) else soft


def _may_lock(status: Path) -> bool:
    """Added capabilities are in effect for root only; a file that cannot be read shows none."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return False
    mask = next((line.partition(":")[2].strip() for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(mask, 16) >> IPC_LOCK & 1)
