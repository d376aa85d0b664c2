"""The approximate index beside a plain one through whole lives: workers come, go and are measured while they are full, prompts
part anywhere, come again and are longer than what is kept of them."""

from __future__ import annotations

import random

import pytest

from fleet_router.kvindex.approximate import GENERATIONS, GENERATIONS_MOST, LEAST_KEYS, STEPS_MOST, ApproximateIndex
from fleet_router.kvindex.masks import LOWEST_BIT
from fleet_router.kvindex.pieces import MAX_PIECES, PIECE_BYTES, bytes_of, pieces_in
from fleet_router.kvindex.runs import Run
from tests.fleet_router.kvindex.test_approximate import check_runs, keys_of

BYTES = [bytes_of(depth + 1) - bytes_of(depth) for depth in range(MAX_PIECES)]


class Plain:
    """What one worker was sent: key → (number of the generation of its last use, keys before it)."""

    def __init__(self) -> None:
        self.number = self.young = self.young_bytes = self.most = 0
        self.older: list[int] = []
        self.used: dict[int, tuple[int, int]] = {}

    def size(self, limit: int, most: int) -> None:
        self.limit, self.most = limit, most
        self.longest = min(limit, MAX_PIECES, pieces_in(most) if most else MAX_PIECES)
        self.room = limit // GENERATIONS
        self.room_bytes = (most or bytes_of(MAX_PIECES) * limit) // GENERATIONS

    def bytes(self) -> int:
        return sum(BYTES[depth] for _, depth in self.used.values())

    def add(self, keys: list[int]) -> None:
        keys = keys[: self.longest]
        if self.used.get(keys[-1], (-1, 0))[0] == self.number:
            return
        anew = [depth for depth, key in enumerate(keys) if self.used.get(key, (-1, 0))[0] != self.number]
        size = sum(BYTES[depth] for depth in anew)
        if self.young and (self.young + len(anew) > self.room or self.young_bytes + size > self.room_bytes):
            self._turn()
            anew, size = list(range(len(keys))), bytes_of(len(keys))
        self.young, self.young_bytes = self.young + len(anew), self.young_bytes + size
        self.used |= {key: (self.number, depth) for depth, key in enumerate(keys)}
        while len(self.used) > self.limit or 0 < self.most < self.bytes():
            oldest = self.older.pop(0)
            self.used = {key: use for key, use in self.used.items() if use[0] != oldest}

    def _turn(self) -> None:
        self.older.append(self.number)
        if len(self.older) > GENERATIONS_MOST:
            first, second = self.older[0], self.older.pop(1)
            self.used = {key: (first if number == second else number, at) for key, (number, at) in self.used.items()}
        self.number, self.young, self.young_bytes = self.number + 1, 0, 0


class Life:
    """One index and its plain twin."""

    def __init__(self, rng: random.Random, workers: int, capacity: int) -> None:
        self.rng, self.capacity, self.index = rng, capacity, ApproximateIndex(capacity)
        self.names = [str(number) for number in range(workers)]
        self.free = [LOWEST_BIT << number for number in range(workers)]
        self.plain: dict[str, Plain] = {}

    def come_or_go(self, name: str) -> None:
        if name in self.plain:
            self.free.append(self.index._held[name].bit)
            self.index.remove(name)
            del self.plain[name]
        else:
            self.index.join(name, self.free.pop(self.rng.randrange(len(self.free))))
            self.plain[name] = Plain()
        for plain in self.plain.values():
            plain.size(max(LEAST_KEYS, self.capacity // len(self.plain)), plain.most)

    def measure(self, name: str, size: int) -> None:
        self.index.resize(name, size)
        self.plain[name].size(self.plain[name].limit, max(LEAST_KEYS * PIECE_BYTES, size))

    def send(self, keys: list[int], name: str) -> None:
        self.index.learn(keys, name)
        self.plain[name].add(keys)

    def check(self, asked: list[int]) -> None:
        check_runs(self.index)
        found: dict[int, int] = {}
        for name, plain in self.plain.items():
            held = self.index._held[name]
            assert keys_of(self.index, name) == sorted(plain.used)
            assert (held.bytes, held.young_keys, held.young_bytes) == (plain.bytes(), plain.young, plain.young_bytes)
            noted = set[Run]()
            for number, runs in [*held.older, (held.youngest, held.young)]:
                for run in runs:
                    one: Run | None = run
                    while one is not None and held.generation(one) == number:
                        noted.add(one)
                        one = one.parent
            assert noted == {run for run in self.index.runs.by_first.values() if run.mask & held.bit}
            if depth := next((at for at, key in enumerate(asked) if key not in plain.used), len(asked)):
                found[depth] = found.get(depth, 0) | held.bit
        if len(found) <= STEPS_MOST:
            assert self.index.depths(asked) == sorted(found.items(), reverse=True)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("workers", "capacity"), [(1, 100), (2, 900), (5, 400), (70, 9_000)])
def test_whole_lives(seed: int, workers: int, capacity: int):
    rng = random.Random(seed)
    life, ways = Life(rng, workers, capacity), ["0"]
    letters, deep = rng.choice(["01", "0" * 9 + "1", "0123456789"]), rng.choice([4, 20, 370])
    for name in life.names[: (workers + 1) // 2]:
        life.come_or_go(name)
    for step in range(240):
        if rng.random() < 0.02:
            life.come_or_go(rng.choice(life.names))
        if life.plain and rng.random() < 0.02:
            life.measure(rng.choice(list(life.plain)), rng.choice([0, 30_000, 100_000, 1_000_000]))
        way = rng.choice(ways[-20:])
        way = way[: rng.randint(1, len(way))] + "".join(rng.choices(letters, k=rng.randint(0, rng.choice([1, deep]))))
        ways.append(way[:400])
        keys, key = list[int](), 0
        for letter in ways[-1]:
            keys.append(key := hash((key, ord(letter))))
        for name in rng.sample(list(life.plain), min(len(life.plain), rng.choice([1, 1, 2, 60]))):
            life.send(keys, name)
        if step % 12 == 0:
            life.check([*keys[: rng.randint(0, len(keys))], 7])
    for name in list(life.plain):
        life.come_or_go(name)
    assert (len(life.index), life.index.entries, life.index.runs.by_first) == (0, 0, {})
