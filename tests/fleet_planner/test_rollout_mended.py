"""A revision that never comes up and fills the nodes gives way to the one that mends it; one that was ready just now does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet_api.quantities import Ratio
from fleet_planner.ratio import Pair
from fleet_planner.reconcile import Plan
from fleet_planner.rollout import Group, Limits, plan_step
from tests.fleet_planner.test_capacity_passes import NEW, OLD, STEP_S, WAIT_S, Nodes, of
from tests.fleet_planner.test_reconcile import counts
from tests.fleet_planner.test_rollout import FIXED, WIDE

WANT = (1, 2)


class Broken(Nodes):
    """Nodes on which the workers of some revisions do not come up; each says since when it is not ready."""

    broken: frozenset[str] = frozenset({OLD})
    roles: frozenset[str] = frozenset({"prefill", "decode"})

    def step(self, seconds: float = STEP_S) -> Plan:
        plan = super().step(seconds)
        pods = [
            replace(p, ready=False, unready_since=p.unready_since or self.now)
            if p.revision in self.broken and p.role in self.roles
            else replace(p, unready_since=None)
            for p in self.observed.pods
        ]
        self.observed = replace(self.observed, pods=tuple(pods))
        return plan


@pytest.mark.parametrize("rollout", [{}, {"maxSurgeGpus": 1}, {"maxUnavailable": 1}, {"maxSurgeGpus": 0, "maxUnavailable": 1}])
@pytest.mark.parametrize("room", [3, 4])
def test_a_first_revision_that_never_came_up_gives_its_room_to_the_one_that_mends_it(rollout: dict[str, int], room: int):
    """Incident: the new workers found no node, nothing served, and the old ones kept theirs for ever; deleted ones came back."""
    nodes = Broken(of({"rollout": rollout}), room)
    nodes.run(2 * WAIT_S)
    nodes.rollout()
    nodes.run(2 * WAIT_S)
    assert (counts(nodes.observed, OLD), counts(nodes.observed, NEW)) == (
        {"prefill": 0, "decode": 0}, {"prefill": 1, "decode": 2},
    )  # fmt: skip
    assert nodes.verdict("RollingOut")[0] == "Complete"


class Queue(Broken):
    """Who finds no room is let in by nobody: a queue whose quota is used up, as Kueue's."""

    def step(self, seconds: float = STEP_S) -> Plan:
        plan = super().step(seconds)
        pods = [replace(p, unschedulable=False, gated=p.node is None) for p in self.observed.pods]
        self.observed = replace(self.observed, pods=tuple(pods))
        return plan


def test_a_queue_that_lets_nobody_in_is_no_room():
    """Incident: old workers kept the queue's quota, new ones waited in it, and maxUnavailable had no effect."""
    two_of_each = {"ratio": {"prefill": 2, "decode": 2}, "prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    nodes = Queue(of({"rollout": {"maxUnavailable": 1, "maxSurgeGpus": 2}}, **two_of_each), 4)
    nodes.broken = frozenset()
    nodes.run(WAIT_S)
    nodes.rollout()
    nodes.run(WAIT_S - 4 * STEP_S)
    assert counts(nodes.observed, OLD) == {"prefill": 2, "decode": 2}, "it may let them in yet"
    nodes.run(3 * WAIT_S)
    assert nodes.verdict("RollingOut")[0] == "Complete"
    assert counts(nodes.observed, NEW) == {"prefill": 2, "decode": 2}


def test_a_rollout_that_waits_in_a_queue_says_so():
    nodes = Queue(of(), 3)
    nodes.broken = frozenset()
    nodes.run(WAIT_S)
    nodes.rollout()
    nodes.run(2 * WAIT_S)
    words = "the new workers wait in a queue, and rollout.maxUnavailable lets no old one go first"
    reason, told = nodes.verdict("RollingOut")
    assert (reason, told.startswith(f"tier t: {words}; ")) == ("Stuck", True)


def test_a_broken_revision_gives_its_place_in_the_queue_to_the_one_that_mends_it():
    nodes = Queue(of(), 3)
    nodes.run(WAIT_S)
    nodes.rollout()
    nodes.run(3 * WAIT_S)
    assert counts(nodes.observed, NEW) == {"prefill": 1, "decode": 2}
    assert nodes.verdict("RollingOut")[0] == "Complete"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_broken_role_is_enough_when_nothing_serves(role: str):
    """The workers of the other role are ready and held: without a partner they serve nobody."""
    nodes = Broken(of(), 3)
    nodes.roles = frozenset({role})
    nodes.observed = replace(nodes.observed, pods=tuple(replace(p, unready_since=None) for p in nodes.observed.pods))
    nodes.run(2 * WAIT_S)
    nodes.rollout()
    nodes.run(2 * WAIT_S)
    assert counts(nodes.observed, NEW) == {"prefill": 1, "decode": 2}
    assert nodes.verdict("RollingOut")[0] == "Complete"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_serves_without_a_partner_serves_on(role: str):
    """It served when its partners ceased to be ready, and goes on alone: nothing of it goes, whatever the new ones wait for."""
    nodes = Broken(of(), 3)
    nodes.broken = frozenset()
    nodes.run(WAIT_S)
    nodes.broken, nodes.roles = frozenset({OLD}), frozenset({role})
    nodes.rollout()
    nodes.run(3 * WAIT_S)
    assert counts(nodes.observed, OLD) == {"prefill": 1, "decode": 2}
    assert any(target.state == "serving" for target in nodes.plan.targets)


def test_workers_that_were_ready_just_now_are_waited_for():
    """All of a stuck rollout's old workers are not ready for a moment: nothing of them goes."""
    nodes = Broken(of(), 3)
    nodes.broken = frozenset()
    nodes.run(2 * WAIT_S)
    nodes.rollout()
    nodes.run(2 * WAIT_S)
    assert nodes.verdict("RollingOut")[0] == "Stuck"
    nodes.broken = frozenset({OLD})
    nodes.run(WAIT_S - 2 * STEP_S)
    assert counts(nodes.observed, OLD) == {"prefill": 1, "decode": 2}
    nodes.run(4 * STEP_S)
    assert counts(nodes.observed, OLD) == {"prefill": 0, "decode": 0}


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        (Group("old", WANT, hopeless=True), Group("new", (0, 1), unschedulable=True), (0, 0)),
        (Group("old", WANT, hopeless=True), Group("new", (0, 1), refused=True), (0, 0)),
        (Group("old", WANT, hopeless=True), Group("new", (1, 2)), WANT),  # they are on their way
        (Group("old", WANT), Group("new", (0, 1), unschedulable=True), WANT),
        (Group("old", WANT, WANT), Group("new", (0, 1), unschedulable=True), WANT),
    ],
    ids=["no-node", "quota", "room", "not-yet-hopeless", "serves"],
)
def test_only_what_has_no_hope_goes_and_only_for_want_of_room(old: Group, new: Group, kept: tuple[int, int]):
    assert plan_step(WANT, new, [old], Limits(*WIDE)).sizes["old"] == kept


