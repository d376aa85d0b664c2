"""The size of a tier: what a user's /scale comes to, and what an operator that has just started takes from the pools."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from fleet_planner.gang import workers_of
from fleet_planner.memory import ScaleMemory
from fleet_planner.money import Purse
from fleet_planner.ratio import bounds_of
from fleet_planner.roles import Role
from fleet_planner.scale import ScaleDecision
from fleet_planner.sizing import current_size, fit, scaled_by_others, size_tier, wished_size
from fleet_planner.types import Observed, ObservedPod, ObservedPool, RoleLoad, TierTelemetry
from tests.fleet_planner.test_reconcile import NOW, fleet, pod, start

OLD, NEW = "aaaaaaaa", "bbbbbbbb"
FLEET = fleet(prefill={"minReplicas": 2, "maxReplicas": 5}, decode={"minReplicas": 3, "maxReplicas": 9})
TIER = FLEET.spec.tiers[0]


def pool(
    role: Role, replicas: int, planned: int | None, size: int | None = None, revision: str = OLD, tier: str = "t", **more: int
) -> ObservedPool:
    """`replicas`: as it stands; `planned`: as the operator left it."""
    return ObservedPool(f"{tier}-{role}-{revision}", role, role, tier, revision, replicas, planned, size, **more)


def clamped(count: int, least: int, most: int) -> int:
    return min(max(count, least), most)


@pytest.mark.parametrize("now", [(2, 3), (2, 8), (3, 9), (5, 5)])
def test_a_role_that_a_user_scales_is_put_there_if_the_bounds_of_the_other_let_it(now: tuple[int, int]):
    """Every /scale of one role or both, from some sizes: no other role's wish moves it."""
    bounds = bounds_of(TIER)
    allowed = [pair for pair in product(range(2, 6), range(3, 10)) if bounds.allow(*pair)]
    for prefill, decode in product(range(8), range(12)):
        pools = pool("prefill", prefill, now[0], now[0]), pool("decode", decode, now[1], now[1])
        found = size_tier(FLEET, TIER, replace(start(), pools=pools), [], NOW)
        got, put = (found.prefill, found.decode), (clamped(prefill, 2, 5), clamped(decode, 3, 9))
        asked = prefill != now[0], decode != now[1]
        kept = [pair for pair in allowed if all(pair[role] == put[role] for role in (0, 1) if asked[role])]
        if any(asked):
            assert got in (kept or allowed), (prefill, decode)
            assert found.reason == f"scaled by a user to {prefill} prefill and {decode} decode workers"
            assert found.memory.wants == ((NOW, *got),)


