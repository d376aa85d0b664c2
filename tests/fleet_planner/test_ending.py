"""A fleet that was deleted and is kept by our finalizer: what runs is never cut before its wait is over, and it always ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest

from fleet_api.conditions import rfc3339
from fleet_api.parse import parse_fleet
from fleet_api.v1alpha1 import InferenceFleet
from fleet_planner.ending import SETTLE_S, Ending, EndingMemory
from fleet_planner.events import Pass, events_of
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.types import Demand, Observed, ObservedPod, Problem, Template, TierTelemetry
from fleet_planner.wanted import Target
from tests.fleet_planner.test_reconcile import pod

DELETED = 10_000.0
P, D0, D1 = "f-t-prefill-aaaaaaaa-0", "f-t-decode-aaaaaaaa-0", "f-t-decode-aaaaaaaa-1"


def fleet(wait: str = "30m", **spec: Any) -> InferenceFleet:
    return parse_fleet(
        {
            "apiVersion": "inferencefleet.io/v1alpha1",
            "kind": "InferenceFleet",
            "metadata": {"name": "f", "namespace": "n", "generation": 2},
            "spec": {
                "model": {"source": "file:///m"}, "tiers": [{"name": "t", "accelerator": {"type": "cpu"}}],
                "deletion": {"wait": wait}, **spec,
            },
        }
    )  # fmt: skip


def worker(name: str, **more: Any) -> ObservedPod:
    return pod(name, "prefill" if "prefill" in name else "decode", int(name[-1]), **more)


def seen(*pods: ObservedPod, idle: dict[str, float] | None = None, busy: dict[str, float] | None = None, **more: Any) -> Observed:
    idle = idle or {}
    telemetry = {"t": TierTelemetry(idle=idle, busy={**dict.fromkeys(idle, 0.0), **(busy or {})})}
    templates = {"t": Template("aaaaaaaa", "c", **more.pop("template", {}))}
    return Observed(pods=pods, telemetry=telemetry, templates=templates, stored={"t": {"aaaaaaaa": templates["t"]}}, **more)


ALL = frozenset(f"uid-{name}" for name in (P, D0, D1))
LONG_TOLD = EndingMemory(DELETED, DELETED, DELETED)


def end(
    observed: Observed, now: float, memory: EndingMemory = LONG_TOLD, named: frozenset[str] | None = ALL, **spec: Any
) -> Plan:
    return reconcile(fleet(**spec), observed, now, Ending(DELETED, 1800.0, named, memory))


def gone(plan: Plan) -> list[str]:
    """Prefill first."""
    return sorted((one.name for one in plan.delete), key=lambda name: ("decode" in name, name))


PLAIN = fleet()
THREE = tuple(worker(name) for name in (P, D0, D1))
LATER = DELETED + 100


def test_routers_are_told_before_anybody_goes():
    serving = tuple(replace(one, serving=True, told=True) for one in THREE)
    plan = end(seen(*serving, idle=dict.fromkeys((P, D0, D1), DELETED + 1)), DELETED + 1, EndingMemory())
    assert gone(plan) == []
    assert {target.state for target in plan.targets} == {"draining"}
    assert len(plan.targets) == 3
    assert (plan.create, plan.pools, plan.pools_gone, plan.fetch, plan.forget, plan.zero) == ((), (), (), (), (), ())
    assert plan.ended is not None
    assert not plan.ended.release
    assert plan.ended.memory.told_at is None


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        pytest.param(seen(*THREE, busy={P: 0, D0: 1, D1: 2}), [], id="lease-or-request-open-everywhere"),
        pytest.param(seen(*THREE, idle={P: LATER}, busy={D0: 1, D1: 1}), [P], id="prefill-is-idle"),
        pytest.param(seen(*THREE, idle={P: LATER, D1: LATER}, busy={D0: 1}), [P, D1], id="a-decode-worker-is-idle"),
        pytest.param(seen(*THREE, idle={P: DELETED + SETTLE_S - 1}), [], id="idle-before-routers-had-heard"),
        pytest.param(seen(*THREE), [], id="nobody-can-be-read"),
        pytest.param(seen(worker(D0, ready=False), idle={D0: LATER}), [D0], id="not-ready-and-idle"),
        pytest.param(seen(worker(D0, ready=False), busy={D0: 1}), [], id="not-ready-and-busy"),
        pytest.param(seen(worker(D0, ready=False)), [], id="not-ready-unread-and-routers-know-it"),
        pytest.param(seen(worker("f-t-decode-aaaaaaaa-9", ready=False)), ["f-t-decode-aaaaaaaa-9"], id="never-told"),
        pytest.param(seen(worker(D0, ready=False, ip=None, node=None, phase="Pending")), [D0], id="never-ran"),
        pytest.param(seen(worker(D0, ready=False, phase="Failed")), [D0], id="ended"),
        pytest.param(seen(worker(D0, tier="old"), busy={D0: 1}), [], id="of-a-tier-that-left-the-spec"),
    ],
)
def test_who_may_go(observed: Observed, expected: list[str]):
    plan = end(observed, LATER)
    assert gone(plan) == expected
    assert plan.ended is not None
    assert not plan.ended.release


def test_decode_stays_while_prefill_has_something_to_hand_over():
    busy = seen(*THREE, idle=dict.fromkeys((D0, D1), LATER), busy={P: 1})
    plan = end(busy, LATER, EndingMemory(DELETED, DELETED, None))
    assert gone(plan) == []
    idle = seen(*THREE, idle=dict.fromkeys((P, D0, D1), LATER))
    plan = end(idle, LATER, EndingMemory(DELETED, DELETED, None))
    assert gone(plan) == [P]  # what it handed over may be on its way
    assert plan.ended is not None
    idle = seen(*THREE[1:], idle=dict.fromkeys((D0, D1), LATER + SETTLE_S))
    assert gone(end(idle, LATER + SETTLE_S, plan.ended.memory)) == [D0, D1]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(worker(P, terminating=True, ready=False, drain_s=60.0), id="going-since-before-the-deletion"),
        pytest.param(worker(P, flipping="decode"), id="on-its-way-to-the-other-role"),
        pytest.param(worker(P, flipping="prefill"), id="told-its-own-role-again"),
    ],
)
def test_decode_stays_while_a_prefill_worker_that_does_not_count_any_more_has_something_to_hand_over(
    first: ObservedPod,
):
    """A rollout, a scale-down, a drained node or a role flip was under way."""
    busy = {P: 1.0} if not first.terminating else {}
    memory = EndingMemory(DELETED, DELETED)
    for at in (LATER, LATER + 10, LATER + 59):
        plan = end(seen(first, *THREE[1:], idle=dict.fromkeys((D0, D1), at), busy=busy), at, memory)
        assert gone(plan) == [], at
        assert plan.ended is not None
        memory = plan.ended.memory
    left = () if first.terminating else (first,)
    for at in (LATER + 61, LATER + 61 + SETTLE_S):
        names = (D0, D1, *(pod.name for pod in left))
        plan = end(seen(*left, *THREE[1:], idle=dict.fromkeys(names, at)), at, memory)
        assert plan.ended is not None
        memory, left = plan.ended.memory, ()
    assert gone(plan) == [D0, D1]


def test_a_prefill_worker_that_never_goes_holds_decode_for_its_drain_time_only():
    """Its node is lost."""
    lost, memory = worker(P, terminating=True, ready=False, drain_s=60.0), EndingMemory(DELETED, DELETED)
    gone_at: list[float] = []
    for at in range(100):
        now = LATER + at
        plan = end(seen(lost, *THREE[1:], idle=dict.fromkeys((D0, D1), now)), now, memory)
        assert plan.ended is not None
        memory = plan.ended.memory
        gone_at += [at] if gone(plan) else []
    assert gone_at[0] == 60 + SETTLE_S


@pytest.mark.parametrize(
    ("prefilling", "held_s"), [(0.0, 2 * SETTLE_S), (1.0, 60 + SETTLE_S), (None, 60 + SETTLE_S)], ids=["none", "one", "unknown"]
)
def test_a_prefill_worker_that_never_goes_holds_nobody_once_no_router_waits_for_it(prefilling: float | None, held_s: float):
    """It lies on a lost node: nothing of it can be read, and it is gone only when somebody mends the node."""
    lost, memory, now = worker(P, terminating=True, ready=False, drain_s=60.0), EndingMemory(DELETED), LATER
    while not (plan := end(asked((lost, *THREE[1:]), prefilling, now), now, memory)).delete:
        assert plan.ended is not None
        memory, now = plan.ended.memory, now + 1
        assert now < LATER + 100
    assert gone(plan) == [D0, D1]
    assert now - LATER == held_s


def asked(pods: tuple[ObservedPod, ...], prefilling: float | None, now: float) -> Observed:
    """Idle decode workers, and routers that wait for so many answers of prefill workers."""
    observed = seen(*pods, idle=dict.fromkeys((D0, D1), now))
    demand = Demand(0, None, now, prefilling)
    return replace(observed, telemetry={"t": replace(observed.telemetry["t"], demand=demand)})


def test_an_idle_prefill_worker_that_takes_long_to_go_holds_nobody():
    memory = EndingMemory(DELETED, DELETED)
    plan = end(seen(*THREE, idle=dict.fromkeys((P, D0, D1), LATER)), LATER, memory)
    assert gone(plan) == [P]
    assert plan.ended is not None
    going = (replace(THREE[0], terminating=True, ready=False), *THREE[1:])
    later = LATER + SETTLE_S
    assert gone(end(seen(*going, idle=dict.fromkeys((D0, D1), later)), later, plan.ended.memory)) == [D0, D1]


def test_a_decode_worker_on_its_way_to_prefill_is_still_one_of_decode():
    """What is in prefill now may have been given to it before it was told."""
    moving = worker(D0, flipping="prefill")
    busy = seen(THREE[0], moving, THREE[2], idle=dict.fromkeys((D0, D1), LATER), busy={P: 1})
    assert gone(end(busy, LATER, EndingMemory(DELETED, DELETED))) == []
    running = seen(THREE[0], moving, THREE[2], idle=dict.fromkeys((P, D1), LATER), busy={D0: 1})
    assert gone(end(running, LATER)) == [P, D1]


def test_a_worker_over_two_nodes_ends_whole():
    def pair(**more: Any) -> tuple[ObservedPod, ...]:
        return worker(D0), pod(f"{D0}-1", "decode", 0, member=1, group=f"uid-{D0}", **more)

    two = {"template": {"nodes": (1, 2)}}
    plan = end(seen(*pair(), busy={D0: 1}, **two), LATER)
    assert (gone(plan), [target.name for target in plan.targets]) == ([], [D0])
    assert gone(end(seen(*pair(), idle={D0: LATER}, **two), LATER)) == [D0, f"{D0}-1"]
    half = end(seen(*pair(terminating=True), busy={D0: 1}, **two), LATER)
    assert gone(half) == [D0]  # one that lost a pod has lost all
    assert half.ended is not None
    assert not half.ended.release, "a pod of it stays, that this pass may fail to delete"


@pytest.mark.parametrize("named", [frozenset(), None], ids=["an-empty-document", "no-document"])
def test_without_a_document_ready_workers_are_told_first(named: frozenset[str] | None):
    plan = end(seen(*THREE), LATER, EndingMemory(), named=named)
    assert gone(plan) == []
    assert len(plan.targets) == 3
    lost = end(seen(worker(D0, ready=False)), LATER, named=None)  # nobody knows whether it was told of
    assert gone(lost) == []


def test_when_the_wait_is_over_the_rest_goes_at_once():
    plan = end(seen(*THREE, busy={P: 1}), DELETED + 1800)
    assert gone(plan) == [P, D0, D1]
    assert plan.ended is not None
    assert (plan.ended.release, plan.ended.late) == (True, True)
    assert not end(seen(*THREE, busy={P: 1}), DELETED + 1799).delete


def test_it_may_go_when_nobody_stays():
    for pods in ((), (worker(D0, terminating=True, ready=False),)):
        plan = end(seen(*pods), LATER)
        assert plan.ended is not None
        assert (plan.ended.release, plan.ended.late, plan.delete) == (True, False, ())


def test_the_status_says_who_drains_and_until_when():
    before = end(seen(*THREE), LATER).status
    ready = before.condition("Ready")
    assert ready is not None
    until = rfc3339(DELETED + 1800)
    assert (ready.status, ready.reason) == ("False", "Deleting")
    assert ready.message == f"deleted; 1 prefill and 2 decode workers drain, until {until} at the latest"
    problem = Problem("Forbidden", "ConfigMap f-router: forbidden")
    told = end(seen(*THREE, problems=(problem,)), LATER).status.condition("Ready")
    assert told is not None
    assert told.message.endswith("; ConfigMap f-router: forbidden")


def test_what_it_wanted_it_wants_no_more():
    """A rollout, nodes: nobody is to look after these."""
    f = fleet()
    start = reconcile(f, seen(*THREE), DELETED - 9).status
    wanted = {"RollingOut": "Progressing", "CapacityLimited": "Unschedulable"}
    busy = tuple(
        one.model_copy(update={"status": "True", "reason": wanted[one.type]}) if one.type in wanted else one
        for one in start.conditions
    )
    before = start.model_copy(update={"conditions": busy})
    told = f.model_copy(update={"status": before})
    for at, reason in ((LATER, "Deleting"), (DELETED + 1800, "DeletionLate")):
        after = reconcile(told, seen(*THREE, busy={P: 1}), at, Ending(DELETED, 1800.0, ALL)).status
        found = [after.condition(kind) for kind in ("RollingOut", "CapacityLimited")]
        assert [(one.status, one.reason, one.message) for one in found if one] == [("False", reason, "the fleet is deleted")] * 2
        assert [event.reason for event in events_of(before, after, Pass("f"))] == [reason]
        rest = {one.type: one.status for one in after.conditions if one.type not in (*wanted, "Ready", "Available")}
        assert rest == {one.type: one.status for one in before.conditions if one.type in rest}, "of these nobody knows better"
        assert "True" in rest.values()


def test_one_event_when_it_begins_and_a_warning_when_something_is_cut():
    f = fleet()
    start = reconcile(f, seen(*THREE), DELETED - 9).status
    drains = f.model_copy(update={"status": start})
    first = reconcile(drains, seen(*THREE), LATER, Ending(DELETED, 1800.0, ALL)).status
    again = f.model_copy(update={"status": first})
    second = reconcile(again, seen(*THREE[1:]), LATER + 9, Ending(DELETED, 1800.0, ALL)).status
    late = reconcile(again, seen(*THREE[1:]), DELETED + 1800, Ending(DELETED, 1800.0, ALL)).status
    told = [events_of(one, other, Pass("f")) for one, other in ((start, first), (first, second), (second, late))]
    assert [[(event.type, event.reason) for event in found] for found in told] == [
        [("Normal", "Deleting")], [], [("Warning", "DeletionLate")],
    ]  # fmt: skip
    assert "0 prefill and 2 decode workers were not idle" in told[2][0].note
    well = tuple(condition.model_copy(update={"status": "True"}) for condition in start.conditions)
    served = start.model_copy(update={"conditions": well})  # Ready says the same as Available, and is not told beside it
    assert [event.reason for event in events_of(served, first, Pass("f"))].count("Deleting") == 1


@pytest.mark.parametrize("set_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_neither_cuts_nor_prolongs(set_s: float):
    at = DELETED + 100
    first = end(seen(*THREE, busy={P: 1}), at, EndingMemory())
    assert first.ended is not None
    moved = replace(seen(*THREE, busy={P: 1}), clock=first.clock, clock_set_s=set_s)
    second = end(moved, at + set_s + 1, first.ended.memory)
    assert second.ended is not None
    assert (second.delete, second.ended.left_s) == ((), pytest.approx(1699.0))
    # an operator whose clock had been set before the fleet was deleted
    ahead = replace(seen(*THREE, busy={P: 1}), clock=second.clock)
    third = end(ahead, at + set_s + 1, EndingMemory())
    assert third.ended is not None
    assert not third.delete
    assert third.ended.left_s == pytest.approx(1699.0) or set_s < 0
    # nothing was left to hand over since: as long ago as before
    alone = replace(seen(worker(D0), busy={D0: 1}), clock=first.clock, clock_set_s=set_s)
    fourth = end(alone, at + set_s + 1, EndingMemory(DELETED, DELETED, at))
    assert fourth.ended is not None
    assert fourth.ended.memory.prefilled_at == at + set_s


# -- every small ending ---------------------------------------------------------------------------------------------------
@dataclass
class Request:
    """Prefilled for so many seconds, on its way for one, then decoded for so many; 0: that part is not there."""

    prefill_s: int
    decode_s: int
    decoder: str
    way_s: int = 1

    def holds(self) -> str | None:
        """The worker that knows of it."""
        return P if self.prefill_s else None if self.way_s else self.decoder if self.decode_s else None

    def second(self) -> None:
        for part in ("prefill_s", "way_s", "decode_s"):
            if left := getattr(self, part):
                setattr(self, part, left - 1)
                return

    @property
    def runs(self) -> bool:
        return bool(self.prefill_s or self.decode_s)


GOES = ("goes", "lost")


@dataclass
class World:
    """One ending, a second per step: pods that are deleted are gone after one, readings are every `every_s`."""

    requests: list[Request]
    every_s: int
    wait_s: float
    forgets_at: int
    blind_to: str = ""
    first: str = ""
    """What the prefill worker did when the fleet was deleted: `goes` (nobody reads it any more), `lost` (nor is it ever gone), or
    `flips`."""
    now: float = DELETED
    pods: tuple[ObservedPod, ...] = tuple(replace(one, serving=True, told=True) for one in THREE)
    named: frozenset[str] = ALL
    memory: EndingMemory = field(default_factory=EndingMemory)
    telemetry: TierTelemetry = field(default_factory=TierTelemetry)
    cut: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        prefill, *others = self.pods
        if self.first in GOES:
            self.pods = (replace(prefill, terminating=True, ready=False, serving=False, told=False), *others)
        elif self.first == "flips":
            self.pods = (replace(prefill, flipping="decode", serving=False, told=False), *others)

    def read(self) -> None:
        """As the telemetry does, of pods that can be read."""
        there = [one.name for one in self.pods if not one.terminating and one.name != self.blind_to]
        held = [request.holds() for request in self.requests]
        busy = {name: float(held.count(name)) for name in there}
        demand = Demand(0, None, self.now, float(sum(request.prefill_s > 0 for request in self.requests)))
        self.telemetry = TierTelemetry(busy=busy, idle={name: self.now for name, load in busy.items() if not load}, demand=demand)

    def step(self, number: int) -> bool:
        """Whether the finalizer may go."""
        if number == self.forgets_at:
            self.memory, self.telemetry = EndingMemory(), TierTelemetry()
        if number % self.every_s == 0:
            self.read()
        observed = replace(seen(*self.pods), telemetry={"t": self.telemetry})
        ending = Ending(DELETED, self.wait_s, self.named, self.memory)
        plan = reconcile(PLAIN, observed, self.now, ending)
        assert plan.ended is not None
        assert plan.create == plan.pools == ()
        self.memory = plan.ended.memory
        self.carry_out(plan, late=plan.ended.late)
        if plan.ended.release:
            return True
        for request in self.requests:
            request.second()
        self.now += 1
        return False

    def carry_out(self, plan: Plan, *, late: bool) -> None:
        names = {one.name for one in plan.delete}
        for request in self.requests:
            needs = {request.holds(), request.decoder} - {None} if request.runs else set()
            if needs & names and not late:
                self.cut.append(f"{needs & names} at {self.now - DELETED:g} s")
        self.pods = tuple(
            replace(one, terminating=True, ready=False) if one.name in names else replace(one, serving=False, told=False)
            for one in self.pods
            if not one.terminating or self.first == "lost" or (self.first == "goes" and any(r.prefill_s for r in self.requests))
        )
        self.named = frozenset(target.uid for target in plan.targets)


def every_ending() -> Iterator[World]:
    lengths = (0, 2, 7)
    for (prefill, decode, other), every_s, wait_s, forgets_at in product(
        product(lengths, repeat=3), (1, 4), (4.0, 40.0), (-1, 0, 2, 5, 9)
    ):
        requests = [Request(prefill, decode, D0), Request(0, other, D1, way_s=0)]
        for blind_to, first in (("", ""), (P, ""), (D0, ""), ("", "goes"), ("", "lost"), ("", "flips")):
            if not first or forgets_at in (-1, 2):
                yield World([replace(one) for one in requests], every_s, wait_s, forgets_at, blind_to, first)


def test_every_small_ending():
    for world in every_ending():
        ended = next((number for number in range(int(world.wait_s) + 2) if world.step(number)), None)
        assert world.cut == [], world
        assert ended is not None, world
        assert ended <= world.wait_s, world
        if world.wait_s == 40.0 and not world.blind_to:
            assert ended < 35, world  # by itself, not because its time was over


def test_planning_twice_changes_nothing():
    for busy in ({P: 1.0}, {D0: 1.0}, {}):
        observed = seen(*THREE, busy=busy)
        first = end(observed, LATER)
        assert first.ended is not None
        second = end(observed, LATER, first.ended.memory)
        assert (first.delete, first.targets, first.status) == (second.delete, second.targets, second.status)


def test_without_an_ending_the_field_changes_no_plan():
    observed = seen(*THREE)
    plain = fleet().model_copy(update={"spec": fleet().spec.model_copy(update={"deletion": None})})
    mine, other = reconcile(fleet(), observed, LATER), reconcile(plain, observed, LATER)
    assert replace(mine, status=other.status) == other
    assert mine.ended is None


def test_targets_are_in_order_of_names():
    plan = end(seen(*THREE), LATER)
    assert [target.name for target in plan.targets] == sorted(target.name for target in plan.targets)
    assert all(isinstance(target, Target) for target in plan.targets)
