"""The approximate prefix index: what this router sent where, forgotten as the worker forgets it.

Prompts come as the keys of their pieces (`pieces`). Per worker each key belongs to the generation in which it was last used. A
generation ends when an eighth of the worker's capacity was used in it; when a worker has been sent more than it holds, what was
last used in its oldest generation goes: least recently used out first, an eighth at a time. All keys of a prompt are used
together, so that no key is ever older than the ones behind it, which `masks.depths` relies on. Those that were used in the
generation already are its beginning, too, and are neither looked at nor counted again.

A new key costs one place in one dictionary: a second one would be a second line of memory that no cache holds, the dearest part
of a decision. The value is the workers as bits, and below them the generation of the only one; keys that several workers have,
which are few, have their generations by worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from fleet_router.kvindex.masks import LOWEST_BIT, REBUILT_AT, depths, without_bit
from fleet_router.kvindex.pieces import BEGINNING_BYTES, BYTES_OF, FINE_PIECES, MAX_PIECES, PIECE_BYTES, bytes_of, pieces_in

GENERATIONS: Final = 8
"""In a worker's capacity."""
GENERATIONS_MOST: Final = 32
"""Where the same prompts come again and again: the oldest two become one."""
GENERATION: Final = LOWEST_BIT - 1
"""The part of a value that says in which generation; the rest are workers."""
SHARED: Final = GENERATION
"""Of a key that more than one worker had: each has its own, in `_Held.shared`."""
LEAST_KEYS: Final = 64
MOST_NEWS: Final = 256
SHORT_PIECES: Final = BEGINNING_BYTES // PIECE_BYTES
"""Of prompts with no more it is not noted where they part from others."""
ENDS_MOST: Final = 1024
"""Beginnings of which it is noted; then that begins anew."""


