"""Which chains of a prefix cache are given to a new worker: bounded, whole from their first block on, hottest first."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_wire.blocks import chain, root_hash
from fleet_worker.engine.blocks import BlockAllocator
from fleet_worker.engine.heat import CONSIDERED, HALF_LIFE, Heat, Node, hottest_chains

ROOT = root_hash("tiny", 16)


def named(**nodes: tuple[str | None, float]) -> dict[bytes, Node]:
    return {name.encode(): Node(None if parent is None else parent.encode(), heat) for name, (parent, heat) in nodes.items()}


@pytest.mark.parametrize(
    ("nodes", "most", "chosen"),
    [
        pytest.param({}, 5, "", id="nothing"),
        pytest.param({"a": (None, 1.0), "b": ("a", 1.0)}, 0, "", id="no-room"),
        pytest.param({"a": (None, 1.0), "b": ("a", 9.0), "c": (None, 5.0)}, 2, "ab", id="a-cold-parent-comes-with-its-hot-child"),
        pytest.param({"a": (None, 1.0), "b": ("a", 9.0), "c": (None, 5.0)}, 3, "abc", id="hottest-first"),
        pytest.param({"a": (None, 3.0), "b": ("a", 3.0), "c": ("b", 3.0)}, 2, "ab", id="a-chain-is-cut-at-its-end"),
        pytest.param({"b": ("a", 9.0), "c": (None, 1.0)}, 5, "c", id="a-hole-is-no-chain"),
        pytest.param({"c": ("b", 9.0), "b": ("a", 9.0), "d": (None, 1.0)}, 5, "d", id="a-hole-far-before"),
        pytest.param({"a": ("b", 9.0), "b": ("a", 9.0), "c": ("b", 2.0), "d": (None, 1.0)}, 5, "d", id="round-in-a-circle"),
        pytest.param({"a": ("a", 9.0)}, 5, "", id="its-own-parent"),
    ],
)
def test_which_blocks_are_chosen(nodes: dict[str, tuple[str | None, float]], most: int, chosen: str):
    assert b"".join(hottest_chains(named(**nodes), most)).decode() == chosen


names = st.integers(0, 12).map(lambda n: bytes([n]))
graphs = st.dictionaries(names, st.builds(Node, st.none() | names, st.floats(0, 100)), max_size=13)


@given(graphs, st.integers(0, 15))
def test_bounded_whole_chains_parents_first_and_nothing_hotter_left_behind(nodes: dict[bytes, Node], most: int):
    chosen = hottest_chains(nodes, most)
    assert len(chosen) <= most
    assert len(set(chosen)) == len(chosen)
    for at, name in enumerate(chosen):
        parent = nodes[name].parent
        assert parent is None or parent in chosen[:at]
    everything = hottest_chains(nodes, len(nodes))
    assert chosen == everything[:most], "a smaller bound is the beginning of a larger one"
    left = everything[most:]
    if most and left:
        ends_here = [nodes[name].heat for name in chosen if not any(nodes[other].parent == name for other in everything)]
        assert not ends_here or min(ends_here) >= max(nodes[name].heat for name in left)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), max_size=30), st.integers(3, 12), st.integers(0, 12))
def test_what_the_allocator_has_is_what_its_heat_knows(prompts: list[tuple[str, int]], total: int, most: int):
    """Prompts come and blocks are evicted: whatever is chosen can be found, each after its parent."""
    blocks = BlockAllocator(total, Heat())
    assert blocks.heat is not None
    for letter, length in prompts:
        tokens = [ord(letter)] * (16 * length)
        chained = list(chain(ROOT, tokens, 16))
        found = blocks.find(chained)
        blocks.share(found)
        rest = blocks.allocate(length - len(found))
        if rest is None:
            blocks.free(found)
            continue
        blocks.heat.prompt(chained[: len(found)])
        for at, block in enumerate(rest, len(found)):
            blocks.register(block, chained[at], chained[at - 1] if at else None, tuple(tokens[:16]), None, ROOT)
        blocks.free([*found, *rest])
        chosen = blocks.heat.hottest(most)
        assert len(chosen) <= most
        for at, name in enumerate(chosen):
            assert blocks.find([name])
            assert blocks.heat.known[name].parent in [ROOT, *chosen[:at]]


def test_what_one_prompt_alone_had_is_not_given_away():
    heat = Heat()
    heat.stored(b"once", ROOT, b"", is_first=True)
    heat.stored(b"twice", ROOT, b"", is_first=True)
    heat.prompt([b"twice"])
    assert heat.hottest(9) == [b"twice"]


def test_an_old_use_counts_less_than_a_new_one():
    heat = Heat()
    for name in (b"before", b"now"):
        heat.stored(name, ROOT, b"", is_first=True)
    for _ in range(3):
        heat.prompt([b"before"])
    for _ in range(int(3 * HALF_LIFE)):
        heat.prompt([])
    heat.prompt([b"now"])
    assert heat.hottest(2) == [b"now", b"before"]
    for _ in range(3):
        heat.prompt([b"before"])
    assert heat.hottest(2) == [b"before", b"now"]


def test_a_parent_that_was_computed_anew_comes_with_its_shared_child():
    """It was evicted and came back: it counts as used once, but all behind it are found by it."""
    heat = Heat()
    heat.stored(b"parent", ROOT, b"", is_first=True)
    heat.stored(b"child", b"parent", b"", is_first=False)
    heat.prompt([b"parent", b"child"])
    heat.gone(b"parent")
    assert heat.hottest(9) == []
    heat.stored(b"parent", ROOT, b"", is_first=True)
    assert heat.hottest(9) == [b"parent", b"child"]


def test_a_large_cache_is_sorted_within_a_moment():
    heat = Heat()
    for number in range(60_000):
        heat.stored(number.to_bytes(4, "big"), max(0, number - 1).to_bytes(4, "big"), b"", is_first=number % 100 == 0)
    for start in range(0, 60_000, 2_000):
        heat.prompt([number.to_bytes(4, "big") for number in range(start, start + 1_000)])
    begun = time.process_time()
    found = heat.hottest(2 * CONSIDERED)
    assert CONSIDERED <= len(found) <= 2 * CONSIDERED
    assert time.process_time() - begun < 0.5
