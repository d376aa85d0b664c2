"""What vLLM 0.32 tells of its blocks that is not told of one block after the other."""

from __future__ import annotations

import pytest

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
