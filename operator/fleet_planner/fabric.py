"""Is disaggregation real? Whether KV moves, and by the transport that was asked for; from the workers' own counters and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.types import KvProof, TierTelemetry, TransportSeen, Verdict

NOT_MOVING_ANSWERS = 10
"""Answers without any transfer after which KV does not move: one reading may catch a few whose transfer is not counted yet."""
MAX_PODS = 3
CALLED: Mapping[str, str] = {"none": "no transport that works", "emulated": "RDMA by name, whose every byte the CPUs copy"}
WHY: Mapping[str, str] = {
    "none": "; their log says why",
    "emulated": "; the NIC does not reach the memory that KV lies in: see to GPUDirect RDMA (nvidia_peermem, or dma-buf) and to "
    "the NIC's driver",
}
NOBODY: Mapping[str, Verdict] = {}
LATE = (
    "times a decode worker told of KV that it had read after its lease had ended: others may have had the blocks by then, and "
    "those answers may be wrong; raise kvTransfer.leaseDuration, and look for what holds decode workers up"
)


def disaggregating(tiers: Mapping[str, TierTelemetry | None], sides: Mapping[str, Verdict] = NOBODY) -> Verdict:
    """Proof that KV moves. The worst tier speaks: one whose answers come without KV is told though others move theirs. `sides`:
    by tier, where it is known which workers are at fault; failed transfers are theirs then."""
    proofs = {name: known.kv for name, known in tiers.items() if known is not None and known.kv is not None}
    if not proofs:
        return "Unknown", "NoData", "no engine counters yet"
    if (wrong := _wrong(proofs, sides)) is not None:
        return wrong
    if sides or any([known is not None and bool(known.pairs) for known in tiers.values()]):
        return _failing(tiers, sides)
    moved, blocks = sum(kv.transfers for kv in proofs.values()), sum(kv.blocks for kv in proofs.values())
    failed, size = sum(kv.failed for kv in proofs.values()), sum(kv.bytes for kv in proofs.values())
    if moved:
        return "True", "KvMoved", f"{moved} transfers moved {blocks} blocks, {size} bytes"
    if failed:
        return "False", "KvFailing", f"{failed} transfers failed, none succeeded"
    return "Unknown", "NoTransferYet", "no request needed a transfer yet"


def _wrong(proofs: Mapping[str, KvProof], sides: Mapping[str, Verdict]) -> Verdict | None:
    """What the engines' counters say is wrong."""
    for name, kv in proofs.items():
        if kv.late:
            return "False", "KvReadLate", f"tier {name}: {kv.late} {LATE}"
    for name, kv in proofs.items():
        if kv.failed_since and name not in sides:
            return "False", "KvFailing", f"tier {name}: {kv.failed_since} transfers failed since the last that succeeded"
        if kv.answers_since is not None and kv.answers_since >= NOT_MOVING_ANSWERS:
            told = f"{kv.answers_since} prompts were prefilled by another worker and answered, but no KV was transferred"
            return "False", "KvNotMoving", f"tier {name}: {told}"
    return None


def _failing(tiers: Mapping[str, TierTelemetry | None], sides: Mapping[str, Verdict]) -> Verdict:
    """Workers, or pairs of them, between which no KV moves while it does between others."""
    pairs = {name: known.pairs for name, known in tiers.items() if known is not None and known.pairs and name not in sides}
    words = [_apart(name, found) for name, found in pairs.items()]
    if sides:
        status, reason, _ = next(iter(sides.values()))
        return status, reason, "; ".join([*(verdict[2] for verdict in sides.values()), *words])
    return "False", "PairFailing", "; ".join(words)


def _apart(tier: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Between whom no KV moves, in words: the way between two pods or nodes is what is to be looked at."""
    named = ", ".join(f"{prefill} to {decode}" for prefill, decode in pairs[:MAX_PODS])
    more = f" and {len(pairs) - MAX_PODS} other pairs" if len(pairs) > MAX_PODS else ""
    return f"tier {tier}: no KV gets from {named}{more}; routers use other pairs meanwhile"


def transport_verified(tiers: Sequence[tuple[TierSpec, TierTelemetry | None]]) -> Verdict:
    """Whether every worker uses what its tier asks for. Memory of one node is nearer than a NIC, not a fallback from it."""
    told = [(tier, known.transports) for tier, known in tiers if known is not None and known.transports]
    for tier, seen in told:
        asked = tier.kv_transfer.transport
        wrong = [worker for worker in seen if not _fits(asked, worker.transport)]
        if wrong:
            words = _words(tier, wrong, len(seen))
            if asked == "rdma" and all(worker.memlock_bytes is not None for worker in wrong):
                return "False", "MemlockTooSmall", words
            used = {worker.transport for worker in wrong}
            if used == {"emulated"}:
                return "False", "RdmaEmulated", words
            return "False", "TcpFallback" if used == {"tcp"} else "Mismatch", words
    if len(told) < len(tiers):
        return "Unknown", "NoData", "no worker has told yet which transport it uses"
    return "True", "Verified", "; ".join(_used(tier, seen) for tier, seen in told)


def _fits(asked: str, used: str) -> bool:
    return used != "none" and (asked in ("auto", used) or (asked == "rdma" and used == "shm"))


def _words(tier: TierSpec, wrong: Sequence[TransportSeen], workers: int) -> str:
    asked, names = tier.kv_transfer.transport, ", ".join(worker.pod for worker in wrong[:MAX_PODS])
    used = ", ".join(sorted({CALLED.get(worker.transport, worker.transport) for worker in wrong}))
    serving = "; they do not serve, because it is required" if tier.kv_transfer.required else ""
    more = " and others" if len(wrong) > MAX_PODS else ""
    words = f"tier {tier.name} asks for {asked}, but {len(wrong)} of {workers} workers use {used}: {names}{more}{serving}"
    why = "".join(words for used, words in WHY.items() if any(worker.transport == used for worker in wrong))
    return words + why + (_locked(wrong) if asked == "rdma" else "")


def _locked(wrong: Sequence[TransportSeen]) -> str:
    """What a NIC lacks most often, in words: it reads memory that is locked."""
    limited = [worker for worker in wrong if worker.memlock_bytes is not None]
    if not limited:
        return ""
    least = min(worker.memlock_bytes or 0 for worker in limited)
    advice = "set LimitMEMLOCK=infinity for the container runtime, or podTemplate.runAsUser: 0"
    return f"; {len(limited)} of them may lock {least} bytes only and have no IPC_LOCK in effect: {advice}"


def _used(tier: TierSpec, seen: Sequence[TransportSeen]) -> str:
    """Names and bandwidth; the latter as the slowest probe measured it."""
    names = ", ".join(sorted({CALLED.get(worker.transport, worker.transport) for worker in seen}))
    speeds = [worker.gbps for worker in seen if worker.gbps is not None]
    probed = f", {min(speeds):.0f} Gb/s or more inside a pod" if speeds else ""
    return f"tier {tier.name}: {len(seen)} workers use {names}{probed}"
