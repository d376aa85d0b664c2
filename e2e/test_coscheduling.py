"""placement.podGroup coscheduling with a real kube-scheduler of scheduler-plugins: all pods of a worker get a node, or none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e import gang_schedulers as ask
from e2e.gang_schedulers import GangFleet, Gangs, operator_of
from e2e.kube.controlplane import ControlPlane
from e2e.kube.sched_plugins import SCHEDULER, sched_plugins

pytestmark = pytest.mark.timeout(590)


@pytest.fixture(scope="module")
def gangs() -> Iterator[Gangs]:
    """With a second scheduler; routers and prefill workers stay with Kubernetes' own."""
    with ControlPlane() as plane:
        plane.install_crds()
        with sched_plugins(plane), operator_of(plane, "coscheduling") as operator:
            yield Gangs(plane, operator, "coscheduling", SCHEDULER)


@pytest.fixture
def fleet(gangs: Gangs) -> GangFleet:
    return gangs.fleet()


def test_a_worker_that_fits_is_placed_whole(fleet: GangFleet):
    ask.a_worker_that_fits_is_placed_whole(fleet)


def test_a_worker_without_all_of_its_nodes_has_none(fleet: GangFleet):
    ask.a_worker_without_all_of_its_nodes_has_none(fleet)


def test_two_workers_that_need_what_the_other_holds_do_not_deadlock(gangs: Gangs, fleet: GangFleet):
    ask.two_workers_that_need_what_the_other_holds_do_not_deadlock(fleet, gangs.fleet())


def test_a_worker_that_is_backed_out_of_leaves_no_group(fleet: GangFleet):
    ask.a_worker_that_is_backed_out_of_leaves_no_group(fleet)


def test_a_group_that_is_deleted_under_a_running_worker_does_not_matter(fleet: GangFleet):
    ask.a_group_that_is_deleted_under_a_running_worker_does_not_matter(fleet)


def test_a_group_that_is_deleted_under_a_waiting_worker_comes_back(fleet: GangFleet):
    ask.a_group_that_is_deleted_under_a_waiting_worker_comes_back(fleet)
