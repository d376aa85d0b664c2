"""vLLM's hybrid models: several groups of layers with blocks of their own, under the same names."""

from __future__ import annotations

import msgspec
import pytest

from fleet_wire.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.fleet_router.kvindex.test_precise import KEYS, TOKENS, index, stored


def of_group(group: int, kind: str, names: list[bytes], tokens: list[int], parent: bytes | None = None) -> BlockStored:
    return msgspec.structs.replace(stored(names, tokens, parent), group_idx=group, kv_cache_spec_kind=kind)


@pytest.mark.parametrize("first", ["full_attention", "sliding_window"])
def test_of_a_hybrid_models_groups_the_one_of_full_attention_speaks(first: str):
    """Its sliding window dropped what was out of it, under the names that full attention still held: the worker was believed to
    hold nothing of a prefix that it had whole."""
    made, kinds = index(), {"full_attention": 0, "sliding_window": 1}
    names = [bytes([number]) * 32 for number in range(10)]
    for kind in sorted(kinds, key=lambda kind: kind != first):
        made.apply("a", [of_group(kinds[kind], kind, names[:6], TOKENS[:24])])
    made.apply("a", [BlockRemoved(names[:4], "GPU", 1)])
    assert made.depths(KEYS) == [(6, 1)]
    made.apply("a", [of_group(1, "sliding_window", names[6:7], TOKENS[24:28], names[5])])
    assert made.depths(KEYS) == [(6, 1)]  # a window is no prefix
    made.apply("a", [BlockRemoved(names[4:6], "GPU", 0)])
    assert made.depths(KEYS) == [(4, 1)]
    made.apply("a", [BlockRemoved(names[2:4], "GPU")])  # an engine that knows no groups
    assert made.depths(KEYS) == [(2, 1)]
    made.apply("a", [AllBlocksCleared(), of_group(3, "mamba", names[:1], TOKENS[:4])])  # begun anew, with other groups
    assert made.depths(KEYS) == [(1, 1)]
