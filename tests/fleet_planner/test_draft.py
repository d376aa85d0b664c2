"""The order in which pods are made and the order in which workers go."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from fleet_planner.draft import scarce_first
from fleet_planner.ratio import Pair, largest, within
from fleet_planner.reconcile import reconcile
from fleet_planner.replicas import plan_replicas, replicas_of
from fleet_planner.roles import Role
from fleet_planner.rollout import Group
from fleet_planner.types import Template
from fleet_planner.wanted import PodWanted, PoolWanted
from tests.fleet_planner.test_reconcile import NOW, carry_out, fleet, pod, start
from tests.fleet_planner.test_rollout import RATIOS

OLD, NEW = "aaaaaaaa", "bbbbbbbb"


def wanted(role: Role, count: int, revision: str = OLD, nodes: int = 1) -> list[PodWanted]:
    """Workers of a role, each of so many pods."""
    pool = f"p-{role}"
    return [
        PodWanted(f"{pool}-{n}-{m}", pool, "t", role, revision, n, m) for n in range(count) for m in range(nodes)
    ]  # fmt: skip


def test_the_first_pods_of_a_new_fleet_are_of_both_roles():
    """Incident: of 2 prefill and 8 decode workers all decode workers were made first; 6 devices held only decode."""
    wish = fleet(ratio={"prefill": 2, "decode": 8}, prefill={"replicas": 2}, decode={"replicas": 8})
    roles = "".join(one.role[0] for one in reconcile(wish, start(), NOW).create)
    assert roles == "dpdddpdddd"


@pytest.mark.parametrize("ratio", RATIOS)
def test_any_first_part_of_the_creations_serves_as_well_as_so_many_workers_can(ratio: Any):
    """As in `grown`: the role that lags behind, of what would serve, is as far as any other choice would bring it."""
    checked = 0
    for want in product(range(1, 7), range(1, 13)):
        if not within(*want, *ratio):
            continue
        create = [*wanted("decode", want[1]), *wanted("prefill", want[0])]
        roles = [one.role for one in scarce_first(create, {}, {OLD: want}, OLD)]
        assert sorted(roles) == sorted(one.role for one in create)

        def lag(prefill: int, decode: int, want: Pair = want) -> Fraction:
            serves = largest((prefill, decode), *ratio)
            return min(Fraction(serves[0], want[0]), Fraction(serves[1], want[1]))

        for count in range(1, sum(want) + 1):
            best = max(lag(p, count - p) for p in range(max(0, count - want[1]), min(want[0], count) + 1))
            assert lag(roles[:count].count("prefill"), roles[:count].count("decode")) == best, (want, count, roles)
            checked += 1
    assert checked > 50


@pytest.mark.parametrize(
    ("lost", "order"),
    [
        pytest.param({"prefill": 1, "decode": 2}, "pdd", id="half-of-the-prefill-a-quarter-of-the-decode"),
        pytest.param({"prefill": 1, "decode": 6}, "ddpdddd", id="three-quarters-of-the-decode"),
        pytest.param({"prefill": 0, "decode": 2}, "dd", id="one-role-only"),
    ],
)
def test_after_a_loss_the_scarcer_role_is_repaired_first(lost: dict[Role, int], order: str):
    wish = fleet(ratio={"prefill": 2, "decode": 8}, prefill={"replicas": 2}, decode={"replicas": 8})
    observed = carry_out(reconcile(wish, start(), NOW), start())
    left = tuple(p for p in observed.pods if p.ordinal >= lost[p.role])
    plan = reconcile(wish, replace(observed, pods=left), NOW + 1)
    assert "".join(one.role[0] for one in plan.create) == order


def test_pods_of_a_worker_over_several_nodes_stay_together_the_leader_first():
    create = [*reversed(wanted("decode", 2, nodes=2)), *wanted("prefill", 1, nodes=2)]
    names = [one.name for one in scarce_first(create, {}, {OLD: (1, 2)}, OLD)]
    assert names == ["p-decode-0-0", "p-decode-0-1", "p-prefill-0-0", "p-prefill-0-1", "p-decode-1-0", "p-decode-1-1"]


def test_what_serves_is_repaired_before_a_new_revision_grows():
    create = [*wanted("prefill", 1, OLD), *wanted("decode", 1, NEW), *wanted("prefill", 1, NEW), *wanted("decode", 1, OLD)]
    groups = {NEW: Group(NEW), OLD: Group(OLD, (1, 3), (1, 3))}
    made = scarce_first(create, groups, {NEW: (1, 1), OLD: (2, 4)}, NEW)
    assert [(one.revision, one.role) for one in made] == [(OLD, "prefill"), (OLD, "decode"), (NEW, "decode"), (NEW, "prefill")]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"busy": 0.0}, {"busy": 3.0}, id="idle-before-busy"),
        pytest.param({"busy": 3.0}, {"busy": None}, id="an-unknown-load-is-busy"),
        pytest.param({"busy": 9.0, "deletion_cost": -1}, {"busy": 0.0}, id="cheap-before-idle"),
        pytest.param({"busy": 0.0, "created_at": 0.0}, {"busy": 1.0, "created_at": 9.0}, id="idle-before-young"),
        pytest.param({"serving": False, "busy": 9.0}, {"serving": True, "busy": 0.0}, id="held-before-serving"),
        pytest.param({"ready": False, "busy": 9.0}, {"busy": 0.0}, id="not-ready-before-idle"),
    ],
)
def test_who_goes_first_at_a_scale_down(first: dict[str, Any], second: dict[str, Any]):
    for names in (("a", "b"), ("b", "a")):  # whatever their names are
        pods = [pod(names[0], "decode", 0, **first), pod(names[1], "decode", 1, **second)]
        _, gone = plan_replicas(PoolWanted("p", "t", "decode", OLD, 1, 1), replicas_of(pods, (1, 1)))
        assert [one.name for one in gone] == [names[0]]


def test_of_workers_on_nodes_that_go_away_the_sick_one_goes_first():
    sick, calm = {"leaving": "taint xid", "sick": "taint xid"}, {"leaving": "cordoned"}
    pods = [pod("a", "decode", 0, serving=True, **sick), pod("b", "decode", 1, **calm), pod("c", "decode", 2, ready=False)]
    _, gone = plan_replicas(PoolWanted("p", "t", "decode", OLD, 1, 1), replicas_of(pods, (1, 1)))
    assert [one.name for one in gone] == ["a"]


def test_a_template_that_nobody_stored_makes_no_pods():
    """The sizes of an old revision may ask for repairs that nothing can be made from."""
    observed = replace(
        carry_out(reconcile(fleet(), start(), NOW), start()), templates={"t": Template(NEW, "c", number=2)}, stored={}
    )
    lost = replace(observed, pods=observed.pods[1:])
    assert {one.revision for one in reconcile(fleet(), lost, NOW + 1).create} <= {NEW}
