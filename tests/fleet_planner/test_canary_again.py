"""A canary of a revision that has served before: routers count from their start, and what they counted then says nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet_api.v1alpha1.status import RolloutStatus
from fleet_planner.canary import Course, Scene, plot_course
from fleet_planner.types import RevisionLoad
from tests.fleet_planner.test_canary import GOOD, NEW, NOW, OLD, scene, spec

LONG_AGO = RevisionLoad(0, 0, 10_000, 300)
"""Three of a hundred failed, all of them long ago."""


def follow(*scenes: Scene) -> list[Course]:
    """From a fleet that serves as OLD, each look with the status that the last one wrote, as it is read back."""
    status, found = RolloutStatus(stable=OLD), list[Course]()
    for one in scenes:
        found.append(plot_course(spec(), status, one))
        status = RolloutStatus.model_validate(found[-1].status.to_dict())
    return found


def plus(requests: int, errors: int, *, window: bool = True) -> RevisionLoad:
    """So many more since then."""
    lately = {"requests": requests, "errors": errors} if window else {}
    return replace(LONG_AGO, total_requests=10_000 + requests, total_errors=300 + errors, **lately)


def test_an_undo_goes_to_a_revision_of_which_requests_once_failed() -> None:
    """Incident: `fleet rollout undo` of a bad revision was itself rolled back, in its first pass, for errors of last month."""
    looks = [scene(loads={OLD: GOOD, NEW: LONG_AGO}), scene((1, 1), {OLD: GOOD, NEW: plus(30, 0)}, NOW + 1)]
    assert [(course.target, course.rolled_back) for course in follow(*looks)] == [(NEW, "")] * 2


def test_requests_of_before_pass_no_step() -> None:
    later = [scene((1, 1), {OLD: GOOD, NEW: plus(given, 0)}, NOW + at) for at, given in ((1, 3), (999, 19), (1_000, 20))]
    looks = [scene(loads={OLD: GOOD, NEW: LONG_AGO}), *later]
    steps = follow(*looks)
    assert [course.status.step for course in steps] == [0, 0, 0, 1]
    assert "19 of 20 requests" in steps[2].status.message


def test_what_nobody_could_say_when_it_began_is_asked_until_it_has_workers() -> None:
    """Routers were not reached in the first pass: errors of last month were the canary's."""
    looks = [scene(loads={OLD: GOOD}), scene(loads={OLD: GOOD, NEW: LONG_AGO}, now=NOW + 1)]
    courses = follow(*looks, scene((1, 1), {OLD: GOOD, NEW: plus(30, 0)}, NOW + 2))
    assert [(course.target, course.rolled_back) for course in courses] == [(NEW, "")] * 3
    assert courses[-1].status.requests_before == LONG_AGO.total_requests


def test_of_a_canary_that_has_served_all_counts_though_its_workers_are_lost() -> None:
    bad = plus(100, 2)
    looks = [scene(loads={OLD: GOOD, NEW: LONG_AGO}), scene((1, 1), {OLD: GOOD, NEW: plus(3, 0)}, NOW + 1)]
    assert "2 of 100 requests failed" in follow(*looks, scene((0, 0), {OLD: GOOD, NEW: bad}, NOW + 2))[-1].rolled_back


@pytest.mark.parametrize("window", [True, False])
def test_what_fails_since_then_rolls_back(window: bool) -> None:
    looks = [scene(loads={OLD: GOOD, NEW: LONG_AGO}), scene((1, 1), {OLD: GOOD, NEW: plus(100, 2, window=window)}, NOW + 1)]
    assert "2 of 100 requests failed" in follow(*looks)[-1].rolled_back


def test_what_failed_a_moment_before_it_began_is_not_counted() -> None:
    """The window reaches back to the last try, and to the routers' start when the operator has just started."""
    lately = RevisionLoad(100, 50, 100, 50)
    looks = [scene(loads={OLD: GOOD, NEW: lately}), scene((1, 1), {OLD: GOOD, NEW: replace(lately, total_requests=130)}, NOW + 1)]
    assert [course.rolled_back for course in follow(*looks)] == ["", ""]


