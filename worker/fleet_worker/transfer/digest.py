"""Digests of KV blocks: xxh3-64 per block, 16 hex digits each, joined. Per block, so that a reader that has the first blocks
already can prove the rest, and so that proving overlaps with reading."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import xxhash

HEX_PER_BLOCK = 16


def memory_of(base_address: int, size_bytes: int) -> memoryview:
    """This process's memory from an address on. Made once per pool: making it costs as much as hashing 32 KiB."""
    return memoryview((ctypes.c_char * size_bytes).from_address(base_address)).cast("B")


def pool_digest(memory: memoryview, block_bytes: int, blocks: Sequence[int]) -> str:
    """Digest text of several blocks of one pool, in order."""
    digest = xxhash.xxh3_64_hexdigest
    return "".join([digest(memory[block * block_bytes : (block + 1) * block_bytes]) for block in blocks])


def first_mismatch(memory: memoryview, block_bytes: int, blocks: Sequence[int], expected: str) -> int | None:
    """Index of the first block whose bytes are not the expected ones."""
    found = pool_digest(memory, block_bytes, blocks)
    if found == expected:
        return None
    at = (index for index in range(len(blocks)) if _of(found, index) != _of(expected, index))
    return next(at, len(blocks) - 1)


def _of(digests: str, index: int) -> str:
    return digests[index * HEX_PER_BLOCK : (index + 1) * HEX_PER_BLOCK]
