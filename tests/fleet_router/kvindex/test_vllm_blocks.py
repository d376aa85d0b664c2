"""What vLLM 0.32 tells of its blocks that is not told of one block after the other."""

from __future__ import annotations

import msgspec
import pytest

from fleet_router.kvindex.precise import SLOW_WORTH, key_of
from fleet_wire.blocks import chain, root_hash
from fleet_wire.events import AllBlocksCleared, BlockRemoved
from tests.fleet_router.kvindex.test_precise import KEYS, NAMES, TOKENS, index, stored


@pytest.mark.parametrize("names", [NAMES, [bytes([i]) * 32 for i in range(10)]], ids=["ours", "vllm sha256"])
@pytest.mark.parametrize("medium", ["GPU", "CPU"])
def test_a_block_is_gone_with_its_last_copy(names: list[bytes], medium: str):
    """vLLM computes what two requests begin with for each of them, where they come at the same time, and tells of both copies as
    they come and go: with the first that went the prompts' common beginning was believed to be gone, for as long as the worker
    found it in its cache."""
    made, count = index(), 3
    for _ in range(count):
        made.apply("a", [stored(names[:4], TOKENS[:16], medium=medium)])
    made.apply("a", [stored(names[4:6], TOKENS[16:24], names[3], medium)])
    assert (made.depths(KEYS), len(made)) == ([(6, 1)], 6)
    for left in range(count - 1, 0, -1):
        made.apply("a", [BlockRemoved([name], medium) for name in names[:4]])
        assert (made.depths(KEYS), left) == ([(6, 1)], left)
    made.apply("a", [BlockRemoved([name], medium) for name in names[3::-1]])
    assert (made.depths(KEYS), len(made), made._holdings["a"].copies) == ([], 2, {})
    for _ in range(2):
        made.apply("a", [stored(names[:4], TOKENS[:16], medium=medium)])
    made.apply("a", [AllBlocksCleared(), stored(names[:4], TOKENS[:16], medium=medium), BlockRemoved(names[3:4], medium)])
    assert made.depths(KEYS) == [(3, 1)]


OTHERS = [bytes([i]) * 32 for i in range(20)]


@pytest.mark.parametrize("lora", [None, "billing"])
@pytest.mark.parametrize("tail_first", [False, True])
def test_the_end_of_a_prompt_that_fills_no_block_is_none(tail_first: bool, lora: str | None):
    """vLLM tells of it as of a block of fewer tokens, where a hybrid model's groups have blocks of several sizes: prompts were
    cut into pieces of that size from there on, and the worker was believed to hold nothing of any."""
    made = index()
    whole = msgspec.structs.replace(stored(OTHERS[:2], TOKENS[:16], lora=lora), block_size=8, group_idx=0)
    more = msgspec.structs.replace(stored(OTHERS[2:3], TOKENS[16:24], OTHERS[1], lora=lora), block_size=8, group_idx=0)
    tails = [stored([name], TOKENS[:4], None, lora=lora) for name in OTHERS[10:12]]
    tails += [stored([OTHERS[12]], TOKENS[16:20], OTHERS[1], lora=lora)]
    made.apply("a", [*tails[:2], whole] if tail_first else [whole, *tails])
    made.apply("a", [tails[2], more, tails[0], BlockRemoved(OTHERS[10:13], "GPU", 0)])
    keys = [key_of(name) for name in chain(root_hash("c", 8, lora or ""), TOKENS, 8)]
    assert (made.layouts(), made.depths(keys), len(made)) == ({("c", 8)}, [(3, 1)], 3)
    made.clear("a")
    made.apply("a", [stored(OTHERS[:2], TOKENS[:8])])  # its next life has smaller ones
    assert (made.layouts(), made.depths(KEYS)) == ({("c", 4)}, [(2, 1)])


def test_whoever_hears_of_offloaded_blocks_first_knows_which_are_the_fast_ones():
    """A router that begins late is told what the worker has published last: where that began with a block in its host's memory,
    what was on the GPU counted for less than what had to be copied there, until one of the two began anew."""
    made = index()
    made.apply("a", [stored(NAMES[:6], medium="CPU"), stored(NAMES[6:7], medium="STORAGE"), stored(NAMES[:4])])
    assert made.depths(KEYS) == [(4 + SLOW_WORTH * 3, 1)]
    made.apply("a", [BlockRemoved(NAMES[6:7], "STORAGE"), BlockRemoved(NAMES[4:6], "CPU"), BlockRemoved(NAMES[2:4], "GPU")])
    assert made.depths(KEYS) == [(2 + SLOW_WORTH * 2, 1)]
    made.apply("b", [stored(NAMES[:6], medium="CPU")])  # of one without a GPU
    assert made.depths(KEYS) == [(6, 2), (2 + SLOW_WORTH * 2, 1)]
    made.remove("a")
    made.remove("b")
    assert (made._fast, made._slow, len(made)) == ({}, {}, 0)


def test_blocks_of_which_some_were_left_out_are_not_taken_for_those_at_the_beginning():
    """vLLM names those blocks alone that a sliding window keeps, and gives all tokens: its last blocks were believed to be the
    prompt's first ones."""
    made = index()
    made.apply("a", [stored(OTHERS[6:10], TOKENS)])
    assert (made.depths(KEYS), len(made)) == ([], 0)
    made.apply("a", [stored(OTHERS[:10], TOKENS)])
    assert made.depths(KEYS) == [(10, 1)]
