"""TransportVerified and Disaggregating: what is asked, against what workers say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_api.v1alpha1 import TierSpec
from fleet_planner.fabric import disaggregating, transport_verified
from fleet_planner.types import KvProof, TierTelemetry, TransportSeen


def tier(**transfer: Any) -> TierSpec:
    return TierSpec.model_validate({"name": "t", "accelerator": {"type": "h100"}, "kvTransfer": transfer})


def seen(*words: str) -> TierTelemetry:
    return TierTelemetry(transports=tuple(TransportSeen(f"p{n}", word, 10.0 * (n + 1)) for n, word in enumerate(words)))


def limited(*limits: int | None, word: str = "tcp") -> TierTelemetry:
    return TierTelemetry(transports=tuple(TransportSeen(f"p{n}", word, None, limit) for n, limit in enumerate(limits)))


RDMA = {"transport": "rdma", "resource": "rdma/ib"}


@pytest.mark.parametrize(
    ("asked", "told", "status", "reason"),
    [
        (RDMA, None, "Unknown", "NoData"),
        (RDMA, seen(), "Unknown", "NoData"),
        (RDMA, seen("rdma", "rdma"), "True", "Verified"),
        (RDMA, seen("rdma", "shm"), "True", "Verified"),
        (RDMA, seen("rdma", "tcp"), "False", "TcpFallback"),
        (RDMA, seen("none", "tcp"), "False", "Mismatch"),
        ({"transport": "shm"}, seen("tcp"), "False", "TcpFallback"),
        ({"transport": "shm"}, seen("rdma"), "False", "Mismatch"),
        ({"transport": "tcp"}, seen("shm"), "False", "Mismatch"),
        ({}, seen("tcp", "shm"), "True", "Verified"),
        ({}, seen("none"), "False", "Mismatch"),
        (RDMA, seen("emulated", "rdma"), "False", "RdmaEmulated"),
        (RDMA, seen("emulated", "tcp"), "False", "Mismatch"),
        (RDMA, limited(65_536, word="emulated"), "False", "MemlockTooSmall"),
        ({}, seen("emulated"), "True", "Verified"),
        (RDMA, limited(65_536, 4_096), "False", "MemlockTooSmall"),
        (RDMA, limited(65_536, None), "False", "TcpFallback"),
        (RDMA, limited(65_536, word="none"), "False", "MemlockTooSmall"),
        (RDMA, limited(65_536, word="rdma"), "True", "Verified"),
        ({"transport": "shm"}, limited(65_536), "False", "TcpFallback"),
    ],
)
def test_transport_verified(asked: dict[str, Any], told: TierTelemetry | None, status: str, reason: str):
    assert transport_verified([(tier(**asked), told)])[:2] == (status, reason)


def test_the_words_name_tier_workers_and_what_required_means():
    message = transport_verified([(tier(**RDMA, required=True), seen("rdma", "tcp", "tcp"))])[2]
    assert message == "tier t asks for rdma, but 2 of 3 workers use tcp: p1, p2; they do not serve, because it is required"
    assert transport_verified([(tier(**RDMA), seen("rdma"))])[2] == "tier t: 1 workers use rdma, 10 Gb/s or more inside a pod"


def test_rdma_by_name_only_is_told_with_what_to_see_to():
    """The NIC of a node without nvidia_peermem: 200s, RDMA's lanes, a hundredth of its speed, and TransportVerified was True."""
    message = transport_verified([(tier(**RDMA), seen("rdma", "emulated"))])[2]
    assert message.startswith("tier t asks for rdma, but 1 of 2 workers use RDMA by name, whose every byte the CPUs copy: p1; ")
    assert "GPUDirect RDMA (nvidia_peermem, or dma-buf)" in message
    assert "whose every byte the CPUs copy" in transport_verified([(tier(), seen("emulated"))])[2], "auto takes it, and says it"


