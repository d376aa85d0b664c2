"""The operator's clock is set while something is under way: every plan is the one that would have been without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet_api.conditions import rfc3339
from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import FleetStatus, FlipStatus, RolloutStatus, TierStatus
from fleet_planner.clock import FUTURE_S, steady
from fleet_planner.flip import RETRY_S
from fleet_planner.gang import SPREAD
from fleet_planner.memory import ClockMemory, ScaleMemory
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.types import Observed, ObservedPod, ObservedPool, RoleLoad, RouterPod, RouterView, Template, TierTelemetry
from tests.fleet_planner import test_flip, test_prefetch
from tests.fleet_planner.test_reconcile import fleet, pod

NOW = 1_000_000.0
HOUR_S = 3_600.0
OLD, NEW = "aaaaaaaa", "bbbbbbbb"
CANARY = {"canary": {"steps": [10, 50], "interval": "1m"}, "progressDeadline": "10m"}
Case = tuple[InferenceFleet, Observed]


def of(status: TierStatus | None = None, tier: dict[str, Any] | None = None, **spec: Any) -> InferenceFleet:
    found = fleet(**(tier or {}))
    spec = {**found.spec.to_dict(), "scaling": {"mode": "manual"}, **spec}
    tiers = (status,) if status is not None else ()
    return found.model_copy(update={"spec": found.spec.model_validate(spec), "status": FleetStatus(tiers=tiers)})


def workers(prefill: int, decode: int, revision: str = OLD, **more: Any) -> tuple[ObservedPod, ...]:
    names = [("prefill", n) for n in range(prefill)] + [("decode", n) for n in range(decode)]
    base = {"created_at": NOW - 500, "ready_since": NOW - 400, "scheduled_at": NOW - 500, "serving": True, "busy": 3.0}
    return tuple(pod(f"f-t-{role}-{revision}-{n}", role, n, revision=revision, **{**base, **more}) for role, n in names)


def pools(prefill: int, decode: int, revision: str = OLD) -> tuple[ObservedPool, ...]:
    return tuple(
        ObservedPool(f"f-t-{role}-{revision}", role, role, "t", revision, size, size, size)
        for role, size in (("prefill", prefill), ("decode", decode))
    )


def seen(pods: Sequence[ObservedPod], size: tuple[int, int], wanted: str = OLD, **more: Any) -> Observed:
    templates = {revision: Template(revision, "c", gpus=(1, 1), number=n) for n, revision in enumerate((OLD, NEW))}
    return Observed(pods=tuple(pods), pools=pools(*size), templates={"t": templates[wanted]}, stored={"t": templates}, **more)


def rolling(**status: Any) -> TierStatus:
    return TierStatus(name="t", rollout=RolloutStatus(stable=OLD, target=NEW, **status))


def canary_comes_up() -> Case:
    coming = workers(1, 1, NEW, ready=False, ready_since=None, created_at=NOW - 30, scheduled_at=NOW - 30, serving=False)
    progress = "new 0+0 ready of 1+2, old 1+2"
    status = rolling(progress=progress, progress_since=rfc3339(NOW - 30))
    return of(status, rollout=CANARY), seen((*workers(1, 2), *coming), (1, 2), NEW)


def canary_serves() -> Case:
    status = rolling(progress="new 1+1 ready of 1+2, old 1+2", progress_since=rfc3339(NOW - 30), step_since=rfc3339(NOW - 30))
    return of(status, rollout=CANARY), seen((*workers(1, 2), *workers(1, 1, NEW)), (1, 2), NEW)


def growth_finds_no_node() -> Case:
    stuck = workers(2, 8, ready=False, ready_since=None, created_at=NOW - 30, scheduled_at=None, node=None, unschedulable=True)
    return of(), seen((*workers(1, 4), *(one for one in stuck if one.ordinal >= (1 if one.role == "prefill" else 4))), (2, 8))


def backed_out() -> Case:
    memory = ScaleMemory(cap=(1, 4), cap_until=NOW + 200, cap_reason="no node", placed=(1, 4))
    found = seen(workers(1, 4), (1, 4), memory={"t": memory})
    return of(), replace(found, pools=tuple(replace(pool, wish=2 if pool.role == "prefill" else 8) for pool in found.pools))


def let_in_by_a_queue() -> Case:
    wish, observed = growth_finds_no_node()
    stuck = {one.uid for one in observed.pods if one.unschedulable}
    late = tuple(replace(one, created_at=NOW - 9_000) if one.uid in stuck else one for one in observed.pods)
    return wish, replace(observed, pods=late, memory={"t": ScaleMemory(gated=tuple((uid, NOW - 30) for uid in sorted(stuck)))})


def a_role_flip() -> Case:
    moving = test_flip.on_the_way()
    pods = (replace(one, flip_since=NOW - 20) if one.flipping else one for one in moving.pods)
    return test_flip.wish(2, 2), replace(moving, pods=tuple(pods), pools=pools(2, 2))


def a_role_flip_that_failed() -> Case:
    failed = FlipStatus(failed_at=rfc3339(NOW - 20), message="f: why")
    wish = test_flip.wish(2, 2)
    status = FleetStatus(tiers=(TierStatus(name="t", flip=failed),))
    observed = replace(test_flip.seen(test_flip.workers(1, 3)), pools=pools(2, 2))
    return wish.model_copy(update={"status": status}), observed


def old_workers_never_came_up() -> Case:
    """The new ones find no node; what does not come up gives way in time."""
    unready = {"ready": False, "ready_since": None, "serving": False, "created_at": NOW - 30}
    old = workers(1, 2, **unready, unready_since=NOW - 20)
    new = workers(1, 2, NEW, **unready, scheduled_at=None, node=None, unschedulable=True, unready_since=NOW - 20)
    return of(rolling()), seen((*old, *new), (1, 2), NEW)


def half_of_a_gang() -> Case:
    template = Template(OLD, "c", gpus=(1, 2), nodes=(1, 2))
    leader = replace(workers(0, 1)[0], created_at=NOW - 60, scheduled_at=NOW - 60, ready=False, ready_since=None)
    follower = replace(
        leader, name=f"{leader.name}-1", uid="m", member=1, group=leader.uid, node=None, scheduled_at=None, unschedulable=True,
    )  # fmt: skip
    return of(), replace(seen((*workers(1, 0), leader, follower), (1, 1)), templates={"t": template}, stored={})


def a_gang_was_deleted() -> Case:
    wish, observed = half_of_a_gang()
    memory = ScaleMemory()
    return wish, replace(observed, memory={"t": replace(memory, gangs=replace(memory.gangs, settle_until=NOW + 14))})


def load_went_down() -> Case:
    wants = ((NOW - 700, 2, 8), (NOW - 20, 2, 8))
    return of(scaling={"scaleDownWindow": "10m"}), seen(workers(2, 8), (2, 8), memory={"t": ScaleMemory(wants)})


def nodes_fetch() -> Case:
    wish = test_prefetch.fleet()
    key = test_prefetch.KEY
    memory = {"t": ScaleMemory(lacking=(key, NOW - 20))}
    failed = replace(test_prefetch.fetching("n2", "Failed"), created_at=NOW - 20)
    observed = replace(test_prefetch.seen("n1", "n2", fetching=(failed,)), memory=memory)
    return wish, replace(observed, stored={}, pods=(), pools=())


def an_old_tier_makes_room() -> Case:
    late = workers(1, 2, node=None, ready=False, ready_since=None, scheduled_at=None, unschedulable=True, created_at=NOW - 30)
    left = tuple(replace(one, tier="s", name=f"s-{one.name}", uid=f"s-{one.uid}") for one in workers(1, 3))
    return of(), seen((*left, *late), (1, 2), memory={"t": ScaleMemory(room_at=NOW - 1)})


def a_first_start() -> Case:
    """Its workers were replaced before they were ready."""
    coming = workers(1, 2, ready=False, ready_since=None, created_at=NOW - 30, scheduled_at=NOW - 30, serving=False)
    return of(TierStatus(name="t", revision=OLD, starting_since=rfc3339(NOW - 500)), rollout=CANARY), seen(coming, (1, 2))


def a_router_is_not_started() -> Case:
    """Another one serves."""
    pods = RouterPod("r-0", NOW - 500, ready=True), RouterPod("r-1", NOW - 30, pending=True)
    serving = TierStatus(name="t", revision=OLD, rollout=RolloutStatus(stable=OLD))
    return of(serving, rollout=CANARY), seen(workers(1, 2), (1, 2), router=RouterView(2, 1, pods=pods))


CASES: dict[str, tuple[Callable[[], Case], float]] = {
    "a canary comes up": (canary_comes_up, 600.0),
    "a canary serves": (canary_serves, 600.0),
    "growth finds no node": (growth_finds_no_node, 300.0),
    "backed out": (backed_out, 300.0),
    "let in by a queue": (let_in_by_a_queue, 300.0),
    "a role flip": (a_role_flip, 62.0),
    "a role flip that failed": (a_role_flip_that_failed, RETRY_S),
    "old workers never came up": (old_workers_never_came_up, 300.0),
    "half of a gang": (half_of_a_gang, 300.0 * (1 + SPREAD)),
    "a gang was deleted": (a_gang_was_deleted, 300.0 * (1 + SPREAD)),
    "load went down": (load_went_down, 600.0),
    "nodes fetch": (nodes_fetch, 300.0),
    "an old tier makes room": (an_old_tier_makes_room, 14.0),
    "a first start": (a_first_start, 100.0),
    "a router is not started": (a_router_is_not_started, 600.0),
}
"""What is under way, and the longest that it may take."""


UNREMEMBERED = {"backed out", "let in by a queue", "a canary serves", "load went down", "an old tier makes room", "a first start"}
"""What an operator that starts does not know of, or what waits for more than time."""


def decided(plan: Plan) -> dict[str, Any]:
    """What is done, without the times in words."""
    return {
        "create": [one.name for one in plan.create], "delete": [one.name for one in plan.delete],
        "flips": [(one.name, one.role) for one in plan.flips], "fetch": [one.name for one in plan.fetch],
        "pools": [(one.name, one.replicas) for one in plan.pools], "targets": [(one.name, one.state) for one in plan.targets],
        "rollouts": [(tier.rollout.target, tier.rollout.failed, tier.rollout.step) for tier in plan.status.tiers if tier.rollout],
        "flip": [tier.flip is not None for tier in plan.status.tiers],
        "available": [one.reason for one in plan.status.conditions if one.type == "Available"],
    }  # fmt: skip


class Operator:
    """Passes over things that do not move."""

    def __init__(self, case: Case) -> None:
        self.fleet, self.observed, self.set_s = *case, 0.0

    def look(self, at: float, set_s: float = 0.0, *, written: bool = True) -> Plan:
        """A pass when it is `at`; just before, the clock was set by so much. `written`: the status arrives."""
        self.set_s += set_s
        now = at + self.set_s
        roles = [RoleLoad(inflight=2.0, measured_at=now) for _ in range(2)]
        loads = {"t": TierTelemetry(prefill=roles[0], decode=roles[1])}
        plan = reconcile(self.fleet, replace(self.observed, telemetry=loads, clock_set_s=set_s), now)
        self.observed = replace(self.observed, memory=plan.memory, rest=plan.rest, clock=plan.clock)
        if written:
            self.fleet = self.fleet.model_copy(update={"status": plan.status})
        return plan


@pytest.mark.parametrize("set_s", [HOUR_S, -HOUR_S])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("written", [True, False], ids=["written", "status-not-written"])
def test_what_is_under_way_goes_on_as_if_the_clock_had_always_been_so(name: str, set_s: float, written: bool):
    made, most_s = CASES[name]
    times = [NOW, NOW + 1, NOW + 2, NOW + 15, NOW + 45, NOW + most_s - 70, NOW + most_s - 15, NOW + most_s, NOW + most_s + 15]
    plain, moved = Operator(made()), Operator(made())
    for number, at in enumerate(sorted(times)):
        expected = plain.look(at, written=written)
        found = moved.look(at, set_s if number == 1 else 0.0, written=written)
        assert decided(found) == decided(expected), at - NOW


@pytest.mark.parametrize("name", CASES)
def test_each_of_these_ends_by_time_alone(name: str):
    """Else the rows above would compare nothing."""
    made, most_s = CASES[name]
    one = Operator(made())
    assert decided(one.look(NOW)) != decided(one.look(NOW + most_s + 15)) or name == "a canary serves"


@pytest.mark.parametrize("name", CASES)
def test_an_operator_that_starts_with_a_clock_that_was_set_back_waits_no_longer_than_ever(name: str):
    """Nobody told it: what is further in the future than clocks differ counts as now."""
    made, most_s = CASES[name]
    wish, observed = made()
    one = Operator((wish, replace(observed, memory={})))
    one.set_s = -HOUR_S
    plain = Operator((wish, replace(observed, memory={})))
    first, last = decided(one.look(NOW)), decided(one.look(NOW + most_s + FUTURE_S))
    assert first["delete"] == decided(plain.look(NOW))["delete"]
    if name not in UNREMEMBERED:
        assert last != first


def test_an_hour_that_did_pass_counts():
    """The deadline of a canary is as long as it says, also when no pass was made meanwhile."""
    one = Operator(canary_comes_up())
    one.look(NOW)
    status = one.look(NOW + HOUR_S).status.tiers[0].rollout
    assert status is not None
    assert status.failed == NEW


def test_a_worker_made_after_the_clock_was_set_forward_has_its_whole_time():
    """The API server's clock is an hour behind now: its new pods are not an hour old."""
    wish, observed = growth_finds_no_node()
    one = Operator((wish, replace(observed, pods=workers(1, 4), pools=pools(1, 4))))
    one.look(NOW, 0.0)
    one.look(NOW + 10, HOUR_S)
    made = [replace(p, created_at=NOW + 20) if p.unschedulable else p for p in observed.pods]
    one.observed = replace(one.observed, pods=tuple(made), pools=observed.pools)
    assert one.look(NOW + 30).delete == ()
    assert one.look(NOW + 310).delete == ()
    assert one.look(NOW + 321).delete


def test_a_clock_that_nobody_set_costs_nothing_and_leaves_nothing():
    wish, observed = canary_comes_up()
    fleet_, seen_, memory = steady(wish, observed, NOW)
    assert fleet_ is wish
    assert seen_ is observed
    assert memory == ClockMemory()


def test_what_is_gone_is_forgotten():
    one = Operator(canary_comes_up())
    one.look(NOW)
    one.look(NOW + 1, -HOUR_S)
    assert one.observed.clock.pods
    assert one.observed.clock.stamps
    one.observed = replace(one.observed, pods=())
    one.look(NOW + 2)
    assert one.observed.clock == ClockMemory(ahead_s=-HOUR_S)
