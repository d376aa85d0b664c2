"""What `placement.podGroup` promises, with a real kube-scheduler of scheduler-plugins and with a real Volcano: all pods of a
worker get a node, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from e2e.gang_schedulers import GangFleet, Gangs, operator_of
from e2e.kube.controlplane import ControlPlane
from e2e.kube.sched_plugins import SCHEDULER, sched_plugins
from e2e.kube.volcano import volcano

pytestmark = pytest.mark.timeout(590)
SCHEDULERS: dict[str, tuple[Callable[[ControlPlane], AbstractContextManager[object]], str | None]] = {
    "coscheduling": (sched_plugins, SCHEDULER),  # a second scheduler, which pods name
    "volcano": (volcano, None),  # pods of its PodGroups name it by themselves
}


@pytest.fixture(scope="module", params=list(SCHEDULERS))
def gangs(request: pytest.FixtureRequest) -> Iterator[Gangs]:
    """Routers and prefill workers stay with Kubernetes' own scheduler."""
    run, scheduler = SCHEDULERS[request.param]
    with ControlPlane() as plane:
        plane.install_crds()
        with run(plane), operator_of(plane, request.param) as operator:
            yield Gangs(plane, operator, request.param, scheduler)


@pytest.fixture
def fleet(gangs: Gangs) -> GangFleet:
    return gangs.fleet()


def test_a_worker_that_fits_is_placed_whole(fleet: GangFleet):
    """Its PodGroup asks for all of its pods, and goes with the fleet."""
    fleet.start(nodes=2)
    for number in range(2):
        fleet.add_node(number)
    fleet.wait_serving(1, 1)
    assert fleet.bound() == [2]
    ((name, group),) = fleet.groups().items()
    assert name in fleet.workers()
    assert group["spec"]["minMember"] == 2
    schedulers = {pod["spec"]["schedulerName"] for pod in fleet.pods("decode")}
    assert schedulers == {fleet.gangs.scheduler or fleet.gangs.pod_group}
    fleet.delete_and_leave_no_group()


def test_a_worker_without_all_of_its_nodes_has_none(fleet: GangFleet):
    """The fleet says what is missing; the same pods are placed when the node comes."""
    fleet.start(nodes=3)
    for number in range(2):
        fleet.add_node(number)
    fleet.wait("the scheduler found no place for any of them", lambda: fleet.refused(3))
    fleet.wait("the fleet says so", lambda: fleet.capacity() == ("True", "Unschedulable"), 60)
    assert fleet.bound() == [0]
    ((name, _),) = fleet.workers().items()
    assert f"{name} has 0 of its 3 nodes" in fleet.condition("CapacityLimited")["message"]
    before = fleet.uids()
    assert fleet.condition("Ready")["status"] == "False"

    fleet.add_node(2)
    fleet.wait_serving(1, 1)
    assert fleet.bound() == [3]
    assert fleet.uids() == before
    fleet.wait("nothing is limited", lambda: fleet.capacity()[0] == "False", 30)
    fleet.delete_and_leave_no_group()


def test_two_workers_that_need_what_the_other_holds_do_not_deadlock(gangs: Gangs):
    """Both wait when nodes come for one of them. Placed pod by pod the other would hold a node, too, or each two of them."""
    fleets = (one := gangs.fleet(), gangs.fleet())
    for fleet in fleets:
        fleet.start(nodes=3, block=one.namespace)
    one.wait("neither has a place", lambda: all(fleet.refused(3) for fleet in fleets))
    for number in range(4):
        one.add_node(number)
    one.wait("one has all of its nodes", lambda: sorted(fleet.bound() for fleet in fleets) == [[0], [3]])
    winner, loser = sorted(fleets, key=GangFleet.bound, reverse=True)
    winner.wait_serving(1, 1)
    loser.wait("the other says what it lacks", lambda: loser.capacity() == ("True", "Unschedulable"), 60)
    assert loser.bound() == [0]
    winner.delete_and_leave_no_group()
    loser.wait_serving(1, 1)
    assert loser.bound() == [3]
    loser.delete_and_leave_no_group()


def test_a_worker_that_is_backed_out_of_leaves_no_group(fleet: GangFleet):
    """One more than there are nodes for goes after capacityWait."""
    fleet.start(nodes=2)
    for number in range(3):
        fleet.add_node(number)
    fleet.wait_serving(1, 1)
    first = set(fleet.groups())
    fleet.grow()
    fleet.wait("the second waits", lambda: fleet.bound() == [0, 2] and len(fleet.groups()) == 2, 60)
    fleet.wait("it goes, and its PodGroup", lambda: set(fleet.workers()) == first == set(fleet.groups()), 90)
    assert fleet.serving() == (1, 1)
    fleet.add_node(3)
    fleet.wait("two that are placed", lambda: asked_for_another(fleet) and fleet.bound() == [2, 2])
    fleet.wait_serving(1, 2)
    fleet.delete_and_leave_no_group()


def asked_for_another(fleet: GangFleet) -> bool:
    """Once more: what is asked for within capacityWait of the last try is not tried."""
    fleet.grow()
    return True


def test_a_group_that_is_deleted_under_a_running_worker_does_not_matter(fleet: GangFleet):
    """Nothing of it restarts; it is there again with the worker's next life."""
    fleet.start(nodes=2)
    for number in range(4):
        fleet.add_node(number)
    fleet.wait_serving(1, 1)
    (name,) = fleet.groups()
    before = fleet.uids()
    fleet.forget_group(name)
    fleet.grow()
    fleet.wait_serving(1, 2)
    assert before < fleet.uids()

    fleet.kubectl("delete", "pod", f"{name}-1", "--force", "--grace-period=0")
    fleet.wait("both of its pods are new", lambda: len(fleet.uids()) == 4 and before.isdisjoint(fleet.uids()), 60)
    fleet.wait("all have a node", lambda: fleet.bound() == [2, 2], 60)
    assert set(fleet.groups()) == set(fleet.workers())
    fleet.wait_serving(1, 2)
    fleet.delete_and_leave_no_group()


def test_a_group_that_is_deleted_under_a_waiting_worker_comes_back(fleet: GangFleet):
    """Without it the scheduler would refuse its pods for ever, whatever nodes there are."""
    fleet.start(nodes=2)
    fleet.add_node(0)
    fleet.wait("the scheduler found no place for any of them", lambda: fleet.refused(2))
    (name,) = fleet.groups()
    gone = fleet.groups()[name]["metadata"]["uid"]
    fleet.forget_group(name)
    fleet.wait("another is in its place", lambda: {one["metadata"]["uid"] for one in fleet.groups().values()} - {gone} != set())
    before = fleet.uids()
    assert fleet.bound() == [0]
    fleet.add_node(1)
    fleet.wait_serving(1, 1)
    assert fleet.uids() == before
    fleet.delete_and_leave_no_group()
