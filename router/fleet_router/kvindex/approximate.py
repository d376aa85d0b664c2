"""The approximate prefix index: what this router sent where, forgotten as the worker forgets it.

Prompts come as the keys of their pieces (`pieces`) and are kept as paths of runs (`runs`). Per worker each run belongs to the
generation in which it was last used. A generation ends when an eighth of the worker's capacity was used in it; when a worker has
been sent more than it holds, what was last used in its oldest generation goes: least recently used out first, an eighth at a
time. All of a prompt is used together, so that no run is ever older than the ones behind it. What was used in the generation
already is not counted again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from fleet_router.kvindex.masks import REBUILT_AT, STEPS_MOST
from fleet_router.kvindex.pieces import BYTES_OF, MAX_PIECES, PIECE_BYTES, bytes_of, pieces_in
from fleet_router.kvindex.runs import Run, Runs

GENERATIONS: Final = 8
"""In a worker's capacity."""
GENERATIONS_MOST: Final = 32
"""Where the same prompts come again and again: the oldest two become one."""
SHARED: Final = -1
"""Generation of a run that more than one worker had: each has its own, in `_Held.shared`."""
LEAST_KEYS: Final = 64
MOST_NEWS: Final = 256
PATH_RUNS: Final = 8
"""Of a prompt that has more, those that can be are united: a conversation that two workers hold has one more with each turn."""


def _bytes_of(run: Run) -> int:
    """Prompt bytes that it stands for."""
    return BYTES_OF[run.start + len(run.keys)] - BYTES_OF[run.start]


