"""To lose races is no failure, however many and however slow; to say nothing at all is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.health.races import LOST_MOST, Races, swallows

SILENT_S = 15.0


@pytest.mark.parametrize(
    ("legs", "found"),
    [
        pytest.param([(0, 1, 0)] * (LOST_MOST - 1), False, id="a few"),
        pytest.param([(0, 1, 0)] * LOST_MOST, True, id="enough"),
        pytest.param([(0, 1, 0)] * (LOST_MOST + 5), True, id="more"),
        pytest.param([(0, 0.1, 0)] * LOST_MOST, False, id="none had its time"),
        pytest.param([(10, 11, 0), (12, 13, 11.5), (14, 15, 11.5)], False, id="it was heard between"),
        pytest.param([(10, 11, 0), (12, 13, 12.5), (14, 15, 12.5), (16, 17, 12.5)], False, id="it was heard during one"),
        pytest.param([(10, 11, 5), (12, 13, 5), (14, 15, 5)], True, id="it was heard before all"),
        pytest.param([(0, 1, 0)], False, id="one"),
    ],
)
def test_who_loses_so_often_without_a_word_has_one_that_runs_on(legs: list[tuple[float, float, float]], found: bool):
    """Each (sent, overtaken, heard of last)."""
    races = Races()
    told = [races.lost_one(sent_at, now, 0.5, heard_at or -1.0) for sent_at, now, heard_at in legs]
    assert told[-1] is found


@pytest.mark.parametrize(
    ("due_at", "heard_at", "now", "found"),
    [
        (100.5, 0.0, 115.4, False), (100.5, 0.0, 115.6, True), (90.0, 0.0, 115.1, True), (100.5, 100.1, 200.0, False),
        (130.0, 0.0, 140.0, False), (130.0, 0.0, 145.1, True),
    ],
)  # fmt: skip
def test_who_says_nothing_for_so_long_after_it_was_due_swallows(due_at: float, heard_at: float, now: float, found: bool):
    assert swallows(100.0, due_at, heard_at, now, SILENT_S) is found


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.001, SILENT_S), st.floats(0.001, SILENT_S)), max_size=200))
def test_nobody_who_answers_is_found_to_swallow(legs: list[tuple[float, float, float]]):
    """Legs (after, took, overtaken after): whatever their times are, of this worker and of those that overtake it, as long as it
    answers what runs on within the time in which anybody has to say something."""
    races, now, heard_at, runs_on = Races(), 100.0, -1.0, None
    for after_s, took_s, overtaken_s in legs:
        now += after_s
        if runs_on is not None:
            sent_at, answers_at = runs_on
            for at in (min(now, answers_at), now):
                assert not swallows(sent_at, sent_at, heard_at, at - 1e-9, SILENT_S)
                if at >= answers_at:
                    heard_at, runs_on = max(heard_at, answers_at), None
                    break
        if took_s <= overtaken_s:
            heard_at = max(heard_at, now + took_s)
        elif races.lost_one(now, now + overtaken_s, 0.0, heard_at) and runs_on is None:
            runs_on = (now, now + took_s)
        now += min(took_s, overtaken_s)


def test_on_trial_the_first_one_runs_on():
    assert Races().lost_one(10.0, 11.0, 0.5, 0.0, on_trial=True)
    assert not Races().lost_one(10.0, 10.1, 0.5, 0.0, on_trial=True)
