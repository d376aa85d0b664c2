"""O9 and O10: fleets that make no sense, refused by the API server or, where it lets them pass, by the operator. Stage one counts
how many were bad, stage two judges the cluster."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest

from e2e.faultproxy.fixtures import FAMILY
from e2e.faultproxy.generate import fleets
from e2e.faultproxy.lab import Admin, Lab, fleet_manifest, path_of, running
from e2e.faultproxy.state import comparable
from fleet_api.validate import STRICT, validate
from fleet_operator.cluster.interface import FLEET

pytestmark = FAMILY
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/inferencefleets.inferencefleet.io"
SMUGGLED_MOST = 150
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def conditions(fleet: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["type"]: c for c in (fleet.get("status") or {}).get("conditions") or []}


@contextmanager
def no_admission(admin: Admin) -> Iterator[None]:
    """The API server stores every spec, as one did that had an older schema."""
    before = admin.get(CRD)
    wide = copy.deepcopy(before)
    schema = wide["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"] = {"spec": {"x-kubernetes-preserve-unknown-fields": True}, "status": OPEN}
    schema.pop("required", None)
    schema.pop("x-kubernetes-validations", None)
    wide["spec"]["versions"][0].pop("subresources", None)
    wide["spec"]["versions"][0]["subresources"] = before["spec"]["versions"][0]["subresources"]
    admin("PUT", CRD, wide).raise_for_status()
    try:
        wait_for(lambda: stores(admin, {"metadata": {"name": "probe"}, "spec": {"tiers": 7}}), "an open schema")
        yield
    finally:
        now = admin.get(CRD)
        now["spec"] = before["spec"]
        admin("PUT", CRD, now).raise_for_status()
        wait_for(lambda: not stores(admin, {"metadata": {"name": "probe"}, "spec": {"tiers": 7}}), "the schema")


def stores(admin: Admin, body: dict[str, Any]) -> bool:
    path = path_of(FLEET, "default")
    return admin("POST", path, {**fleet_manifest("default"), **body}, dryRun="All").status_code == 201


def wait_for(check: Callable[[], bool], what: str, timeout_s: float = 30.0, pause_s: float = 0.1) -> None:
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end, what
        time.sleep(pause_s)


# -- O9 and O10 ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [pytest.param(50, marks=pytest.mark.smoke), 500])
def test_generated_fleets_are_refused_or_not_accepted(new_lab: Callable[[], Lab], count: int):
    lab = new_lab()
    lab.start()
    made = list(fleets(lab.proxy.seed, count, fleet_manifest(lab.namespace)))
    refused, unnamed = post_all(lab, made)
    assert not unnamed, unnamed[:5]
    assert len(refused) > count / 3, "the generator must make bad fleets"
    accepted = {fleet["metadata"]["name"] for fleet, _ in made} - {fleet["metadata"]["name"] for fleet in refused}
    wait_for(lambda: judged(lab) >= accepted, "every stored fleet has a verdict", 120, pause_s=1.0)
    with no_admission(lab.admin):
        past = (fleet for fleet in refused if wrong_in_itself(fleet) and stored(lab, fleet))
        smuggled = {fleet["metadata"]["name"]: fleet for fleet in islice(past, SMUGGLED_MOST)}
        assert len(smuggled) > min(SMUGGLED_MOST, count) / 2
        wait_for(lambda: judged(lab) >= smuggled.keys(), "every smuggled fleet has a verdict", 150, pause_s=1.0)
        wrong = [(name, fleet["spec"]) for name, fleet in smuggled.items() if not said_no(lab, name)]
    assert not wrong, wrong[:5]
    lab.operator.check()
    assert len(lab.lives) == 1
    lab.apply(fleet_manifest(lab.namespace, "sane"))
    lab.until("a sane fleet beside them", lambda: lab.ready("sane"), 60)
    print(f"{len(refused)} of {count} refused, {len(smuggled)} stored past the schema, {len(accepted)} accepted")


def post_all(lab: Lab, made: list[tuple[dict[str, Any], tuple[str, ...]]]) -> tuple[list[dict[str, Any]], list[str]]:
    """(fleets that were refused, refusals that name no field)."""
    refused, unnamed = [], []
    for fleet, touched in made:
        answer = lab.admin("POST", path_of(FLEET, lab.namespace), fleet, fieldValidation="Strict")
        if answer.status_code == 201:
            continue
        assert answer.status_code in (400, 422), (answer.status_code, answer.text[:500])
        refused.append(fleet)
        if not any(path.rpartition(".")[2].split("[")[0] in answer.text for path in touched):
            unnamed.append(f"{touched}: {answer.text[:300]}")
    return refused, unnamed


def wrong_in_itself(fleet: dict[str, Any]) -> bool:
    """Not only by fields that nobody knows: those the API server takes away, and what is left may be right."""
    return any(not words.startswith(STRICT) for words in validate(fleet))


def stored(lab: Lab, fleet: dict[str, Any]) -> bool:
    return lab.admin("POST", path_of(FLEET, lab.namespace), fleet).status_code == 201


def judged(lab: Lab) -> set[str]:
    """Fleets whose present spec the operator has a word about."""
    items = lab.admin.get(path_of(FLEET, lab.namespace))["items"]
    return {item["metadata"]["name"] for item in items if conditions(item).get("Accepted", {}).get("status") in ("True", "False")}


def said_no(lab: Lab, name: str) -> bool:
    """Accepted is False with a field's name, and no child exists."""
    found = lab.condition("Accepted", name)
    children = [key for key in lab.objects(name) if key[0] != "InferenceFleet"]
    return found["status"] == "False" and bool(found["message"]) and not children


@pytest.mark.smoke
def test_an_invalid_spec_that_was_stored_leaves_the_running_fleet_alone(new_lab: Callable[[], Lab]):
    lab = new_lab()
    running(lab)
    before, uids = comparable(lab.objects()), lab.uids()
    good = fleet_manifest(lab.namespace)["spec"]
    with no_admission(lab.admin):
        lab.admin.merge(path_of(FLEET, lab.namespace, "f"), {"spec": {"tiers": [], "model": {"source": "ftp://x"}}})
        lab.until("Accepted is False", lambda: lab.condition("Accepted")["status"] == "False")
        message = lab.condition("Accepted")["message"]
        assert "spec.tiers" in message
        assert "spec.model.source" in message
        lab.at_rest()
        after = comparable(lab.objects())
        children = [key for key in before if not key.startswith("InferenceFleet")]
        assert {key: after[key] for key in children} == {key: before[key] for key in children}
        assert lab.uids() == uids
        ready = lab.condition("Ready")
        assert (ready["status"], ready["reason"]) == ("False", "NotAccepted")
    lab.admin.merge(path_of(FLEET, lab.namespace, "f"), {"spec": good})
    lab.until("accepted again", lambda: lab.condition("Accepted")["status"] == "True" and lab.serving(1, 2))
    assert lab.uids() == uids
    lab.at_rest()
