"""Digests of KV blocks: xxh3-64 per block, 16 hex digits each, joined. Per block, so that a reader that has the first blocks
already can prove the rest, and so that proving overlaps with reading."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import xxhash

HEX_PER_BLOCK = 16


def block_digest(address: int, block_bytes: int) -> str:
    """Digest of one block in this process's memory."""
    view = (ctypes.c_char * block_bytes).from_address(address)
    return xxhash.xxh3_64_hexdigest(memoryview(view))


def pool_digest(base_address: int, block_bytes: int, blocks: Sequence[int]) -> str:
    """Digest text of several blocks of one pool, in order."""
    return "".join(block_digest(base_address + block * block_bytes, block_bytes) for block in blocks)


def first_mismatch(base_address: int, block_bytes: int, blocks: Sequence[int], expected: str) -> int | None:
    """Index of the first block whose bytes are not the expected ones."""
    for index, block in enumerate(blocks):
        want = expected[index * HEX_PER_BLOCK : (index + 1) * HEX_PER_BLOCK]
        if block_digest(base_address + block * block_bytes, block_bytes) != want:
            return index
    return None
