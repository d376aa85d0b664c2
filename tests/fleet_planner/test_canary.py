"""The course of a rollout: canary steps, breaches, rolling back, pausing. A time line per test, no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_api.quantities import Ratio
from fleet_api.v1alpha1.rollout import RolloutSpec
from fleet_api.v1alpha1.status import RolloutStatus
from fleet_planner.canary import Course, Scene, larger_of, overdue, plot_course
from fleet_planner.rollout import Canary, Group, Limits
from fleet_planner.types import RevisionLoad

NOW = 1_000_000.0
OLD, NEW = "aaaaaaaa", "bbbbbbbb"
LIMITS = Limits(Ratio(1, 4), Ratio(1, 1))
WANT = (4, 8)
STABLE = RolloutStatus(stable=OLD)
GOOD = RevisionLoad(100, 0, 100, 0, ttft_p99_s=1.0, itl_p99_s=0.02)


def spec(**more: Any) -> RolloutSpec:
    canary = {"steps": [10, 50], "interval": "1m"}
    return RolloutSpec.model_validate({"canary": canary, "progressDeadline": "10m", **more})


def scene(new: tuple[int, int] = (0, 0), loads: dict[str, RevisionLoad] | None = None, now: float = NOW, **more: Any) -> Scene:
    groups = {OLD: Group(OLD, WANT, WANT), NEW: Group(NEW, new, new)}
    return replace(Scene(NEW, groups, loads or {}, WANT, LIMITS, now), **more)


def follow(rollout: RolloutSpec, *scenes: Scene) -> Course:
    """One look after the other, each with the status that the last one wrote."""
    status: RolloutStatus | None = STABLE
    for one in scenes:
        course = plot_course(rollout, status, one)
        status = course.status
    return course


def test_a_canary_goes_through_its_steps_and_is_promoted():
    loads = {OLD: GOOD, NEW: GOOD}
    begun = scene()
    first = follow(spec(), begun)
    assert (first.target, first.canary, first.status.percent) == (NEW, Canary((1, 1)), 0)
    serving = scene((1, 1), loads, NOW + 5)
    assert follow(spec(), begun, serving).status.percent == 10
    too_early = scene((1, 1), loads, NOW + 64)
    assert follow(spec(), begun, serving, too_early).status.step == 0
    second = follow(spec(), begun, serving, scene((1, 1), loads, NOW + 65))
    assert (second.canary, second.status.step, second.status.percent) == (Canary((2, 4)), 1, 10)
    half = scene((2, 4), loads, NOW + 70)
    done = follow(spec(), begun, serving, scene((1, 1), loads, NOW + 65), half, scene((2, 4), loads, NOW + 131))
    assert (done.target, done.canary, done.status.percent, done.status.step) == (NEW, None, None, 2)
    ended = scene(WANT, loads, NOW + 200, groups={NEW: Group(NEW, WANT, WANT)})
    assert plot_course(spec(), done.status, ended).status == RolloutStatus(stable=NEW, previous=OLD)


def test_time_alone_passes_no_step():
    few = RevisionLoad(3, 0, 19, 0)
    course = follow(spec(), scene(), scene((1, 1), {NEW: few}, NOW + 1), scene((1, 1), {NEW: few}, NOW + 9_000))
    assert course.status.step == 0
    assert "19 of 20 requests" in course.status.message
    assert follow(spec(), scene(), scene((1, 1), {}, NOW + 1), scene((1, 1), {}, NOW + 9_000)).status.step == 0


@pytest.mark.parametrize(
    ("load", "words"),
    [
        pytest.param(replace(GOOD, errors=2), "2 of 100 requests failed", id="errors"),
        pytest.param(RevisionLoad(20, 1, 20, 1), "1 of 20 requests failed", id="errors-as-soon-as-they-can-be-judged"),
        pytest.param(replace(GOOD, requests=1, total_errors=2), "2 of 100 requests failed", id="few-a-minute-but-many-in-all"),
        pytest.param(replace(GOOD, ttft_p99_s=1.51), "TTFT p99 is 1.510 s, 1.51x of the old revision's 1.000 s", id="ttft"),
        pytest.param(replace(GOOD, itl_p99_s=0.031), "ITL p99 is 0.031 s", id="itl"),
    ],
)
def test_the_first_breach_rolls_back_at_once_and_for_good(load: RevisionLoad, words: str):
    looks = [scene(), scene((1, 1), {OLD: GOOD, NEW: GOOD}, NOW + 1), scene((1, 1), {OLD: GOOD, NEW: load}, NOW + 2)]
    back = follow(spec(), *looks)
    assert (back.target, back.canary, back.status.failed) == (OLD, None, NEW)
    assert words in back.rolled_back
    later = follow(spec(), *looks, scene((0, 0), {OLD: GOOD}, NOW + 9_999))
    assert (later.target, later.status.failed, later.rolled_back) == (OLD, NEW, "")
    assert words in later.status.message
    other = follow(spec(), *looks, scene(wanted="cccccccc", groups={OLD: Group(OLD, WANT, WANT)}))
    assert (other.target, other.status.failed) == ("cccccccc", "")


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(replace(GOOD, ttft_p99_s=1.5, itl_p99_s=0.03, errors=1), id="at-its-bounds"),
        pytest.param(RevisionLoad(19, 19, 19, 19), id="too-few-to-judge"),
        pytest.param(replace(GOOD, ttft_p99_s=None, itl_p99_s=None), id="no-latency-known"),
    ],
)
def test_what_is_inside_its_bounds_or_unknown_stays(load: RevisionLoad):
    assert follow(spec(), scene(), scene((1, 1), {OLD: GOOD, NEW: load}, NOW + 1)).target == NEW


def test_latency_is_not_compared_with_that_of_a_few_requests():
    """p99 of one quick request made a good revision look twice as slow, and late in a canary few are left to the old one."""
    few, slow = replace(GOOD, requests=19, ttft_p99_s=0.1), replace(GOOD, requests=20, ttft_p99_s=0.1)
    assert follow(spec(), scene(), scene((1, 1), {OLD: few, NEW: GOOD}, NOW + 1)).target == NEW
    assert follow(spec(), scene(), scene((1, 1), {OLD: slow, NEW: GOOD}, NOW + 1)).target == OLD


@pytest.mark.parametrize(("streams", "target"), [((100, 1), NEW), ((19, 100), NEW), ((20, 20), OLD), ((100, 100), OLD)])
def test_latency_is_not_compared_by_that_of_a_few_streams(streams: tuple[float, float], target: str):
    """Only of streams is it known when they began. Where most clients do not ask for one, p99 was that of the one who did, among
    a hundred requests: its prompt was long, and a good revision went back for it."""
    old, new = replace(GOOD, streams=streams[0]), replace(GOOD, ttft_p99_s=4.0, streams=streams[1])
    assert follow(spec(), scene(), scene((1, 1), {OLD: old, NEW: new}, NOW + 1)).target == target


def test_a_breach_while_the_rest_follows_rolls_back_too():
    promoted = RolloutStatus(stable=OLD, target=NEW, step=2)
    course = plot_course(spec(), promoted, scene((3, 6), {OLD: GOOD, NEW: replace(GOOD, errors=9)}))
    assert (course.target, course.status.failed) == (OLD, NEW)


def test_a_canary_that_never_starts_is_rolled_back_after_its_deadline():
    looks = [scene(), scene((0, 0), {}, NOW + 601)]
    assert "no progress for 10m" in follow(spec(), *looks).rolled_back


@pytest.mark.parametrize(
    ("limits", "new", "words"),
    [
        pytest.param(LIMITS, {}, ", old 4+8", id="nothing to say"),
        pytest.param(replace(LIMITS, surge_gpus=2), {}, ", old 4+8", id="there was room"),
        pytest.param(
            replace(LIMITS, surge_gpus=1),
            {},
            "; rollout.maxSurgeGpus is 1, but inside the ratio the next step needs 2 more devices than the 12 of 4 prefill and 8 "
            "decode workers",
            id="no surge",
        ),
        pytest.param(
            LIMITS,
            {"refused": True},
            "; a quota refuses the new workers, and rollout.maxUnavailable lets no old one go first",
            id="a quota",
        ),
    ],
)
def test_a_canary_that_had_no_room_says_so_when_it_is_rolled_back(limits: Limits, new: dict[str, Any], words: str):
    """Incident: "no progress for 30m: new 0+0 ready of 4+8" was all that was left of it; until then RollingOut had said why."""
    late = scene((0, 0), {}, NOW + 601, limits=limits)
    late = replace(late, groups={**late.groups, NEW: Group(NEW, **new)})
    assert follow(spec(), scene(), late).rolled_back.endswith(words)


def test_without_canary_a_late_rollout_is_only_reported():
    plain = RolloutSpec.model_validate({"progressDeadline": "10m"})
    course = follow(plain, scene(), scene((0, 0), {}, NOW + 601))
    assert (course.target, course.canary, course.rolled_back) == (NEW, None, "")
    assert overdue(plain, course.status, NOW + 601)
    moved = follow(plain, scene(), scene((1, 1), {}, NOW + 601))
    assert not overdue(plain, moved.status, NOW + 601)


def test_a_paused_fleet_begins_nothing_and_passes_no_step():
    paused = spec(paused=True)
    assert follow(paused, scene()).target == OLD
    loads = {OLD: GOOD, NEW: GOOD}
    begun = follow(spec(), scene(), scene((1, 1), loads, NOW + 1))
    later = plot_course(paused, begun.status, scene((1, 1), loads, NOW + 999))
    assert (later.target, later.status.step) == (NEW, 0)


def test_without_memory_what_is_ready_counts_as_stable():
    course = plot_course(spec(), None, scene((1, 1)))
    assert (course.status.stable, course.target) == (OLD, NEW)


def test_planning_again_changes_nothing():
    loads = {OLD: GOOD, NEW: GOOD}
    for one in (scene(), scene((1, 1), loads), scene((1, 1), {NEW: replace(GOOD, errors=50), OLD: GOOD})):
        course = plot_course(spec(), STABLE, one)
        assert plot_course(spec(), course.status, one).status == course.status


def test_a_step_longer_than_the_deadline_is_passed_and_not_rolled_back():
    """Incident: a healthy canary with `interval` above `progressDeadline` went back in the pass in which it passed its step."""
    slow, loads = spec(canary={"steps": [10, 50], "interval": "15m"}), {OLD: GOOD, NEW: GOOD}
    looks = [scene(), scene((1, 1), loads, NOW + 5), scene((1, 1), loads, NOW + 700), scene((1, 1), loads, NOW + 906)]
    passed = follow(slow, *looks)
    assert (passed.target, passed.status.step, passed.rolled_back) == (NEW, 1, "")
    assert follow(slow, *looks, scene((1, 1), loads, NOW + 906 + 599)).rolled_back == ""  # passing it was progress
    assert "no progress for 10m" in follow(slow, *looks, scene((1, 1), loads, NOW + 906 + 601)).rolled_back


def test_a_step_that_waits_for_requests_longer_than_the_deadline_is_passed():
    """Incident: the twentieth request came after `progressDeadline`, and the revision that had answered all of them went back."""
    few, enough = {OLD: GOOD, NEW: RevisionLoad(3, 0, 19, 0)}, {OLD: GOOD, NEW: RevisionLoad(3, 0, 20, 0)}
    late = [scene((1, 1), loads, NOW + at) for loads, at in ((few, 5), (few, 1_000), (enough, 1_060))]
    passed = follow(spec(), scene(), *late)
    assert (passed.target, passed.status.step, passed.rolled_back) == (NEW, 1, "")
    last = [scene((2, 4), enough, NOW + at) for at in (1_070, 2_000)]
    promoted = follow(spec(), scene(), *late, *last)
    assert (promoted.status.step, promoted.canary, promoted.rolled_back) == (2, None, "")


@pytest.mark.parametrize("canary", [True, False])
def test_a_pause_stops_the_clock_of_the_deadline(canary: bool):
    """Incident: a rollout that was paused for longer than `progressDeadline` went back as soon as it was resumed."""
    more: dict[str, Any] = {} if canary else {"canary": None}
    half = scene((3, 6), {OLD: GOOD, NEW: GOOD})
    running, paused = spec(**more), spec(**more, paused=True)
    status = plot_course(running, RolloutStatus(stable=OLD, target=NEW, step=2), half).status
    for at in (60, 3_600):
        status = plot_course(paused, status, replace(half, now=NOW + at)).status
        assert not overdue(paused, status, NOW + at)
    resumed = plot_course(running, status, replace(half, now=NOW + 3_601))
    assert (resumed.target, resumed.rolled_back) == (NEW, "")
    later = [plot_course(running, resumed.status, replace(half, now=NOW + 3_601 + more_s)) for more_s in (599, 601)]
    assert [bool(course.rolled_back) for course in later] == [False, canary]
    assert [overdue(running, resumed.status, NOW + 3_601 + more_s) for more_s in (599, 601)] == [False, True]


def test_a_paused_rollout_writes_the_same_status_again():
    half = scene((3, 6), {OLD: GOOD, NEW: GOOD})
    status = plot_course(spec(paused=True), RolloutStatus(stable=OLD, target=NEW, step=2), half).status
    assert plot_course(spec(paused=True), status, replace(half, now=NOW + 3_600)).status == status


def test_what_serves_alone_is_what_to_return_to_even_if_it_never_was_whole():
    """Incident: with `maxUnavailable` and too few nodes B ended its rollout without being whole, and a breach of C went to A."""
    ended = scene(wanted=NEW, groups={OLD: Group(OLD), NEW: Group(NEW, WANT, (3, 7))})
    status = plot_course(spec(), RolloutStatus(stable=OLD, target=NEW, step=2), ended).status
    assert status.stable == NEW
    groups = {OLD: Group(OLD), NEW: Group(NEW, WANT, (3, 7)), "cccccccc": Group("cccccccc", (1, 1), (1, 1))}
    third = scene(wanted="cccccccc", groups=groups, loads={NEW: GOOD, "cccccccc": replace(GOOD, errors=50)})
    assert plot_course(spec(), status, third).target == NEW
    starting = scene(wanted=NEW, groups={OLD: Group(OLD), NEW: Group(NEW, WANT, (0, 7))})
    assert plot_course(spec(), STABLE, starting).status.stable == OLD  # nothing that could serve: it proved nothing


def test_without_canary_no_share_of_the_requests_is_told():
    """Of a canary that is taken out of the spec in the middle of a step."""
    before = RolloutStatus(stable=OLD, target=NEW, percent=10)
    assert plot_course(spec(canary=None), before, scene((1, 1))).status.percent is None


@pytest.mark.parametrize(
    ("alive", "ready", "found"), [((2, 0), (0, 0), (2, 0)), ((0, 3), (1, 0), (1, 3)), ((1, 1), (2, 2), (2, 2))]
)
def test_whatever_exists_of_a_group_counts(alive: tuple[int, int], ready: tuple[int, int], found: tuple[int, int]):
    assert larger_of(Group(NEW, alive, ready)) == found


@pytest.mark.parametrize("message", ["", f"revision {NEW} was rolled back: x"])
def test_the_revision_that_serves_was_not_rolled_back(message: str):
    """It said so for good: of one that somebody had written there, with an empty cause, and of one that alone was left when the
    template of the old one was lost."""
    alone = scene(WANT, groups={NEW: Group(NEW, WANT, WANT)})
    for stable in (NEW, OLD):
        status = RolloutStatus(stable=stable, failed=NEW, message=message)
        for one in (alone, alone):
            status = plot_course(spec(), status, one).status
        assert (status.stable, status.failed, status.message) == (NEW, "", "")
