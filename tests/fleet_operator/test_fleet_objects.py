"""The cache: whatever order news arrive in, the newest stands, and what is gone stays gone."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_operator.cached import cached
from fleet_operator.cluster.interface import CONFIG_MAP, DEPLOYMENT, FLEET, PDB, POD, Kind, WatchEvent
from fleet_operator.fleet_objects import GONE_MOST, FleetObjects
from fleet_operator.names import FLEET as FLEET_LABEL

KEY = ("ml", "f")


def obj(version: int | str, uid: str = "u1", kind: Kind = POD, name: str = "p") -> dict[str, Any]:
    """Another content with every version."""
    meta: dict[str, Any] = {"name": name, "namespace": "ml", "uid": uid, "resourceVersion": str(version)}
    if kind != FLEET:
        meta["labels"] = {FLEET_LABEL: "f"}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "spec": {"at": str(version)}}


def versions(cache: FleetObjects) -> list[str]:
    return [child["metadata"]["resourceVersion"] for child in cache.children(KEY).values()]


@pytest.mark.parametrize(
    ("events", "left", "news"),
    [
        ([("ADDED", obj(1)), ("MODIFIED", obj(2))], ["2"], [True, True]),
        ([("MODIFIED", obj(10)), ("MODIFIED", obj(9))], ["10"], [True, False]),
        ([("ADDED", obj(3)), ("ADDED", obj(3))], ["3"], [True, False]),
        ([("ADDED", obj(1)), ("DELETED", obj(2))], [], [True, True]),
        ([("DELETED", obj(5)), ("MODIFIED", obj(4))], [], [False, False]),
        ([("ADDED", obj(1)), ("ADDED", obj(7, "u2")), ("DELETED", obj(6))], ["7"], [True, True, False]),
        ([("ADDED", obj("a")), ("ADDED", obj("b")), ("ADDED", obj("b"))], ["b"], [True, True, False]),
    ],
    ids=["newer", "older", "again", "deleted", "answer-after-deletion", "made-anew", "versions-that-are-no-numbers"],
)
def test_old_news_never_replaces_newer(events: list[tuple[Any, dict[str, Any]]], left: list[str], news: list[bool]):
    cache = FleetObjects()
    assert [cache.take(POD, WatchEvent(kind, one)) is not None for kind, one in events] == news
    assert versions(cache) == left


def test_of_a_fleet_that_is_gone_nothing_is_kept():
    """An end that was told twice, or news of what is gone, left an empty place per fleet behind."""
    cache = FleetObjects()
    for kind, version in (("ADDED", 1), ("DELETED", 2), ("DELETED", 2), ("MODIFIED", 1)):
        cache.take(POD, WatchEvent(kind, obj(version)))  # type: ignore[arg-type]
    assert (cache._children, cache._where) == ({}, {})


@given(st.permutations([("ADDED", 1), ("MODIFIED", 2), ("MODIFIED", 3), ("MODIFIED", 3), ("DELETED", 4)]))
def test_a_deleted_object_is_gone_in_whatever_order_its_story_is_told(story: list[tuple[Any, int]]):
    cache = FleetObjects()
    for kind, version in story:
        cache.take(POD, WatchEvent(kind, obj(version)))
    assert versions(cache) == []


OLD_AND_NEW = [("ADDED", 1, "u1"), ("MODIFIED", 2, "u1"), ("MODIFIED", 3, "u1"), ("DELETED", 4, "u1"), ("ADDED", 7, "u2")]


@pytest.mark.parametrize("kind", [POD, FLEET], ids=["pod", "fleet"])
@given(story=st.permutations(OLD_AND_NEW))
def test_what_was_made_anew_stays_in_whatever_order_both_stories_are_told(kind: Kind, story: list[tuple[Any, int, str]]):
    """kopf keeps the order of one uid's events only: two late ones of a fleet that was deleted and made anew put the old one in
    the place of the new one and then took it away. The new one was looked after when the audit found it, up to 40 s later."""
    cache = FleetObjects()
    for event, version, uid in story:
        cache.take(kind, WatchEvent(event, obj(version, uid, kind)))
    left = cache.fleets.values() if kind == FLEET else cache.children(KEY).values()
    assert [found["metadata"]["uid"] for found in left] == ["u2"]


@pytest.mark.parametrize("label", [None, "g"])
@pytest.mark.parametrize("ending", ["MODIFIED", "DELETED"])
def test_what_lost_the_fleets_label_is_no_longer_of_the_fleet(ending: Any, label: str | None):
    """It stayed for ever: no later event was about this fleet, not even its end."""
    cache, taken = FleetObjects(), obj(2)
    cache.take(POD, WatchEvent("ADDED", obj(1)))
    taken["metadata"]["labels"] = {FLEET_LABEL: label} if label else {}
    assert cache.lost(POD, WatchEvent("MODIFIED", obj(1))) is None  # still of its fleet
    old = obj(0) | {"metadata": {**taken["metadata"], "resourceVersion": "0"}}
    assert cache.lost(POD, WatchEvent("MODIFIED", old)) is None  # old news
    assert cache.lost(POD, WatchEvent(ending, taken)) == KEY
    assert cache.lost(POD, WatchEvent(ending, taken)) is None
    cache.take(POD, WatchEvent("MODIFIED", obj(1)))
    assert versions(cache) == []  # and old news bring it back no more
    cache.take(POD, WatchEvent("MODIFIED", obj(3)))
    assert versions(cache) == ["3"]  # its label was given back


def test_objects_of_no_fleet_are_not_kept():
    cache, stranger = FleetObjects(), obj(1)
    del stranger["metadata"]["labels"]
    assert cache.take(POD, WatchEvent("ADDED", stranger)) is None


def test_a_fleet_without_children_takes_no_memory():
    cache = FleetObjects()
    for number in range(3):
        cache.take(POD, WatchEvent("ADDED", obj(1, f"u{number}", name=f"p{number}")))
    for number in range(3):
        cache.take(POD, WatchEvent("DELETED", obj(2, f"u{number}", name=f"p{number}")))
    cache.take(FLEET, WatchEvent("ADDED", obj(1, "f", FLEET, "f")))
    cache.take(FLEET, WatchEvent("DELETED", obj(2, "f", FLEET, "f")))
    assert cache._children == {}
    assert cache.fleets == {}


def test_what_is_remembered_of_deletions_is_bounded():
    cache = FleetObjects()
    for number in range(GONE_MOST + 10):
        cache.take(POD, WatchEvent("DELETED", obj(1, f"u{number}")))
    assert len(cache._gone) == GONE_MOST


def test_a_pass_keeps_what_it_began_with():
    cache = FleetObjects()
    cache.take(POD, WatchEvent("ADDED", obj(1)))
    before = cache.children(KEY)
    cache.take(POD, WatchEvent("DELETED", obj(2)))
    assert len(before) == 1
    assert cache.children(KEY) == {}


# -- what is kept of an object ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("host_network", [False, True], ids=["own-network", "host-network"])
def test_pods_are_kept_without_what_nobody_reads_and_the_event_is_left_alone(host_network: bool):
    pod = obj(1)
    pod["metadata"]["managedFields"] = [{"manager": "x"}]
    ports = [{"name": "agent", "containerPort": 9000}]
    worker = {"name": "worker", "ports": ports, "env": [{"name": "A"}]}
    read = {"nodeName": "n", "hostNetwork": host_network, "resourceClaims": [{"name": "gpu"}]}
    pod["spec"] = {"containers": [worker], "volumes": [], **read}
    pod["status"] = {"podIP": "10.0.0.1"}
    before = repr(pod)
    kept = cached(POD, pod)
    assert kept["spec"] == (read | {"containers": [{"name": "worker", "ports": ports}]} if host_network else read)
    assert kept["status"] == {"podIP": "10.0.0.1"}
    assert "managedFields" not in kept["metadata"]
    assert repr(pod) == before


@pytest.mark.parametrize("kind", [CONFIG_MAP, FLEET], ids=["ConfigMap", "InferenceFleet"])
def test_everything_else_is_kept_whole_because_wishes_are_compared_with_it(kind: Kind):
    whole = {**obj(1, kind=kind), "data": {"a": ["b", {"c": 1}]}, "spec": {"containers": [1], "volumes": {"x": 2}}}
    assert cached(kind, whole) == whole


def test_names_of_fields_are_shared():
    names = [
        key for number in range(2) for key in cached(POD, {**obj(number), "status": {"".join(["pod", "IP"]): "x"}})["status"]
    ]
    assert names[0] is names[1] is sys.intern("podIP")


def test_what_a_list_leaves_out_is_added():
    item = obj(1)
    del item["apiVersion"], item["kind"]
    assert (cached(POD, item)["apiVersion"], cached(POD, item)["kind"]) == ("v1", "Pod")


# -- what was asked to go ---------------------------------------------------------------------------------------------
def test_what_was_asked_to_go_is_leaving_until_the_watch_says_that_it_is_gone():
    cache = FleetObjects()
    cache.take(POD, WatchEvent("ADDED", obj(1)))
    assert cache.mark_leaving(POD, "p", "u1", "now") == KEY
    assert [child["metadata"].get("deletionTimestamp") for child in cache.children(KEY).values()] == ["now"]
    assert cache.mark_leaving(POD, "p", "u1", "later") is None
    assert cache.mark_leaving(POD, "other", "u2", "now") is None
    assert cache.mark_leaving(POD, "p", None, "now") is None
    cache.take(POD, WatchEvent("MODIFIED", obj(2)))  # the server's own word stands above ours
    assert "deletionTimestamp" not in next(iter(cache.children(KEY).values()))["metadata"]
    cache.take(POD, WatchEvent("DELETED", obj(3)))
    assert cache.children(KEY) == {}


def test_what_has_its_name_by_the_time_of_the_answer_is_not_leaving():
    """Nobody would have said otherwise until that one changed: its worker was believed to go, and another made in its place."""
    cache = FleetObjects()
    cache.take(POD, WatchEvent("ADDED", obj(1, "old")))
    cache.take(POD, WatchEvent("DELETED", obj(2, "old")))
    cache.take(POD, WatchEvent("ADDED", obj(3, "new")))
    assert cache.mark_leaving(POD, "p", "old", "now") is None
    assert ["deletionTimestamp" in child["metadata"] for child in cache.children(KEY).values()] == [False]


def test_fleets_on_a_node():
    cache = FleetObjects()
    pod = obj(1)
    pod["spec"]["nodeName"] = "n1"
    cache.take(POD, WatchEvent("ADDED", pod))
    assert (cache.fleets_on({"n1"}), cache.fleets_on({"n2"}), cache.fleets_on(set())) == ([KEY], [], [])


@pytest.mark.parametrize(
    ("kind", "part", "news"),
    [(PDB, "status", False), (DEPLOYMENT, "status", True), (POD, "status", True), (PDB, "spec", True)],
    ids=["budget-status", "deployment-status", "pod-status", "budget-spec"],
)
def test_a_change_of_what_nobody_reads_is_no_news(kind: Kind, part: str, news: bool):
    cache, before, after = FleetObjects(), obj(1, kind=kind), obj(1, kind=kind)
    cache.take(kind, WatchEvent("ADDED", before))
    after["metadata"]["resourceVersion"] = "2"
    after[part] = {"currentHealthy": 4}
    assert (cache.take(kind, WatchEvent("MODIFIED", after)) is not None) is news
    assert versions(cache) == ["2"]
