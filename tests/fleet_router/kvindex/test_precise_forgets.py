"""What the indexes forget of one worker: quickly, and nothing else."""

from __future__ import annotations

import random

import pytest

from fleet_router.kvindex.approximate import ApproximateIndex
from fleet_router.kvindex.precise import SLOW_WORTH, PreciseIndex, key_of
from fleet_wire.blocks import chain, root_hash
from fleet_wire.events import BlockRemoved
from tests.fleet_router.kvindex.test_precise import KEYS, NAMES, SIZE, TOKENS, index, stored


def test_who_held_much_is_forgotten_at_once():
    """80 ms for a worker of 200,000 blocks, whose connection broke: each stream stood (`make bench-choose` has the time)."""
    made = PreciseIndex(100_000)
    made.join("a", 64, "c")
    names = [number.to_bytes(16, "little") for number in range(50_000)]
    made.apply("a", [stored(names)])
    assert len(made) == 50_000
    made.clear("a")
    assert (len(made), made._fast, made._slow) == (0, {}, {})


def test_who_held_much_is_forgotten_and_nobody_else():
    made = index()
    made.apply("a", [stored(NAMES), stored(NAMES[5:], medium="CPU")])
    made.apply("b", [stored(NAMES[:3]), stored(NAMES[:5], medium="CPU")])
    made.clear("a")
    assert (made.depths(KEYS), len(made)) == ([(3 + SLOW_WORTH * 2, 2)], 8)


@pytest.mark.parametrize("first", [0, 1], ids=["old first", "new first"])
def test_blocks_of_two_versions_of_an_adapter_go_one_by_one(first: int):
    """Events name no version: with the old one's blocks, which go first, the new one's were believed to be gone, as long as the
    worker found them in its cache."""
    made = index()
    old, new = [bytes([1, i]) * 16 for i in range(3)], [bytes([2, i]) * 16 for i in range(3)]
    own = [key_of(name) for name in chain(root_hash("c", SIZE, "billing"), TOKENS, SIZE)]
    made.apply("a", [stored(names, TOKENS[: 3 * SIZE], lora="billing") for names in (old, new)])
    made.apply("a", [BlockRemoved((old, new)[first], "GPU")])
    assert made.depths(own) == [(3, 1)]
    made.apply("a", [BlockRemoved((new, old)[first], "GPU")])
    assert (made.depths(own), len(made), made._fast, made._holdings["a"].twins) == ([], 0, {}, {})
    made.apply("a", [stored(names, TOKENS[: 3 * SIZE], lora="billing") for names in (old, new)])
    made.clear("a")
    made.apply("a", [stored(old, TOKENS[: 3 * SIZE], lora="billing"), BlockRemoved(old, "GPU")])
    assert made.depths(own) == []


def test_who_was_sent_much_is_forgotten_at_once():
    """95 ms, compiled, for the only worker of half a million keys, when it left (`make bench-choose` has the time)."""
    made, rng = ApproximateIndex(200_000), random.Random(1)
    made.join("a", 64)
    prompts = [[rng.getrandbits(64) for _ in range(80)] for _ in range(1_000)]
    for keys in prompts:
        made.learn(keys, "a")
    assert made.entries == 80_000
    made.remove("a")
    assert (made.entries, made.runs.by_first, made.runs.keys) == (0, {}, 0)


def test_who_was_sent_much_is_forgotten_and_nobody_else():
    made = ApproximateIndex(10_000)
    made.join("a", 64)
    made.join("b", 128)
    made.learn([*range(1, 41)], "a")
    made.learn([*range(1, 11)], "b")
    made.remove("a")
    assert (made.depths([*range(1, 41)]), made.entries, len(made)) == ([(10, 128)], 10, 10)
    assert all(run.mask for run in made.runs.by_first.values())
    made.join("c", 64)
    made.learn([*range(1, 6)], "c")
    made.learn([*range(100, 400)], "b")
    made.remove("c")
    assert (made.depths([*range(1, 41)]), made.entries) == ([(10, 128)], 310)
