"""When a worker that a quota refuses is asked for again. A time line per test."""

from __future__ import annotations

from fleet_operator.refusals import FIRST_S, MOST_S, Refusals
from fleet_planner.types import Problem
from fleet_planner.wanted import PodWanted

PODS = frozenset({"a", "b"})
WAIT_S = 300.0


def wanted(ordinal: int, member: int = 0) -> PodWanted:
    name = f"f-t-decode-r-{ordinal}" + (f"-{member}" if member else "")
    return PodWanted(name, "f-t-decode-r", "t", "decode", "r", ordinal, member)


def refused(one: PodWanted, words: str = "exceeded quota: gpus") -> Problem:
    return Problem("Forbidden", f"Pod {one.name}: {words}")


ONE, OTHER = wanted(1), wanted(2)


def asked_at(refusals: Refusals, seconds: int, *, wait_s: float = WAIT_S, until: int = 10_000) -> list[int]:
    """A pass each second; the quota has room from `until` on."""
    times = []
    for now in range(seconds):
        asked, told = refusals.held((ONE,), PODS, float(now))
        assert [one.message for one in told] == ([] if asked else [refused(ONE).message])
        refusals.note(asked, [refused(ONE)] if asked and now < until else [], PODS, wait_s, float(now))
        times += [now] if asked else []
    return times


def test_it_waits_as_long_again_as_it_was_refused_already():
    assert asked_at(Refusals(), 125) == [0, 1, 2, 4, 8, 16, 32, 62, 92, 122]
    assert asked_at(Refusals(), 40, wait_s=10.0) == [0, 1, 2, 4, 8, 16, 26, 36]


def test_one_that_was_made_begins_anew():
    assert asked_at(Refusals(), 8, until=4) == [0, 1, 2, 4, 5, 6, 7]
    refusals = Refusals()
    for at, problems in ((0.0, [refused(ONE)]), (1.0, [refused(ONE)]), (2.0, []), (50.0, [refused(ONE)])):
        refusals.note((ONE,), problems, PODS, WAIT_S, at)
    assert refusals.held((ONE,), PODS, 50.0 + FIRST_S)[0] == (ONE,)


def test_room_that_a_pod_of_the_fleet_leaves_is_asked_for_at_once():
    refusals = Refusals()
    refusals.note((ONE,), [refused(ONE)], PODS, WAIT_S, 0.0)
    assert refusals.held((ONE,), {*PODS, "c"}, 0.5)[0] == ()
    assert refusals.held((ONE,), {"a", "c"}, 0.5)[0] == (ONE,)


def test_one_whose_name_is_taken_waits_as_long():
    """A policy of the cluster took the label from all of a fleet's pods: each was asked for in every pass."""
    refusals, taken = Refusals(), Problem("NameConflict", f"Pod {ONE.name} is this fleet's without its label x")
    refusals.note((ONE,), [taken], PODS, WAIT_S, 0.0)
    assert refusals.held((ONE, OTHER), PODS, 0.5) == ((OTHER,), [taken])
    assert refusals.held((ONE, OTHER), PODS, FIRST_S)[0] == (ONE, OTHER)
    assert Refusals.in_order([taken, refused(OTHER)], (OTHER, ONE)) == [refused(OTHER), taken]


def test_others_are_asked_for_meanwhile_and_what_follows_a_leader_waits_with_it():
    refusals, gang = Refusals(), (ONE, wanted(1, 1), OTHER, wanted(2, 1))
    refusals.note(gang, [refused(ONE), refused(OTHER, "its webhook says no")], PODS, WAIT_S, 0.0)
    assert refusals.held(gang, PODS, 0.5) == (gang[2:], [refused(ONE)])
    refusals.note(gang, [refused(wanted(2, 1))], PODS, WAIT_S, 1.0)
    assert refusals.held(gang, PODS, 1.5) == (gang, []), "who follows is counted by its worker (GangHold)"


def test_what_nobody_wants_any_more_is_forgotten():
    refusals = Refusals()
    refusals.note((ONE,), [refused(ONE)], PODS, WAIT_S, 0.0)
    refusals.note((), [], PODS, WAIT_S, FIRST_S + MOST_S)
    assert refusals.held((ONE,), PODS, 0.5)[0] == ()
    refusals.note((), [], PODS, WAIT_S, FIRST_S + MOST_S + 1)
    assert refusals.held((ONE,), PODS, 0.5)[0] == (ONE,)


def test_the_same_problems_are_told_in_one_order():
    other = Problem("Unavailable", "Service f: no answer")
    assert Refusals.in_order([refused(OTHER), other, refused(ONE)], (ONE, OTHER)) == [other, refused(ONE), refused(OTHER)]
