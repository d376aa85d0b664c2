"""The desk under anything that may come: requests of tenants and classes, ends of every kind, reloads of tenants and classes,
slots that come and go, time that stands, jumps or goes back. Nothing leaks, no slot stays empty while somebody waits, nobody is
answered twice, and of a tenant's requests in a class the one with the earliest deadline begins."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fleet_router.admission.fair import COMPACT_LEAST
from fleet_router.admission.gate import STARVED, Ticket
from fleet_router.admission.quota import Account, Outcome
from fleet_router.config import RouterConfig, SloClass
from fleet_router.errors import RequestError
from tests.fleet_router.admission.made import CONFIG, Clock, ask_of, desk_with, key_of, parsed

NAMES = ("a", "b", "c")
CLASSES = ("default", "gold", "iron")
WEIGHTS = st.sampled_from([0.01, 1.0, 2.5, 1000.0])
OUTCOMES: list[Outcome] = ["answered", "refused", "left", "failed"]


def config_of(priorities: dict[str, int], per_slot: int) -> RouterConfig:
    classes = tuple(SloClass(name=name, priority=priority, ttft_budget_s=10.0) for name, priority in priorities.items())
    return msgspec.structs.replace(CONFIG, classes=classes, queue_per_slot=per_slot)


class Flow:
    """Told exactly once that it begins, or why not."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.told = machine, list[int]()
        self.ticket: Ticket

    def begin(self) -> None:
        self.told.append(200)
        self.machine.running.append(self)

    def admitted(self) -> None:
        waits = [one.ticket for one in self.machine.waiting if one is not self]
        mine = self.ticket
        rivals = [t for t in waits if t.waiting and t.tenant == mine.tenant and t.lane.slo_class.name == mine.lane.slo_class.name]
        assert all(mine.deadline <= rival.deadline for rival in rivals)
        self.machine.waiting.remove(self)
        self.begin()

    def cut(self, error: RequestError) -> None:
        assert (error.status, error.reason) in {(529, "overloaded"), (503, "queue_timeout")}
        assert 1 <= int(error.headers.split("retry-after: ")[1].split()[0]) <= 60
        self.told.append(error.status)
        self.machine.waiting.remove(self)


class Machine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 4), per_slot=st.integers(1, 4))
    def begin(self, slots: int, per_slot: int) -> None:
        self.clock, self.slots, self.per_slot = Clock(), slots, per_slot
        self.running, self.waiting = list[Flow](), list[Flow]()
        self.flows, self.accounts, self.refused = list[Flow](), list[Account](), list[int]()
        self.desk = desk_with(self.clock, slots, config_of({"gold": 5}, per_slot), a={"classes": ["gold"]})
        self.reload_tenants({name: 1.0 for name in NAMES}, 50, 100_000)

    def known(self) -> None:
        self.accounts += [one for one in self.desk.accounts.values() if one not in self.accounts]

    @rule(tenant=st.sampled_from(NAMES), slo_class=st.sampled_from(CLASSES), ttft_ms=st.sampled_from([0, 1, 500, 999_999]),
          size=st.sampled_from([1, 300]))  # fmt: skip
    def come(self, tenant: str, slo_class: str, ttft_ms: int, size: int) -> None:
        flow, desk = Flow(self), self.desk
        try:
            lane = desk.lane(key_of(tenant).encode(), slo_class.encode())
            _, flow.ticket = desk.admit(lane, ask_of(prompt="x" * size), ttft_ms)
        except RequestError as refused:
            self.refused.append(refused.status)
            return
        self.flows.append(flow)
        if flow.ticket.waiting:
            self.waiting.append(flow)
        desk.start(flow.ticket, flow)

    @rule(at=st.integers(0, 99), waits=st.booleans(), outcome=st.sampled_from(OUTCOMES), used=st.integers(0, 9000))
    def end(self, at: int, waits: bool, outcome: Outcome, used: int) -> None:
        among = self.waiting if waits else self.running
        if among:
            flow = among.pop(at % len(among))
            for _ in range(2):
                self.desk.leave(flow.ticket, "failed" if waits else outcome, (used, used))

    @rule(seconds=st.sampled_from([0.0, 0.01, 1.0, 9.0, 600.0, -5.0]))
    def passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.desk.tick()
        assert all(flow.ticket.deadline > self.clock.now for flow in self.waiting)

    @rule(weights=st.dictionaries(st.sampled_from(NAMES), WEIGHTS), rps=st.sampled_from([None, 1, 50]),
          tokens=st.sampled_from([None, 600, 100_000]))  # fmt: skip
    def reload_tenants(self, weights: dict[str, float], rps: int | None, tokens: int | None) -> None:
        limits: dict[str, Any] = {
            "requestsPerSecond": rps,
            "tokensPerMinute": tokens,
            "concurrency": 30,
            "classes": list(CLASSES),
        }
        self.desk.know(parsed(**{name: {"weight": weight, **limits} for name, weight in weights.items()}))
        self.known()

    @rule(priorities=st.dictionaries(st.sampled_from(CLASSES), st.integers(-2, 2)), slots=st.integers(0, 5))
    def reload(self, priorities: dict[str, int], slots: int) -> None:
        self.slots = slots
        self.desk.follow(config_of(priorities, self.per_slot), {"t": slots} if slots else {}, [])

    @precondition(lambda self: self.waiting)
    @rule()
    def drains(self) -> None:
        """Ends alone: everybody begins, and whoever is of the highest class within a bounded number of starts."""
        queues = self.desk.gate._queues
        priority = {one: queues[one.ticket.lane.slo_class.name][0].priority for one in self.waiting}
        first = [one for one in self.waiting if priority[one] == max(priority.values())]
        for _ in range(len(self.running) + (STARVED + 2) * (len(self.waiting) + 1)):
            if not (set(map(id, first)) & set(map(id, self.waiting))):
                return
            assert self.running
            self.desk.leave(self.running.pop(0).ticket, "answered", (1, 1))
        raise AssertionError("the highest class starves")

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "desk"):
            return
        gate, desk = self.desk.gate, self.desk
        assert desk.faults.count == 0
        assert set(self.refused) <= {400, 401, 403, 429, 529}
        assert (gate.running, gate.waiting, len(desk._flows)) == (len(self.running), len(self.waiting), len(self.waiting))
        assert gate.waiting == sum(gate.lengths().values())
        assert gate.waiting_bytes == sum(flow.ticket.size for flow in self.waiting)
        assert not (self.waiting and gate.free())  # work conserving
        assert all(flow.ticket.state == "waiting" for flow in self.waiting)
        for account in self.accounts:
            mine = [flow for flow in (*self.running, *self.waiting) if flow.ticket.lane.account is account]
            assert (account.inflight, account.waiting) == (len(mine), sum(flow.ticket.waiting for flow in mine))
            assert account.input_tokens >= 0
        for _, queue in gate._queues.values():
            assert len(queue._order) <= COMPACT_LEAST + 2 * (len(queue.backlogs) + 1)
        assert all(len(flow.told) <= 1 for flow in self.flows)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
