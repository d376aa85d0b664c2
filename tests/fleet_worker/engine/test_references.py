"""References that a request brings: what cannot be said, or is of another prompt, is refused before anything is read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleet_wire.blocks import prompt_name, sealed
from fleet_wire.kv import MAX_KV_BLOCKS, KvReference
from fleet_worker.engine.references import MAX_GENERATION, check_reference
from fleet_worker.engine.sequence import Sampling, Sequence
from fleet_worker.transfer.base import KvReferenceError

PROMPT = tuple(range(20))
BLOCK = 8


def lease(tokens: int) -> str:
    return "l." + sealed(prompt_name(PROMPT[:tokens], "", "", "w"), "d")


GOOD = KvReference(
    do_remote_prefill=True, remote_block_ids=(0, 1, 2), remote_engine_id="e", remote_request_id="r", remote_host="127.0.0.1",
    remote_port=5600, remote_num_tokens=20, remote_epoch="e", digest="d", weights="w", lease_id=lease(20),
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"remote_port": 1}, ""), ({"remote_port": 65_535}, ""), ({"remote_port": 0}, "address"),
        ({"remote_port": 65_536}, "address"), ({"remote_host": "a b"}, "address"),
        ({"lease_generation": MAX_GENERATION}, ""), ({"lease_generation": 2**63}, "bounds"), ({"lease_generation": -1}, "bounds"),
        ({"remote_num_tokens": 17, "lease_id": lease(17)}, ""), ({"remote_num_tokens": 16, "lease_id": lease(16)}, "shape"),
        ({"remote_num_tokens": 0, "remote_block_ids": (), "lease_id": lease(0)}, "shape"),
        ({"remote_num_tokens": 21}, "shape"), ({"remote_block_ids": (0, 1)}, "shape"),
        ({"remote_block_ids": (0, 1, 2, 3)}, "shape"),
        ({"remote_block_ids": (0,) * MAX_KV_BLOCKS}, "shape"), ({"remote_block_ids": (0,) * (MAX_KV_BLOCKS + 1)}, "layout"),
        ({"remote_block_ids": (0, (1, 2), 3)}, "layout"),
        ({"lease_id": lease(19)}, "prompt"), ({"lease_id": ""}, "unprovable"), ({"digest": ""}, "unprovable"),
        ({"remote_engine_id": "x" * 257}, "bounds"), ({"remote_engine_id": "x" * 256}, ""), ({"remote_epoch": "é"}, "bounds"),
    ],
)  # fmt: skip
def test_k4_a_reference_is_of_this_prompt_and_can_be_said(change: dict[str, Any], reason: str):
    sequence = Sequence("s", PROMPT, Sampling(), 0, 0.0)
    made = msgspec.structs.replace(GOOD, **change)
    if not reason:
        check_reference(made, sequence, BLOCK, "w")
        return
    with pytest.raises(KvReferenceError) as refused:
        check_reference(made, sequence, BLOCK, "w")
    assert refused.value.reason == reason