SCALED: dict[str, tuple[tuple[ObservedPool, ...], dict[str, int]]] = {
    "nobody": ((pool("decode", 3, 3, 3),), {}),
    "another tier": ((pool("decode", 5, 3, 3, tier="u"),), {}),
    "never planned": ((pool("decode", 5, None),), {}),
    "more": ((pool("decode", 5, 3, 3),), {"decode": 5}),
    "one pool of two revisions": ((pool("decode", 2, 1, 4, NEW), pool("decode", 3, 3, 4)), {"decode": 5}),
    "the older one of two": ((pool("decode", 1, 1, 4, NEW), pool("decode", 9, 3, 4)), {}),
    "the older one alone": ((pool("decode", 2, 3, 4),), {"decode": 3}),
    "the older one of a role that the newer has not": (
        (pool("prefill", 2, 2, 2, NEW), pool("decode", 6, 4, 4)), {"decode": 6},
    ),
    "less than there is": ((pool("decode", 0, 3, 2),), {"decode": 0}),
    "from zero": ((pool("decode", 1, 0, 0),), {"decode": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_who_scaled_what(name: str):
    pools, found = SCALED[name]
    assert scaled_by_others("t", NEW, Observed(pools=pools)) == found


def test_sizes_are_those_of_the_wanted_revision_and_a_wish_outlives_what_there_is():
    pools = [pool("prefill", 1, 1, 2, OLD), pool("prefill", 1, 1, 3, NEW, wish=5), pool("prefill", 1, 1, 4, "cccccccc")]
    pools += [pool("decode", 1, 1, 6, OLD), pool("decode", 1, 1, None, NEW), pool("decode", 9, 9, 9, NEW, tier="u")]
    seen = replace(start(NEW), pools=tuple(pools))
    assert (current_size(TIER, seen), wished_size(TIER, seen)) == ((3, 6), (5, 6))
    assert current_size(TIER, start()) == wished_size(TIER, start()) == TIER.initial
    half = replace(start(), pools=(pool("prefill", 5, 5, 5),))  # the operator ended between its two pools
    assert current_size(TIER, half) == (5, TIER.initial[1])


def worker(role: Role, number: int, **more: Any) -> ObservedPod:
    return pod(f"f-t-{role}-{OLD}-{number}", role, number, **more)


PAIR = worker("prefill", 0), worker("decode", 0)
WAITS: dict[str, Any] = {"ready": False, "node": None, "ip": None, "phase": "Pending", "ready_since": None}
STEPWISE = "workers of a tier that left the spec make room step by step"


@pytest.mark.parametrize(
    ("workers", "want", "size", "limited"),
    [
        pytest.param(PAIR, (2, 4), (1, 2), STEPWISE, id="the-next-step"),
        pytest.param((*PAIR, worker("decode", 1, **WAITS, created_at=NOW)), (2, 4), (1, 2), STEPWISE, id="one-waits-for-a-node"),
        pytest.param(
            (*PAIR, worker("decode", 1, **WAITS, created_at=-9_999.0, unschedulable=True)), (1, 2), (1, 2), "",
            id="it-waits-for-long-and-is-not-backed-out-of",
        ),
        pytest.param((*PAIR, *(worker("decode", n) for n in (1, 2, 3))), (1, 1), (1, 1), "", id="fewer-are-wanted"),
        pytest.param(tuple(worker("decode", n) for n in range(4)), (2, 2), (1, 2), STEPWISE, id="more-of-one-role-is-no-step"),
    ],
)  # fmt: skip
def test_a_tier_grows_as_workers_of_one_that_left_the_spec_make_room(
    workers: tuple[ObservedPod, ...], want: tuple[int, int], size: tuple[int, int], limited: str
):
    plain = fleet()
    seen = replace(start(), pods=workers, memory={"t": ScaleMemory(room_at=NOW - 1.0)})
    decision = ScaleDecision(*want, "load", ScaleMemory())
    found = fit(plain, plain.spec.tiers[0], decision, seen, workers_of(seen, "t"), Purse(), NOW)
    assert (found.prefill, found.decode, found.limited) == (*size, limited)


BACKED_OUT = pool("prefill", 2, 2, 2), pool("decode", 3, 3, 3, wish=8)
"""Of 8 decode workers 3 found nodes."""
MANUAL = FLEET.model_copy(
    update={"spec": FLEET.spec.model_copy(update={"scaling": FLEET.spec.scaling.model_copy(update={"mode": "manual"})})}
)
AT_REST = TierTelemetry(*(RoleLoad(inflight=0.0, measured_at=NOW) for _ in range(2)))
LONG_AT_REST = ScaleMemory(((NOW - 9_999.0, 1, 1), (NOW - 1.0, 1, 1)))


def test_what_is_wished_stays_wished_while_a_part_of_it_is_backed_out_of():
    seen = replace(start(), pools=BACKED_OUT)
    for spec, reason in ((FLEET, "holding: no telemetry"), (MANUAL, "scaling.mode is manual")):
        found = size_tier(spec, TIER, seen, [], NOW)
        assert (found.prefill, found.decode, found.reason) == (2, 8, reason)
    scaled = replace(start(), pools=(replace(BACKED_OUT[0], replicas=3), BACKED_OUT[1]))
    found = size_tier(FLEET, TIER, scaled, [], NOW)
    assert (found.prefill, found.decode) == (3, 8), "one role was scaled: the other's wish is not what there is of it"


def test_who_takes_over_from_a_tier_that_left_the_spec_does_not_shrink_on_what_it_has_of_the_load():
    """Nor at once when it has all of it: what it needed meanwhile says nothing."""
    before = replace(start(), pools=BACKED_OUT, telemetry={"t": AT_REST}, memory={"t": LONG_AT_REST})
    alone = size_tier(FLEET, TIER, before, [], NOW)
    assert (alone.prefill, alone.decode) < (2, 8), "it would, were it alone"
    assert alone.memory.wants
    left = pod("old", "decode", 0, tier="old", serving=True)
    both = size_tier(FLEET, TIER, replace(before, pods=(left,)), [], NOW)
    assert (both.prefill, both.decode, both.memory.wants) == (2, 8, ())


@pytest.mark.parametrize(
    ("since", "ready_since", "size"),
    [
        (NOW - 60.0, NOW - 10.0, (2, 3)),
        (NOW - 5.0, NOW - 10.0, (2, 4)),
        (None, NOW - 10.0, (2, 4)),
        (NOW - 60.0, None, (2, 4)),
    ],
    ids=["it-came-inside-of-the-window", "before", "window-not-known", "not-known-since-when"],
)
def test_a_missed_objective_is_one_of_all_workers_that_there_are(
    since: float | None, ready_since: float | None, size: tuple[int, int]
):
    """b42: p99 is of the last minute, or of twelve readings. A worker that was asked for because of it was ready before any of it
    was gone, so another one was asked for, and one more for each that was ready inside of the window."""
    pods = *(pod(f"p{n}", "prefill", n) for n in range(2)), *(pod(f"d{n}", "decode", 2 + n) for n in range(2))
    pods = *(replace(one, ready_since=NOW - 900.0) for one in pods), replace(pod("d2", "decode", 4), ready_since=ready_since)
    slow = TierTelemetry(
        RoleLoad(inflight=1.0, measured_at=NOW), RoleLoad(inflight=1.0, measured_at=NOW, itl_p99_s=9.0), latencies_since=since
    )
    spec = FLEET.spec.model_validate({**FLEET.spec.to_dict(), "slo": {"itl": {"p99": "50ms"}}})
    seen = replace(start(), pods=pods, pools=(pool("prefill", 2, 2, 2), pool("decode", 3, 3, 3)), telemetry={"t": slow})
    found = size_tier(FLEET.model_copy(update={"spec": spec}), TIER, seen, workers_of(seen, "t"), NOW)
    assert (found.prefill, found.decode) == size


@pytest.mark.parametrize(("wish", "size"), [(None, (3, 9)), (9, (3, 6))])
def test_an_operator_that_starts_in_a_rollout_goes_on_with_what_had_room(wish: int | None, size: tuple[int, int]):
    """Pools whose wish is more than their size say that it had none."""
    pools = pool("prefill", 3, 3, 3), replace(pool("decode", 6, 6, 6), wish=wish)
    rolls = Observed(pods=(pod("d", "decode", 0),), pools=pools, templates=start(NEW).templates)
    found = fit(FLEET, TIER, ScaleDecision(3, 9, "load", ScaleMemory()), rolls, [], Purse(), NOW)
    assert (found.prefill, found.decode) == size
    if wish:
        wait_s = FLEET.spec.scaling.capacity_wait_s
        assert found.limited == "more had no room before the operator started; tried again when the rollout is over"
        assert (found.memory.cap, found.memory.cap_until) == ((3, 6), NOW + wait_s)
