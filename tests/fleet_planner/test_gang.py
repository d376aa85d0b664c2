"""Workers over several nodes: no partial one serves, all live and go together, halves do not wait for each other for ever."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_api.v1alpha1.fleet import InferenceFleet
from fleet_api.v1alpha1.status import FleetStatus
from fleet_planner.gang import SETTLE_S, SPREAD, as_pods, give_back, settled
from fleet_planner.memory import GangMemory
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.replicas import Replica, plan_replicas, replicas_of
from fleet_planner.roles import Role
from fleet_planner.types import Observed, ObservedPod, ObservedPool, RouterView, Template
from fleet_planner.wanted import PodGone, PoolWanted
from tests.fleet_planner.test_reconcile import NOW, fleet, pod, start
from tests.fleet_planner.test_serving import EVENTS, RATIOS, Model, play

WAIT_S = 300.0
STUCK: dict[str, Any] = {"node": None, "ready": False, "unschedulable": True, "phase": "Pending", "message": "0/4 nodes: no gpu"}


def gang(name: str, role: Role = "decode", size: int = 2, placed: int | None = None, **more: Any) -> list[ObservedPod]:
    """A worker's pods, `placed` of which have a node."""
    found = []
    for member in range(size):
        own = {"uid": f"uid-{name}", "group": ""} if member == 0 else {"uid": f"uid-{name}-{member}", "group": f"uid-{name}"}
        state = {} if placed is None or member < placed else STUCK
        named = name if member == 0 else f"{name}-{member}"
        found.append(pod(named, role, 0, member=member, **{**own, "scheduled_at": 0.0, **state, **more}))
    return found


def workers(*groups: list[ObservedPod]) -> list[Replica]:
    return replicas_of([one for group in groups for one in group], (2, 2))


# -- whole or nothing -----------------------------------------------------------------------------------------------------
class GangModel(Model):
    """Every worker has two pods; each event happens to one pod."""

    nodes = (2, 2)

    def check(self, plan: Plan, served_before: set[str]) -> None:
        super().check(plan, served_before)
        by_leader = {worker.leader.uid: worker for worker in self.workers(list(self.observed.pods))}
        for target in plan.targets:
            worker = by_leader[target.uid]
            assert worker.leader.member == 0  # only leaders are told
            if target.state == "serving":
                assert len(worker.pods) == 2
                assert all(one.ready and one.phase == "Running" and not one.terminating for one in worker.pods)
        gone = {one.uid for one in plan.delete}
        for worker in by_leader.values():  # nobody goes without the rest, and nobody who is left alone stays
            going = {one.uid in gone or one.terminating for one in worker.pods}
            assert len(going) == 1
            assert len(worker.pods) == 2 or going == {True}
        made: dict[str, set[int]] = {}
        for wanted in plan.create:
            made.setdefault(f"{wanted.pool}-{wanted.ordinal}", set()).add(wanted.member)
        assert all(members == {0, 1} for members in made.values())


class HalfGangModel(GangModel):
    """Only decode workers span two nodes."""

    nodes = (1, 2)

    def check(self, plan: Plan, served_before: set[str]) -> None:
        Model.check(self, plan, served_before)
        by_leader = {worker.leader.uid: worker for worker in self.workers(list(self.observed.pods))}
        for target in plan.targets:
            assert target.state != "serving" or by_leader[target.uid].ready


@pytest.mark.parametrize("model", [GangModel, HalfGangModel])
@pytest.mark.parametrize("ratio", RATIOS, ids=[f"{low}..{high}" for low, high, _, _ in RATIOS])
@settings(max_examples=60, deadline=None)
@given(events=st.lists(EVENTS, max_size=40))
def test_no_partial_worker_serves_and_the_ratio_is_kept(
    model: type[Model], ratio: tuple[str, str, int, int], events: list[tuple[str, int]]
):
    play(model(*ratio), events)


LIVES = ("ready", "unready", "failed", "terminating", "missing", "unplaced")


