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


@pytest.mark.parametrize("metadata", ["good", ["good"], {"name": 7}])
def test_metadata_of_a_wrong_type_is_refused(metadata):
    assert validate({**manifest(()), "metadata": metadata})[0].startswith("metadata.name: Invalid value")
