"""Prefix keys and the approximate prefix index: what this router sent where.

A prompt's bytes are cut into 256-byte pieces; key i is xxh3-64 of piece i seeded with key i-1, so that equal keys mean equal
prefixes. The index maps a key to the set of workers (a bit each) that were sent it, bounded, least recently used out first. A
wrong hint costs time, never correctness.
"""

from __future__ import annotations

from collections import OrderedDict

import xxhash

PIECE_BYTES = 256
MAX_PIECES = 512
RING_PIECES = 4
"""Ring key: the first KiB of the prompt."""


def key_chain(prompt: bytes, seed: int = 0) -> list[int]:
    """Keys of all full pieces (the last, partial one too when the prompt is shorter than a piece); at most MAX_PIECES. Prompts
    with different seeds have no key in common."""
    digest = xxhash.xxh3_64_intdigest
    if len(prompt) < PIECE_BYTES:
        return [digest(prompt, seed)]
    starts = range(0, min(len(prompt), PIECE_BYTES * MAX_PIECES) - PIECE_BYTES + 1, PIECE_BYTES)
    return [seed := digest(prompt[start : start + PIECE_BYTES], seed) for start in starts]


def adapter_seed(seed: int, version: str) -> int:
    """Seed of the keys of prompts under one version of an adapter; `version` empty: the base model, which has `seed` itself."""
    return xxhash.xxh3_64_intdigest(version.encode(), seed) if version else seed


def ring_key(keys: list[int]) -> int:
    """The key that the ring goes by."""
    return keys[min(len(keys), RING_PIECES) - 1]


class PrefixIndex:
    """Key → workers, at most `capacity` keys."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._masks: OrderedDict[int, int] = OrderedDict()
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def matched(self, keys: list[int]) -> dict[str, int]:
        """Longest known prefix per worker, in pieces; workers without any are absent.

        A key is never older than the ones behind it (see `add`), so whoever knows a key knows all before it: depths are found
        by bisection, and a prompt of a thousand pieces costs ten look-ups.
        """
        get, names = self._masks.get, self._names
        found: dict[str, int] = {}
        alive = get(keys[0], 0) if keys else 0
        while alive:
            low, high = 1, len(keys)  # somebody who is alive knows `low` pieces; whoever knows more than `high` is done
            while low < high:
                middle = (low + high + 1) // 2
                if get(keys[middle - 1], 0) & alive:
                    low = middle
                else:
                    high = middle - 1
            here = get(keys[low - 1], 0) & alive
            alive &= ~here
            while here:
                bit = here & -here
                found[names[bit]] = low
                here ^= bit
        return found

    def add(self, keys: list[int], worker: str) -> None:
        """This worker is being sent a prompt with these keys."""
        bit = self._bits.get(worker)
        if bit is None:
            bit = self._bits[worker] = 1 << _lowest_free(self._bits.values())
            self._names[bit] = worker
        masks = self._masks
        get, touch = masks.get, masks.move_to_end
        for key in reversed(keys):  # the first pieces are the youngest: the end of a prompt is forgotten before its beginning
            known = get(key)
            if known is None:
                masks[key] = bit
            else:
                touch(key)
                if not known & bit:
                    masks[key] = known | bit
        while len(masks) > self._capacity:
            masks.popitem(last=False)

    def remove(self, worker: str) -> None:
        """The worker is gone: nobody may be matched to it again, nor to whoever gets its bit."""
        bit = self._bits.pop(worker, None)
        if bit is None:
            return
        del self._names[bit]
        for key in [key for key, mask in self._masks.items() if mask & bit]:
            left = self._masks[key] & ~bit
            if left:
                self._masks[key] = left
            else:
                del self._masks[key]


def _lowest_free(bits: object) -> int:
    used = set(bits)  # type: ignore[call-overload]
    return next(i for i in range(len(used) + 1) if 1 << i not in used)