class _Held:
    """What one worker was sent."""

    __slots__ = (
        "bit", "bytes", "free", "keys", "limit", "longest", "most_bytes", "older", "room_bytes", "room_keys", "shared", "young",
        "young_bytes", "young_keys", "youngest",
    )  # fmt: skip

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.limit = self.most_bytes = 0
        """Keys, for the sake of our memory; bytes of prompts, as the worker's own cache holds them, 0: not known."""
        self.longest = self.room_keys = self.room_bytes = 0
        """Keys of one prompt that are kept; keys and bytes of a generation."""
        self.keys = self.bytes = 0
        """How many it has, and what they stand for."""
        self.shared: dict[int, int] = {}
        """Key → its generation, of keys that others have as well."""
        self.free = list(range(1, SHARED))
        self.youngest = 0
        """Generations have numbers for as long as they are there."""
        self.young: list[tuple[int, Sequence[int]]] = []
        """The prompts that were used in it: from which key on, for the first time in this generation, and these keys."""
        self.young_keys = self.young_bytes = 0
        """Each key once."""
        self.older: deque[tuple[int, list[tuple[int, Sequence[int]]]]] = deque()
        """(number, prompts) of the others, the oldest first."""

    def size(self, limit: int, most_bytes: int) -> None:
        """How much is kept."""
        self.limit, self.most_bytes = limit, most_bytes
        self.longest = min(limit, MAX_PIECES, pieces_in(most_bytes) if most_bytes else MAX_PIECES)
        self.room_keys = limit // GENERATIONS
        self.room_bytes = (most_bytes or bytes_of(MAX_PIECES) * limit) // GENERATIONS

    def generation(self, masks: dict[int, int], key: int) -> int:
        """In which this worker last used it; -1: it has not got it."""
        value = masks.get(key, 0)
        if not value & self.bit:
            return -1
        at = value & GENERATION
        return self.shared[key] if at == SHARED else at

    def used(self, masks: dict[int, int], keys: Sequence[int]) -> int:
        """How many of a prompt's keys were used in the youngest generation: its beginning."""
        low, top = 0, len(keys)
        while low < top:
            middle = low + top >> 1
            if self.generation(masks, keys[middle]) == self.youngest:
                low = middle + 1
            else:
                top = middle
        return low

    def turn(self, masks: dict[int, int]) -> None:
        """Begin a generation: the next prompt does not fit into the present one."""
        self.older.append((self.youngest, self.young))
        if len(self.older) > GENERATIONS_MOST:
            self._unite_oldest(masks)
        self.youngest, self.young, self.young_keys, self.young_bytes = self.free.pop(), [], 0, 0

    def _unite_oldest(self, masks: dict[int, int]) -> None:
        """The oldest two generations, as the older one."""
        (oldest, prompts), (next_oldest, more) = self.older.popleft(), self.older.popleft()
        for _, keys in more:
            for key in keys:
                if self.generation(masks, key) == next_oldest:
                    self._put(masks, key, oldest)
        self.free.append(next_oldest)
        kept = [(start, keys) for start, keys in prompts + more if self.generation(masks, keys[-1]) == oldest]
        self.older.appendleft((oldest, kept))

    def _put(self, masks: dict[int, int], key: int, number: int) -> None:
        """One that it has belongs to this generation."""
        if masks[key] & GENERATION == SHARED:
            self.shared[key] = number
        else:
            masks[key] = self.bit | number

    def make_room(self, masks: dict[int, int]) -> None:
        """As long as it was sent more than it holds. The youngest generation alone is never more: when nothing else is left, keys
        were made to collide, so that those before them were passed over, and all of it goes."""
        while self.keys > self.limit or 0 < self.most_bytes < self.bytes:
            if not self.older:
                self.forget_all(masks)
                return
            self.forget_oldest(masks)

    def forget_oldest(self, masks: dict[int, int]) -> None:
        """What was not used since. A prompt's beginning may have been, its end then not: from the end on."""
        number, prompts = self.older.popleft()
        alone = self.bit | number
        for start, keys in prompts:
            for at in range(len(keys) - 1, -1, -1):
                if masks.get(key := keys[at], 0) == alone:  # nearly all: no more is looked for than what must be
                    del masks[key]
                    self.keys -= 1
                    self.bytes -= BYTES_OF[start + at + 1] - BYTES_OF[start + at]
                    continue
                used = self.generation(masks, key)
                if used >= 0:
                    if used != number:
                        break  # later
                    self.drop(masks, key)
                    self.bytes -= BYTES_OF[start + at + 1] - BYTES_OF[start + at]
        self.free.append(number)

    def drop(self, masks: dict[int, int], key: int) -> None:
        """It has not got this one any more, which it had."""
        self.keys -= 1
        self.shared.pop(key, None)
        left = masks[key] & ~self.bit
        if left > GENERATION:
            masks[key] = left
        else:
            del masks[key]

    def _leave_all(self, masks: dict[int, int]) -> None:
        kept = without_bit(masks, self.bit, GENERATION)
        masks.clear()
        masks.update(kept)
        self.shared.clear()
        self.keys = 0

    def forget_all(self, masks: dict[int, int]) -> None:
        """It has nothing any more. Every key is in a prompt of its generation, but for those that were made to collide; who has
        much is dropped from all keys at once, in a fraction of the time."""
        if REBUILT_AT * self.keys > len(masks):
            self._leave_all(masks)
        for _, prompts in [*self.older, (self.youngest, self.young)] if self.keys else ():
            for _, keys in prompts:
                for key in keys:
                    if masks.get(key, 0) & self.bit:
                        self.drop(masks, key)
        if self.keys:
            self._leave_all(masks)
        self.free, self.youngest, self.bytes = list(range(1, SHARED)), 0, 0
        self.older.clear()
        self.young, self.young_keys, self.young_bytes = [], 0, 0