def test_every_state_of_two_workers_of_two_pods():
    """Exhaustive: of 6^4 states only whole and ready workers serve, and what is not whole goes as a whole."""
    for states in product(LIVES, repeat=4):
        names = ("f-t-prefill-aaaaaaaa-0", "prefill"), ("f-t-decode-aaaaaaaa-0", "decode")
        groups = [gang(name, role, created_at=NOW) for name, role in names]
        pods = [one for group, two in zip(groups, (states[:2], states[2:]), strict=True) for one in lived(group, two)]
        observed = replace(start(nodes=(2, 2)), pods=tuple(pods))
        plan = reconcile(fleet(ratio={"decode": 1}, decode={"maxReplicas": 1}), observed, NOW)
        serving = {target.name for target in plan.targets if target.state == "serving"}
        assert serving == ({groups[0][0].name, groups[1][0].name} if set(states) == {"ready"} else set()), states
        gone = {one.uid for one in plan.delete}
        for group, two in zip(groups, (states[:2], states[2:]), strict=True):
            left = [one for one, state in zip(group, two, strict=True) if state not in ("missing", "terminating")]
            ended = set(two) & {"failed", "missing", "terminating"} and two != ("missing", "missing")
            assert {one.uid for one in left} & gone == ({one.uid for one in left} if ended else set()), states
        assert all(target.name in {groups[0][0].name, groups[1][0].name} for target in plan.targets), states


def lived(group: list[ObservedPod], states: tuple[str, ...]) -> list[ObservedPod]:
    changes: dict[str, dict[str, Any]] = {
        "ready": {}, "unready": {"ready": False}, "failed": {"phase": "Failed", "ready": False},
        "terminating": {"terminating": True, "ready": False}, "unplaced": STUCK,
    }  # fmt: skip
    return [replace(one, **changes[state]) for one, state in zip(group, states, strict=True) if state != "missing"]


def test_a_follower_of_an_earlier_life_does_not_count():
    leader, follower = gang("d")
    (stray,) = replicas_of([leader, replace(follower, group="uid-of-another")], (2, 2))
    assert stray.broken
    assert not stray.ready


def test_a_worker_that_lost_its_leader_is_told_to_nobody():
    pods = [*gang("f-t-prefill-aaaaaaaa-0", "prefill"), *gang("f-t-decode-aaaaaaaa-0")[1:]]
    plan = reconcile(fleet(ratio={"decode": 1}), replace(start(nodes=(2, 2)), pods=tuple(pods)), NOW)
    assert [target.name for target in plan.targets] == ["f-t-prefill-aaaaaaaa-0"]
    assert [gone.name for gone in plan.delete] == ["f-t-decode-aaaaaaaa-0-1"]


def test_what_is_left_of_the_last_old_worker_holds_its_devices_until_it_is_gone():
    """Of one that had lost a pod, and goes for that, nothing counted: its successors were made beside it, above the surge."""
    spec = fleet(ratio={"prefill": 1, "decode": 1, "min": "1:4", "max": "1:1"})
    rollout = {"maxSurgeGpus": 0, "maxUnavailable": 1}
    wish = spec.model_copy(update={"spec": spec.spec.model_validate(spec.spec.to_dict() | {"rollout": rollout})})
    old, new = (Template(name, name, gpus=(4, 1), nodes=(2, 1)) for name in ("aaaaaaaa", "bbbbbbbb"))
    left = gang("f-t-prefill-aaaaaaaa-0", "prefill")[:1]
    seen = Observed(pods=tuple(left), templates={"t": new}, stored={"t": {old.revision: old}})
    plan = reconcile(wish, seen, NOW)
    assert ([one.name for one in plan.delete], plan.create) == ([left[0].name], ())
    going = replace(seen, pods=(replace(left[0], terminating=True, ready=False),))
    assert reconcile(wish, going, NOW).create == ()
    made = reconcile(wish, replace(seen, pods=()), NOW).create
    assert [(one.role, one.revision, one.member) for one in made] == [
        ("decode", "bbbbbbbb", 0), ("prefill", "bbbbbbbb", 0), ("prefill", "bbbbbbbb", 1)
    ]  # fmt: skip


def test_of_equals_the_one_with_the_fewest_nodes_goes_first():
    some = workers(gang("a", placed=1), gang("b", placed=0))
    pool = PoolWanted("p", "t", "decode", "aaaaaaaa", 1, 1, 2)
    _, gone = plan_replicas(pool, some)
    assert {one.name for one in gone} == {"b", "b-1"}


