"""Pods that fetched, or failed to, as records of what nodes have: what counts, what is tried again, what goes."""

from __future__ import annotations

from dataclasses import replace

from fleet_planner.prefetch import BEGIN_S, RETRY_S, plan_prefetch
from tests.fleet_planner.test_prefetch import NOW, fetching, fleet, seen


def test_a_failure_is_told_tried_again_later_and_waited_for_by_nobody():
    failed = fetching("n1", "Failed", message="BadModel: the disk is too small")
    found = plan_prefetch(fleet(), seen("n1", "n2", fetching=(failed, fetching("n2", "Succeeded"))), NOW)
    assert (found.create, found.delete, found.waiting) == ((), (), frozenset())
    assert found.verdict == (
        "False", "PrefetchFailed", "1 of 2 nodes have the model; node n1: BadModel: the disk is too small",
    )  # fmt: skip
    later = plan_prefetch(fleet(), seen("n1", fetching=(failed,)), failed.created_at + RETRY_S)
    assert [gone.name for gone in later.delete] == [failed.name]


def test_a_pod_without_a_place_is_a_failure_in_time():
    stuck = fetching("n1", "Pending")
    assert plan_prefetch(fleet(), seen("n1", fetching=(stuck,)), NOW).waiting == {"t"}
    late = plan_prefetch(fleet(), seen("n1", fetching=(stuck,)), NOW + RETRY_S)
    assert (late.waiting, late.verdict) == (
        frozenset(), ("False", "PrefetchFailed", "0 of 1 nodes have the model; node n1: no place was found for its pod"),
    )  # fmt: skip


def test_a_pod_whose_image_is_pulled_has_not_failed():
    """After 120 s it was deleted, which ends its pull, made again, and ModelCached said that no place was found for it."""
    pulling = fetching("n1", "Pending", placed=True)
    late = plan_prefetch(fleet(prefetch={"wait": "1h"}), seen("n1", fetching=(pulling,)), NOW + 10 * RETRY_S)
    assert (late.delete, late.waiting, late.verdict) == ((), {"t"}, ("False", "Prefetching", "0 of 1 nodes have the model"))
    hopeless = plan_prefetch(fleet(), seen("n1", fetching=(pulling,)), pulling.created_at + BEGIN_S)
    assert ([gone.name for gone in hopeless.delete], hopeless.verdict) == (
        [pulling.name], ("False", "PrefetchFailed", "0 of 1 nodes have the model; node n1: its pod did not begin within 1800 s"),
    )  # fmt: skip
    refused = replace(pulling, message='Back-off pulling image "x"')
    told = plan_prefetch(fleet(), seen("n1", fetching=(refused,)), NOW + RETRY_S)
    assert told.verdict == ("False", "PrefetchFailed", '0 of 1 nodes have the model; node n1: Back-off pulling image "x"')


def test_records_of_other_models_and_lost_nodes_go():
    old, gone = fetching("n1", "Succeeded", key="0ld", name="old"), fetching("lost", "Succeeded")
    found = plan_prefetch(fleet(), seen("n1", fetching=(old, gone, fetching("n1", "Succeeded"))), NOW)
    assert {one.name: one.reason for one in found.delete} == {"old": "another model is served", gone.name: "its node is gone"}


def test_a_node_that_was_made_anew_has_nothing():
    """A machine was replaced under its name: the pod that had fetched for the one before said that the model was there."""
    done = fetching("n1", "Succeeded")
    anew = seen("n1", fetching=(replace(done, outlived=True),))
    found = plan_prefetch(fleet(), anew, NOW)
    assert [(gone.name, gone.reason) for gone in found.delete] == [(done.name, "its node was made anew")]
    assert (found.create, found.waiting, found.verdict) == ((), {"t"}, ("False", "Prefetching", "0 of 1 nodes have the model"))
    going = replace(anew, fetching=(replace(done, outlived=True, terminating=True),))
    assert plan_prefetch(fleet(), going, NOW).create == (), "its name is taken until it is gone"
    assert [wanted.node for wanted in plan_prefetch(fleet(), replace(anew, fetching=()), NOW).create] == ["n1"]
    assert plan_prefetch(fleet(), seen("n1", fetching=(done,)), NOW).verdict == ("True", "Cached", "1 of 1 nodes have the model")
