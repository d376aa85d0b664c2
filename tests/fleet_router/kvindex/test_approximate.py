"""The approximate index: keys are prefixes, depths are what a plain model says, memory is bounded as the worker's cache is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.kvindex.approximate import GENERATIONS, GENERATIONS_MOST, LEAST_KEYS, PATH_RUNS, SHARED, ApproximateIndex
from fleet_router.kvindex.masks import LOWEST_BIT, STEPS_MOST, Bits, depths
from fleet_router.kvindex.pieces import bytes_of, key_chain
from fleet_router.kvindex.runs import Run


def joined(*workers: str, capacity: int = 100_000) -> ApproximateIndex:
    index = ApproximateIndex(capacity)
    for i, worker in enumerate(workers):
        index.join(worker, LOWEST_BIT << i)
    return index


def held(index: ApproximateIndex, keys: list[int], worker: int) -> int:
    """`worker`: 1, 2, 4, ..."""
    return next((depth for depth, mask in index.depths(keys) if mask & LOWEST_BIT * worker), 0)


def keys_of(index: ApproximateIndex, worker: str) -> list[int]:
    """Each as often as it is there."""
    runs = index.runs.by_first.values()
    return sorted(key for run in runs if run.mask & index._held[worker].bit for key in run.keys)


def check_runs(index: ApproximateIndex) -> None:
    """What is told of runs is so, whatever was sent."""
    runs = index.runs.by_first
    assert all(first == run.keys[0] and run.mask for first, run in runs.items())
    assert sum(len(run.keys) for run in runs.values()) == len(index)
    for held in index._held.values():
        mine = [run for run in runs.values() if run.mask & held.bit]
        assert held.keys == sum(len(run.keys) for run in mine)
        assert held.bytes == sum(bytes_of(run.start + len(run.keys)) - bytes_of(run.start) for run in mine)
        assert held.shared.keys() == {run for run in mine if run.generation == SHARED}


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
            known = [asked * 100 + i in keys_of(index, "w") for i in range(12)]
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
    assert len(one.young) == 90
    assert one.young_keys == 990
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
        assert len(set(known)) == len(known) == len(index) == index.entries <= capacity
        lately = list(used)[-(capacity - capacity // GENERATIONS - 30) :]
        assert set(known).issuperset(lately)
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
            assert not any(run.mask & bit for run in index.runs.by_first.values())
            index.join(step[0], bit)
            plain[step[0]] = Plain(LEAST_KEYS)
        else:
            worker, topic, depth = step
            keys = [topic * 100 + i for i in range(depth)]
            index.add(keys, worker)
            plain[worker].add(keys)
        for worker, known in plain.items():
            assert keys_of(index, worker) == sorted(known.used)
            assert index._held[worker].keys == len(known.used)
            assert index._held[worker].bytes == sum(bytes_of(key % 100 + 1) - bytes_of(key % 100) for key in known.used)
        check_runs(index)


def branched(way: str) -> list[int]:
    """Keys of a prompt whose pieces are letters: equal beginnings, equal keys."""
    return [int("1" + way[: end + 1], 3) for end in range(len(way))]


@given(st.lists(st.tuples(st.sampled_from("aab"), st.text("012", min_size=1, max_size=9)), max_size=200), st.randoms())
def test_prompts_that_part_anywhere_are_known_as_the_plain_ones_know_them(sent: list[tuple[str, str]], rng: random.Random):
    """Every prompt is asked for after every other, one that was sent and one with another end."""
    index, plain = joined(*"ab", capacity=2 * LEAST_KEYS), {worker: Plain(LEAST_KEYS) for worker in "ab"}
    for worker, way in sent:
        asked = branched(way[: rng.randint(0, 9)] + "".join(rng.choices("012", k=4)))
        index.add(branched(way), worker)
        plain[worker].add(branched(way))
        for bit, (name, known) in enumerate(plain.items()):
            assert keys_of(index, name) == sorted(known.used)
            expected = next((i for i, key in enumerate(asked) if key not in known.used), len(asked))
            assert held(index, asked, 1 << bit) == expected
        check_runs(index)


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
        check_runs(index)
    for worker in "ab":
        index.remove(worker)
        index.join(worker, LOWEST_BIT << "ab".index(worker))
        assert not keys_of(index, worker)
    assert not index.runs.by_first
    assert not len(index)


def kept_runs(index: ApproximateIndex) -> set[Run]:
    """All that are in memory for its sake: in it, noted in a generation, or before another one of these."""
    notes = [noted for one in index._held.values() for noted in [*(runs for _, runs in one.older), one.young]]
    found, left = set[Run](), [*index.runs.by_first.values(), *(run for noted in notes for run in noted)]
    while left:
        if (run := left.pop()) not in found:
            found.add(run)
            left += [run.parent] if run.parent is not None else []
    return found


def test_runs_that_collide_behind_each_other_leave_nothing():
    """Each of them kept the one before it, which had long been forgotten: 200 bytes per prompt, for as long as one is known."""
    index = joined("w", capacity=LEAST_KEYS)
    index.add([0, 1], "w")
    index.add([0, 9_999], "w")
    for number in range(1, 3_000):
        index.add([number, number + 1], "w")
    assert 0 < index.entries <= LEAST_KEYS
    assert len(kept_runs(index)) <= 3 * LEAST_KEYS
    check_runs(index)


def test_what_a_pair_was_sent_turn_by_turn_is_in_memory_once():
    """Each turn's run that was united with the next stayed in its generation's notes with all keys up to it: conversations of
    300 turns were 716 bytes per key instead of 160, hundreds of MB in all."""
    index = joined(*"pd", capacity=100_000)
    for talk in range(4):
        for turn in range(1, 301):
            for worker in "pd":
                index.add([1_000 * talk + i for i in range(turn)], worker)
    assert len(index) == 1_200
    assert sum(len(run.keys) for run in kept_runs(index)) == 1_200
    check_runs(index)


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


def test_a_prompt_is_found_by_few_looks_whatever_its_length():
    """A system prompt of 10 KB, and a question of many more behind it: where the questions part, and no further."""
    index = joined("w")
    for beginning in range(3):
        shared = [beginning * 1_000 + i for i in range(34)]
        for question in range(5):
            keys = [*shared, *(100_000 + 100 * question + 10_000 * beginning + i for i in range(300))]
            index.runs.by_first = looked = Counted(index.runs.by_first)
            assert index.depths(keys) == ([(34, LOWEST_BIT)] if question else [])
            assert looked.looks <= 2
            index.add(keys, "w")


def test_a_conversation_of_many_turns_is_one_run_until_another_one_parts_from_it():
    index, keys = joined(*"ab"), []
    for turn in range(60):
        keys = [*keys, *(100 * turn + i for i in range(5))]
        index.add(keys, "a")
    assert [len(run.keys) for run in index.runs.by_first.values()] == [300]
    index.add([*keys[:100], 9_000, 9_001], "b")
    assert index.depths(keys) == [(300, LOWEST_BIT), (100, LOWEST_BIT << 1)]
    assert sorted(len(run.keys) for run in index.runs.by_first.values()) == [2, 100, 200]
    index.add([*keys, 7_000], "a")
    assert index.depths([*keys, 7_000]) == [(301, LOWEST_BIT), (100, LOWEST_BIT << 1)]
    assert len(index.runs.by_first) == 3
    check_runs(index)


def test_a_conversation_that_a_pair_holds_does_not_get_longer_to_look_for():
    """Each turn is sent to its prefill worker and then held by the decode worker, too: neither has the last run alone."""
    index, keys = joined(*"pd", capacity=4_000), []
    for turn in range(100):
        keys = [*keys, *(10 * turn + i for i in range(3))]
        index.add(keys, "p")
        index.add(keys, "d")
        assert len(index.runs.path(keys)[0]) <= PATH_RUNS + 2
        assert index.depths([*keys, 5]) == [(len(keys), LOWEST_BIT | LOWEST_BIT << 1)]
        check_runs(index)
    assert len(index) == 300


class Asked(dict):
    asked = 0

    def __getitem__(self, run: Run) -> int:
        self.asked += 1
        return super().__getitem__(run)


def test_what_cannot_be_united_is_found_out_by_few_looks_however_many_hold_it():
    """A prompt that 64 workers hold, of which one was sent beginnings at other times: every holder was asked at each end of one,
    0.4 ms for each prompt that begins so, of a path of 343 runs 0.7 ms (compiled)."""
    index, keys = joined(*(f"w{i}" for i in range(64)), capacity=64 * 800), list(range(30))
    for worker in index._held:
        index.add(keys, worker)
    for end in range(29, 14, -1):
        index.add(list(range(1_000, 1_100)), "w0")  # a generation of its own
        index.add(keys[:end], "w0")
    assert len(index.runs.path(keys)[0]) == 16
    for one in index._held.values():
        one.shared = Asked(one.shared)
    index.add([*keys, 30], "w63")
    assert len(index.runs.path(keys)[0]) == 16
    assert sum(one.shared.asked for one in index._held.values()) <= 100
    check_runs(index)


def test_many_depths_are_lumped():
    workers = [f"w{i}" for i in range(12)]
    index, keys = joined(*workers), list(range(100))
    for i, worker in enumerate(workers):
        index.add(keys[: 12 - i], worker)
    found = index.depths(keys)
    assert found[:STEPS_MOST] == [(12 - i, LOWEST_BIT << i) for i in range(STEPS_MOST)]
    assert found[STEPS_MOST:] == [(1, sum(LOWEST_BIT << i for i in range(STEPS_MOST, 12)))]
    assert index.depths(keys, LOWEST_BIT << 11 | LOWEST_BIT << 5) == [(7, LOWEST_BIT << 5), (1, LOWEST_BIT << 11)]


def test_a_prompt_that_comes_again_and_again_pushes_nobody_out():
    index = joined("w", capacity=400)
    quiet, hot = [9000 + j for j in range(20)], list(range(20))
    index.add(quiet, "w")
    for _ in range(500):
        index.add(hot, "w")
    assert held(index, quiet, 1) == 20
