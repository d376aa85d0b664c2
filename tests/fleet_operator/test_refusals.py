"""When a worker that a quota refuses is asked for again. A time line per test."""

from __future__ import annotations

from fleet_operator.cluster.interface import POD, ForbiddenError
from fleet_operator.refusals import FIRST_S, MOST_S, Refusals
from fleet_planner.types import Problem
from fleet_planner.wanted import PodWanted
from tests.fleet_operator.test_gangs import TIER, pods
from tests.fleet_operator.world import NAMESPACE, World, play

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


def test_a_pool_waits_when_a_later_pod_of_its_worker_is_refused():
    """Its first pod was made and deleted in every pass, and each time it had another name: no name of a worker says it."""
    refusals, times = Refusals(), list[int]()
    for now in range(70):
        worker = (wanted(now), wanted(now, 1))
        asked, told = refusals.held((*worker, PodWanted("p-0", "p", "t", "prefill", "r", 0)), PODS, float(now))
        assert [one.name for one in asked][-1] == "p-0", "others do not wait"
        assert len(told) == (len(asked) == 1)
        refusals.note(
            asked, [refused(worker[1], "denied by policy")] if worker[1] in asked else [], {*PODS, str(now)}, WAIT_S, now
        )
        times += [now] if worker[0] in asked else []
    assert times == [0, 1, 2, 4, 8, 16, 32, 62]
    whole = (wanted(92), wanted(92, 1))
    refusals.note(whole, [], PODS, WAIT_S, 92.0)
    assert refusals.held(whole, PODS, 92.5) == (whole, [])


def test_of_a_pool_that_a_quota_cuts_short_the_planner_takes_care():
    refusals, worker = Refusals(), (wanted(1), wanted(1, 1))
    refusals.note(worker, [refused(worker[1])], PODS, WAIT_S, 0.0)
    assert refusals.held(worker, PODS, 0.5) == (worker, [])


def test_a_pool_whose_first_pod_is_refused_keeps_what_is_known_of_it():
    refusals, worker = Refusals(), (wanted(1), wanted(1, 1))
    refusals.note(worker, [refused(worker[1], "denied by policy")], PODS, WAIT_S, 0.0)
    refusals.note(worker, [refused(worker[0], "no answer")], PODS, WAIT_S, 0.5)
    assert refusals.held(worker, PODS, 0.6)[0] == ()


def test_a_leader_whose_followers_are_refused_is_not_made_in_every_pass():
    """A policy that denies them: each pass made a leader of another name and deleted it, and each write began the next pass."""

    async def scenario(world: World) -> None:
        for pod in await pods(world):
            await world.user.delete(POD, NAMESPACE, pod["metadata"]["name"], grace_s=0)
        refused, followers = ForbiddenError("denied by a policy"), "f-t-decode-REVISION-ORDINAL-MEMBER".count("-")
        world.api.refuse = lambda verb, kind, name: refused if (verb, name.count("-")) == ("create", followers) else None
        written = []
        for _ in range(60):
            world.now += 1
            written += await world.step()
        assert 3 < sum(write[:2] == ("create", "Pod") for write in written) < 12
        assert "denied by a policy" in (await world.condition("Provisioned"))["message"]
        assert len(await pods(world)) <= 1

    play(scenario, tiers=[TIER])