# -- giving back ----------------------------------------------------------------------------------------------------------
def offered(replicas: list[Replica], memory: GangMemory | None = None, now: float = WAIT_S * (1 + SPREAD)):
    return give_back({"aaaaaaaa": replicas}, memory or GangMemory(), WAIT_S, now)


def test_a_partial_worker_gives_back_all_of_its_pods_after_the_wait_and_not_before():
    half = workers(gang("d", placed=1))
    assert offered(half, now=WAIT_S - 1).gone == ()
    found = offered(half)
    assert {one.name for one in found.gone} == {"d", "d-1"}
    assert "d found 1 of its 2 nodes and gave them back (d-1: 0/4 nodes: no gpu)" in found.limited
    assert found.most == {("aaaaaaaa", "decode"): 0}


def test_progress_and_a_pod_that_was_not_judged_yet_start_the_wait_again():
    late = [replace(one, scheduled_at=WAIT_S) for one in gang("d", placed=1)]
    assert offered(workers(late)).gone == ()
    unseen = [replace(one, unschedulable=False) for one in gang("d", placed=1)]
    assert offered(workers(unseen)).gone == ()


def test_workers_that_hold_nothing_or_everything_wait_on():
    assert offered(workers(gang("a", placed=0), gang("b", placed=2))).gone == ()


def test_one_at_a_time_and_the_others_get_a_moment():
    halves = workers(gang("a", placed=1), gang("b", placed=1), gang("c", placed=2))
    first = offered(halves)
    assert len(first.gone) == 2
    now = WAIT_S * (1 + SPREAD)
    calm = GangMemory(first.memory.holds, now + SETTLE_S)
    assert offered(halves, calm, now + SETTLE_S - 1).gone == ()
    leaving = workers(gang("a", placed=1, terminating=True), gang("b", placed=1))
    assert offered(leaving, now=now + 2 * SETTLE_S).gone == ()


def test_while_it_is_held_none_is_made_but_what_is_lost_is_made_again():
    found = offered(workers(gang("f-t-decode-aaaaaaaa-0"), gang("f-t-decode-aaaaaaaa-1", placed=1)))
    (hold,) = found.memory.holds
    assert hold.most == 1
    pool = PoolWanted("f-t-decode-aaaaaaaa", "t", "decode", "aaaaaaaa", 2, 2, 2, most=hold.most)
    assert plan_replicas(pool, workers(gang("f-t-decode-aaaaaaaa-0")))[0] == []
    assert len(plan_replicas(pool, [])[0]) == 2
    over = offered(workers(gang("f-t-decode-aaaaaaaa-0")), found.memory, hold.until)
    assert (over.most, over.limited) == ({}, "")


def test_the_one_with_the_fewest_nodes_is_given_back_first():
    three = [one for name, placed in (("a", 2), ("b", 1), ("c", 2)) for one in gang(name, size=3, placed=placed)]
    found = offered(replicas_of(three, (3, 3)))
    assert [one.name for one in found.gone] == ["b", "b-1", "b-2"]
    (hold,) = found.memory.holds
    assert hold.most == 2


@pytest.mark.parametrize(
    ("going", "until"), [("uid-d", NOW + SETTLE_S), ("uid-d-1", NOW + SETTLE_S), ("uid-one", 7.0), ("", 7.0)]
)
def test_nodes_change_hands_when_a_worker_of_several_is_told_to_go(going: str, until: float):
    there = [*workers(gang("d")), *replicas_of([pod("one", "prefill", 0, uid="uid-one")], (1, 1))]
    told = [PodGone("x", going, "")] if going else []
    assert settled(GangMemory(settle_until=7.0), told, there, NOW).settle_until == until


LEAVES: dict[str, Any] = {"leaving": "node n is cordoned"}
REFUSED = {("aaaaaaaa", "decode"): "Pod f-t-decode-aaaaaaaa-2-1: exceeded quota: pods"}


