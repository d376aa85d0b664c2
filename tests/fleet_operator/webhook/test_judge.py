"""Admission as pure functions: reviews in, verdicts out; a second pass over what was allowed changes nothing."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest

from fleet_api.parse import parse_fleet
from fleet_api.validate import refusal, validate
from fleet_operator.names import CHANGED_BY
from fleet_operator.render.fleet import render_pool
from fleet_operator.scale_targets import render_target
from fleet_operator.webhook.judge import judge_fleet, judge_scale, mark_fleet
from fleet_operator.webhook.manifests import configurations, main
from fleet_operator.webhook.review import Request, ReviewError, Verdict, parse_review, render_review
from fleet_planner.scale_targets import EVERY_REVISION
from fleet_planner.wanted import PoolWanted


def fleet(annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    tiers = [{"name": "t", "accelerator": {"type": "cpu"}, "prefill": {"minReplicas": 2, "maxReplicas": 4}}]
    metadata: dict[str, Any] = {"name": "f", "namespace": "ml"}
    if annotations is not None:
        metadata["annotations"] = annotations
    return {
        "apiVersion": "inferencefleet.io/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": metadata,
        "spec": {"model": {"source": "file:///m"}, "tiers": tiers, **spec},
    }


def request(new: dict[str, Any], old: dict[str, Any] | None = None, user: str = "ada", operation: str = "") -> Request:
    operation = operation or ("UPDATE" if old else "CREATE")
    return Request("u", "InferenceFleet", "", operation, user, "ml", "f", new, old or {})


def pool(role: str = "prefill", tier: str = "t") -> dict[str, Any]:
    spec = {"fleet": "f", "tier": tier, "role": role, "revision": "0123abcd", "replicas": 2}
    metadata = {"name": "p", "namespace": "ml"}
    return {"apiVersion": "inferencefleet.io/v1alpha1", "kind": "WorkerPool", "metadata": metadata, "spec": spec}


# -- fleets -------------------------------------------------------------------------------------------------------------
VLLM = {"type": "vllm", "args": ["--api-key=x"]}


def test_the_words_are_those_of_the_api_server():
    bad = fleet(limits={"maxOutputTokens": 0})
    assert judge_fleet(request(bad)).message == refusal(bad, validate(bad))


def test_what_cel_cannot_judge_is_refused():
    verdict = judge_fleet(request(fleet(engine=VLLM)))
    assert (verdict.allowed, verdict.code, verdict.reason) == (False, 422, "Invalid")
    assert "spec.engine.args[0]: Forbidden: --api-key" in verdict.message


def test_a_risk_is_a_warning():
    verdict = judge_fleet(request(fleet(engine={"type": "vllm", "image": "vllm:latest"})))
    assert verdict.allowed
    assert verdict.warnings[0].startswith("spec.engine.image: vllm:latest may change")


def test_a_tier_that_leaves_is_told():
    two = fleet()
    two["spec"]["tiers"].append({"name": "b", "accelerator": {"type": "cpu"}})
    assert "spec.tiers: tier b is removed: its workers are drained and deleted" in judge_fleet(request(fleet(), two)).warnings


def test_a_fleet_that_became_invalid_can_still_be_labelled_and_deleted():
    """Finalizers and labels change; a newer webhook must not lock an older fleet."""
    old = fleet(engine=VLLM)
    new = copy.deepcopy(old)
    new["metadata"]["labels"] = {"a": "b"}
    assert judge_fleet(request(new, old)).allowed
    assert judge_fleet(request({}, old, operation="DELETE")).allowed
    new["spec"]["limits"] = {"maxOutputTokens": 5}
    assert not judge_fleet(request(new, old)).allowed


# -- who ----------------------------------------------------------------------------------------------------------------
def applied(verdict: Verdict, obj: dict[str, Any]) -> dict[str, Any]:
    """The object after the API server applied the patch (add and remove are all that we use)."""
    obj = copy.deepcopy(obj)
    for step in verdict.patch:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
        at = obj
        for part in parents:
            at = at[part]
        if step["op"] == "remove":
            del at[last]
        else:
            at[last] = step["value"]
    return obj


def who(obj: dict[str, Any]) -> str | None:
    return (obj["metadata"].get("annotations") or {}).get(CHANGED_BY)


MINE, OTHER, FORGED = {CHANGED_BY: "ada"}, {"note": "x"}, {CHANGED_BY: "root"}


@pytest.mark.parametrize(
    ("new", "old", "user", "expected"),
    [
        (fleet(), None, "ada", "ada"),
        (fleet(OTHER), None, "ada", "ada"),
        (fleet(FORGED), None, "ada", "ada"),
        (fleet(FORGED), None, "", None),
        # somebody else changes the spec
        (fleet(MINE, slo={}), fleet(MINE), "bob", "bob"),
        (fleet(None, slo={}), fleet(MINE), "bob", "bob"),
        # nobody changes the spec: who did stays
        (fleet(MINE), fleet(MINE), "bob", "ada"),
        (fleet({**MINE, "note": "x"}), fleet(MINE), "bob", "ada"),
        (fleet(), fleet(MINE), "bob", "ada"),
        (fleet(FORGED), fleet(MINE), "root", "ada"),
        (fleet(FORGED), fleet(), "root", None),
        (fleet(), fleet(), "bob", None),
    ],
)
def test_who_changed_the_spec_is_written_down(new: dict, old: dict | None, user: str, expected: str | None):
    made = applied(mark_fleet(request(new, old, user)), new)
    assert who(made) == expected
    assert {k: v for k, v in made.items() if k != "metadata"} == {k: v for k, v in new.items() if k != "metadata"}
    again = mark_fleet(request(made, made, "carol"))
    assert again.patch == ()  # a second apply of the same changes nothing


@pytest.mark.parametrize("broken", [{}, {"metadata": None}, {"metadata": "x", "spec": []}, {"metadata": {}, "spec": None}])
def test_a_broken_object_is_left_to_the_schema(broken: dict[str, Any]):
    """A mutating webhook sees what no schema has judged yet."""
    verdict = mark_fleet(request(broken, None))
    assert verdict.allowed


# -- scale --------------------------------------------------------------------------------------------------------------
def scale(replicas: Any) -> Request:
    return Request("u", "Scale", "scale", "UPDATE", "hpa", "ml", "p", {"kind": "Scale", "spec": {"replicas": replicas}}, {})


@pytest.mark.parametrize(("replicas", "allowed"), [(0, False), (1, False), (2, True), (4, True), (5, False), (10**6, False)])
def test_a_size_outside_the_bounds_is_refused_with_the_bounds(replicas: int, allowed: bool):
    verdict = judge_scale(scale(replicas), pool(), fleet())
    assert verdict.allowed is allowed
    if not allowed:
        assert verdict.message == (
            f"spec.replicas: Invalid value: {replicas}: prefill of tier t of InferenceFleet f has between 2 (minReplicas) and 4 "
            "(maxReplicas) workers"
        )


@pytest.mark.parametrize(
    ("replicas", "role"),
    [pytest.param(1, 3, id="as it is"), (2, 4), (0, 2), (3, 5), (4, 6)],
)
def test_while_two_revisions_share_a_role_its_size_is_judged(replicas: int, role: int):
    """Incident: in the middle of a rollout one worker more was refused (2 is fewer than the role may have), and as many as the
    whole role may have were let pass for the new revision alone."""
    parsed, owner = parse_fleet(fleet()), {**fleet(), "metadata": {"name": "f", "uid": "u"}}
    part = render_pool(parsed, PoolWanted("f-t-prefill-0123abcd", "t", "prefill", "0123abcd", 1, 3), owner)
    verdict = judge_scale(scale(replicas), part, fleet())
    assert verdict.allowed is (2 <= role <= 4)
    if not verdict.allowed:
        assert verdict.message.startswith(f"spec.replicas: Invalid value: {replicas}: all revisions together would have {role}: ")


def test_a_size_that_stays_is_not_judged():
    """Bounds that were changed since, and a client that writes the whole of a Scale."""
    assert judge_scale(scale(9), {**pool(), "spec": {**pool()["spec"], "replicas": 9}}, fleet()).allowed


@pytest.mark.parametrize(("replicas", "allowed"), [(1, False), (2, True), (4, True), (5, False)])
def test_a_target_of_a_whole_role_has_the_same_bounds(replicas: int, allowed: bool):
    parsed = parse_fleet(fleet(scaling={"mode": "external"}))
    owner = {**fleet(), "metadata": {"name": "f", "uid": "u"}}
    target = render_target(parsed, PoolWanted("f-t-prefill", "t", "prefill", EVERY_REVISION, 2, 2), owner)
    assert judge_scale(scale(replicas), target, fleet()).allowed is allowed


@pytest.mark.parametrize(("pool", "fleet"), [(pool(tier="gone"), fleet()), ({}, fleet()), (pool(), fleet(limits=0))])
def test_what_cannot_be_judged_is_allowed(pool: dict[str, Any], fleet: dict[str, Any]):
    assert judge_scale(scale(1), pool, fleet).allowed


# -- reviews ------------------------------------------------------------------------------------------------------------
def review(**changes: Any) -> dict[str, Any]:
    inner = {
        "uid": "u-1", "kind": {"kind": "InferenceFleet"}, "operation": "CREATE", "userInfo": {"username": "ada"},
        "namespace": "ml", "name": "f", "object": fleet(), "oldObject": None, "dryRun": True, **changes,
    }  # fmt: skip
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": inner}


def test_a_review_becomes_a_request_and_a_verdict_an_answer():
    asked = parse_review(json.dumps(review()).encode())
    assert (asked.uid, asked.user, asked.operation, asked.kind, asked.old) == ("u-1", "ada", "CREATE", "InferenceFleet", {})
    answer = render_review(asked, mark_fleet(asked))["response"]
    assert (answer["uid"], answer["allowed"], answer["patchType"]) == ("u-1", True, "JSONPatch")
    assert json.loads(base64.b64decode(answer["patch"])) == [
        {"op": "add", "path": "/metadata/annotations", "value": {CHANGED_BY: "ada"}}
    ]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"\xff\xfe", b'"x"', b"{}", b"[" * 100_000,
     json.dumps({**review(), "apiVersion": "v1"}).encode(),
      json.dumps({**review(), "request": None}).encode(),
     json.dumps(review(uid="")).encode(), json.dumps(review(uid=7)).encode()],
)  # fmt: skip
def test_anything_else_is_refused(body: bytes):
    with pytest.raises(ReviewError):
        parse_review(body)


@pytest.mark.parametrize("field", ["kind", "operation", "userInfo", "object", "oldObject", "namespace", "name", "subResource"])
@pytest.mark.parametrize("value", [None, 7, "x", [], {}, {"kind": 7, "username": []}])
def test_fields_of_any_type_are_survived(field: str, value: Any):
    asked = parse_review(json.dumps(review(**{field: value})).encode())
    for judge in (judge_fleet, mark_fleet):
        assert json.dumps(render_review(asked, judge(asked)))


def test_warnings_and_messages_are_bounded():
    asked = parse_review(json.dumps(review()).encode())
    answer = render_review(asked, Verdict(warnings=tuple("w" * 1_000 for _ in range(50))))["response"]
    assert len(answer["warnings"]) == 13
    assert sum(map(len, answer["warnings"])) < 4096
    assert len(render_review(asked, Verdict(False, "m" * 10**6))["response"]["status"]["message"]) <= 8192


# -- configurations -----------------------------------------------------------------------------------------------------
def test_the_configurations_are_safe(capsys: pytest.CaptureFixture[str]):
    made = configurations({"service": {"name": "hook", "namespace": "ns", "port": 443}})
    for configuration in made:
        for hook in configuration["webhooks"]:
            assert hook["failurePolicy"] == "Ignore"
            assert hook["sideEffects"] == "None"
            assert hook["timeoutSeconds"] <= 10
            assert "caBundle" not in hook["clientConfig"]
            assert all("/status" not in resource for rule in hook["rules"] for resource in rule["resources"])
    assert main(["--service", "ns/hook", "--failure-policy", "Fail"]) == 0
    assert capsys.readouterr().out.count("failurePolicy: Fail") == 3


# -- what nobody should send ----------------------------------------------------------------------------------------------
ODD: list[Any] = [None, 0, "x", [], [None], {"a": None}]


@pytest.mark.parametrize("odd", ODD, ids=json.dumps)
def test_odd_objects_are_answered(odd: Any):
    """Each of these was an HTTP 500 and a traceback in the operator's log."""
    good = fleet({"note": "n"})
    for bad in ({**good, "metadata": odd}, fleet(odd), {**good, "spec": odd}, {**good, "spec": {**good["spec"], "tiers": odd}}):
        for new, old in ((bad, None), (bad, good), (good, bad)):
            for judge in (judge_fleet, mark_fleet):
                assert render_review(request(new, old), judge(request(new, old)))["response"]["uid"] == "u"


def test_half_a_surrogate_in_an_annotation_is_told_with_its_field():
    """`fleet validate` ended with a traceback; then it took what `fleet up` ended at."""
    assert validate(fleet({"note": "\ud800"})) == [
        "metadata.annotations.note: Invalid value: must be text: half a surrogate pair is no character"
    ]