def test_routers_that_start_again_count_from_nothing() -> None:
    fresh = RevisionLoad(40, 1, 40, 1)
    looks = [scene(loads={OLD: GOOD, NEW: LONG_AGO}), scene((1, 1), {OLD: GOOD, NEW: fresh}, NOW + 1)]
    assert "1 of 40 requests failed" in follow(*looks)[-1].rolled_back


def test_a_router_that_cannot_be_read_for_a_moment_makes_nothing_of_before_count() -> None:
    """b42: of two routers one did not answer once: what both had counted was more than the other alone had, and its part of last
    month's requests passed the step, or its errors rolled back."""
    half = RevisionLoad(3, 0, 5_003, 150, partial=True)
    later = [((1, 1), plus(3, 0), 1), ((1, 1), half, 999), ((1, 1), half, 1_000), ((1, 1), plus(19, 0), 1_001)]
    later = [*later, ((1, 1), plus(20, 0), 1_002)]
    looks = [
        scene(loads={OLD: GOOD, NEW: LONG_AGO}),
        *(scene(pair, {OLD: GOOD, NEW: load}, NOW + at) for pair, load, at in later),
    ]
    steps = follow(*looks)
    assert [(course.status.step, course.rolled_back) for course in steps] == [(0, "")] * 5 + [(1, "")]


def test_a_router_that_cannot_be_read_as_it_begins_leaves_what_was_known() -> None:
    half = RevisionLoad(0, 0, 5_000, 150, partial=True)
    looks = [scene(loads={OLD: GOOD, NEW: load}, now=NOW + at) for at, load in enumerate((LONG_AGO, half))]
    assert [one.status.requests_before for one in follow(*looks)] == [10_000, 10_000]


def test_of_a_router_that_starts_again_beside_others_nothing_of_before_counts() -> None:
    """What the others had counted before is no request of this rollout."""
    counts = ((2, 5_002, 1), (2, 5_002, 1_000), (5, 5_019, 1_001), (6, 5_020, 1_002))
    later = [scene((1, 1), {OLD: GOOD, NEW: RevisionLoad(lately, 0, total, 150)}, NOW + at) for lately, total, at in counts]
    steps = follow(scene(loads={OLD: GOOD, NEW: LONG_AGO}), *later)
    assert [(course.status.step, course.rolled_back) for course in steps] == [(0, "")] * 4 + [(1, "")]


def test_a_revision_that_was_rolled_back_is_tried_again_after_another_one() -> None:
    bad = RevisionLoad(100, 50, 100, 50)
    begun = [scene(), scene((1, 1), {OLD: GOOD, NEW: bad}, NOW + 1), scene((0, 0), {OLD: GOOD, NEW: bad}, NOW + 2)]
    reverted = scene((0, 0), {OLD: GOOD, NEW: bad}, NOW + 3, wanted=OLD)
    again = [scene((0, 0), {OLD: GOOD, NEW: bad}, NOW + 4), scene((1, 1), {OLD: GOOD, NEW: bad}, NOW + 5)]
    courses = follow(*begun, reverted, *again)
    assert [course.target for course in courses] == [NEW, OLD, OLD, OLD, NEW, NEW]


def test_a_worker_that_is_seen_late_takes_nothing_from_what_is_told_of_a_rollback() -> None:
    """It was made a moment before: once nothing else was left the status had forgotten why, and said "tier t: ;"."""
    bad = RevisionLoad(100, 50, 100, 50)
    begun = [scene(), scene((1, 1), {OLD: GOOD, NEW: bad}, NOW + 1), scene((0, 0), {OLD: GOOD, NEW: bad}, NOW + 2)]
    late = scene((1, 0), {OLD: GOOD, NEW: bad}, NOW + 3)
    courses = follow(*begun, late)
    assert {(one.status.failed, one.status.message) for one in courses[1:]} == {(NEW, courses[1].rolled_back)}