def test_what_a_quota_cut_short_is_tried_once_in_each_wait():
    """Beside a worker on a node that goes away its first pods were made and deleted in every pass."""
    mine = workers(gang("f-t-decode-aaaaaaaa-0"), gang("f-t-decode-aaaaaaaa-1", **LEAVES), gang("p", "prefill"))
    first = give_back({"aaaaaaaa": mine}, GangMemory(), WAIT_S, NOW, REFUSED)  # type: ignore[arg-type]
    then = give_back({"aaaaaaaa": mine}, first.memory, WAIT_S, NOW + WAIT_S - 1)
    again = give_back({"aaaaaaaa": mine}, then.memory, WAIT_S, NOW + WAIT_S - 1, REFUSED)  # type: ignore[arg-type]
    for found, until in ((first, NOW + WAIT_S), (then, NOW + WAIT_S), (again, NOW + 2 * WAIT_S - 1)):
        assert [(hold.role, hold.until) for hold in found.memory.holds] == [("decode", until)]
        assert found.limited.startswith(REFUSED["aaaaaaaa", "decode"])
        pool = PoolWanted("f-t-decode-aaaaaaaa", "t", "decode", "aaaaaaaa", 2, 2, 2, most=found.most["aaaaaaaa", "decode"])
        assert plan_replicas(pool, [one for one in mine if one.role == "decode"]) == ([], [])
    assert give_back({"aaaaaaaa": mine}, again.memory, WAIT_S, NOW + 2 * WAIT_S - 1).most == {}


def test_none_is_made_in_the_place_of_one_that_was_given_back_beside_one_on_a_node_that_goes_away():
    """That one counted: the worker was made again at once, and took back what it had given."""
    half, now = gang("f-t-decode-aaaaaaaa-1", placed=1), WAIT_S * (1 + SPREAD)
    found = offered(workers(gang("f-t-decode-aaaaaaaa-0", **LEAVES), half, gang("p", "prefill")))
    (hold,) = found.memory.holds
    assert (hold.most, hold.until) == (0, now + WAIT_S)


def test_capacity_counts_workers_and_what_halves_would_make_whole():
    some = workers(gang("a"), gang("b", placed=1), gang("c", placed=1))
    seen = as_pods(some, GangMemory(), WAIT_S, 10 * WAIT_S)
    assert [(one.name, one.unschedulable) for one in seen] == [("a", False), ("b", False), ("c", True)]
    assert "1 of its 2 pods have one: 0/4 nodes: no gpu" in seen[2].message
    quiet = as_pods(some, GangMemory(settle_until=10 * WAIT_S + SETTLE_S), WAIT_S, 10 * WAIT_S)
    assert not any(one.unschedulable for one in quiet)
    two = workers(gang("d", placed=1), gang("p", "prefill", placed=1))
    halves = as_pods(two, GangMemory(), WAIT_S, 10 * WAIT_S)
    assert [one.unschedulable for one in halves] == [True, True], "a node of one role makes none of the other whole"


def test_a_clock_that_was_set_back_lets_halves_be_given_back():
    """For an hour none was, and none was told to find no node."""
    half, now = workers(gang("d", placed=1)), 10 * WAIT_S
    memory = GangMemory(settle_until=now + 3600.0)
    assert len(offered(half, memory, now).gone) == 2
    assert [one.unschedulable for one in as_pods(half, memory, WAIT_S, now)] == [True]


def test_workers_differ_in_their_patience():
    """Else two fleets would give back and try again in step for ever."""
    seen = as_pods(workers(gang("a", placed=1), gang("b", placed=1), gang("c", placed=1)), GangMemory(), WAIT_S, 0.0)
    waits = {one.created_at for one in seen}
    assert len(waits) == 3
    assert all(0 <= wait <= SPREAD * WAIT_S for wait in waits)


