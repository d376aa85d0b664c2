"""The approximate prefix index: what this router sent where, forgotten as the worker forgets it.

A prompt's bytes are cut into pieces; key i is xxh3-64 of piece i seeded with key i-1, so that equal keys mean equal prefixes.
Per worker each key has the number of the generation in which it was last used. A generation ends when an eighth of the worker's
capacity was used in it; when a worker has been sent more than it holds, what was last used in its oldest generation goes: least
recently used out first, an eighth at a time, for the price of one dictionary update per request. All keys of a prompt are used
together, so that no key is ever older than the ones behind it, which `masks.depths` relies on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Final

import xxhash

from fleet_router.kvindex.masks import depths, drop_bit

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
GENERATIONS: Final = 8
"""In a worker's capacity."""
GENERATIONS_MOST: Final = 32
"""Where the same prompts come again and again: the oldest two become one."""
LEAST_KEYS: Final = 64
MOST_NEWS: Final = 256
_FINE: Final = Struct(f"{PIECE_BYTES}s").iter_unpack


def key_chain(prompt: bytes, seed: int = 0) -> list[int]:
    """Keys of all full pieces (of all there is when the prompt is shorter than one). `seed` separates tenants and adapters."""
    digest, size = xxhash.xxh3_64_intdigest, len(prompt)
    if size < PIECE_BYTES:
        return [digest(prompt, seed)]
    keys: list[int] = []
    end = size if size < FINE_BYTES else FINE_BYTES
    for (piece,) in _FINE(prompt[: end - end % PIECE_BYTES]):  # a third less than slicing
        seed = digest(piece, seed)
        keys.append(seed)
    if size >= FINE_BYTES + MEDIUM_BYTES:
        _add_coarser(keys, prompt, seed)
    return keys


def _add_coarser(keys: list[int], prompt: bytes, seed: int) -> None:
    """Apart from the fine pieces: their loop would be slower beside these comprehensions, which share its variables."""
    digest, size = xxhash.xxh3_64_intdigest, len(prompt)
    medium = range(FINE_BYTES, min(size, LONG_BYTES) - MEDIUM_BYTES + 1, MEDIUM_BYTES)
    keys += [seed := digest(prompt[at : at + MEDIUM_BYTES], seed) for at in medium]
    if size >= LONG_BYTES + COARSE_BYTES:
        coarse = range(LONG_BYTES, min(size, MOST_BYTES) - COARSE_BYTES + 1, COARSE_BYTES)
        keys += [seed := digest(prompt[at : at + COARSE_BYTES], seed) for at in coarse]


def adapter_seed(seed: int, version: str) -> int:
    """Seed of the keys of prompts under one version of an adapter; `version` empty: the base model, which has `seed` itself."""
    return xxhash.xxh3_64_intdigest(version.encode(), seed) if version else seed


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


