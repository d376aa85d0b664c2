"""The approximate index: keys are prefixes, depths are what a plain model says, memory is bounded as the worker's cache is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.kvindex.approximate import ENDS_MOST, GENERATIONS, GENERATIONS_MOST, LEAST_KEYS, ApproximateIndex
from fleet_router.kvindex.masks import LOWEST_BIT, STEPS_MOST, Bits, depths
from fleet_router.kvindex.pieces import bytes_of, key_chain


def joined(*workers: str, capacity: int = 100_000) -> ApproximateIndex:
    index = ApproximateIndex(capacity)
    for i, worker in enumerate(workers):
        index.join(worker, LOWEST_BIT << i)
    return index


def held(index: ApproximateIndex, keys: list[int], worker: int) -> int:
    """`worker`: 1, 2, 4, ..."""
    return next((depth for depth, mask in index.depths(keys) if mask & LOWEST_BIT * worker), 0)


def keys_of(index: ApproximateIndex, worker: str) -> set[int]:
    return {key for key, value in index.masks.items() if value & index._held[worker].bit}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=40))
def test_the_index_equals_a_plain_model(steps: list[tuple[str, int, int, bool]]):
    index, model = joined(*"abc"), {worker: set() for worker in "abc"}
    bits = {worker: 1 << i for i, worker in enumerate("abc")}
    for worker, topic, depth, removed in steps:
        keys = [topic * 100 + i for i in range(depth)]
        if removed:
            index.remove(worker)
            index.join(worker, LOWEST_BIT * bits[worker])
            model[worker].clear()
        else:
            index.add(keys, worker)
            model[worker].update(keys)
        for asked in range(4):
            chain = [asked * 100 + i for i in range(6)]
            for name, known in model.items():
                expected = next((i for i, key in enumerate(chain) if key not in known), len(chain))
                assert held(index, chain, bits[name]) == expected


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=200))
def test_a_worker_never_knows_the_end_of_a_prompt_without_its_beginning(sent: list[tuple[int, int]]):
    index = joined("w", capacity=LEAST_KEYS)
    for topic, depth in sent:
        index.add([topic * 100 + i for i in range(depth)], "w")
        for asked in range(31):
            known = [bool(index.masks.get(asked * 100 + i, 0)) for i in range(12)]
            assert known == sorted(known, reverse=True)
    assert len(index) <= LEAST_KEYS


def test_what_is_used_again_outlives_what_is_not():
    index = joined("w", capacity=400)
    hot = list(range(20))
    for i in range(200):
        index.add(hot, "w")
        index.add([1000 + 10 * i + j for j in range(10)], "w")
    assert held(index, hot, 1) == 20
    assert held(index, [1000 + j for j in range(10)], 1) == 0
    assert held(index, [1000 + 1990 + j for j in range(10)], 1) == 10
    assert len(index) <= 400


def test_what_many_prompts_begin_with_is_looked_at_once_in_a_generation():
    """Counted anew for each of them, a hundred prompts were a generation, and each hundredth one moved what all begin with: 87
    look-ups for a prompt of 16 KB instead of 22."""
    index = joined("w", capacity=8_000)
    common = list(range(90))
    for i in range(90):
        index.add([*common, *range(1_000 + 10 * i, 1_010 + 10 * i)], "w")
    one = index._held["w"]
    assert sum(len(keys) for _, keys in one.young) == one.young_keys == 990
    assert not one.older
    assert one.keys == len(index) == 990
    index.add([*common, *range(9_000, 9_020)], "w")
    assert (len(one.older), one.young_keys) == (1, 110)


def test_a_small_cache_forgets_sooner_and_nobody_gets_more_than_its_part():
    index = joined("small", "large", capacity=4000)
    index.resize("small", 400 * 256)
    for worker in ("small", "large"):
        for i in range(150):
            index.add([i * 10 + j for j in range(10)], worker)
    first, last = list(range(10)), [1490 + j for j in range(10)]
    assert (held(index, first, 1), held(index, last, 1)) == (0, 10)
    assert (held(index, first, 2), held(index, last, 2)) == (10, 10)
    assert 400 * (GENERATIONS - 1) / GENERATIONS - 10 <= index._held["small"].keys <= 400
    index.join("third", LOWEST_BIT << 2)
    assert index._held["large"].limit == 4000 // 3


def test_a_cache_is_counted_in_bytes_whatever_the_size_of_the_pieces():
    index = joined("w", capacity=100_000)
    index.resize("w", 1024 * 1024)
    rng = random.Random(3)
    prompts = [key_chain(rng.randbytes(40_000)) for _ in range(40)]
    for keys in prompts:
        index.add(keys, "w")
        index.add(keys, "w")  # again: no more room for it
    known = [held(index, keys, 1) == len(keys) for keys in prompts]
    assert known == sorted(known)
    assert 0.7 * 1024 * 1024 < sum(known) * 40_000 <= 1024 * 1024
    index.resize("w", 30_000)  # a prompt longer than the cache is known as far as it fits
    index.add(whole := key_chain(rng.randbytes(60_000)), "w")
    assert 20_000 < bytes_of(held(index, whole, 1)) <= 30_000
    assert index.entries == len(index) == held(index, whole, 1)


@given(st.lists(st.tuples(st.integers(0, 25), st.integers(1, 30)), max_size=300))
def test_it_forgets_as_a_cache_does_that_evicts_what_was_used_least_lately(sent: list[tuple[int, int]]):
    """Against a plain model: all that was used within 7/8 of a capacity is known, and no more than a capacity in all."""
    capacity = 160
    index, used = joined("w", capacity=capacity), dict[int, None]()
    for topic, depth in sent:
        keys = [topic * 100 + i for i in range(depth)]
        index.add(keys, "w")
        for key in keys[::-1]:
            used.pop(key, None)
            used[key] = None
        known = keys_of(index, "w")
        assert known == set(index.masks)
        assert len(known) == index.entries <= capacity
        lately = list(used)[-(capacity - capacity // GENERATIONS - 30) :]
        assert known.issuperset(lately)
        assert index._held["w"].bytes == sum(bytes_of(key % 100 + 1) - bytes_of(key % 100) for key in known)


class Plain:
    """What one worker was sent, in the plainest way: key → number of the generation of its last use."""

    def __init__(self, room: int) -> None:
        self.room, self.number, self.young = room, 0, 0
        self.older: list[int] = []
        self.used: dict[int, int] = {}

    def add(self, keys: list[int]) -> None:
        if self.used.get(keys[-1]) == self.number:
            return
        anew = sum(self.used.get(key) != self.number for key in keys)
        if self.young and self.young + anew > self.room // GENERATIONS:
            self.older.append(self.number)
            if len(self.older) > GENERATIONS_MOST:
                first, second = self.older[0], self.older.pop(1)
                self.used = {key: first if number == second else number for key, number in self.used.items()}
            self.number, self.young, anew = self.number + 1, 0, len(keys)
        self.young += anew
        self.used |= dict.fromkeys(keys, self.number)
        while self.older and len(self.used) > self.room:
            oldest = self.older.pop(0)
            self.used = {key: number for key, number in self.used.items() if number != oldest}


SENT = st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.integers(1, 9))


def drawn(seed: int) -> list[tuple[str, int, int] | tuple[str]]:
    """A long life: topics that come again and again and such that come rarely, now and then a worker that begins anew."""
    rng = random.Random(seed)
    topics = rng.choice([3, 8, 30])
    return [
        (rng.choice("abc"),) if rng.random() < 0.004 else (rng.choice("aabc"), int(topics * rng.random() ** 2), rng.randint(1, 9))
        for _ in range(800)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_workers_that_share_prompts_forget_each_for_itself(seed: int):
    """A key that only one worker has keeps its generation in another place than one that several have."""
    check_beside_plain(drawn(seed))


@given(st.lists(st.one_of(SENT, SENT, SENT, SENT, st.tuples(st.sampled_from("abc"))), max_size=300))
def test_whatever_workers_are_sent_they_know_what_the_plain_ones_know(steps: list[tuple[str, int, int] | tuple[str]]):
    check_beside_plain(steps)


def check_beside_plain(steps: list[tuple[str, int, int] | tuple[str]]) -> None:
    index, plain = joined(*"abc", capacity=3 * LEAST_KEYS), {worker: Plain(LEAST_KEYS) for worker in "abc"}
    for step in steps:
        if len(step) == 1:  # it comes back, with nothing
            bit = index._held[step[0]].bit
            index.remove(step[0])
            assert not any(value & bit for value in index.masks.values())
            index.join(step[0], bit)
            plain[step[0]] = Plain(LEAST_KEYS)
        else:
            worker, topic, depth = step
            keys = [topic * 100 + i for i in range(depth)]
            index.add(keys, worker)
            plain[worker].add(keys)
        for worker, known in plain.items():
            assert keys_of(index, worker) == known.used.keys()
            assert index._held[worker].keys == len(known.used)
            assert index._held[worker].bytes == sum(bytes_of(key % 100 + 1) - bytes_of(key % 100) for key in known.used)
            assert index._held[worker].shared.keys() <= known.used.keys()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [LEAST_KEYS, 400])
def test_keys_that_are_no_chains_leak_nothing(seed: int, capacity: int):
    """The hash is no secret where access is open: who makes pieces collide breaks `all keys before it`. That may cost hints."""
    rng, bound = random.Random(seed), max(LEAST_KEYS, capacity // 2)
    index = joined(*"ab", capacity=capacity)
    index.resize("b", 80 * 256)
    for number in range(3_000):
        collide = [rng.randrange(8)]  # at the end, where the rest is new, or in the middle
        index.add(
            [*(1_000 * number + i for i in range(rng.randint(1, 9))), *collide, *([5_000_000 + number] * (number % 3 == 0))],
            rng.choice("ab"),
        )
        for worker in "ab":
            assert len(keys_of(index, worker)) == index._held[worker].keys <= bound
            assert index._held[worker].shared.keys() <= keys_of(index, worker)
    for worker in "ab":
        index.remove(worker)
        index.join(worker, LOWEST_BIT << "ab".index(worker))
        assert not keys_of(index, worker)
    assert not index.masks


def test_prompts_that_come_again_and_again_cost_no_memory():
    index = joined("w", capacity=8_000)
    prompts = [[topic * 1000 + i for i in range(100)] for topic in range(40)]
    for turn in range(200):
        for keys in prompts:
            index.add(keys, "w")
        kept = index._held["w"]
        assert len(kept.older) <= GENERATIONS_MOST
        assert sum(len(old) for _, old in kept.older) <= (GENERATIONS_MOST + 1) * 10, turn
    assert index.entries == 4_000
    assert all(held(index, keys, 1) == 100 for keys in prompts)


def test_a_worker_that_left_leaves_nothing():
    index = joined("a", "b")
    index.add([1, 2, 3], "a")
    index.add([1, 2], "b")
    index.remove("a")
    assert index.depths([1, 2, 3]) == [(2, LOWEST_BIT << 1)]
    index.remove("b")
    assert len(index) == 0
    index.add([1, 2], "gone")
    index.add([], "b")
    assert len(index) == 0


def test_a_bit_is_given_again_only_after_its_release():
    bits = Bits()
    assert [bits.of(name) for name in "aba"] == [LOWEST_BIT, LOWEST_BIT << 1, LOWEST_BIT]
    bits.release("a")
    assert (bits.of("c"), bits.of("d")) == (LOWEST_BIT, LOWEST_BIT << 2)


class Counted(dict):
    looks = 0

    def get(self, *args):
        self.looks += 1
        return super().get(*args)


def test_a_long_prompt_costs_few_look_ups_and_many_depths_are_lumped():
    keys = list(range(10_000))
    masks = Counted({key: (1 << 200) - 1 if key < 100 else 1 for key in keys})
    assert depths(masks, keys, -1) == [(10_000, 1), (100, (1 << 200) - 2)]
    assert masks.looks < 50
    steep = Counted({key: (1 << (100 - key)) - 1 for key in range(100)})
    found = depths(steep, list(range(100)), -1)
    assert len(found) == STEPS_MOST + 1
    assert found[0] == (100, 1)
    assert found[-1][0] == 1
    union = 0
    for _, mask in found:
        assert not union & mask
        union |= mask
    assert union == (1 << 100) - 1


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 40), st.integers(-3, 60))
def test_where_it_is_looked_first_changes_no_depth(held_by: list[int], size: int, likely: int):
    masks = {key: sum(1 << i for i, most in enumerate(held_by) if key < most) for key in range(40)}
    keys = list(range(size))
    assert depths(masks, keys, -1, likely) == depths(masks, keys, -1)
    assert depths(masks, keys, 0b101, likely) == depths(masks, keys, 0b101)


def test_where_prompts_with_one_beginning_part_is_looked_at_first():
    """A system prompt of 10 KB, and a question of a KB behind it."""
    index = joined("w")
    for beginning in range(3):
        shared = [beginning * 1_000 + i for i in range(34)]
        index.add(shared, "w")
        for question in range(5):
            keys = [*shared, *(100_000 + 100 * question + 10_000 * beginning + i for i in range(300))]
            index.masks = masks = Counted(index.masks)
            assert index.depths(keys) == [(34, LOWEST_BIT)]
            assert masks.looks <= (3 if question else 12)
    assert len(index._ends) == 3


def test_of_few_beginnings_it_is_noted_where_prompts_part():
    index = joined("w")
    for beginning in range(2 * ENDS_MOST + 10):
        keys = [beginning * 100 + i for i in range(9)]
        index.add(keys, "w")
        assert index.depths(keys) == [(9, LOWEST_BIT)]
        assert len(index._ends) <= ENDS_MOST


def test_a_prompt_that_comes_again_and_again_pushes_nobody_out():
    index = joined("w", capacity=400)
    quiet, hot = [9000 + j for j in range(20)], list(range(20))
    index.add(quiet, "w")
    for _ in range(500):
        index.add(hot, "w")
    assert held(index, quiet, 1) == 20
