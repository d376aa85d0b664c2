"""The fair queue of a class: earliest deadline first within a tenant, shares by weight between tenants, nobody forgotten."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fleet_router.admission.fair import COMPACT_LEAST, FairQueue, last_of


@dataclass(eq=False)
class Tenant:
    running: int = 0


@dataclass(eq=False)
class One:
    tenant: str
    deadline: float = 0.0
    cost: float = 1.0
    weight: float = 1.0
    waiting: bool = True
    holder: Tenant = field(default_factory=Tenant)


def drained(queue: FairQueue[One]) -> list[One]:
    out = []
    while (one := queue.pop()) is not None:
        one.waiting = False
        out.append(one)
    return out


@given(st.lists(st.floats(0, 100), max_size=40))
def test_one_tenant_is_served_by_deadline_then_by_arrival(deadlines: list[float]):
    queue, made = FairQueue[One](), [One("a", deadline) for deadline in deadlines]
    for one in made:
        queue.push(one)
    assert drained(queue) == sorted(made, key=lambda one: one.deadline)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), min_size=1, max_size=120),
    st.integers(1, 8),
    st.integers(1, 8),
)
def test_while_two_tenants_wait_neither_gets_ahead_of_its_share(asks: list[tuple[str, int]], wa: int, wb: int):
    """At any moment at which both still wait, what they were served differs by at most one request of each, by weight."""
    weights, queue, served = {"a": wa, "b": wb, "c": 3}, FairQueue[One](), {"a": 0.0, "b": 0.0, "c": 0.0}
    left = dict.fromkeys(weights, 0)
    for tenant, cost in asks:
        left[tenant] += 1
        queue.push(One(tenant, cost=cost / weights[tenant], weight=weights[tenant]))
    most = {t: max([c / weights[t] for x, c in asks if x == t], default=0) for t in weights}
    while (one := queue.pop()) is not None:
        one.waiting = False
        served[one.tenant] += one.cost
        left[one.tenant] -= 1
        for x, y in itertools.combinations([t for t in weights if left[t]], 2):
            assert abs(served[x] - served[y]) <= most[x] + most[y] + 1e-9


@pytest.mark.parametrize("known", [False, True], ids=["it comes for the first time", "it was here before"])
def test_a_tenant_that_comes_back_neither_pays_nor_has_saved_up(known: bool):
    queue = FairQueue[One]()
    if known:
        queue.push(One("light"))
    for _ in range(100):
        queue.push(One("flood"))
    for _ in range(50):
        queue.pop()
    assert ("light" in queue.backlogs) == known
    for _ in range(10):
        queue.push(One("light"))
    order = [one.tenant for _ in range(20) if (one := queue.pop()) is not None]
    assert order.count("light") in (9, 10)
    assert order[:10].count("light") in (4, 5, 6), "by turns from the first on"


@given(st.lists(st.sampled_from("ab"), min_size=30, max_size=80), st.integers(1, 4), st.integers(1, 12))
def test_slots_are_held_by_weight_however_long_requests_are(ends: list[str], weight: int, slots: int):
    """Two tenants with a backlog; requests of either end in any order: at every start the tenant that is served holds fewest."""
    queue, weights = FairQueue[One](), {"a": weight, "b": 1}
    holders = {"a": Tenant(), "b": Tenant()}
    for _ in range(100):
        for tenant in "ab":
            queue.push(One(tenant, weight=weights[tenant], holder=holders[tenant]))

    def start() -> None:
        least = min(holders[tenant].running / weights[tenant] for tenant in "ab")
        one = queue.pop()
        assert one is not None
        assert one.holder.running / weights[one.tenant] == least
        one.holder.running += 1
        queue.changed(one.tenant)

    for _ in range(slots):
        start()
    for tenant in ends:
        if holders[tenant].running:
            holders[tenant].running -= 1
            queue.changed(tenant)
            start()


def test_places_that_are_no_longer_true_are_not_kept():
    queue, holder = FairQueue[One](), Tenant()
    for _ in range(1000):
        queue.push(One("a", holder=holder))
        holder.running += 1
        queue.changed("a")
        assert queue.pop() is not None
        queue.changed("a")
    assert (len(queue._order), len(queue.backlogs)) == (0, 0)


def test_places_that_are_no_longer_true_are_not_kept_while_somebody_always_waits():
    """Each request of a queue that is never empty left one: its tenant held one slot more for a moment. Hours of overload were as
    many entries as there had been requests."""
    queue, holder = FairQueue[One](), Tenant(running=10)
    queue.push(One("a", holder=holder))
    for _ in range(10_000):
        queue.push(One("a", holder=holder))
        holder.running -= 1
        queue.changed("a")
        assert queue.pop() is not None
        holder.running += 1
        queue.changed("a")
    assert len(queue._order) <= 2 * COMPACT_LEAST
    assert queue.live == 1


def test_a_tenant_that_went_and_came_back_stands_where_it_stands_now():
    """A file without it, and one with it again, while its requests waited: it kept the place of the slots that it held before."""
    queue, before, now, other = FairQueue[One](), Tenant(running=9), Tenant(), Tenant(running=5)
    queue.push(first := One("back", deadline=1.0, holder=before))
    queue.push(One("other", holder=other))
    queue.push(One("back", deadline=2.0, holder=now))
    queue.changed("back")
    assert queue.pop() is first


class Queue(RuleBasedStateMachine):
    """Push, pop and leave in any order against a list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue[One]()
        self.waiting: list[One] = []

    @rule(tenant=st.sampled_from("abcd"), deadline=st.integers(0, 9), cost=st.integers(1, 5))
    def push(self, tenant: str, deadline: float, cost: float) -> None:
        one = One(tenant, deadline, cost)
        self.queue.push(one)
        self.waiting.append(one)

    @rule()
    def pop(self) -> None:
        one = self.queue.pop()
        if one is None:
            assert not self.waiting
            return
        one.waiting = False
        assert one.deadline == min(other.deadline for other in self.waiting if other.tenant == one.tenant)
        self.waiting.remove(one)

    @rule(at=st.integers(0, 1000))
    def leave(self, at: int) -> None:
        if self.waiting:
            one = self.waiting.pop(at % len(self.waiting))
            one.waiting = False
            self.queue.left(one)

    @rule(now=st.integers(0, 9))
    def late(self, now: float) -> None:
        assert set(map(id, self.queue.late(now))) == {id(one) for one in self.waiting if one.deadline <= now}

    @invariant()
    def counted(self) -> None:
        assert self.queue.live == len(self.waiting)
        fullest = self.queue.fullest()
        assert (fullest is None) == (not self.waiting)
        if fullest is not None:
            mine = [one for one in self.waiting if one.tenant == last_of(fullest).tenant]
            assert len(mine) == fullest.live == max(sum(o.tenant == t for o in self.waiting) for t in "abcd")
            assert last_of(fullest).deadline == max(one.deadline for one in mine)


