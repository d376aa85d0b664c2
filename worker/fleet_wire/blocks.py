"""Chained block hashes: the name of a KV block is a hash over everything that its content depends on.

hash(block) = xxh3-128(parent hash ‖ token ids as little-endian uint32). The first parent is the root: a hash over model,
layout and salt, so that two models, layouts or tenants never share a name. Not cryptographic: it names blocks inside one
fleet; tenants are kept apart by a secret salt in the root.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

import xxhash

HASH_BYTES = 16
NAMES = "xxh3-128/root,adapter,cache_salt/1"
"""What this module computes: two workers whose texts differ would give one block two names. Change it with any of the functions
below."""


def root_hash(model: str, block_tokens: int, salt: str = "") -> bytes:
    """Parent of every first block; 16 bytes."""
    return xxhash.xxh3_128_digest(f"{model}\0{block_tokens}\0{salt}".encode())


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of one full block after `parent`; 16 bytes. Token ids must fit in 32 bits (struct.error otherwise)."""
    return xxhash.xxh3_128_digest(parent + struct.pack(f"<{len(tokens)}I", *tokens))


def chain(root: bytes, tokens: Sequence[int], block_tokens: int) -> Iterable[bytes]:
    """Names of all full blocks of `tokens`, in order."""
    parent = root
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = block_hash(parent, tokens[start : start + block_tokens])
        yield parent


def chain_packed(parent: bytes, packed: bytes, block_tokens: int) -> list[bytes]:
    """Names of all full blocks after `parent`, of token ids that are packed as little-endian uint32 already."""
    digest, step = xxhash.xxh3_128_digest, 4 * block_tokens
    return [parent := digest(parent + packed[at : at + step]) for at in range(0, len(packed) - step + 1, step)]


def adapter_salt(name: str, digest: str) -> str:
    """What KV that was computed under an adapter depends on beside the tokens; also `adapter` of a KV reference."""
    return f"{name}@{digest}"


def salted_root(root: bytes, salt: str) -> bytes:
    """Parent of the first blocks under an adapter; 16 bytes. Never the base model's root, nor another adapter's."""
    return xxhash.xxh3_128_digest(root + b"\0adapter\0" + salt.encode())


def tenant_root(root: bytes, cache_salt: str) -> bytes:
    """Parent of the first blocks of requests with a `cache_salt` (the router gives each tenant its own); 16 bytes. Nobody finds
    KV of another tenant, nor learns from the time of an answer what others asked."""
    return xxhash.xxh3_128_digest(root + b"\0cache_salt\0" + cache_salt.encode())


def prompt_name(tokens: Sequence[int], adapter: str = "", cache_salt: str = "", weights: str = "") -> str:
    """Name of what these tokens' KV depends on, partly filled block and all; 32 hex digits. Cryptographic, unlike the names of
    blocks: a hand-off is proven by it, and nobody may find a second prompt with the name of the first. The layout is not in it:
    two workers compare that when they first meet."""
    found = hashlib.blake2b(digest_size=16, person=b"kv-reference")
    for text in (adapter, cache_salt, weights):
        raw = text.encode()
        found.update(struct.pack("<Q", len(raw)) + raw)
    found.update(struct.pack(f"<{len(tokens)}I", *tokens))
    return found.hexdigest()


def sealed(prompt: str, digest: str) -> str:
    """How the lease of KV of this prompt (its name) with these bytes (KvReference.digest) ends; 32 hex digits."""
    return hashlib.blake2b(f"{prompt}.{digest}".encode(), digest_size=16, person=b"kv-lease").hexdigest()
