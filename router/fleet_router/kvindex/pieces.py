"""A prompt is cut into pieces; key i is xxh3-64 of piece i seeded with key i-1, so that equal keys mean equal prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import xxhash

PIECE_BYTES: Final = 256
FINE_PIECES: Final = 32
MEDIUM_BYTES: Final = 1024
MEDIUM_PIECES: Final = 56
COARSE_BYTES: Final = 2048
MAX_PIECES: Final = 344
"""8 KiB in pieces of 256 bytes, up to 64 KiB in pieces of 1 KiB, then 512 KiB in pieces of 2 KiB; what is behind that counts as
new. From 8 KiB on a piece is at most an eighth of what is before it: what two long prompts share is known well enough."""
FINE_BYTES: Final = PIECE_BYTES * FINE_PIECES
LONG_BYTES: Final = FINE_BYTES + MEDIUM_BYTES * MEDIUM_PIECES
LONG_PIECES: Final = FINE_PIECES + MEDIUM_PIECES
MOST_BYTES: Final = LONG_BYTES + COARSE_BYTES * (MAX_PIECES - LONG_PIECES)
RING_PIECES: Final = 4
"""Ring key: the first KiB of the prompt."""
BEGINNING_BYTES: Final = 2048
"""Of shorter prompts; of those that have them FINE_BYTES."""
BEGINNINGS_MOST: Final = 1024
"""So many are remembered, half a MB at most; then it begins anew."""
_DIGEST: Final = xxhash.xxh3_64_intdigest
"""As xxhash's attribute it would be looked for three times per prompt."""


def key_chain(prompt: bytes, seed: int = 0) -> list[int]:
    """Keys of all full pieces (of all there is when the prompt is shorter than one). `seed` separates tenants and adapters."""
    if len(prompt) < PIECE_BYTES:
        return [_DIGEST(prompt, seed)]
    keys: list[int] = []
    _go_on(keys, prompt, seed)
    return keys


class Beginnings:
    """Keys of what prompts begin with: many share a system prompt or the turns before, whose pieces are looked up together here
    instead of hashed one by one. A prompt of 3 KB takes a third less so, and half as much more where nobody began like it."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, list[int]] = {}

    def key_chain(self, prompt: bytes, seed: int = 0) -> list[int]:
        """The same as `key_chain`."""
        size = len(prompt)
        if size < BEGINNING_BYTES:
            return key_chain(prompt, seed)
        end = FINE_BYTES if size >= FINE_BYTES else BEGINNING_BYTES
        name = _DIGEST(prompt[:end] if end < FINE_BYTES else memoryview(prompt)[:end], seed)  # to copy little is quicker
        known = self._known.get(name)
        if known is not None:
            keys = known.copy()
            _go_on(keys, prompt, keys[-1])
            return keys
        keys = key_chain(prompt, seed)
        if len(self._known) >= BEGINNINGS_MOST:
            self._known.clear()
        self._known[name] = keys[: end // PIECE_BYTES]
        return keys


def _go_on(keys: list[int], prompt: bytes, seed: int) -> None:
    """Add the keys of the pieces behind those fine ones whose keys are there; `seed`: the last of these."""
    size, start = len(prompt), len(keys) * PIECE_BYTES
    end = size if size < FINE_BYTES else FINE_BYTES
    for at in range(start, end - PIECE_BYTES + 1, PIECE_BYTES):
        seed = _DIGEST(prompt[at : at + PIECE_BYTES], seed)
        keys.append(seed)
    if size >= FINE_BYTES + MEDIUM_BYTES:
        _add_coarser(keys, prompt, seed)


def _add_coarser(keys: list[int], prompt: bytes, seed: int) -> None:
    """Apart from the fine pieces: their loop would be slower beside these comprehensions, which share its variables."""
    size = len(prompt)
    medium = range(FINE_BYTES, min(size, LONG_BYTES) - MEDIUM_BYTES + 1, MEDIUM_BYTES)
    keys += [seed := _DIGEST(prompt[at : at + MEDIUM_BYTES], seed) for at in medium]
    if size >= LONG_BYTES + COARSE_BYTES:
        coarse = range(LONG_BYTES, min(size, MOST_BYTES) - COARSE_BYTES + 1, COARSE_BYTES)
        keys += [seed := _DIGEST(prompt[at : at + COARSE_BYTES], seed) for at in coarse]


def adapter_seed(seed: int, version: str) -> int:
    """Seed of the keys of prompts under one version of an adapter; `version` empty: the base model, which has `seed` itself."""
    return _DIGEST(version.encode(), seed) if version else seed


def bytes_of(pieces: int) -> int:
    """Prompt bytes that so many keys stand for."""
    if pieces <= FINE_PIECES:
        return pieces * PIECE_BYTES
    if pieces <= LONG_PIECES:
        return FINE_BYTES + (pieces - FINE_PIECES) * MEDIUM_BYTES
    return LONG_BYTES + (pieces - LONG_PIECES) * COARSE_BYTES


BYTES_OF: Final = tuple(bytes_of(pieces) for pieces in range(MAX_PIECES + 1))
"""The same as a table, for every request."""


def pieces_in(size: int) -> int:
    """Whole pieces of so many bytes."""
    if size <= FINE_BYTES:
        return size // PIECE_BYTES
    if size <= LONG_BYTES:
        return FINE_PIECES + (size - FINE_BYTES) // MEDIUM_BYTES
    return LONG_PIECES + (size - LONG_BYTES) // COARSE_BYTES


def piece_after(pieces: int) -> int:
    """Bytes of the piece behind so many."""
    return PIECE_BYTES if pieces < FINE_PIECES else MEDIUM_BYTES if pieces < LONG_PIECES else COARSE_BYTES


def ring_key(keys: Sequence[int]) -> int:
    """The key that the ring goes by."""
    return keys[RING_PIECES - 1] if len(keys) >= RING_PIECES else keys[-1]
