"""Which side fails, from pairs alone."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_planner.poisoned import NEARLY_ALL, find_poisoned

Pairs = set[tuple[str, str]]


def all_of(prefill: str, decode: str) -> Pairs:
    """Every pair of the two."""
    return set(product(prefill.split(), decode.split()))


@pytest.mark.parametrize(
    ("failing", "moved", "poisoned", "suspects"),
    [
        pytest.param(set(), set(), "", "", id="nothing-is-wrong"),
        pytest.param(all_of("p0", "d0 d1"), all_of("p1", "d0 d1"), "p0", "p0", id="a-prefill-worker"),
        pytest.param(all_of("p0 p1", "d0"), all_of("p0 p1", "d1"), "d0", "d0", id="a-decode-worker"),
        pytest.param(all_of("p0", "d0"), all_of("p1", "d0") | all_of("p0", "d1"), "", "", id="one-pair"),
        pytest.param(all_of("p0", "d0"), all_of("p1", "d0"), "", "", id="its-only-partner: the way between the two, perhaps"),
        pytest.param(all_of("p0", "d0 d1"), set(), "", "p0", id="nobody-else-moves-anything"),
        pytest.param(all_of("p0", "d0 d1"), all_of("p1", "d0"), "", "p0", id="of-one-partner-nobody-knows"),
        pytest.param(all_of("p0", "d0 d1"), all_of("p0", "d2 d3") | all_of("p1", "d0 d1"), "", "", id="half-of-them: a switch"),
        pytest.param(all_of("p0", "d0 d1 d2 d3"), all_of("p0", "d4") | all_of("p1", "d0 d1 d2 d3"), "p0", "p0", id="nearly-all"),
        pytest.param(all_of("p0 p1", "d0 d1"), set(), "", "p0 p1 d0 d1", id="everybody"),
        pytest.param(all_of("p0 p1", "d0 d1 d2"), all_of("p2", "d0 d1 d2"), "p0 p1", "p0 p1", id="two-of-three"),
        pytest.param(
            all_of("p0", "d0 d1 d2") | all_of("p1", "d0"), all_of("p1", "d1 d2"), "p0", "p0 d0", id="one-of-each: one at a time"
        ),
        pytest.param(all_of("p0", "d0 d1"), all_of("p0", "d0 d1") | all_of("p1", "d0 d1"), "", "", id="another-router-saw-it"),
    ],
)  # fmt: skip
def test_which_side_it_is(failing: Pairs, moved: Pairs, poisoned: str, suspects: str):
    found = find_poisoned(failing, moved)
    assert (set(found.poisoned), set(found.suspects)) == (set(poisoned.split()), set(suspects.split()))


PAIRS = st.sets(st.tuples(st.sampled_from([f"p{n}" for n in range(4)]), st.sampled_from([f"d{n}" for n in range(4)])))


@given(PAIRS, PAIRS)
def test_who_is_blamed_failed_with_nearly_all_and_they_work_without_it(failing: Pairs, moved: Pairs):
    found = find_poisoned(failing, moved)
    assert set(found.poisoned) <= found.suspects
    for name, partners in found.poisoned.items():
        worked = [pair for pair in moved if name in pair]
        failed = [pair for pair in failing - moved if name in pair]
        assert len(failed) >= max(2, NEARLY_ALL * (len(failed) + len(worked)))
        for partner in partners:
            assert any(partner in pair and name not in pair for pair in moved)


@given(PAIRS, PAIRS)
def test_nobody_is_blamed_for_what_was_not_seen_to_work(failing: Pairs, moved: Pairs):
    assert not find_poisoned(failing, set()).poisoned
    assert find_poisoned(set(), moved).suspects == frozenset()
