"""KV references: what a prefill worker answers and a decode worker is given (vLLM's `kv_transfer_params` dialect).

Source of the field names: vLLM NixlConnector 0.32. The fields behind `lease_id` are ours and optional, so that a vLLM
answer parses as well; a torch decode worker refuses a reference without them (it cannot prove such a read).
"""

from __future__ import annotations

import msgspec

MAX_KV_BLOCKS = 65_536
"""Upper bound of blocks in one reference: a longer list is refused before any memory is touched."""


class PrefillAsk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """`kv_transfer_params` of the prefill leg."""

    do_remote_decode: bool = True
    do_remote_prefill: bool = False


class KvReference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`kv_transfer_params` answered by the prefill leg and handed, unchanged, to the decode leg."""

    do_remote_prefill: bool
    do_remote_decode: bool = False
    remote_block_ids: tuple[int | tuple[int, ...], ...]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int = 1
    remote_num_tokens: int = 0
    """Prompt tokens whose KV the blocks hold."""
    lease_id: str = ""
    """Lease on the prefill worker; empty for engines without leases of ours (vLLM). It ends with `.` and a
    hash over the prompt's name and `digest` (fleet_wire.blocks: prompt_name, sealed): the owner's word for the lease is its
    word for both, and no edited reference passes another prompt's KV off as this one's. One without it (an older prefill
    worker) is refused as a failed transfer: prefill anew."""
    lease_generation: int = 0
    """Bumped whenever the owner reuses the lease's blocks; checked again after the read."""
    remote_epoch: str = ""
    """Random per engine start: a restarted worker on the same address refuses old references."""
    digest: str = ""
    """xxh3-64 of the bytes of each block in order, 16 hex digits each (fleet_worker.transfer.digest); empty when the engine gives
    none."""
    adapter: str = ""
    """Adapter and version of it that the KV was computed under (fleet_wire.blocks.adapter_salt); empty: the base model."""
    weights: str = ""
    """Digest of the model's weights, architecture, tokenizer and template. A compatibility hash names a source, and what is
    behind a branch or in a folder may have changed between two starts; empty: not told."""
    said_at: str = ""
    """What time it was for the chat template that wrote the prompt, in ISO 8601 by the prefill worker's own clock; empty: no
    template that asks wrote it."""