@pytest.mark.parametrize(
    ("asked", "limits", "words"),
    [
        (RDMA, (None, None), ""),
        (RDMA, (65_536, None), "; 1 of them may lock 65536 bytes only and have no IPC_LOCK in effect: set LimitMEMLOCK=infinity"),
        (RDMA, (65_536, 4_096), "; 2 of them may lock 4096 bytes only and have no IPC_LOCK in effect: set LimitMEMLOCK=infinity"),
        ({"transport": "shm"}, (65_536, 65_536), ""),
    ],
)
def test_a_memlock_limit_is_named_where_rdma_is_asked_for(asked: dict[str, Any], limits: tuple[int | None, ...], words: str):
    told = TierTelemetry(transports=tuple(TransportSeen(f"p{n}", "tcp", None, limit) for n, limit in enumerate(limits)))
    message = transport_verified([(tier(**asked), told)])[2]
    assert ("may lock" in message) == bool(words)
    assert words in message
    assert transport_verified([(tier(**RDMA), TierTelemetry(transports=(TransportSeen("p", "rdma", 1.0, 65_536),)))])[0] == "True"


def test_one_silent_tier_leaves_it_unknown_but_a_wrong_one_is_told():
    assert transport_verified([(tier(**RDMA), seen("rdma")), (tier(), None)])[:2] == ("Unknown", "NoData")
    assert transport_verified([(tier(), None), (tier(**RDMA), seen("tcp"))])[:2] == ("False", "TcpFallback")


def proof(transfers: int, failed: int = 0, answers_since: int | None = None, failed_since: int | None = None) -> TierTelemetry:
    return TierTelemetry(kv=KvProof(transfers, 1, 1, failed, 0.0, answers_since, failed_since))


@pytest.mark.parametrize(
    ("tiers", "status", "reason"),
    [
        ({"a": None}, "Unknown", "NoData"),
        ({"a": proof(3, answers_since=9)}, "True", "KvMoved"),
        ({"a": proof(3, answers_since=10)}, "False", "KvNotMoving"),
        ({"a": proof(0, answers_since=10)}, "False", "KvNotMoving"),
        ({"a": proof(3, 2, answers_since=0, failed_since=0)}, "True", "KvMoved"),
        ({"a": proof(3, 2, answers_since=1, failed_since=1)}, "False", "KvFailing"),
        ({"a": proof(0, 2)}, "False", "KvFailing"),
        ({"a": proof(9, answers_since=0), "b": proof(0, answers_since=10)}, "False", "KvNotMoving"),
        ({"a": proof(0)}, "Unknown", "NoTransferYet"),
        ({"a": proof(3, answers_since=9), "b": TierTelemetry(pairs=(("p-0", "d-1"),))}, "False", "PairFailing"),
        ({"a": replace(proof(3, 2, failed_since=1), pairs=(("p-0", "d-1"),))}, "False", "KvFailing"),  # all of them, not one pair
    ],
)
def test_disaggregating(tiers: dict[str, TierTelemetry | None], status: str, reason: str):
    assert disaggregating(tiers)[:2] == (status, reason)


def test_a_pair_that_fails_is_named_while_others_work():
    pairs = tuple((f"p-{number}", "d-1") for number in range(5))
    _, _, message = disaggregating({"a": replace(proof(7), pairs=pairs[:1]), "b": replace(proof(7), pairs=pairs)})
    assert message == (
        "tier a: no KV gets from p-0 to d-1; routers use other pairs meanwhile; "
        "tier b: no KV gets from p-0 to d-1, p-1 to d-1, p-2 to d-1 and 2 other pairs; routers use other pairs meanwhile"
    )


def test_kv_that_was_read_after_its_lease_is_told_before_anything_else():
    late = TierTelemetry(kv=KvProof(9, 1, 1, 0, 0.0, 0, 0, late=2))
    status, reason, message = disaggregating({"a": proof(0, 2, failed_since=2), "b": late})
    assert (status, reason) == ("False", "KvReadLate")
    assert message.startswith("tier b: 2 times a decode worker")
    assert "kvTransfer.leaseDuration" in message
