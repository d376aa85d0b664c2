"""Which pairs are to meet, and when: the plan alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.health.breaker import PAIR_FAILURES_MOST
from fleet_router.policy.candidate import Candidate
from fleet_router.policy.group import Group
from fleet_router.policy.prewarm import LOOKED_MOST, PAUSE_S, Pair, Plan, owner, partners

MOST = 2


def group_of(prefill: int, decode: int, kind: str = "c", before: Group | None = None) -> Group:
    """The same workers as `before` has, and more."""
    made = before or Group(("t", kind))
    known = {worker.uid: worker for worker in (*made.prefill.members, *made.decode.members)}
    names = [(f"p{i}{kind}", "prefill") for i in range(prefill)] + [(f"d{i}{kind}", "decode") for i in range(decode)]
    workers = [known.get(name) or Candidate(name, role, ("t", kind), 0) for name, role in names]
    made.update([(worker, 1 << i) for i, worker in enumerate(workers)])
    return made


def never(_: Pair) -> bool:
    return False


def always(_: Pair) -> bool:
    return True


@pytest.mark.parametrize(
    ("prefill", "decode", "most", "pairs"),
    [
        pytest.param(0, 3, 4, 0, id="nobody to meet"),
        pytest.param(1, 1, 4, 1, id="one pair, found from both sides"),
        pytest.param(2, 3, 4, 6, id="all of a small fleet"),
        pytest.param(1, 9, 1, 9, id="each decode worker picks the only prefill worker"),
        pytest.param(3, 3, 0, 0, id="off"),
    ],
)
def test_how_many_pairs_wait(prefill: int, decode: int, most: int, pairs: int):
    plan = Plan()
    plan.follow([group_of(prefill, decode)], most)
    assert len(plan.left) == pairs
    assert all(pair[0][0] == "p" and pair[1][0] == "d" for pair in plan.left)


@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 6))
def test_a_worker_that_joins_gets_its_partners_and_nobody_else_anything(prefill: int, decode: int, most: int):
    plan = Plan()
    group = group_of(prefill, decode)
    plan.follow([group], most)
    plan.left.clear()
    plan.follow([group_of(prefill, decode + 1, before=group)], most)
    assert [pair[0] for pair in plan.left] == partners(group.prefill, f"d{decode}c", most)
    assert {pair[1] for pair in plan.left} == {f"d{decode}c"}
    assert len(plan.left) == min(most, prefill)


def test_pairs_stay_inside_their_group_and_leave_with_their_workers():
    plan = Plan()
    first, second = group_of(2, 2, "c"), group_of(2, 2, "e")
    plan.follow([first, second], 9)
    assert {(pair[0][-1], pair[1][-1]) for pair in plan.left} == {("c", "c"), ("e", "e")}
    plan.follow([group_of(1, 2, before=first), second], 9)
    assert not any("p1c" in pair for pair in plan.left)
    assert len(plan.left) == 6


def test_an_old_uid_at_another_place_is_another_worker():
    plan, group = Plan(), group_of(1, 1)
    plan.follow([group], 9)
    plan.left.clear()
    plan.follow([group], 9)
    assert not plan.left
    plan.follow([group_of(1, 1)], 9)  # made anew
    assert list(plan.left) == [("p0c", "d0c")]


@given(st.integers(1, 4))
def test_of_several_processes_each_pair_is_one_ones(processes: int):
    plans = [Plan(member, processes) for member in range(processes)]
    for plan in plans:
        plan.follow([group_of(4, 6)], 9)
    found = Counter(pair for plan in plans for pair in plan.left)
    assert len(found) == 24
    assert set(found.values()) == {1}
    assert all(pair in plans[owner(pair, processes)].left for pair in found)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 5), st.data())
def test_all_pairs_are_tried_within_bounds_and_none_after(prefill: int, decode: int, parallel: int, data: st.DataObject):
    """Whatever becomes of each try: never more than `parallel`, no worker in two of them, at most so many tries as put a pair
    out, and in the end none is left."""
    plan, now = Plan(), 0.0
    plan.follow([group_of(prefill, decode)], 99)
    tries, over = Counter[Pair](), set[Pair]()
    while plan.left:
        now += PAUSE_S
        found = plan.due(now, parallel, never, always)
        tries.update(found)
        assert not over & set(found)
        assert len(plan.running) <= parallel
        busy = [uid for pair in plan.running for uid in pair]
        assert len(busy) == len(set(busy))
        for pair in list(plan.running):
            moved = data.draw(st.sampled_from([True, False, None]))
            plan.ended(pair, now, moved=moved)
            if moved is not False:
                over.add(pair)
    assert set(tries) == {(f"p{i}c", f"d{j}c") for i in range(prefill) for j in range(decode)}
    assert max(tries.values()) <= PAIR_FAILURES_MOST
    assert all(tries[pair] == PAIR_FAILURES_MOST for pair in set(tries) - over)


def test_a_pair_that_a_request_made_meet_is_done_one_that_may_not_be_used_waits_and_one_that_failed_pauses():
    plan = Plan()
    plan.follow([group_of(1, 3)], 9)
    met, out = ("p0c", "d0c"), ("p0c", "d1c")
    [tried] = plan.due(1.0, 3, lambda pair: pair == met, lambda pair: pair != out)
    assert tried == ("p0c", "d2c")
    assert set(plan.left) == {out, tried}
    plan.ended(tried, 1.0, moved=False)
    assert plan.due(1.0 + PAUSE_S / 2, 3, never, lambda pair: pair != out) == []
    assert plan.due(1.0 + PAUSE_S, 3, never, lambda pair: pair != out) == [tried]


def test_a_worker_that_changed_its_role_or_its_group_is_in_no_pair_of_before():
    """A prefill worker that decodes now would be asked to give KV to another one that decodes; and no KV moves between groups."""
    plan, group = Plan(), group_of(2, 2)
    plan.follow([group], 9)
    flipped = Candidate("p0c", "decode", ("t", "c"), 0)
    members = [worker for worker in (*group.prefill.members, *group.decode.members) if worker.uid != "p0c"]
    group.update([(worker, 1 << i) for i, worker in enumerate([*members, flipped])])
    plan.follow([group], 9)
    assert set(plan.left) == {("p1c", "d0c"), ("p1c", "d1c"), ("p1c", "p0c")}
    other = Group(("t", "e"))
    for worker in (flipped, members[0]):
        worker.group = other.key
    other.update([(flipped, 1), (members[0], 2)])
    group.update([(worker, 4 << i) for i, worker in enumerate(members[1:])])
    plan.follow([group, other], 9)
    assert set(plan.left) == {("p1c", "p0c")}


def test_switched_on_again_all_that_have_not_met_are_to():
    plan, group = Plan(), group_of(2, 2)
    for most, left in ((9, 4), (0, 0), (9, 4)):
        plan.follow([group], most)
        assert len(plan.left) == left


def test_of_thousands_that_wait_no_more_are_looked_at_than_may_begin():
    plan, looked = Plan(), list[Pair]()
    plan.follow([group_of(40, 40)], 64)
    assert len(plan.left) == 1_600

    def usable(pair: Pair) -> bool:
        looked.append(pair)
        return True

    def met(pair: Pair) -> bool:
        looked.append(pair)
        return False

    assert len(plan.due(1.0, 2, met, usable)) == 2
    looked.clear()
    assert plan.due(1.0, 2, met, usable) == []
    assert looked == []


def test_of_thousands_that_may_not_be_used_some_are_looked_at_and_the_rest_next_time():
    plan, looked = Plan(), list[Pair]()
    plan.follow([group_of(40, 40)], 64)
    last = list(plan.left)[-1]

    def usable(pair: Pair) -> bool:
        looked.append(pair)
        return pair == last

    calls = 0
    while not plan.due(1.0, 2, never, usable):
        calls += 1
        assert len(looked) == calls * LOOKED_MOST
    assert calls == 1_600 // LOOKED_MOST
    assert len(plan.left) == 1_600
