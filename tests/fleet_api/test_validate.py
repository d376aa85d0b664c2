"""Bad manifests are refused in the API server's words; good ones are not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fleet_api.parse import ManifestError, parse_fleet
from fleet_api.validate import refusal, validate

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from bad_manifests import BAD, GOOD_CHANGES, manifest  # noqa: E402

WORDS = json.loads((HERE / "expected_words.json").read_text())


def test_the_table_and_the_recorded_words_belong_together():
    assert [name for name, _ in BAD] == list(WORDS)


@pytest.mark.parametrize(("name", "changes"), BAD, ids=[name for name, _ in BAD])
def test_bad_manifest_gets_the_words_of_the_api_server(name, changes):
    assert sorted(validate(manifest(changes))) == WORDS[name]


@pytest.mark.parametrize(("name", "changes"), BAD, ids=[name for name, _ in BAD])
def test_bad_manifest_never_becomes_a_fleet(name, changes):
    with pytest.raises(ManifestError) as refused:
        parse_fleet(manifest(changes))
    assert sorted(refused.value.errors) == WORDS[name]


@pytest.mark.parametrize(("name", "changes"), GOOD_CHANGES, ids=[name for name, _ in GOOD_CHANGES])
def test_good_manifest_is_accepted(name, changes):
    assert validate(manifest(changes)) == []
    assert parse_fleet(manifest(changes)).metadata.name == manifest(changes)["metadata"]["name"]


def test_whole_numbers_may_be_written_as_kubectl_sends_them():
    assert parse_fleet(manifest((("spec.engine", {"maxModelLen": 1024.0}),))).spec.engine.max_model_len == 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            (("spec.routing", {"replicas": 0}),),
            'InferenceFleet.inferencefleet.io "good" is invalid: spec.routing.replicas: Invalid value: 0: '
            "spec.routing.replicas in body should be greater than or equal to 1",
        ),
        (
            (("spec.rooting", {}),),
            'InferenceFleet in version "v1alpha1" cannot be handled as a InferenceFleet: strict decoding error: '
            'unknown field "spec.rooting"',
        ),
        (
            (("spec.limits", {"maxInputTokens": 0, "maxOutputTokens": 0}),),
            'InferenceFleet.inferencefleet.io "good" is invalid: [spec.limits.maxInputTokens: Invalid value: 0: '
            "spec.limits.maxInputTokens in body should be greater than or equal to 1, spec.limits.maxOutputTokens: "
            "Invalid value: 0: spec.limits.maxOutputTokens in body should be greater than or equal to 1]",
        ),
    ],
)
def test_the_whole_refusal_reads_as_the_servers(changes, message):
    spoiled = manifest(changes)
    assert refusal(spoiled, validate(spoiled)) == message


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("spec.engine", {"image": "\ud800"}, "spec.engine.image"),
        ("spec.engine", {"args": ["--a", "x\udfffy"]}, "spec.engine.args[1]"),
        ("spec.tiers.0.decode", {"podTemplate": {"annotations": {"\ud83d": "", "b": "\ud83d"}}},
         ("spec.tiers[0].decode.podTemplate.annotations", "spec.tiers[0].decode.podTemplate.annotations.b")),
        ("metadata.annotations", {"a": "\udc00"}, "metadata.annotations.a"),
        ("metadata.name", "\ud800", "metadata.name"),
        ("spec.\ud800", {}, "spec"),
    ],
    ids=ascii,
)  # fmt: skip
def test_half_a_surrogate_pair_is_refused_with_the_fields_path(path, value, field):
    """pydantic's words came as a traceback, and no terminal could print them."""
    spoiled = manifest(((path, value),))
    with pytest.raises(ManifestError) as refused:
        parse_fleet(spoiled)
    fields = [field] if isinstance(field, str) else list(field)
    assert refused.value.errors == [
        f"{each}: Invalid value: must be text: half a surrogate pair is no character" for each in fields
    ]
    assert refusal(spoiled, refused.value.errors).encode()


