"""The approximate prefix index: what this router sent where, forgotten as the worker forgets it.

A prompt's bytes are cut into pieces; key i is xxh3-64 of piece i seeded with key i-1, so that equal keys mean equal prefixes.
Per worker the keys are kept in four generations: what is used moves to the youngest, and when a quarter of the worker's capacity
was touched the oldest generation goes, and with it what nobody used since: least recently used out first, a quarter at a time,
for the price of one dictionary update per request. All keys of a prompt are touched together, so that no key is ever older than
the ones behind it, which `masks.depths` relies on.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from fleet_router.kvindex.masks import add_bit, depths, drop_bit

PIECE_BYTES = 256
FINE_PIECES = 256
COARSE_BYTES = 1024
MAX_PIECES = 768
"""64 KiB in pieces of 256 bytes, then 512 KiB in pieces of 1 KiB; what is behind that counts as new."""
FINE_BYTES = PIECE_BYTES * FINE_PIECES
MOST_BYTES = FINE_BYTES + COARSE_BYTES * (MAX_PIECES - FINE_PIECES)
RING_PIECES = 4
"""Ring key: the first KiB of the prompt."""
GENERATIONS = 4
LEAST_KEYS = 64
MOST_NEWS = 256


def key_chain(prompt: bytes, seed: int = 0) -> list[int]:
    """Keys of all full pieces (of all there is when the prompt is shorter than one). `seed` separates tenants and adapters."""
    digest, size = xxhash.xxh3_64_intdigest, len(prompt)
    if size < PIECE_BYTES:
        return [digest(prompt, seed)]
    fine = range(0, min(size, FINE_BYTES) - PIECE_BYTES + 1, PIECE_BYTES)
    keys = [seed := digest(prompt[at : at + PIECE_BYTES], seed) for at in fine]
    if size >= FINE_BYTES + COARSE_BYTES:
        coarse = range(FINE_BYTES, min(size, MOST_BYTES) - COARSE_BYTES + 1, COARSE_BYTES)
        keys += [seed := digest(prompt[at : at + COARSE_BYTES], seed) for at in coarse]
    return keys


def adapter_seed(seed: int, version: str) -> int:
    """Seed of the keys of prompts under one version of an adapter; `version` empty: the base model, which has `seed` itself."""
    return xxhash.xxh3_64_intdigest(version.encode(), seed) if version else seed


def bytes_of(pieces: int) -> int:
    """Prompt bytes that so many keys stand for."""
    return pieces * PIECE_BYTES if pieces <= FINE_PIECES else FINE_BYTES + (pieces - FINE_PIECES) * COARSE_BYTES


def ring_key(keys: Sequence[int]) -> int:
    """The key that the ring goes by."""
    return keys[min(len(keys), RING_PIECES) - 1]


class _Held:
    """What one worker was sent, by generation, the youngest first."""

    __slots__ = ("bit", "generations", "limit")

    def __init__(self, bit: int, limit: int) -> None:
        self.bit = bit
        self.limit = limit
        self.generations: list[dict[int, None]] = [{} for _ in range(GENERATIONS)]


class ApproximateIndex:
    """Key → workers. `capacity`: entries (a key at a worker) of all workers together."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._masks: dict[int, int] = {}
        self._held: dict[str, _Held] = {}
        self._asked: dict[str, int] = {}
        self.news: dict[tuple[str, int], Sequence[int]] | None = None
        """What was sent, by worker and last key, for other routers; None when there are none. Whoever tells them empties it."""

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def entries(self) -> int:
        """Keys at workers, at most; a key that is in two generations counts twice."""
        return sum(len(generation) for held in self._held.values() for generation in held.generations)

    def join(self, worker: str, bit: int) -> None:
        """A worker that may be sent something."""
        self._held[worker] = _Held(bit, 0)
        self._share_out()

    def remove(self, worker: str) -> None:
        """The worker is gone: nobody may be matched to it again, nor to whoever gets its bit."""
        held = self._held.pop(worker, None)
        self._asked.pop(worker, None)
        if held is not None:
            while any(held.generations):
                self._age(held)
            self._share_out()

    def resize(self, worker: str, prompt_bytes: int) -> None:
        """The worker's KV cache holds about so many bytes of prompts: what does not fit is forgotten here as well."""
        pieces = max(LEAST_KEYS, prompt_bytes // PIECE_BYTES)
        if worker in self._held and self._asked.get(worker) != pieces:
            self._asked[worker] = pieces
            self._share_out()

    def _share_out(self) -> None:
        """Everybody gets what it asked for, but no more than an equal part of what there is."""
        part = self._capacity // max(1, len(self._held))
        for worker, held in self._held.items():
            held.limit = max(LEAST_KEYS, min(part, self._asked.get(worker, part)))

    def depths(self, keys: Sequence[int], among: int = -1) -> list[tuple[int, int]]:
        """(pieces, workers as bits), the deepest first."""
        return depths(self._masks, keys, among)

    def add(self, keys: Sequence[int], worker: str) -> None:
        """This worker is being sent a prompt with these keys."""
        if (news := self.news) is not None and keys and len(news) < MOST_NEWS:
            news[worker, keys[-1]] = keys
        self.learn(keys, worker)

    def learn(self, keys: Sequence[int], worker: str) -> None:
        """This worker was sent a prompt with these keys, by whomever."""
        held = self._held.get(worker)
        if held is None or not keys:
            return
        generation = held.limit // GENERATIONS
        if len(keys) > generation:
            keys = keys[:generation]
        young = held.generations[0]
        if len(young) + len(keys) > generation and len(young) + sum(key not in young for key in keys) > generation:
            self._age(held)
        held.generations[0].update(dict.fromkeys(keys))
        masks, bit = self._masks, held.bit
        if not masks.get(keys[-1], 0) & bit:  # whoever holds the last one holds all of them
            add_bit(masks, keys, bit)

    def _age(self, held: _Held) -> None:
        oldest = held.generations.pop()
        held.generations.insert(0, {})
        younger, masks, bit = held.generations, self._masks, held.bit
        for key in oldest:
            if not any(key in generation for generation in younger):
                drop_bit(masks, key, bit)
