"""The tools of the fault family: the same seed makes the same choices, a path is read rightly, equal fleets are equal."""

from __future__ import annotations

import json

import pytest

from e2e.faultproxy.faults import Answer, Crash, Dice, EventFault
from e2e.faultproxy.generate import fleets
from e2e.faultproxy.lab import fleet_manifest
from e2e.faultproxy.ledger import Ledger, where
from e2e.faultproxy.state import comparable, differences

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/api/v1/namespaces/n/pods", ("pods", "n", "", "")),
        ("/api/v1/namespaces/n/pods/p", ("pods", "n", "p", "")),
        ("/api/v1/pods", ("pods", "", "", "")),
        ("/api/v1/namespaces/n", ("namespaces", "", "n", "")),
        ("/apis/apps/v1/namespaces/n/deployments/d/status", ("deployments", "n", "d", "status")),
        ("/apis/inferencefleet.io/v1alpha1/inferencefleets", ("inferencefleets", "", "", "")),
        ("/version", ("", "", "", "")),
    ],
)
def test_where(path: str, found: tuple[str, str, str, str]):
    assert where(path) == found


def drawn(seed: int, names: list[str]) -> dict[str, list[float]]:
    dice, ledger, found = Dice(seed), Ledger(), {}
    for name in names:
        request = ledger.open("PATCH", ("pods", "n", name, ""), watch=False, agent="", body=None)
        found.setdefault(name, []).append(dice.draw(request))
        assert dice.draw(request) == found[name][-1]
    return found


def test_chance_follows_from_seed_request_and_occurrence_not_from_the_order():
    assert drawn(7, ["a", "b", "a", "b"]) == drawn(7, ["b", "b", "a", "a"])
    assert drawn(7, ["a"]) != drawn(8, ["a"])
    often = [value for values in drawn(3, [f"p{i}" for i in range(2_000)]).values() for value in values]
    assert 0.25 < sum(value < 0.3 for value in often) / 2_000 < 0.35


def test_a_crash_meets_the_kth_write_and_no_read():
    ledger, crash, killed = Ledger(), Crash(2, "before", lambda: None), []
    for number, method in enumerate(["GET", "PATCH", "GET", "DELETE", "POST"]):
        if crash.due(ledger.open(method, ("pods", "n", "p", ""), watch=False, agent="", body=None)):
            killed.append(number)
    assert killed == [3]


def test_an_answer_is_for_what_it_names_and_while_it_lasts():
    request = Ledger().open("POST", ("pods", "n", "", ""), watch=False, agent="", body=None)
    assert Answer(500).applies(request, lambda _: 0.99)
    assert not Answer(500, only=lambda r: r.kind == "events").applies(request, lambda _: 0.0)
    assert not Answer(500, probability=0.3).applies(request, lambda _: 0.3)
    assert not Answer(500, until_s=0.0).applies(request, lambda _: 0.0)


def test_an_event_fault_counts_what_it_meets():
    fault = EventFault("drop", "pods", lambda name: name.startswith("a"), frozenset({"DELETED"}), count=1)
    seen = [("pods", "ADDED", "a"), ("pods", "DELETED", "b"), ("services", "DELETED", "a"), ("pods", "DELETED", "a"),
            ("pods", "DELETED", "a")]  # fmt: skip
    assert [fault.applies(*event) for event in seen] == [False, False, False, True, False]
    assert fault.done == ["DELETED pods/a"]


def test_generated_fleets_are_the_same_for_a_seed_and_can_be_sent():
    base = fleet_manifest("n")
    one, two = list(fleets(5, 200, base)), list(fleets(5, 200, base))
    assert one == two
    assert one != list(fleets(6, 200, base))
    assert base == fleet_manifest("n")
    for fleet, touched in one:
        assert touched
        json.dumps(fleet, allow_nan=False)


def a_pod(uid: str, ip: str, name: str = "f-t-decode-1") -> dict:
    meta = {
        "name": name,
        "uid": uid,
        "resourceVersion": uid,
        "labels": {"a": "b"},
        "ownerReferences": [{"name": "o", "uid": "x" + uid}],
    }
    return {"kind": "Pod", "apiVersion": "v1", "metadata": meta, "spec": {"nodeName": uid}, "status": {"podIP": ip}}


def test_equal_fleets_are_equal_and_others_say_where_they_differ():
    def world(uid: str, ip: str, label: str = "b") -> dict:
        pod = a_pod(uid, ip)
        pod["metadata"]["labels"]["a"] = label
        endpoints = {"kind": "ConfigMap", "metadata": {"name": "r", "uid": uid * 2}, "data": {"e": json.dumps({"w": [uid, ip]})}}
        return comparable({("Pod", "f-t-decode-1"): pod, ("ConfigMap", "r"): endpoints})

    assert differences(world("u-1", "10.0.0.1"), world("u-2", "10.0.0.17")) == []
    (line,) = differences(world("u-1", "10.0.0.1"), world("u-1", "10.0.0.1", label="c"))
    assert line == 'Pod/f-t-decode-1.metadata.labels.a: "b" != "c"'


def test_the_busiest_window_is_found():
    ledger = Ledger()
    for at in (0.0, 0.2, 5.0, 5.1, 5.9, 6.05):
        ledger.open("PATCH", ("pods", "n", "p", ""), watch=False, agent="", body=None).at_s = at
    assert ledger.busiest(ledger.requests, 1.0) == 3
