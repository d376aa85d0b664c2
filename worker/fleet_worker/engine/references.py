"""Which KV references a decode engine takes: only such as it can prove, and none that could upset the transfer thread."""

from __future__ import annotations

import re

from fleet_wire.blocks import sealed
from fleet_wire.kv import MAX_KV_BLOCKS, KvReference
from fleet_worker.engine.sequence import Sequence
from fleet_worker.transfer.base import KvReferenceError, KvTransferError

HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]|(?=[^:]*:)[0-9A-Fa-f:.]{2,45}")
"""DNS name, IPv4 address or IPv6 address, with or without brackets: what a zmq tcp:// address may hold."""
OPAQUE = re.compile(r"[!-~]{1,256}")
"""What we or another worker made up: it goes over the side channel, whose messages are bounded."""
MAX_GENERATION = 2**63 - 1


def check_reference(reference: KvReference, sequence: Sequence, block_tokens: int, weights: str) -> None:
    """Raise KvReferenceError unless the reference is provable and is of the sequence's own prompt; KvTransferError when the KV
    was computed by another version of the model, under another adapter or version of it, or by a worker that does not name
    prompts: a prefill here is right then. That comes first: another tokenizer or template makes another prompt."""
    check_form(reference)
    _check_origin(reference, sequence, weights)
    blocks, tokens, prompt_tokens = reference.remote_block_ids, reference.remote_num_tokens, len(sequence.prompt)
    if not 0 < tokens <= prompt_tokens or len(blocks) != -(-tokens // block_tokens):
        raise KvReferenceError(
            "shape",
            f"kv_transfer_params name {len(blocks)} blocks for {tokens} tokens; "
            f"the prompt has {prompt_tokens} tokens and a block holds {block_tokens}",
        )
    if reference.lease_id.rpartition(".")[2] != sealed(sequence.prompt_name(tokens, weights), reference.digest):
        raise KvReferenceError(
            "prompt", "kv_transfer_params are of another prompt, or of another cache_salt; give them with the request that was "
            "prefilled, or leave them out"
        )  # fmt: skip


def check_form(reference: KvReference) -> None:
    """KvReferenceError unless it can be proven and its fields are bounded: they go over the side channel."""
    if not reference.lease_id or not reference.remote_epoch or not reference.digest:
        raise KvReferenceError("unprovable", "kv_transfer_params carry no lease, epoch or digest: the read could not be proven")
    for name in ("lease_id", "remote_epoch", "remote_engine_id"):
        if not OPAQUE.fullmatch(getattr(reference, name)):
            raise KvReferenceError("bounds", f"kv_transfer_params.{name} must be 1 to 256 printable ASCII characters")
    if not 0 <= reference.lease_generation <= MAX_GENERATION:
        raise KvReferenceError("bounds", f"kv_transfer_params.lease_generation must be between 0 and {MAX_GENERATION}")
    blocks = reference.remote_block_ids
    if len(blocks) > MAX_KV_BLOCKS or any(not isinstance(block, int) for block in blocks):
        raise KvReferenceError(
            "layout", f"kv_transfer_params.remote_block_ids must be one list of at most {MAX_KV_BLOCKS} integers"
        )
    if not HOST.fullmatch(reference.remote_host) or not 0 < reference.remote_port < 65_536:
        raise KvReferenceError("address", "kv_transfer_params.remote_host and remote_port are not a TCP address")


def _check_origin(reference: KvReference, sequence: Sequence, weights: str) -> None:
    """What computed it. Blocks and digests only say that what was leased is what arrived."""
    adapter = sequence.salt
    if reference.adapter != adapter:
        raise KvTransferError(
            "adapter", f"the KV was computed under {reference.adapter or 'the base model'}, the request runs under "
            f"{adapter or 'the base model'}"
        )  # fmt: skip
    if reference.weights != weights:
        raise KvTransferError(
            "weights", f"the KV was computed by another version of the model ({reference.weights or 'not told which'}) than this "
            f"worker has ({weights}): its source changed between two starts; name a revision that does not move"
        )  # fmt: skip
    if "." not in reference.lease_id:
        raise KvTransferError("unnamed", "the KV's lease does not say of which prompt it is")