class ApproximateIndex:
    """Key → workers. `capacity`: entries (a key at a worker) of all workers together."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.masks: dict[int, int] = {}
        """Key → workers as bits, and GENERATION."""
        self._ends: dict[int, int] = {}
        """Key of a prompt's beginning → how deep the last prompt with it was known."""
        self._held: dict[str, _Held] = {}
        self._by_bit: dict[int, _Held] = {}
        self.news: dict[tuple[str, int], Sequence[int]] | None = None
        """What was sent, by worker and last key, for other routers; None when there are none. Whoever tells them empties it."""

    def __len__(self) -> int:
        return len(self.masks)

    @property
    def entries(self) -> int:
        """Keys at workers."""
        return sum(held.keys for held in self._held.values())

    def join(self, worker: str, bit: int) -> None:
        """A worker that may be sent something; `bit` as of `Bits`."""
        self._held[worker] = self._by_bit[bit] = _Held(bit)
        self._share_out()

    def remove(self, worker: str) -> None:
        """The worker is gone: nobody may be matched to it again, nor to whoever gets its bit."""
        held = self._held.pop(worker, None)
        if held is not None:
            held.forget_all(self.masks)
            del self._by_bit[held.bit]
            self._share_out()

    def resize(self, worker: str, prompt_bytes: int) -> None:
        """The worker's KV cache holds about so many bytes of prompts: what does not fit is forgotten here as well."""
        if (held := self._held.get(worker)) is not None:
            held.size(held.limit, max(LEAST_KEYS * PIECE_BYTES, prompt_bytes))

    def measured(self, worker: str) -> bool:
        """It is known how much the worker's cache holds."""
        held = self._held.get(worker)
        return held is not None and held.most_bytes > 0

    def _share_out(self) -> None:
        """Everybody gets an equal part of what there is."""
        part = max(LEAST_KEYS, self._capacity // max(1, len(self._held)))
        for held in self._held.values():
            held.size(part, held.most_bytes)

    def depths(self, keys: Sequence[int], among: int = -1) -> list[tuple[int, int]]:
        """(pieces, workers as bits), the deepest first. Prompts that share a beginning (a system prompt, say) mostly part at the
        same place: it is looked at first. Each look into a large index waits for memory, which is most of a decision."""
        size = len(keys)
        if size <= SHORT_PIECES:
            return depths(self.masks, keys, among & ~GENERATION)
        beginning = keys[FINE_PIECES - 1 if size > FINE_PIECES else SHORT_PIECES - 1]
        likely = self._ends.get(beginning, 0)
        found = depths(self.masks, keys, among & ~GENERATION, likely)
        if found and found[0][0] != likely:
            if len(self._ends) >= ENDS_MOST:
                self._ends.clear()
            self._ends[beginning] = found[0][0]
        return found

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
        masks, count, size = self.masks, len(keys), BYTES_OF[len(keys)]
        if held.generation(masks, keys[-1]) == held.youngest:
            return  # used in this generation already, and with it all before it
        if held.young and (held.young_keys + count > held.room_keys or held.young_bytes + size > held.room_bytes):
            used = held.used(masks, keys)
            if held.young_keys + count - used > held.room_keys or held.young_bytes + size - BYTES_OF[used] > held.room_bytes:
                held.turn(masks)
        start, fresh = self._use(keys, held)
        held.young.append((start, keys[start:] if start else keys))
        held.young_keys += count - start
        held.young_bytes += size - BYTES_OF[start]
        if fresh:
            held.keys += fresh
            held.bytes += size - BYTES_OF[count - fresh]
            if held.keys > held.limit or 0 < held.most_bytes < held.bytes:
                held.make_room(masks)

    def _use(self, keys: Sequence[int], held: _Held) -> tuple[int, int]:
        """All of them are used by this worker in its youngest generation; from which on for the first time, how many of these it
        had not got."""
        masks, bit, fresh, mine, start = self.masks, held.bit, 0, held.bit | held.youngest, len(keys)
        known = len(masks)
        for key in reversed(keys):
            value = masks.setdefault(key, mine)  # most are new: one look instead of two
            if len(masks) > known:
                known += 1
                fresh += 1
            elif value == mine:
                break  # and with it all before it
            elif value & GENERATION == SHARED:
                used = held.shared.get(key, -1)
                if used == held.youngest:
                    break
                if used < 0:
                    masks[key] = value | bit
                    fresh += 1
                held.shared[key] = held.youngest
            elif value & bit:
                masks[key] = mine
            else:
                self._by_bit[value & ~GENERATION].shared[key] = value & GENERATION
                held.shared[key] = held.youngest
                masks[key] = value | bit | SHARED
                fresh += 1
            start -= 1
        return start, fresh