def test_an_old_group_that_serves_stays_whatever_others_hope_for():
    serves, hopeless = Group("a", (1, 1), (1, 1)), Group("b", (0, 1), hopeless=True)
    step = plan_step(WANT, Group("new", (0, 1), unschedulable=True), [serves, hopeless], Limits(*WIDE))
    assert min(step.sizes["a"]) >= 1


@pytest.mark.parametrize(
    ("new", "limits", "kept"),
    [
        pytest.param(Group("new", (1, 2), unschedulable=True), Limits(*FIXED), (0, 0), id="no-node"),
        pytest.param(Group("new"), Limits(*FIXED, surge_gpus=0, unavailable=1), (0, 0), id="surge"),
        pytest.param(Group("new", (1, 2)), Limits(*FIXED), (0, 1), id="room"),
    ],
)
def test_what_has_no_hope_keeps_no_room_from_an_old_group_that_lost_a_worker(new: Group, limits: Limits, kept: Pair):
    """A broken rollout, then one that mends it: the first one's worker held the node or the surge that the lost one needs, for
    ever, and `Stuck` said that no old worker may go."""
    serves, broken = Group("a", (2, 3), (2, 3)), Group("b", (0, 1), hopeless=True)
    step = plan_step((2, 4), new, [serves, broken], limits)
    assert (step.sizes["a"], step.sizes["b"], step.stuck) == ((2, 3), kept, False)
    if kept == (0, 0):
        assert plan_step((2, 4), new, [serves], limits).sizes["a"] == (2, 4)


@pytest.mark.parametrize(
    ("have", "spare", "expected"),
    [
        pytest.param((1, 2), 2, (2, 2), id="level-prefill-first"),
        pytest.param((1, 3), 1, (2, 3), id="prefill-lags"),
        pytest.param((2, 2), 1, (2, 3), id="decode-lags"),
        pytest.param((1, 4), 1, (2, 4), id="prefill-alone-is-missing"),
        pytest.param((2, 3), 1, (2, 4), id="decode-alone-is-missing"),
        pytest.param((1, 2), 3, (2, 4), id="room-for-all"),
        pytest.param((1, 2), 0, (1, 2), id="no-room"),
        pytest.param((2, 3), -1, (2, 3), id="more-than-allowed"),
    ],
)
def test_what_still_ends_leaves_room_for_the_role_that_lags_first(have: Pair, spare: int, expected: Pair):
    """Only the new revision is left, and the last old worker still holds a device; whole pairs find no room."""
    limits = Limits(*FIXED, surge_gpus=sum(have) + spare + 1 - 6)
    old = Group(OLD, terminating=True)
    step = plan_step((2, 4), Group(NEW, have, have), [old], limits, leaving_gpus=1)
    assert step.sizes == {NEW: expected}


@pytest.mark.parametrize(
    ("want", "have", "gpus", "expected"),
    [
        pytest.param((3, 3), (3, 1), (2, 1), (3, 2), id="decode-was-lost"),
        pytest.param((6, 7), (4, 7), (1, 2), (5, 7), id="prefill-was-lost"),
    ],
)
def test_automatic_surge_takes_a_next_step_from_any_state(want: Pair, have: Pair, gpus: Pair, expected: Pair):
    """A new revision that lost workers has no room to grow while the last old one, without a partner, keeps its own."""
    last = (1, 0) if have[0] < want[0] else (0, 1)
    limits = Limits(Ratio(1, 4), Ratio(4, 1), gpus=gpus, unavailable=1)
    step = plan_step(want, Group(NEW, have, have), [Group(OLD, last, last)], limits)
    assert (step.sizes, step.stuck) == ({NEW: expected, OLD: last}, False)
