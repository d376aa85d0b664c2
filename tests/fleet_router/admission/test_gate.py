"""Slots, classes and bounds of the queue; every request runs or is told why not, and holds its slot exactly once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fleet_router.admission.bound import LEAST
from fleet_router.admission.gate import QUEUE_BYTES, STARVED, Gate, Ticket
from fleet_router.admission.refused import Full
from fleet_router.config import SloClass
from tests.fleet_router.admission.made import CLASSES, lane_of

HIGH, LOW = CLASSES
MIDDLE = SloClass(name="default", ttft_budget_s=60.0)
ALL = (HIGH, MIDDLE, LOW)


def gate_of(slots: int, per_slot: int = 4) -> Gate:
    gate = Gate()
    gate.follow(slots, per_slot, ALL)
    return gate


def come(gate: Gate, tenant: str = "a", slo_class: SloClass = MIDDLE, *, now: float = 0.0, weight: float = 1.0, size: int = 10):
    """(ticket, what the gate said: True it runs). Nobody keeps accounts here: tenants hold nothing."""
    ticket = Ticket(lane_of(tenant, slo_class, weight), 1, 0.0)
    if gate.start():
        return ticket, True
    ticket.waits(1, size, now, slo_class.ttft_budget_s)
    return ticket, gate.queue(ticket, now)


def test_nobody_waits_while_slots_are_free_and_everybody_when_none_is():
    gate = gate_of(2)
    told = [come(gate) for _ in range(5)]
    assert [ticket.state for ticket, _ in told] == ["running", "running", "waiting", "waiting", "waiting"]
    assert gate.next() is None
    assert gate.leave(told[0][0])
    assert gate.next() is told[2][0]
    assert gate.next() is None
    assert not gate.leave(told[0][0])  # once


def test_without_slots_to_count_nobody_waits():
    gate = gate_of(0)
    assert all(come(gate)[1] is True for _ in range(100))


def test_requests_on_workers_that_leave_hold_no_slot():
    gate = gate_of(2)
    come(gate)
    come(gate)
    waiting, _ = come(gate)
    gate.strays = 1
    assert gate.next() is waiting
    gate.strays = 2
    assert come(gate)[1] is True
    assert come(gate)[1] == []


def test_a_newcomer_does_not_pass_who_waits():
    gate = gate_of(1)
    running, _ = come(gate)
    waiting, _ = come(gate)
    gate.leave(running)
    assert come(gate)[0].state == "waiting"
    assert gate.next() is waiting


def test_a_full_queue_of_one_tenant_is_overloaded():
    gate = gate_of(2)
    told = [come(gate)[1] for _ in range(2 + 8 + 1)]
    assert told[-1] == Full("overloaded", 1)
    assert gate.waiting == 8


def test_who_holds_most_of_the_queue_gives_way():
    gate = gate_of(2)
    flood = [come(gate, "flood", now=float(i)) for i in range(2 + 8)]
    light, pushed = come(gate, "light")
    assert light.state == "waiting"
    assert pushed == [flood[-1][0]]
    assert pushed[0].state == "done"
    assert come(gate, "flood")[1] == Full("queue_share", 1)
    shares = [come(gate, "light")[1] for _ in range(5)]
    assert [isinstance(one, Full) for one in shares] == [False, False, False, True, True]  # half of eight each
    assert gate.waiting == 8


def test_shares_of_a_full_queue_go_by_weight():
    gate = gate_of(2)
    for _ in range(2 + 8):
        come(gate, "flood")
    got = [come(gate, "heavy", weight=3.0)[1] for _ in range(8)]
    assert [isinstance(one, Full) for one in got].count(False) == 6


def test_the_lower_class_gives_way_when_the_whole_queue_is_full():
    gate = gate_of(2)
    low = [come(gate, slo_class=LOW)[0] for _ in range(2 + 8)]
    high, pushed = come(gate, "b", HIGH)
    assert (high.state, pushed) == ("waiting", [low[-1]])
    assert isinstance(come(gate, "c", LOW)[1], Full | list)


def test_the_bound_is_littles_law_of_the_class():
    gate = gate_of(100)
    starts = [come(gate)[0] for _ in range(100)]
    for second in range(0, 100):
        gate.sample(second / 10)
        gate.leave(starts[second])
        starts.append(come(gate)[0])  # 10 a second
    now = 9.9
    assert gate.bound(HIGH, now) in (LEAST, LEAST + 1)
    assert gate.bound(SloClass(name="x", ttft_budget_s=4.0), now) in range(32, 40)
    assert gate.bound(LOW, now) == 400
    most = gate.bound(HIGH, now)
    told = [come(gate, slo_class=HIGH, now=now)[1] for _ in range(most + 2)]
    assert [isinstance(one, Full) for one in told] == [False] * most + [True] * 2
    assert come(gate, slo_class=LOW, now=now)[1] == []  # the high ones count for it, and there is room


def test_bodies_that_wait_are_bounded():
    gate = gate_of(1, 1000)
    come(gate)
    assert come(gate, size=QUEUE_BYTES)[1] == []
    assert isinstance(come(gate, size=1)[1], Full)
    assert come(gate, "other", HIGH, size=1)[1] != Full("overloaded", 1)


def test_classes_by_priority_with_a_guard_against_starvation():
    gate = gate_of(1, 1000)
    come(gate)
    for _ in range(60):
        come(gate, slo_class=HIGH)
    low = [come(gate, slo_class=LOW)[0] for _ in range(3)]
    order = []
    for _ in range(40):
        gate.running -= 1
        order.append(gate.next())
    places = [order.index(ticket) for ticket in low]
    assert places == [STARVED, 2 * STARVED + 1, 3 * STARVED + 2]


def test_who_waited_too_long_leaves_the_queue():
    gate = gate_of(1)
    come(gate)
    early, later = come(gate, slo_class=HIGH, now=0.0)[0], come(gate, slo_class=HIGH, now=0.5)[0]
    assert gate.late(0.8) == []
    assert gate.late(0.85) == [early]
    gate.running -= 1
    assert gate.next() is later
    assert (gate.waiting, gate.waiting_bytes) == (0, 0)


def test_a_class_that_is_gone_is_served_to_its_end():
    gate = gate_of(1)
    come(gate)
    old, _ = come(gate, slo_class=HIGH)
    gate.follow(1, 4, (MIDDLE,))
    new, _ = come(gate)
    gate.running -= 1
    assert gate.next() is old
    gate.running -= 1
    assert gate.next() is new
    gate.follow(1, 4, (MIDDLE,))
    assert set(gate.lengths()) == {"default"}


def test_bytes_stay_within_their_bound_whoever_gives_way():
    """Found by the machine below: a newcomer took the place of a smaller request, and its bytes as well."""
    gate = gate_of(3)
    for size in (0, 0, 0, 0, 0):
        come(gate, slo_class=HIGH, size=size)
    low, _ = come(gate, slo_class=LOW, size=0)
    come(gate, slo_class=HIGH, size=QUEUE_BYTES)
    assert gate.waiting_bytes == QUEUE_BYTES
    _, told = come(gate, slo_class=HIGH, size=1)
    assert isinstance(told, Full)
    assert (gate.waiting_bytes, low.state) == (QUEUE_BYTES, "waiting")


def test_the_last_free_place_and_the_last_free_byte_are_given():
    gate = gate_of(2, per_slot=1)
    come(gate)
    come(gate)
    (_, one), (last, two) = (come(gate, slo_class=LOW) for _ in range(2))
    assert (one, two) == ([], [])
    assert come(gate, "b", LOW)[1] == [last]
    assert come(gate, "b", LOW)[1] == Full("queue_share", 1)  # half of two each is what it may have
    gate = gate_of(1, per_slot=100)
    come(gate)
    come(gate, slo_class=LOW, size=QUEUE_BYTES - 7)
    assert come(gate, "b", LOW, size=7)[1] == []
    assert gate.waiting_bytes == QUEUE_BYTES
    low = gate.late(1e9)
    assert ([one.size for one in low], gate.waiting_bytes, gate.waiting) == ([QUEUE_BYTES - 7, 7], 0, 0)


def test_who_would_hold_as_much_as_the_largest_takes_nobodys_place():
    gate = gate_of(1, per_slot=3)
    come(gate)
    for tenant in "aab":
        come(gate, tenant)
    assert come(gate, "b")[1] == Full("queue_share", 1)


def test_a_tenant_whose_requests_have_left_takes_no_share():
    gate = gate_of(1, per_slot=2)
    come(gate)
    come(gate, "a")
    gate.leave(come(gate, "b")[0])
    come(gate, "a")
    assert come(gate, "a")[1] == Full("overloaded", 1)


def test_who_begins_later_counts_in_the_rate_as_well():
    gate = gate_of(1)
    first, _ = come(gate)
    come(gate)
    gate.leave(first)
    gate.next()
    assert gate.starts == 2


def test_of_two_lower_classes_the_lowest_gives_way_and_of_it_who_holds_most():
    gate = gate_of(2, per_slot=2)
    come(gate)
    come(gate)
    middle = come(gate, "m", MIDDLE)[0]
    low = [come(gate, tenant, LOW)[0] for tenant in "aba"]
    assert come(gate, "h", HIGH)[1] == [low[2]]
    assert come(gate, "h", HIGH)[1] in ([low[0]], [low[1]])
    assert come(gate, "h", HIGH)[1] in ([low[0]], [low[1]])
    assert come(gate, "h", HIGH)[1] == [middle]
    assert come(gate, "h", HIGH)[1] == Full("overloaded", 1)  # nobody is below it
    assert gate.lengths() == {"interactive": 4, "default": 0, "batch": 0}


def test_requests_of_a_class_are_not_turned_away_for_those_below_it():
    gate = gate_of(10, per_slot=4)
    for _ in range(10):
        come(gate)
    for second in range(6):
        gate.sample(float(second))
    assert [come(gate, slo_class=LOW)[1] for _ in range(LEAST)] == [[]] * LEAST
    assert [come(gate, slo_class=HIGH, now=5.0)[1] for _ in range(LEAST)] == [[]] * LEAST
    assert come(gate, slo_class=HIGH, now=5.0)[1] == Full("overloaded", 60)  # none of them has begun for five seconds


class Machine(RuleBasedStateMachine):
    """Requests come, wait, start, leave, expire; slots come and go."""

    @initialize(slots=st.integers(1, 4), per_slot=st.integers(1, 4))
    def begin(self, slots: int, per_slot: int) -> None:
        self.gate, self.now = gate_of(slots, per_slot), 0.0
        self.waiting: list[Ticket] = []
        self.running: list[Ticket] = []
        self.came = self.ended = 0

    @rule(tenant=st.sampled_from("abc"), slo_class=st.sampled_from(ALL), size=st.integers(0, 10**8))
    def request(self, tenant: str, slo_class: SloClass, size: int) -> None:
        ticket, told = come(self.gate, tenant, slo_class, now=self.now, size=size)
        self.came += 1
        if told is True:
            assert not self.waiting
            self.running.append(ticket)
        elif isinstance(told, Full):
            assert ticket.state == "done"
            assert 1 <= told.retry_after_s <= 60
            self.ended += 1
        else:
            assert not any(other is ticket for other in told)
            self.waiting.append(ticket)
            self.gone(told)

    def gone(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            assert ticket.state == "done"
            self.waiting.remove(ticket)
            self.ended += 1

    @rule(at=st.integers(0, 1000), waits=st.booleans())
    def leave(self, at: int, waits: bool) -> None:
        among = self.waiting if waits else self.running
        if among:
            ticket = among.pop(at % len(among))
            assert self.gate.leave(ticket)
            assert not self.gate.leave(ticket)
            self.ended += 1

    @rule()
    def start(self) -> None:
        passed_over = dict(self.gate._passed_over)
        while (ticket := self.gate.next()) is not None:
            highest = max(one.lane.slo_class.priority for one in self.waiting)
            mine = ticket.lane.slo_class
            assert mine.priority == highest or passed_over[mine.name] >= STARVED
            passed_over = dict(self.gate._passed_over)
            self.waiting.remove(ticket)
            self.running.append(ticket)

    @rule(seconds=st.floats(0, 30))
    def later(self, seconds: float) -> None:
        self.now += seconds
        self.gate.sample(self.now)
        late = self.gate.late(self.now)
        assert all(ticket.deadline <= self.now for ticket in late)
        self.gone(late)
        assert all(ticket.deadline > self.now for ticket in self.waiting)

    @rule(slots=st.integers(1, 6))
    def resize(self, slots: int) -> None:
        self.gate.follow(slots, self.gate.per_slot, ALL)

    @invariant()
    def counted(self) -> None:
        if not hasattr(self, "gate"):
            return
        gate = self.gate
        assert (gate.running, gate.waiting) == (len(self.running), len(self.waiting))
        assert gate.waiting_bytes == sum(ticket.size for ticket in self.waiting) <= QUEUE_BYTES
        assert gate.waiting == sum(gate.lengths().values())
        assert self.came == self.ended + len(self.running) + len(self.waiting)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.sampled_from([HIGH, MIDDLE, LOW]), min_size=1, max_size=80), st.randoms())
@settings(deadline=None)
def test_no_class_starves(classes: list[SloClass], rng):
    """Higher classes never run dry, and yet every request that waits starts within a bounded number of starts."""
    gate = gate_of(1, 100_000)
    come(gate)
    waiting = {id(come(gate, slo_class=one)[0]): one for one in classes}
    for starts in range(1, (len(classes) + 1) * 3 * (STARVED + 3)):
        if not waiting:
            return
        come(gate, slo_class=rng.choice([HIGH, MIDDLE]))
        gate.running -= 1
        ticket = gate.next()
        assert ticket is not None
        waiting.pop(id(ticket), None)
        del starts
    raise AssertionError(f"{len(waiting)} starved")