# -- no deadlock ----------------------------------------------------------------------------------------------------------
class Cluster:
    """Nodes with room for one pod each, some fleets that know nothing of each other, and a scheduler that picks as it is told."""

    def __init__(self, fleets: int, nodes: int, picks: list[int]) -> None:
        self.nodes = [f"n{number}" for number in range(nodes)]
        self.picks = picks
        self.now = NOW
        self.serial = 0
        spec = {"ratio": {"decode": 1}, "prefill": {"maxReplicas": 1}, "decode": {"maxReplicas": 1}}
        self.fleets = [fleet(**spec) for _ in range(fleets)]
        self.seen = [start(nodes=(1, 2)) for _ in range(fleets)]

    def step(self) -> None:
        """Ten seconds: every operator plans, then the scheduler places one pod, then what was told to go is gone."""
        self.now += 10
        for number, wish in enumerate(self.fleets):
            self.operate(number, wish)
        self.schedule()
        self.seen = [self.settled(observed) for observed in self.seen]

    def operate(self, number: int, wish: InferenceFleet) -> None:
        observed = self.seen[number]
        plan = reconcile(wish.model_copy(update={"status": FleetStatus()}), observed, self.now)
        for target in plan.targets:
            if target.state == "serving":
                worker = [one for one in observed.pods if target.uid in (one.uid, one.group)]
                assert len(worker) == (2 if target.role == "decode" else 1)
                assert all(one.ready for one in worker)
        gone = {one.uid for one in plan.delete}
        pods = [replace(one, terminating=one.terminating or one.uid in gone) for one in observed.pods]
        pods = [replace(one, ready=one.ready and not one.terminating) for one in pods]
        leaders: dict[str, str] = {}
        for wanted in plan.create:
            self.serial += 1
            uid, group = f"uid-{number}-{self.serial}", f"{wanted.pool}-{wanted.ordinal}"
            leaders.setdefault(group, uid)
            own = {"member": wanted.member, "group": leaders[group] if wanted.member else "", "created_at": self.now}
            free = {"node": "cpu", "phase": "Running", "ready": True} if wanted.role == "prefill" else STUCK
            pods.append(pod(wanted.name, wanted.role, wanted.ordinal, uid=uid, **{**own, **free}))
        pools = tuple(
            ObservedPool(p.name, p.name, p.role, p.tier, p.revision, p.replicas, p.replicas, p.size) for p in plan.pools
        )
        stored = {"t": {"aaaaaaaa": observed.templates["t"]}}
        changed = {"pods": tuple(pods), "pools": pools, "memory": plan.memory, "router": RouterView(1, 1), "stored": stored}
        self.seen[number] = replace(observed, **changed)

    def schedule(self) -> None:
        """One pod gets a node: which one is the adversary's to say."""
        held = {one.node for observed in self.seen for one in observed.pods}
        free = [node for node in self.nodes if node not in held]
        waiting = [one for observed in self.seen for one in observed.pods if one.node is None and not one.terminating]
        if free and waiting:
            self.serial += 1
            picked = waiting[self.picks[self.serial % len(self.picks)] % len(waiting)].uid
            change = {"node": free[0], "unschedulable": False, "scheduled_at": self.now}
            self.seen = [
                replace(o, pods=tuple(replace(p, **change) if p.uid == picked else p for p in o.pods)) for o in self.seen
            ]

    def settled(self, observed: Observed) -> Observed:
        pods = [one for one in observed.pods if not one.terminating]
        ready = {worker.leader.uid for worker in replicas_of(pods, (1, 2)) if worker.size == 2 and worker.placed == 2}
        on = {"phase": "Running", "ready": True}
        return replace(observed, pods=tuple(replace(p, **on) if {p.uid, p.group} & ready else p for p in pods))

    def whole(self) -> int:
        """Decode workers that serve or could."""
        return sum(worker.ready and worker.size == 2 for o in self.seen for worker in replicas_of(o.pods, (1, 2)))


