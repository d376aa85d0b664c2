"""Node conditions that call devices bad: from which share of a fleet's nodes on they are suspected, and who goes then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_planner.node_conditions import believed
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.roles import Role
from fleet_planner.types import Observed, ObservedPod, ObservedPool
from tests.fleet_planner.test_flip import seen, wish
from tests.fleet_planner.test_gang import gang
from tests.fleet_planner.test_reconcile import NOW, pod

XID, MEMORY = "GPUXIDError=True", "GpuMemWatch=True"


def worker(number: int, bad: bool = False, role: Role = "decode", **more: Any) -> ObservedPod:
    """On a node of its own."""
    known = {"node": f"n{number}", "accused": (XID,) if bad else (), "created_at": float(number), **more}
    return pod(f"f-t-{role}-aaaaaaaa-{number}", role, number, **known)


def workers(nodes: int, bad: int, **more: Any) -> tuple[ObservedPod, ...]:
    """One on each node, the first so many of them called bad."""
    return tuple(worker(number, number < bad, **more) for number in range(nodes))


def pool(replicas: int, role: Role = "decode", revision: str = "aaaaaaaa") -> ObservedPool:
    return ObservedPool(f"f-t-{role}-{revision}", "u", role, "t", revision, replicas, replicas)


def suspected(pods: tuple[ObservedPod, ...], *pools: ObservedPool) -> int:
    """How many workers are under suspicion; every other one that is accused is on failing devices."""
    found = believed(pods, pools)
    assert believed(found, pools) == found, "judged once more it is the same"
    assert all(bool(one.suspected) != bool(one.sick) for one in found if one.accused)
    assert all(one.leaving == one.sick for one in found if one.accused)
    return sum(bool(one.suspected) for one in found)


@pytest.mark.parametrize(
    ("nodes", "bad", "found"),
    [
        *(pytest.param(nodes, nodes, 0, id=f"all-of-{nodes}") for nodes in (1, 2, 3, 4)),
        pytest.param(5, 2, 0, id="two-of-five"),
        pytest.param(5, 3, 3, id="three-of-five"),
        pytest.param(5, 5, 5, id="all-of-five"),
        pytest.param(20, 0, 0, id="none-of-twenty"),
        pytest.param(20, 1, 0, id="one-of-twenty"),
        pytest.param(20, 11, 0, id="just-not-too-many"),
        pytest.param(20, 12, 12, id="just-too-many"),
        pytest.param(20, 18, 18, id="nearly-all"),
    ],
)
def test_the_share_of_nodes_from_which_on_a_condition_is_suspected(nodes: int, bad: int, found: int):
    assert suspected(workers(nodes, bad)) == found


OTHERS = tuple(worker(number, role="prefill", node="n0", tier="other") for number in range(30, 60))
GANGS = tuple(
    replace(one, node=f"g{group}-{place}", accused=(XID,) if group < 3 and place else ())
    for group in range(5)
    for place, one in enumerate(gang(f"d-{group}", size=3))
)
"""Five workers over three nodes each, six of the fifteen called bad."""


@pytest.mark.parametrize(
    ("pods", "pools", "found"),
    [
        pytest.param((*workers(20, 18), *OTHERS), (), 18, id="nodes-count-and-not-workers"),
        pytest.param(tuple(replace(one, node=f"n{one.ordinal % 4}") for one in workers(20, 20)), (), 0, id="many-on-four-nodes"),
        pytest.param((*workers(12, 0), *(worker(n, True, "prefill") for n in range(12, 20))), (), 0, id="all-of-a-role-are-few"),
        pytest.param(
            (*workers(8, 0, tier="other"), *(worker(n, True) for n in range(8, 20))), (), 12, id="of-several-tiers-together"
        ),
        pytest.param((*workers(18, 0), worker(18, True, revision="bbbbbbbb")), (), 0, id="a-canary"),
        pytest.param((*workers(20, 11), worker(20, True, revision="bbbbbbbb")), (), 12, id="a-canary-counts-as-any-other"),
        pytest.param((*workers(20, 11), worker(20, True, terminating=True)), (), 0, id="not-those-that-go"),
        pytest.param((*workers(20, 11), worker(20, True, phase="Failed")), (), 0, id="not-those-that-ended"),
        pytest.param((*workers(20, 12), worker(20, node=None)), (), 12, id="not-those-without-a-node"),
        pytest.param(tuple(replace(one, ready=False) for one in workers(20, 12)), (), 12, id="those-that-start-as-well"),
        pytest.param((*workers(20, 12), *(worker(n) for n in range(20, 40))), (pool(20),), 12, id="not-those-in-their-place"),
        pytest.param(
            (*workers(20, 11), *(worker(n, True) for n in range(20, 31))), (pool(20),), 0, id="nor-if-called-bad-themselves"
        ),
        pytest.param((*workers(4, 4), *(worker(n, True) for n in range(4, 8))), (pool(4),), 0, id="a-few-stay-few"),
        pytest.param(tuple(replace(one, accused=(MEMORY, XID)[: one.ordinal % 2 + 1]) for one in workers(20, 0)), (), 10,
                     id="each-condition-for-itself"),
    ],
)  # fmt: skip
def test_of_which_nodes_the_share_is_taken(pods: tuple[ObservedPod, ...], pools: tuple[ObservedPool, ...], found: int):
    assert suspected(tuple(sorted(pods, key=lambda one: one.name)), *pools) == found


def test_all_nodes_of_a_worker_over_several_count():
    assert suspected(GANGS) == 0
    more = tuple(replace(one, accused=(XID,)) if one.node in {"g0-0", "g1-0", "g2-0"} else one for one in GANGS)
    assert suspected(more) == 9


def test_what_else_is_said_of_a_node_is_believed():
    """A taint, another condition, a cordon: each is as it was."""
    odd = {0: {"sick": "taint", "leaving": "taint"}, 1: {"accused": (XID, MEMORY)}, 2: {"leaving": "cordoned"}}
    pods = tuple(replace(one, **odd.get(one.ordinal, {})) for one in workers(20, 18))
    found = believed(pods, ())
    assert [(one.sick, one.leaving, bool(one.suspected)) for one in found[:4]] == [
        ("taint", "taint", False),
        (words := f"node n1 has condition {MEMORY}", words, False),
        ("", "cordoned", True),
        ("", "", True),
    ]
    assert {one.suspected for one in found[2:18]} == {f"18 of 20 nodes have condition {XID}"}
    tainted = tuple(replace(one, sick="taint", leaving="taint") if one.accused else one for one in workers(20, 18))
    assert believed(tainted, ()) == tainted


# -- what follows ------------------------------------------------------------------------------------------------------
def fleet_of(bad: int, *more: ObservedPod, served: bool = True) -> Observed:
    """Five prefill and five decode workers; of the nodes so many are called bad, prefill and decode in turn."""
    pods = [worker(n, n < bad, "prefill" if n % 2 else "decode", serving=served or n >= bad, told=True) for n in range(10)]
    pools = (pool(5, "prefill"), pool(5))
    return seen(believed(tuple(sorted([*pods, *more], key=lambda one: one.name)), pools), pools=pools)


def planned(observed: Observed) -> tuple[Plan, str, int]:
    plan = reconcile(wish(5, 5), observed, NOW)
    found = plan.status.condition("WithinRatio")
    assert found is not None
    return plan, found.reason, sum(target.state == "serving" for target in plan.targets)


@pytest.mark.parametrize(
    ("bad", "reason", "serving", "made"),
    [(0, "InRatio", 10, 0), (5, "DevicesFailing", 4, 5), (6, "DevicesSuspected", 10, 0), (8, "DevicesSuspected", 10, 0)],
)
def test_what_is_suspected_serves_on_and_none_is_made_for_it(bad: int, reason: str, serving: int, made: int):
    plan, said, served = planned(fleet_of(bad))
    assert (said, served, len(plan.create), plan.delete) == (reason, serving, made, ())


@pytest.mark.parametrize("busy", [None, 0.0], ids=["unknown", "idle"])
@pytest.mark.parametrize("ready", [False, True])
def test_those_that_were_held_stay_and_those_in_their_place_go(ready: bool, busy: float | None):
    """Else so few of the old ones were left that they were believed again, and held again."""
    roles: dict[int, Role] = {20: "decode", 21: "prefill"}
    more = [worker(n, role=role, ready=ready, serving=ready, told=ready, busy=5.0) for n, role in roles.items()]
    observed = fleet_of(6, *more, served=False)
    observed = replace(observed, pods=tuple(replace(one, busy=busy) if one.suspected else one for one in observed.pods))
    plan, said, _ = planned(observed)
    assert {one.name for one in plan.delete} == {one.name for one in more}
    assert (said, plan.create) == ("DevicesSuspected", ())


def test_the_status_says_which_condition_of_how_many_nodes_and_what_to_do():
    plan, *_ = planned(fleet_of(8))
    said = plan.status.condition("WithinRatio")
    assert said is not None
    assert f"8 of 10 nodes have condition {XID}" in said.message
    assert "cordon" in said.message
