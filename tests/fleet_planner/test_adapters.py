"""Adapters in the plan: what workers are told, what routers may use, what the status and the events say."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import AdapterStatus, FleetStatus
from fleet_planner.adapters import adapter_statuses, adapters_loaded, usable, wishes
from fleet_planner.events import Pass, events_of
from fleet_planner.types import AdapterSeen, ObservedPod


def fleet(**model: Any) -> InferenceFleet:
    return InferenceFleet.model_validate(
        {
            "metadata": {"name": "f", "namespace": "n", "uid": "u"},
            "spec": {
                "model": {"source": "file:///models/tiny", **model},
                "tiers": [{"name": "t", "accelerator": {"type": "h100-sxm"}}],
            },
        }
    )


def adapter(name: str, source: str, **more: str) -> dict[str, str]:
    return {"name": name, "source": source, **more}


def pod(name: str, **changes: Any) -> ObservedPod:
    base: dict[str, Any] = {
        "name": name, "uid": f"u-{name}", "role": "decode", "tier": "t", "revision": "r", "ordinal": 0, "ip": "10.0.0.1",
        "node": "n1", "phase": "Running", "ready": True, "terminating": False, "created_at": 0.0, "ready_since": 0.0,
    }  # fmt: skip
    return ObservedPod(**{**base, **changes})


ROWS: dict[str, tuple[dict[str, Any], tuple[tuple[str, str], ...]]] = {
    "none": ({}, ()),
    "below-the-model": ({"adapters": [adapter("a", "file:///models/tiny/x/a")]}, (("a", "x/a"),)),
    "below-a-root": (
        {"adapterRoot": "file:///srv", "adapters": [adapter("b", "file:///srv/b"), adapter("a", "file:///srv/c/d")]},
        (("a", "c/d"), ("b", "b")),
    ),
    "in-a-claim": ({"adapterRoot": "pvc://c", "adapters": [adapter("a", "pvc://c/one")]}, (("a", "one"),)),
    "in-a-part-of-a-claim": ({"adapterRoot": "pvc://c/all", "adapters": [adapter("a", "pvc://c/all/one")]}, (("a", "one"),)),
    "on-the-hub": (
        {"adapters": [adapter("a", "hf://org/a"), adapter("b", "hf://org/b", revision="v2")]},
        (("a", "hf://org/a@main"), ("b", "hf://org/b@v2")),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_workers_are_told(name: str):
    model, expected = ROWS[name]
    assert wishes(fleet(**model)) == expected


def test_what_routers_may_use():
    seen = [
        AdapterSeen("a", "one", "Loaded", "1"), AdapterSeen("b", "two", "Failed", "2"), AdapterSeen("c", "three", "Failed"),
        AdapterSeen("d", "four", "Loading"), AdapterSeen("e", "", "Unloading", "5"),
    ]  # fmt: skip
    wished = [(name, "x") for name in "abcd"]
    assert usable(wished, seen) == (("a", "1"), ("b", "2")), "a version that could not be replaced still answers"
    assert usable([], seen) == ()


TWO = fleet(adapters=[adapter("a", "hf://o/a"), adapter("b", "hf://o/b")])
A, B = "hf://o/a@main", "hf://o/b@main"


def test_the_status_counts_workers_and_names_the_first_failure():
    pods = [pod("p1"), pod("p2"), pod("p3"), pod("gone", terminating=True), pod("member", member=1)]
    seen = {
        "u-p1": (AdapterSeen("a", A, "Loaded", "1"), AdapterSeen("b", B, "Failed", "", "BadAdapter", "it is bad")),
        "u-p2": (AdapterSeen("a", A, "Loaded", "1"), AdapterSeen("b", B, "Failed", "", "BadAdapter", "it is bad")),
        "u-p3": (AdapterSeen("a", "hf://o/a@old", "Loaded", "0"), AdapterSeen("b", B, "Loading")),
        "u-gone": (AdapterSeen("a", A, "Loaded", "9"),),
    }
    a, b = adapter_statuses(TWO, pods, seen)
    assert (a.name, a.desired, a.loaded, a.digest, a.reason) == ("a", 3, 2, "1", "")
    assert (b.desired, b.loaded, b.digest, b.reason, b.message) == (3, 0, "", "BadAdapter", "p1 and 1 more: it is bad")


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((), None),
        ((AdapterStatus(name="a", desired=2, loaded=2),), ("True", "AllLoaded", "1 adapters are on every worker")),
        # `kubectl wait --for=condition=AdaptersLoaded` passed before there was any worker
        ((AdapterStatus(name="a", desired=0, loaded=0),), ("Unknown", "NoWorkers", "there is no worker that could have them")),
        ((AdapterStatus(name="a", desired=2, loaded=1),), ("False", "Loading", "a on 1 of 2 workers")),
        (
            (AdapterStatus(name="a", desired=2, loaded=1), AdapterStatus(name="b", desired=2, reason="BadAdapter")),
            ("False", "AdapterFailed", "not loaded everywhere: b (BadAdapter)"),
        ),
    ],
)
def test_the_condition(statuses: tuple[AdapterStatus, ...], expected: Any):
    assert adapters_loaded(statuses) == expected


def test_events_tell_each_failure_once_and_when_it_is_over():
    def status(**fields: Any) -> FleetStatus:
        return FleetStatus(adapters=(AdapterStatus(name="a", desired=2, **fields),))

    def told(before: FleetStatus, after: FleetStatus) -> list[tuple[str, str]]:
        return [(event.type, event.reason) for event in events_of(before, after, Pass())]

    none, loading = FleetStatus(), status()
    failed, other = status(reason="BadAdapter", message="m"), status(reason="HubFailed", message="m")
    loaded, changed = status(loaded=2, digest="1"), status(loaded=2, digest="2")
    assert told(none, loading) == []
    assert told(loading, failed) == [("Warning", "AdapterFailed")]
    assert told(failed, failed) == []
    assert told(failed, other) == [("Warning", "AdapterFailed")]
    assert told(other, loaded) == [("Normal", "AdapterLoaded")]
    assert told(loaded, loaded) == []
    assert told(loaded, changed) == [("Normal", "AdapterLoaded")]
    grown = FleetStatus(adapters=(AdapterStatus(name="a", desired=3, loaded=2, digest="1"),))
    assert told(loaded, grown) == told(grown, loaded) == [], "another worker is no news of the adapter"
    assert told(loaded, none) == []
