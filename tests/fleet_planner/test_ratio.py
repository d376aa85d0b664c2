"""The ratio rule, proven by enumeration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_api.quantities import Ratio
from fleet_planner.ratio import Bounds, project, within


@pytest.mark.parametrize(
    ("want", "found"),
    [
        pytest.param((1, 2), (1, 2), id="as-wished"),
        pytest.param((1, 8), (2, 8), id="prefill-follows-decode"),
        pytest.param((6, 1), (6, 6), id="decode-follows-prefill"),
        pytest.param((0, 0), (1, 1), id="minimum"),
        pytest.param((99, 99), (8, 8), id="maximum"),
    ],
)
def test_the_nearest_allowed_pair(want: tuple[int, int], found: tuple[int, int]):
    assert project(*want, Bounds(1, 8, 1, 8, Ratio(1, 4), Ratio(1, 1))) == found


@st.composite
def bounds(draw: st.DrawFn) -> Bounds:
    low, high = sorted([Ratio(draw(st.integers(1, 5)), draw(st.integers(1, 5))) for _ in range(2)], key=lambda r: r.value)
    p, d = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return Bounds(p, p + draw(st.integers(0, 6)), d, d + draw(st.integers(0, 6)), low, high)


@given(bounds(), st.integers(0, 12), st.integers(0, 12))
def test_projection_is_the_best_of_all_pairs(limits: Bounds, want_p: int, want_d: int):
    allowed = [(p, d) for p in range(0, 15) for d in range(0, 15) if limits.allow(p, d)]
    if not allowed:
        with pytest.raises(ValueError, match="no pair"):
            project(want_p, want_d, limits)
        return
    found = project(want_p, want_d, limits)
    assert found in allowed
    covering = [pair for pair in allowed if pair[0] >= want_p and pair[1] >= want_d]
    if covering:
        assert found in covering
        assert sum(found) == min(map(sum, covering))


@given(bounds(), st.integers(0, 12), st.integers(0, 12))
def test_projecting_twice_changes_nothing(limits: Bounds, want_p: int, want_d: int):
    if any(limits.allow(p, d) for p in range(1, 12) for d in range(1, 12)):
        once = project(want_p, want_d, limits)
        assert project(*once, limits) == once


def test_within_is_exact():
    assert within(1, 3, Ratio(1, 3), Ratio(1, 1))
    assert not within(1, 4, Ratio(1, 3), Ratio(1, 1))
    assert not within(0, 1, Ratio(1, 3), Ratio(1, 1))