@pytest.mark.parametrize("metadata", ["good", ["good"], {"name": 7}])
def test_metadata_of_a_wrong_type_is_refused(metadata):
    assert validate({**manifest(()), "metadata": metadata})[0].startswith("metadata.name: Invalid value")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"namespace": 5}, "metadata.namespace: Invalid value: 5: must be text"),
        ({"namespace": "Bad NS!"}, 'metadata.namespace: Invalid value: "Bad NS!": a lowercase RFC 1123 label must'),
        ({"namespace": "../../x"}, 'metadata.namespace: Invalid value: "../../x": a lowercase RFC 1123 label must'),
        ({"namespace": "a.b"}, 'metadata.namespace: Invalid value: "a.b": a lowercase RFC 1123 label must'),
        ({"namespace": "a" * 64}, "must be no more than 63 characters"),
        ({"namespace": "a\n"}, "metadata.namespace: Invalid value"),
        ({"name": ["x"]}, "metadata.name: Invalid value: "),
        ({"resourceVersion": 5}, "metadata.resourceVersion: Invalid value: 5: must be text"),
        ({"generation": "1"}, "metadata.generation: Invalid value: must be a whole number"),
        ({"generation": True}, "metadata.generation: Invalid value: must be a whole number"),
        ({"deletionTimestamp": "yesterday"}, "metadata.deletionTimestamp: Invalid value: must be a time such as"),
        ({"labels": "a"}, "metadata.labels: Invalid value: must be an object whose values are text"),
        ({"labels": {"a": 5}}, "metadata.labels[a]: Invalid value: 5: must be text: write it in quotes"),
        ({"labels": {"a": True}}, "metadata.labels[a]: Invalid value: true: must be text: write it in quotes"),
        ({"labels": {"a": "b c"}}, 'metadata.labels: Invalid value: "b c": a valid label must'),
        ({"labels": {"a b": "c"}}, 'metadata.labels: Invalid value: "a b": a qualified name is'),
        ({"labels": {"/a": "c"}}, 'metadata.labels: Invalid value: "/a": a qualified name is'),
        ({"annotations": {"a": ["x"]}}, 'metadata.annotations[a]: Invalid value: ["x"]: must be text'),
        ({"annotations": {"a": "x" * 262_145}}, "metadata.annotations: Too long: may not be more than 262144 bytes"),
        ({"finalizers": "a"}, "metadata.finalizers: Invalid value: must be a list of text"),
        ({"ownerReferences": ["a"]}, "metadata.ownerReferences: Invalid value: must be a list of objects"),
    ],
    ids=str,
)
def test_bad_metadata_is_refused_with_the_fields_path(change, words):
    spoiled = manifest(tuple((f"metadata.{key}", value) for key, value in change.items()))
    found = validate(spoiled)
    assert len(found) == 1, found
    assert words in found[0]
    with pytest.raises(ManifestError):
        parse_fleet(spoiled)


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": ""},
        {"namespace": None},
        {"labels": None, "annotations": {}},
        {"labels": {"app.kubernetes.io/name": "a_B.c", "x": ""}, "annotations": {"Example.com/Note": "any\ntext \U0001f600"}},
        {"uid": "u", "resourceVersion": "5", "generation": 3, "creationTimestamp": "2026-01-31T12:00:00Z"},
        {"deletionTimestamp": "2026-01-31T12:00:00Z", "deletionGracePeriodSeconds": 0, "finalizers": ["a/b"]},
        {"creationTimestamp": None, "managedFields": [{"manager": "kubectl"}], "ownerReferences": []},
    ],
    ids=str,
)
def test_good_metadata_and_what_a_server_adds_is_accepted(change):
    kept = manifest(tuple((f"metadata.{key}", value) for key, value in change.items()))
    assert validate(kept) == []
    assert parse_fleet(kept).metadata.namespace == "default"