class _Held:
    """What one worker was sent."""

    __slots__ = (
        "bit", "bytes", "keys", "limit", "longest", "most_bytes", "older", "room_bytes", "room_keys", "shared", "young",
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
        self.shared: dict[Run, int] = {}
        """Run → its generation, of runs that others have as well."""
        self.youngest = 0
        """Number of its generation."""
        self.young: list[Run] = []
        """Runs that were used in it, for the first time in this generation. Of a run that was cut since, the end: the rest is its
        parent."""
        self.young_keys = self.young_bytes = 0
        """Each key once."""
        self.older: deque[tuple[int, list[Run]]] = deque()
        """(number, runs) of the others, the oldest first."""

    def size(self, limit: int, most_bytes: int) -> None:
        """How much is kept."""
        self.limit, self.most_bytes = limit, most_bytes
        self.longest = min(limit, MAX_PIECES, pieces_in(most_bytes) if most_bytes else MAX_PIECES)
        self.room_keys = limit // GENERATIONS
        self.room_bytes = (most_bytes or bytes_of(MAX_PIECES) * limit) // GENERATIONS

    def generation(self, run: Run) -> int:
        """In which this worker last used it; -2: it has not got it."""
        if not run.mask & self.bit:
            return -2
        return run.generation if run.generation != SHARED else self.shared[run]

    def used(self, path: Sequence[Run], end: int) -> int:
        """How many of a prompt's keys were used in the youngest generation: its beginning. `path` and `end` as of `Runs.path`."""
        found = 0
        for run in path:
            if self.generation(run) != self.youngest:
                return found
            found += len(run.keys)
        return end

    def turn(self) -> None:
        """Begin a generation: the next prompt does not fit into the present one."""
        self.older.append((self.youngest, self.young))
        if len(self.older) > GENERATIONS_MOST:
            self._unite_oldest()
        self.youngest, self.young, self.young_keys, self.young_bytes = self.youngest + 1, [], 0, 0

    def _unite_oldest(self) -> None:
        """The oldest two generations, as the older one."""
        (oldest, runs), (next_oldest, more) = self.older.popleft(), self.older.popleft()
        for run in more:
            one: Run | None = run
            while one is not None and self.generation(one) == next_oldest:
                self._put(one, oldest)
                one = one.parent
        self.older.appendleft((oldest, [run for run in runs + more if self.generation(run) == oldest]))

    def _put(self, run: Run, number: int) -> None:
        """One that it has belongs to this generation."""
        if run.generation == SHARED:
            self.shared[run] = number
        else:
            run.generation = number

    def take(self, run: Run, by_bit: dict[int, _Held]) -> None:
        """It is used in the youngest generation, whether this worker had it or not."""
        size, stands_for = len(run.keys), _bytes_of(run)
        if not run.mask & self.bit:
            if run.generation != SHARED:
                by_bit[run.mask].shared[run] = run.generation
                run.generation = SHARED
            run.mask |= self.bit
            self.keys += size
            self.bytes += stands_for
        self._put(run, self.youngest)
        self.note(run, size, stands_for)

    def note(self, run: Run, keys: int, stands_for: int) -> None:
        """So much of the youngest generation is used for the first time."""
        self.young.append(run)
        self.young_keys += keys
        self.young_bytes += stands_for

    def make_room(self, runs: Runs) -> None:
        """As long as it was sent more than it holds. The youngest generation alone is never more: when nothing else is left, keys
        were made to collide, so that those before them were passed over, and all of it goes."""
        while self.keys > self.limit or 0 < self.most_bytes < self.bytes:
            if not self.older:
                self.forget_all(runs)
                return
            number, noted = self.older.popleft()
            for run in noted:
                self._drop_while(runs, run, number)

    def _drop_while(self, runs: Runs, run: Run | None, number: int) -> None:
        """What was not used since: of a run that was cut, the end may be, and its beginning then not."""
        while run is not None and self.generation(run) == number:
            before = run.parent
            self.drop(runs, run)
            run = before

    def drop(self, runs: Runs, run: Run) -> None:
        """It has not got this one any more, which it had."""
        self.keys -= len(run.keys)
        self.bytes -= _bytes_of(run)
        if run.generation == SHARED:
            del self.shared[run]
        runs.drop(run, self.bit)

    def forget_all(self, runs: Runs) -> None:
        """It has nothing any more. Every run is noted in its generation, or its end is, but for those that were made to collide;
        who has much looks at all runs at once."""
        if REBUILT_AT * self.keys < runs.keys:
            for number, noted in [*self.older, (self.youngest, self.young)]:
                for run in noted:
                    self._drop_while(runs, run, number)
        if self.keys:
            for run in [run for run in runs.by_first.values() if run.mask & self.bit]:
                self.drop(runs, run)
        self.older.clear()
        self.young, self.young_keys, self.young_bytes = [], 0, 0


class ApproximateIndex:
    """Key → workers. `capacity`: entries (a key at a worker) of all workers together."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.runs = Runs()
        self._held: dict[str, _Held] = {}
        self._by_bit: dict[int, _Held] = {}
        self.news: dict[tuple[str, int], list[int]] | None = None
        """What was sent, by worker and last key, for other routers; None when there are none. Whoever tells them empties it."""

    def __len__(self) -> int:
        return self.runs.keys

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
            held.forget_all(self.runs)
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

    def depths(self, keys: list[int], among: int = -1) -> list[tuple[int, int]]:
        """(pieces, workers as bits), the deepest first. So many different depths are told apart as in `masks.depths`."""
        found: list[tuple[int, int]] = []
        at, alive, count, by_first = 0, among, len(keys), self.runs.by_first
        while at < count and (run := by_first.get(keys[at])) is not None:
            held = run.mask & alive
            if held != alive and at:
                found.append((at, alive & ~held))
            alive = held
            if not alive:
                break
            same = run.common(keys, at)
            at += same
            if same < len(run.keys):
                break
        if at and alive:
            found.append((at, alive))
        found.reverse()
        return found if len(found) <= STEPS_MOST else _lumped(found)

    def add(self, keys: list[int], worker: str) -> None:
        """This worker is being sent a prompt with these keys."""
        if (news := self.news) is not None and keys and len(news) < MOST_NEWS:
            news[worker, keys[-1]] = keys
        self.learn(keys, worker)

    def learn(self, keys: list[int], worker: str) -> None:
        """This worker was sent a prompt with these keys, by whomever."""
        held = self._held.get(worker)
        if held is None or not keys:
            return
        if len(keys) > held.longest:
            keys = keys[: held.longest]
        count = len(keys)
        path, end, same = self.runs.path(keys)
        if end == count and held.generation(path[-1]) == held.youngest:
            return  # used in this generation already, and with it all before it
        self._make_place(held, count, BYTES_OF[count], path, end)
        if path and same < len(path[-1].keys):
            end = self._parted(path, keys, end, same)
        for run in reversed(path):
            if held.generation(run) == held.youngest:
                break  # and with it all before it
            held.take(run, self._by_bit)
        if end < count:
            self._append(held, keys, end, path[-1] if path else None)
        if len(path) > PATH_RUNS:
            self._unite(path)
        if held.keys > held.limit or 0 < held.most_bytes < held.bytes:
            held.make_room(self.runs)

    @staticmethod
    def _make_place(held: _Held, count: int, size: int, path: Sequence[Run], end: int) -> None:
        """In the youngest generation, for so many keys and bytes, a part of which may be in it."""
        if held.young and (held.young_keys + count > held.room_keys or held.young_bytes + size > held.room_bytes):
            used = held.used(path, end)
            if held.young_keys + count - used > held.room_keys or held.young_bytes + size - BYTES_OF[used] > held.room_bytes:
                held.turn()

    def _parted(self, path: list[Run], keys: list[int], end: int, same: int) -> int:
        """Others go on in the last run where this prompt ends or parts from them: it is cut there. Up to which key the path goes
        then: all of them where keys collide, and nothing more is kept of this prompt."""
        while path and same < len(path[-1].keys):
            run = path.pop()
            front = self.runs.cut(run, same)
            if front is None:
                return len(keys)
            if run.generation == SHARED:
                for held in self._of(run.mask):
                    held.shared[front] = held.shared[run]
            path.append(front)
            more, end, same = self.runs.path(keys, end)
            if not more:
                break
            path += more
        return end

    def _unite(self, path: Sequence[Run]) -> None:
        """Those that the same workers hold, each since the same generation, and nothing else is between."""
        mask = 0
        holders: list[_Held] = []
        for i in range(1, len(path)):
            before, run = path[i - 1], path[i]
            if (
                run.parent is not before or before.kids != 1 or run.mask != before.mask or not run.mask
                or before.start + len(before.keys) != run.start
            ):  # fmt: skip
                continue
            if run.mask != mask:
                mask, holders = run.mask, self._of(run.mask)
            if _alike(holders, before, run):
                for held in holders:
                    held.shared.pop(before, None)
                self.runs.unite(before, run)

    def _of(self, mask: int) -> list[_Held]:
        """Workers with these bits."""
        found: list[_Held] = []
        while mask:
            found.append(self._by_bit[mask & -mask])
            mask &= mask - 1
        return found

    def _append(self, held: _Held, keys: list[int], end: int, last: Run | None) -> None:
        """What of a prompt is new, behind the run that was its last. A conversation that only this worker has goes on in its run:
        each turn would be a run more to be looked for."""
        new = keys[end:]
        size, stands_for = len(new), BYTES_OF[len(keys)] - BYTES_OF[end]
        if (
            last is not None and last.kids == 0 and last.mask == held.bit and last.generation == held.youngest
            and last.start + len(last.keys) == end
        ):  # fmt: skip
            self.runs.extend(last, new)
            held.young_keys += size
            held.young_bytes += stands_for
        else:
            held.note(self.runs.put(new, end, held.bit, held.youngest, last), size, stands_for)
        held.keys += size
        held.bytes += stands_for


def _alike(holders: Sequence[_Held], before: Run, run: Run) -> bool:
    """All of them used both last in the same generation: no list is made, where they did not one of the first tells."""
    return all(held.generation(before) == held.generation(run) for held in holders)


def _lumped(found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    rest = 0
    for _, mask in found[STEPS_MOST:]:
        rest |= mask
    return [*found[:STEPS_MOST], (1, rest)]