TestQueue = Queue.TestCase


def test_what_leaves_is_not_kept():
    queue = FairQueue[One]()
    queue.push(One("a"))
    for _ in range(10_000):
        one = One("a")
        queue.push(one)
        one.waiting = False
        queue.left(one)
    assert len(queue.backlogs["a"].heap) < 40


def test_tenants_that_have_left_are_forgotten_while_another_one_waits():
    queue = FairQueue[One]()
    queue.push(One("waits", holder=Tenant(running=99)))
    for n in range(200):
        first, second = One(f"t{n}"), One(f"t{n}")
        queue.push(first)
        queue.push(second)
        assert [queue.pop(), queue.pop()] == [first, second]
        first.waiting = second.waiting = False
    assert len(queue.backlogs) <= COMPACT_LEAST + 2
    assert queue.backlogs["waits"].live == 1


def test_what_left_early_is_kept_no_longer_than_a_few():
    queue = FairQueue[One]()
    queue.push(One("a"))
    for n in range(200):
        queue.push(one := One("a", deadline=1.0 + n))
        one.waiting = False
        queue.left(one)
    assert len(queue.backlogs["a"].heap) <= COMPACT_LEAST + 2
    assert [one.deadline for one in drained(queue)] == [0.0]


def test_who_had_more_than_its_share_is_not_forgotten_with_the_others():
    queue = FairQueue[One]()
    queue.push(One("waits", holder=Tenant(running=99)))
    for one in (One("greedy", cost=100.0), *(One(f"t{n}") for n in range(2 * COMPACT_LEAST))):
        queue.push(one)
        assert queue.pop() is one
        one.waiting = False
    for tenant in ("greedy", "new"):
        queue.push(One(tenant))
    assert [one.tenant for one in drained(queue)] == ["new", "greedy", "waits"]
