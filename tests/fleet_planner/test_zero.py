"""Scale to zero and back: when it begins and ends, what everybody sees of it, and that no role is ever without the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_api.conditions import rfc3339
from fleet_api.v1alpha1.status import FleetStatus, RolloutStatus, TierStatus, ZeroStatus
from fleet_planner.reconcile import reconcile
from fleet_planner.types import Demand, RouterView, Template
from fleet_planner.zero import rolls
from tests.fleet_planner.zero_world import IDLE_S, NEW, OLD, World, condition, counts, fleet


# -- to zero ----------------------------------------------------------------------------------------------------------
def test_an_idle_fleet_gives_up_both_roles_in_one_document():
    world = World()
    world.settle()
    plans = [world.step() for _ in range(int(IDLE_S) + 2)]
    told = [row["t"] for row in world.served[4:]]
    at = told.index((0, 0))
    assert at == int(IDLE_S) - 3  # idle since it served, in the second pass
    assert set(told[:at]) == {(1, 2)}
    assert {target.state for target in plans[at].targets} == {"draining"}
    assert {pool.role: (pool.replicas, pool.size) for pool in plans[-1].pools} == {"prefill": (0, 0), "decode": (0, 0)}
    assert world.observed.pods == ()
    assert plans[-1].create == plans[-1].delete == plans[-1].pools_gone == ()


def test_a_fleet_at_zero_says_so():
    plan = World().rest()
    assert condition(plan, "Ready") == condition(plan, "Available") == ("True", "AtZero")
    assert condition(plan, "WithinRatio") == ("True", "InRatio")
    assert condition(plan, "Provisioned") == ("True", "AllCreated")
    assert condition(plan, "TelemetryFresh") == ("True", "Fresh")
    assert plan.status.summary.prefill == plan.status.summary.decode == "0/0"
    assert plan.status.tiers[0].zero is not None
    assert plan.status.tiers[0].zero.state == "AtZero"
    assert [(zero.tier, zero.limited) for zero in plan.zero] == [("t", False)]


def test_without_a_router_a_fleet_at_zero_is_not_available():
    world = World()
    world.rest()
    world.observed = replace(world.observed, router=RouterView(1, 0))
    assert condition(world.step(), "Available") == ("False", "NoRouter")


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("it is not asked for", lambda w: setattr(w, "spec", fleet(toZero={"enabled": False}))),
        ("the scaling field is off by default", lambda w: setattr(w, "spec", fleet(toZero={}))),
        ("no telemetry", lambda w: setattr(w, "readable", False)),
        ("a router cannot be read", lambda w: setattr(w, "arrivals", None)),
        ("something runs", lambda w: setattr(w, "running", 1.0)),
        ("a prompt is computed", lambda w: setattr(w, "runs", (1.0, 0.0))),
        ("an answer is written", lambda w: setattr(w, "runs", (0.0, 1.0))),
        ("something is held", lambda w: setattr(w, "held", 1)),
        ("warm workers", lambda w: setattr(w, "spec", fleet([{"name": "t", "decode": {"minReplicas": 2, "warm": 1}}]))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_keeps_a_fleet(what: str, change: Any):
    world = World()
    world.settle()
    change(world)
    for _ in range(int(IDLE_S) * 3):
        world.step()
    assert world.workers() >= 3, what


def test_telemetry_that_stops_is_not_idleness():
    world = World()
    world.settle()
    world.now += IDLE_S * 5  # the last reading is old by now
    plan = reconcile(world.spec, world.observed, world.now)
    assert plan.delete == ()
    assert "holding" in plan.reasons[0]


def test_idleness_ends_with_the_last_reading():
    """A reading counts as fresh for three intervals, a minute here: nobody knows what came in that minute."""
    world = World(fleet(telemetry={"interval": "18s"}))
    world.settle()
    world.now += IDLE_S - 5
    world.read()
    world.now += 55
    assert reconcile(world.spec, world.observed, world.now).delete == ()
    assert world.step().delete != ()


def test_requests_between_two_readings_count():
    world = World()
    world.settle()
    for _ in range(int(IDLE_S) * 3):
        world.arrivals = (world.arrivals or 0) + 1
        world.step()
    assert world.workers() == 3
    for _ in range(int(IDLE_S) - 1):
        world.step()
    assert world.workers() == 3
    world.settle()
    assert world.workers() == 0


def test_an_operator_that_just_started_knows_of_no_idleness():
    world = World()
    world.settle()
    for _ in range(int(IDLE_S) - 5):
        world.step()
    world.restart()
    for _ in range(int(IDLE_S) - 2):
        world.step()
    assert world.workers() == 3


def test_a_fleet_at_zero_stays_there_over_a_restart_and_without_telemetry():
    world = World()
    world.rest()
    world.restart()
    world.readable = False
    for _ in range(100):
        assert world.step().create == ()
    world.readable = True
    for world.arrivals in (17.0, 3.0, 18.0):  # routers were replaced, or somebody left again: who waits is held
        for _ in range(50):
            assert world.step().create == ()


# -- and back ---------------------------------------------------------------------------------------------------------
def test_one_held_request_wakes_both_roles_to_the_minimum():
    world = World()
    world.rest()
    world.held = 1
    plan = world.step()
    assert sorted((wanted.role, wanted.ordinal) for wanted in plan.create) == [("decode", 0), ("decode", 1), ("prefill", 0)]
    assert next(wanted.role for wanted in plan.create) == "decode"
    assert "woken: 1 held by the router" in plan.reasons[0]
    assert condition(plan, "Available") == condition(plan, "Ready") == ("False", "Waking")
    assert plan.status.tiers[0].zero is not None
    assert plan.status.tiers[0].zero.state == "Waking"
    world.ready("prefill")
    assert counts(world.step(), "t") == (0, 0)  # decode first
    world.ready("decode")
    plan = world.step()
    assert counts(plan, "t") == (1, 2)
    assert condition(plan, "Ready") == ("True", "AllGood")
    world.held, plan = 0, world.step()
    assert plan.status.tiers[0].zero is None
    assert plan.zero == ()


def test_workers_over_several_nodes_come_and_go_as_a_whole():
    world = World(nodes=(1, 2))
    world.rest()
    world.held = 1
    world.step()
    assert world.workers() == 5
    world.ready()
    world.observed = replace(
        world.observed, pods=tuple(replace(pod, ready=False) if pod.member else pod for pod in world.observed.pods)
    )
    assert counts(world.step(), "t") == (0, 0)
    world.ready()
    assert counts(world.step(), "t") == (1, 2)


def test_what_was_heard_between_two_readings_wakes():
    world = World()
    world.rest()
    world.observed = replace(world.observed, heard=Demand(3, None, world.now + 0.5))
    world.now += 1
    assert len(reconcile(world.spec, world.observed, world.now).create) == 3
    assert reconcile(world.spec, world.observed, world.now + 60).create == ()  # that was long ago


def test_it_is_enough_that_one_tier_s_reading_tells_what_routers_hold():
    """Workers of the first tier could not be read, and so it says nothing of the routers."""
    world = World(fleet([{"name": "t"}, {"name": "u"}]))
    world.rest()
    world.held, world.now = 1, world.now + 1
    world.read()
    known = world.observed.telemetry
    world.observed = replace(world.observed, telemetry={**known, "t": replace(known["t"], demand=None)})
    assert {wanted.tier for wanted in reconcile(world.spec, world.observed, world.now).create} == {"t", "u"}


def test_a_fleet_whose_workers_serve_on_has_not_taken_its_time_at_zero_to_wake():
    """Somebody asked before they had gone: it stays idle as long as before until it rests again."""
    world = World()
    world.settle()
    long_ago = ZeroStatus(state="AtZero", since=rfc3339(world.now - 900))
    world.observed = replace(world.observed, rest=replace(world.observed.rest, zero={"t": long_ago}))
    world.held = 1
    plan = world.step()
    assert (plan.rest.woke_in_s, plan.status.tiers[0].zero, world.workers()) == (0.0, None, 3)


def test_waking_goes_on_over_a_restart_of_the_operator():
    world = World()
    world.rest()
    world.held = 1
    world.step()
    world.restart()
    world.readable = False
    plan = world.step()
    assert (plan.delete, [zero.tier for zero in plan.zero]) == ((), ["t"])
    assert condition(plan, "Available") == ("False", "Waking")
    world.ready()
    assert counts(world.step(), "t") == (1, 2)


def test_a_woken_fleet_stays_for_as_long_as_waking_took():
    world = World()
    world.rest()
    world.held = 1
    world.step()
    for _ in range(300):
        world.step()
    world.ready()
    world.step()
    world.held = 0
    for _ in range(290):
        world.step()
    assert world.workers() == 3
    for _ in range(20):
        world.step()
    assert world.workers() == 0


def test_a_user_wakes_a_fleet_with_scale():
    world = World()
    world.rest()
    pools = tuple(replace(p, replicas=2) if p.role == "decode" else p for p in world.observed.pools)
    world.observed = replace(world.observed, pools=pools)
    world.step()
    assert world.workers() == 3
    world.settle()
    assert world.workers() == 3


def test_a_fleet_wakes_when_the_field_is_taken_away():
    world = World()
    plan = world.rest()
    world.spec = fleet(status=plan.status, toZero={"enabled": False})
    plan = world.step()
    assert world.workers() == 3
    assert [zero.tier for zero in plan.zero] == ["t"]  # what is held until then is not refused
    world.settle()
    assert world.step().zero == ()


def test_a_wake_without_nodes_says_so_and_ends_when_nobody_waits_any_more():
    world = World()
    world.rest()
    world.held, world.fits = 2, False
    world.step()
    plan = world.step()
    assert condition(plan, "CapacityLimited") == ("True", "Unschedulable")
    assert [(zero.tier, zero.limited) for zero in plan.zero] == [("t", True)]
    for _ in range(700):  # longer than capacityWait
        plan = world.step()
    assert plan.delete == ()
    world.held = 0
    for _ in range(int(IDLE_S) + 1):
        plan = world.step()
    assert world.workers() == 0
    assert condition(plan, "CapacityLimited") == ("False", "Sufficient")
    world.held, world.fits = 1, True
    world.settle()
    assert counts(world.step(), "t") == (1, 2)


# -- several tiers ----------------------------------------------------------------------------------------------------
TWO = [{"name": "a"}, {"name": "b"}]


def test_tiers_rest_and_wake_together():
    world = World(fleet(TWO))
    world.rest()
    world.held = 1
    world.step()
    assert {pod.tier for pod in world.observed.pods} == {"a", "b"}
    world.ready(tier="a")
    plan = world.step()
    assert (counts(plan, "a"), counts(plan, "b")) == ((1, 2), (0, 0))


def test_a_warm_tier_stays_and_its_first_request_wakes_the_other():
    world = World(fleet([{"name": "a", "decode": {"minReplicas": 2, "warm": 1}}, {"name": "b"}]))
    world.settle()
    for _ in range(int(IDLE_S) + 2):
        plan = world.step()
    assert {pod.tier for pod in world.observed.pods} == {"a"}
    assert condition(plan, "Ready") == ("True", "AllGood")
    assert [zero.tier for zero in plan.zero] == ["b"]
    world.running = 1.0
    world.step()
    assert {pod.tier for pod in world.observed.pods} == {"a", "b"}


def test_a_tier_at_zero_has_no_share_of_the_budget_until_it_wakes():
    wide = {"name": "a", "decode": {"minReplicas": 2, "warm": 4}}
    world = World(fleet([wide, {"name": "b"}], budget={"gpus": 6}))
    world.observed = replace(world.observed, templates={tier: Template(OLD, "c", gpus=(1, 1)) for tier in ("a", "b")})
    world.settle()
    assert [(pool.tier, pool.size) for pool in world.step().pools] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)], "each its least"
    for _ in range(int(IDLE_S) + 6):
        plan = world.step()
        world.ready()
    assert {pod.tier for pod in world.observed.pods} == {"a"}
    assert counts(plan, "a") == (1, 4), "what b does not use"


# -- rollouts -----------------------------------------------------------------------------------------------------------
def to_revision(world: World, revision: str) -> None:
    world.observed = replace(world.observed, templates={tier: Template(revision, "c") for tier in world.observed.templates})


def test_a_revision_that_changes_at_zero_starts_nothing_and_wakes_as_the_new_one():
    world = World()
    world.rest()
    to_revision(world, NEW)
    for _ in range(5):
        plan = world.step()
        assert (plan.create, plan.delete) == ((), ())
    assert {pool.revision for pool in plan.pools} == {NEW}
    assert condition(plan, "RollingOut") == ("False", "Complete")
    assert plan.status.tiers[0].rollout is not None
    assert plan.status.tiers[0].rollout.stable == OLD  # nothing of the new one ever ran
    world.held = 1
    world.settle()
    assert (world.workers(NEW), world.workers(OLD)) == (3, 0)


def test_a_paused_fleet_rests_and_wakes_as_what_it_was():
    world = World(fleet(rollout={"paused": True}))
    world.rest()
    to_revision(world, NEW)
    world.step()
    world.held = 1
    world.settle()
    assert (world.workers(NEW), world.workers(OLD)) == (0, 3)


def test_what_was_rolled_back_is_that_tiers_own():
    """Two tiers have workers of the old revision; the new one failed in `a`, and `b` is about to get it."""
    world = World(fleet([{"name": "a"}, {"name": "b"}]))
    world.settle()
    to_revision(world, NEW)
    tiers = tuple(TierStatus(name=name, rollout=RolloutStatus(failed=failed)) for name, failed in (("a", NEW), ("b", "")))
    spec = world.spec.model_copy(update={"status": FleetStatus(tiers=tiers)})
    assert [rolls(spec, tier, world.observed) for tier in spec.spec.tiers] == [False, True]


def test_a_rollout_ends_before_its_fleet_rests():
    world = World()
    world.settle()
    world.now += IDLE_S - 3
    to_revision(world, NEW)
    for _ in range(int(IDLE_S)):
        world.step()  # nothing gets ready
    assert world.workers(OLD) == 3
    for _ in range(20):
        world.settle()
    assert world.workers() == 0


# -- the invariant --------------------------------------------------------------------------------------------------------
def assert_coupled(world: World) -> None:
    """At every state that routers were ever told: nothing, or both roles inside the ratio (1:4 to 1:1)."""
    for row in world.served:
        for tier, (prefill, decode) in row.items():
            assert (prefill, decode) == (0, 0) or (prefill <= decode <= 4 * prefill and prefill), (tier, prefill, decode)


@pytest.mark.parametrize("order", list(product(["prefill", "decode", "lose"], repeat=4)), ids="-".join)
def test_waking_in_every_order_of_readiness_and_loss(order: tuple[str, ...]):
    world = World()
    world.rest()
    world.held = 1
    world.step()
    for event in order:
        if event == "lose":
            world.observed = replace(world.observed, pods=world.observed.pods[1:])
        else:
            one = next((pod for pod in world.observed.pods if pod.role == event and not pod.ready), None)
            pods = tuple(replace(pod, ready=True, ready_since=world.now) if pod is one else pod for pod in world.observed.pods)
            world.observed = replace(world.observed, pods=pods)
        world.step()
    world.settle()
    assert world.served[-1]["t"] == (1, 2)
    # a loss while serving may strand what is left of a role for a moment; nobody is stranded by waking
    if "lose" not in order:
        assert_coupled(world)


def much_later(world: World) -> None:
    world.now += IDLE_S


def asked(world: World) -> None:
    world.held, world.arrivals = 2, (world.arrivals or 0.0) + 2


def other_revision(world: World) -> None:
    to_revision(world, NEW if world.observed.templates["t"].revision == OLD else OLD)


EVENTS: dict[str, Callable[[World], Any]] = {
    "wait": lambda world: None,
    "much later": much_later,
    "ask": asked,
    "answer": lambda world: setattr(world, "held", 0),
    "ready": World.ready,
    "prefill ready": lambda world: world.ready("prefill"),
    "decode ready": lambda world: world.ready("decode"),
    "blind": lambda world: setattr(world, "readable", False),
    "see": lambda world: setattr(world, "readable", True),
    "restart": World.restart,
    "template": other_revision,
    "full": lambda world: setattr(world, "fits", False),
    "room": lambda world: setattr(world, "fits", True),
}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=25))
def test_no_role_is_ever_there_without_the_other(events: list[str]):
    """Demand, blindness, restarts, revisions and full clusters in any order: coupled at every moment, never asleep while somebody
    waits or while nothing is known, and it always wakes in the end."""
    world = World()
    world.settle()
    for event in events:
        was_up, waited = world.workers() > 0, world.held
        EVENTS[event](world)
        plan = world.step()
        sizes = {plan.status.tiers[0].prefill.desired, plan.status.tiers[0].decode.desired}
        assert (0 in sizes) == (sizes == {0})
        if was_up and ((waited and world.held) or not world.readable):
            assert sizes != {0}
        if sizes == {0}:
            assert world.workers() == 0
            assert all(target.state != "serving" for target in plan.targets)
    assert_coupled(world)
    world.readable, world.fits, world.held = True, True, 1
    world.observed = replace(world.observed, pods=tuple(pod for pod in world.observed.pods if pod.node))
    world.settle(32)
    assert world.served[-1]["t"][0] >= 1
