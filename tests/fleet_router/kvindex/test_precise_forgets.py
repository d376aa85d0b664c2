"""What the precise index forgets of one worker: quickly, and nothing else."""

from __future__ import annotations

import time

import pytest

from fleet_router.kvindex.precise import SLOW_WORTH, PreciseIndex, key_of
from fleet_wire.blocks import chain, root_hash
from fleet_wire.events import BlockRemoved
from tests.fleet_router.kvindex.test_precise import KEYS, NAMES, SIZE, TOKENS, index, stored


def test_who_held_much_is_forgotten_in_a_fraction_of_the_time_that_it_took_to_tell():
    """80 ms for a worker of 200,000 blocks, whose connection broke: each stream stood."""
    made = PreciseIndex(100_000)
    made.join("a", 64, "c")
    names = [number.to_bytes(16, "little") for number in range(50_000)]
    began = time.thread_time()
    made.apply("a", [stored(names)])
    told = time.thread_time()
    assert len(made) == 50_000
    made.clear("a")
    assert (time.thread_time() - told) * 5 < told - began
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
