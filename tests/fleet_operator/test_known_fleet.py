"""Parsing again only what changed, and never keeping what did."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fleet_api.parse import ManifestError, parse_fleet
from fleet_operator.known_fleet import parse_again
from tests.fleet_operator.world import manifest


def raw(version: str = "1", **spec: Any) -> dict[str, Any]:
    made = manifest(**spec)
    made["metadata"] |= {"uid": "u", "generation": 1, "resourceVersion": version}
    return made


def with_status(fleet: dict[str, Any], version: str) -> dict[str, Any]:
    condition = {"type": "Ready", "status": "True", "reason": "R", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    out = copy.deepcopy(fleet)
    out["metadata"]["resourceVersion"] = version
    return {**out, "status": {"observedGeneration": 1, "conditions": [condition | {"observedGeneration": 1}]}}


def test_a_status_that_changed_leaves_the_wish_the_very_same():
    first = parse_again(None, raw())
    second = parse_again(first, with_status(raw(), "2"))
    assert second.fleet.spec is first.fleet.spec
    assert second.fleet == parse_fleet(with_status(raw(), "2"))
    assert parse_again(second, second.raw) is second


@pytest.mark.parametrize(
    "change",
    [
        lambda fleet: fleet["spec"].update(slo={"ttft": {"p99": "1s"}}),
        lambda fleet: fleet["metadata"].update(annotations={"inferencefleet.io/restarted-at": "now"}),
        lambda fleet: fleet["metadata"].update(generation=2),
        lambda fleet: fleet["metadata"].update(uid="another"),
    ],
    ids=["spec", "annotation", "generation", "another-fleet"],
)
def test_what_the_user_changed_is_parsed(change: Any):
    first, edited = parse_again(None, raw()), raw("2")
    change(edited)
    assert parse_again(first, edited).fleet == parse_fleet(edited) != first.fleet


def test_a_spec_that_became_wrong_is_refused_every_time():
    first, wrong = parse_again(None, raw()), raw("2")
    wrong["spec"]["tiers"] = []
    for _ in range(2):
        with pytest.raises(ManifestError, match=r"spec\.tiers"):
            parse_again(first, wrong)