class _Held:
    """What one worker was sent."""

    __slots__ = (
        "bit", "bytes", "last_used", "limit", "longest", "most_bytes", "number", "older", "room_bytes", "room_keys", "young",
        "young_bytes", "young_keys",
    )  # fmt: skip

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.limit = self.most_bytes = 0
        """Keys, for the sake of our memory; bytes of prompts, as the worker's own cache holds them, 0: not known."""
        self.longest = self.room_keys = self.room_bytes = 0
        """Keys of one prompt that are kept; keys and bytes of a generation."""
        self.last_used: dict[int, int] = {}
        """Key → the generation of its last use."""
        self.bytes = 0
        """What these keys stand for."""
        self.number = 0
        """Of the youngest generation."""
        self.young: list[Sequence[int]] = []
        """The prompts that were used in it, as keys."""
        self.young_keys = self.young_bytes = 0
        self.older: deque[tuple[int, list[Sequence[int]]]] = deque()
        """(number, prompts) of the others, the oldest first."""

    def size(self, limit: int, most_bytes: int) -> None:
        """How much is kept."""
        self.limit, self.most_bytes = limit, most_bytes
        self.longest = min(limit, MAX_PIECES, pieces_in(most_bytes) if most_bytes else MAX_PIECES)
        self.room_keys = limit // GENERATIONS
        self.room_bytes = (most_bytes or bytes_of(MAX_PIECES) * limit) // GENERATIONS

    def turn(self) -> None:
        """Begin a generation: the next prompt does not fit into the present one."""
        self.older.append((self.number, self.young))
        self.number, self.young, self.young_keys, self.young_bytes = self.number + 1, [], 0, 0
        if len(self.older) > GENERATIONS_MOST:
            (_, oldest), (number, next_oldest) = self.older.popleft(), self.older.popleft()
            used_last = self.last_used
            kept = [prompt for prompt in oldest + next_oldest if used_last.get(prompt[-1], number + 1) <= number]
            self.older.appendleft((number, kept))

    def make_room(self, masks: dict[int, int]) -> None:
        """As long as it was sent more than it holds."""
        while self.older and (len(self.last_used) > self.limit or 0 < self.most_bytes < self.bytes):
            self.forget_oldest(masks)

    def forget_oldest(self, masks: dict[int, int]) -> None:
        """What was not used since. A prompt's beginning may have been, its end then not: from the end on."""
        number, prompts = self.older.popleft()
        last_used = self.last_used
        for prompt in prompts:
            for at in range(len(prompt) - 1, -1, -1):
                key = prompt[at]
                if (used := last_used.get(key)) is not None:
                    if used > number:
                        break
                    del last_used[key]
                    self.bytes -= bytes_of(at + 1) - bytes_of(at)
                    drop_bit(masks, key, self.bit)


class ApproximateIndex:
    """Key → workers. `capacity`: entries (a key at a worker) of all workers together."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.masks: dict[int, int] = {}
        """Key → workers as bits."""
        self._held: dict[str, _Held] = {}
        self.news: dict[tuple[str, int], Sequence[int]] | None = None
        """What was sent, by worker and last key, for other routers; None when there are none. Whoever tells them empties it."""

    def __len__(self) -> int:
        return len(self.masks)

    @property
    def entries(self) -> int:
        """Keys at workers."""
        return sum(len(held.last_used) for held in self._held.values())

    def join(self, worker: str, bit: int) -> None:
        """A worker that may be sent something."""
        self._held[worker] = _Held(bit)
        self._share_out()

    def remove(self, worker: str) -> None:
        """The worker is gone: nobody may be matched to it again, nor to whoever gets its bit."""
        held = self._held.pop(worker, None)
        if held is not None:
            for key in held.last_used:
                drop_bit(self.masks, key, held.bit)
            self._share_out()

    def resize(self, worker: str, prompt_bytes: int) -> None:
        """The worker's KV cache holds about so many bytes of prompts: what does not fit is forgotten here as well."""
        if (held := self._held.get(worker)) is not None:
            held.size(held.limit, max(LEAST_KEYS * PIECE_BYTES, prompt_bytes))

    def _share_out(self) -> None:
        """Everybody gets an equal part of what there is."""
        part = max(LEAST_KEYS, self._capacity // max(1, len(self._held)))
        for held in self._held.values():
            held.size(part, held.most_bytes)

    def depths(self, keys: Sequence[int], among: int = -1) -> list[tuple[int, int]]:
        """(pieces, workers as bits), the deepest first."""
        return depths(self.masks, keys, among)

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
        if len(keys) > held.longest:
            keys = keys[: held.longest]
        last_used, number, count, size = held.last_used, held.number, len(keys), BYTES_OF[len(keys)]
        if last_used.get(keys[-1], -1) == number:
            return  # used in this generation already, and with it all before it
        if held.young and (held.young_keys + count > held.room_keys or held.young_bytes + size > held.room_bytes):
            held.turn()
            number = held.number
        held.young.append(keys)
        held.young_keys += count
        held.young_bytes += size
        masks, bit, fresh = self.masks, held.bit, 0
        for key in reversed(keys):
            used = last_used.get(key)
            if used is None:
                masks[key] = masks.get(key, 0) | bit
                fresh += 1
            elif used == number:
                break  # and with it all before it
            last_used[key] = number
        if fresh:
            held.bytes += size - BYTES_OF[count - fresh]
            if len(last_used) > held.limit or 0 < held.most_bytes < held.bytes:
                held.make_room(masks)