@settings(max_examples=25, deadline=None)
@given(fleets=st.integers(2, 4), nodes=st.integers(2, 5), seed=st.integers(0, 2**32))
def test_workers_of_fleets_that_know_nothing_of_each_other_become_whole(fleets: int, nodes: int, seed: int):
    """With a scheduler that places pods in any order, but passes nobody over for ever: within some rounds as many workers are
    whole as the nodes can hold. (One that always chooses the wrong pod can be beaten by nobody without a PodGroup.)"""
    cluster = Cluster(fleets, nodes, random.Random(seed).choices(range(840), k=997))
    most = min(fleets, nodes // 2)
    for _ in range(1_500):
        cluster.step()
        if cluster.whole() == most:
            return
    raise AssertionError(f"{cluster.whole()} of {most} workers are whole after {cluster.now - NOW:.0f} s")


def test_the_adversary_really_makes_halves():
    """Else the test above would prove nothing."""
    cluster = Cluster(2, 2, [0])
    cluster.picks = [0, 1, 2, 3, 2, 1]
    halves = 0
    for _ in range(40):
        cluster.step()
        partial = [w for o in cluster.seen for w in replicas_of(o.pods, (1, 2)) if w.size == 2 and w.placed == 1]
        halves = max(halves, len(partial))
    assert halves == 2


def test_what_waits_in_a_queue_is_told_and_not_backed_out_of():
    wish = fleet(ratio={"decode": 1}, placement={"queue": "gpus"})
    gated = {"node": None, "ready": False, "phase": "Pending", "gated": True}
    pods = [one for name, role in (("p", "prefill"), ("d", "decode")) for one in gang(name, role, **gated)]  # type: ignore[arg-type]
    observed = replace(start(nodes=(2, 2)), pods=tuple(pods), router=RouterView(1, 1))
    plan = reconcile(wish, observed, NOW + 100 * WAIT_S)
    limited = plan.status.condition("CapacityLimited")
    assert limited is not None
    assert (limited.status, limited.reason, limited.message) == ("True", "Queued", "tier t: 2 workers wait in queue gpus: p, d")
    assert plan.delete == ()


def test_what_cannot_be_whole_is_backed_out_of_together_with_what_it_strands():
    """Two prefill workers are there for eight decode workers of two nodes; of these five are whole, one has half of its nodes."""
    ratio = {"prefill": 1, "decode": 4, "min": "1:4", "max": "1:4"}
    wish = fleet(ratio=ratio, prefill={"maxReplicas": 2}, decode={"minReplicas": 4, "maxReplicas": 8})
    decode = [gang(f"f-t-decode-aaaaaaaa-{n}", placed=2 if n < 5 else 1 if n == 5 else 0) for n in range(8)]
    prefill = [pod(f"f-t-prefill-aaaaaaaa-{n}", "prefill", n) for n in range(2)]
    pools = tuple(
        ObservedPool(f"f-t-{role}-aaaaaaaa", role, role, "t", "aaaaaaaa", size, size, size)
        for role, size in (("prefill", 2), ("decode", 8))
    )
    seen = replace(start(nodes=(1, 2)), pods=tuple([*prefill, *(one for group in decode for one in group)]), pools=pools)
    plan = reconcile(wish, seen, NOW + 10 * WAIT_S)
    assert {pool.role: pool.replicas for pool in plan.pools} == {"prefill": 1, "decode": 4}
    limited = plan.status.condition("CapacityLimited")
    assert limited is not None
    assert (limited.status, limited.reason) == ("True", "BackedOut")
    assert "0/4 nodes: no gpu" in limited.message
    gone = {one.name for one in plan.delete}
    assert len(gone) == 1 + 4 * 2
    assert {f"f-t-decode-aaaaaaaa-{n}{member}" for n in (5, 6, 7) for member in ("", "-1")} <= gone


def test_what_was_backed_out_of_is_not_made_again_while_nodes_change_hands():
    """Incident: while some workers terminated none was told to find no node, so that those without one counted as room: two were
    made and deleted again, every half a minute, for as long as a worker of one pod found no node beside them."""
    wish = fleet(ratio={"prefill": 1, "decode": 6, "min": "1:8", "max": "1:1"}, decode={"maxReplicas": 6})
    prefix, lost = "f-t-decode-aaaaaaaa", {"leaving": "node n is not ready", "ready": False}
    decode = [gang(f"{prefix}-{n}", **(lost if n < 2 else STUCK), created_at=0.0) for n in range(8)]
    prefill = [pod("f-t-prefill-aaaaaaaa-0", "prefill", 0, **lost), pod("f-t-prefill-aaaaaaaa-1", "prefill", 1, **STUCK)]
    seen = replace(start(nodes=(1, 2)), pods=tuple([*prefill, *(one for group in decode for one in group)]))
    sizes = []
    for number in range(12):
        plan = reconcile(wish, seen, NOW + 10 * WAIT_S + 10 * number)
        sizes.append({pool.role: pool.replicas for pool in plan.pools}["decode"])
        assert not plan.create
        gone = {one.uid for one in plan.delete}
        pods = [replace(one, terminating=one.uid in gone) for one in seen.pods if not one.terminating]
        pools = tuple(
            ObservedPool(p.name, p.name, p.role, "t", p.revision, p.replicas, p.replicas, p.size, p.wish) for p in plan.pools
        )
        seen = replace(seen, pods=tuple(pods), pools=pools, memory=plan.memory)
    assert set(sizes) == {2}
