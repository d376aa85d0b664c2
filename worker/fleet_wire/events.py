"""KV events in vLLM's msgpack layout (vllm.distributed.kv_events 0.32): a batch is an array, an event a map with its `type`;
fields that we do not know are ignored, and what may be null may be left out (llm-d-inference-sim does).

Frames on the PUB socket: topic, sequence number as 8 bytes big-endian, KVEventBatch. A subscriber that sees a gap asks the
replay ROUTER with ("", first missing number in 8 bytes) and gets ("", topic, number, payload) per batch, then ("", "", -1, "").
"""

from __future__ import annotations

import msgspec

TOPIC = b"kv-events"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag=True, frozen=True):
    """Blocks became findable."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    group_idx: int | None = None
    """Of a hybrid model's layers: each group has blocks of its own, under the same names. None: all are one."""
    kv_cache_spec_kind: str | None = None
    """vLLM's KVCacheSpecKind of that group."""


class BlockRemoved(msgspec.Struct, tag=True, frozen=True):
    """Blocks were evicted."""

    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """The whole cache is gone."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Events of one engine step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(KVEventBatch)


def encode(batch: KVEventBatch) -> bytes:
    """One batch as msgpack."""
    return _ENCODER.encode(batch)


def decode(payload: bytes) -> KVEventBatch:
    """Parse; msgspec.DecodeError otherwise."""
    return _DECODER.decode(payload)
