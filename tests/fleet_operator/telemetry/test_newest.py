"""What is kept of earlier answers: as long as it is newer, its pod is there and its fleet is asked about, and no longer."""

from __future__ import annotations

from fleet_operator.telemetry.aggregate import Reading
from fleet_operator.telemetry.newest import FORGET_S, Newest
from fleet_operator.telemetry.series import TargetSeries

ONE, OTHER = ("n", "one"), ("n", "other")


def target(at: float, oldest: float | None = None) -> TargetSeries:
    """`oldest`: of the samples in it, where not all are of the last scrape."""
    return TargetSeries(Reading([], at), Reading([], at if oldest is None else oldest), at)


def test_the_newer_one_counts_and_what_is_not_told_is_not_known():
    newest = Newest()
    assert newest.of(ONE, {"a": target(20), "b": None}, 21) == {"a": target(20), "b": None}
    assert newest.of(ONE, {"a": target(17), "b": target(18)}, 22) == {"a": target(20), "b": target(18)}
    assert newest.of(ONE, {"a": None, "b": target(19)}, 23) == {"a": None, "b": target(19)}
    assert newest.of(ONE, {"a": target(19)}, 24) == {"a": target(20)}
    assert newest.of(OTHER, {"a": target(7)}, 24) == {"a": target(7)}


def test_of_two_replicas_the_one_whose_scrape_is_older_says_nothing_though_the_other_s_is_not_whole():
    newest = Newest()
    newest.of(ONE, {"a": target(30, 20)}, 31)
    assert newest.of(ONE, {"a": target(25)}, 32) == {"a": target(30, 20)}
    assert newest.of(ONE, {"a": target(30)}, 33) == {"a": target(30)}


def test_a_clock_that_was_set_back_holds_nobody_up():
    newest = Newest()
    newest.of(ONE, {"a": target(5_000)}, 5_001)
    assert newest.of(ONE, {"a": target(1_000)}, 1_001) == {"a": target(1_000)}


def test_pods_and_fleets_that_are_gone_are_forgotten():
    newest = Newest()
    newest.of(OTHER, {"a": target(0)}, 1)
    newest.of(ONE, {"a": target(1), "b": target(1)}, 2)
    newest.of(ONE, {"b": target(2)}, 3 + FORGET_S)
    assert {fleet: set(known) for fleet, (_, known) in newest._known.items()} == {ONE: {"b"}}
