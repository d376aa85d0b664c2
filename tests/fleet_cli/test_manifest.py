"""Reading manifests: every refusal names its cause and ends with exit code 2."""

from __future__ import annotations

import io
import json

import pytest
import yaml

from fleet_cli.errors import InputError
from fleet_cli.main import main
from fleet_cli.manifest import MAX_MANIFEST_BYTES, read_manifest
from fleet_cli.up.command import as_new
from fleet_cli.up.local import LocalFleet

GOOD = {
    "apiVersion": "inferencefleet.io/v1alpha1",
    "kind": "InferenceFleet",
    "metadata": {"name": "good"},
    "spec": {"model": {"source": "file:///m"}, "tiers": [{"name": "a", "accelerator": {"type": "cpu"}}]},
}


@pytest.fixture
def written(tmp_path):
    def write(content: str | bytes) -> str:
        path = tmp_path / "fleet.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def test_a_good_manifest_comes_back_as_written(written):
    assert read_manifest(written(yaml.safe_dump(GOOD))) == GOOD


@pytest.mark.parametrize("start", ["", "\ufeff", "\n\t"])
def test_json_may_be_indented_with_tabs_and_escape_what_is_beyond_16_bits(written, start):
    """kubectl takes it; read as YAML a tab starts no token, and two halves of a character are none."""
    note = {**GOOD, "metadata": {"name": "good", "annotations": {"a": "\U0001f600", "b": "1"}}}
    assert read_manifest(written(start + json.dumps(note, indent="\t"))) == note


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"spec": {}, "spec": {}}', 'key "spec" already set in map'),
        ('{"kind": NaN}', 'no matches for kind "NaN"'),
        ('{"a": ' * 3_000 + "1" + "}" * 3_000, "is nested too deeply"),
        (json.dumps(GOOD) + "\n---\n" + json.dumps(GOOD), "holds 2 documents"),
    ],
)
def test_odd_json_is_refused_like_yaml(written, text, words):
    with pytest.raises(InputError) as refused:
        read_manifest(written(text))
    assert words in str(refused.value)


def test_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(yaml.safe_dump(GOOD).encode())))
    assert read_manifest("-") == GOOD


BOMB = "\n".join(['a0: &a0 ["x", "x"]', *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 34))])
"""66 aliases, 17 thousand million values."""


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("", "holds 0 documents; one InferenceFleet is needed"),
        (yaml.safe_dump_all([GOOD, GOOD]), "holds 2 documents"),
        ("- a\n", "does not hold an object but list"),
        ("a: [1\n", "is not valid YAML: line 2, column 1"),
        ("spec: {}\nspec: {}\n", 'line 2, column 1: key "spec" already set in map'),
        ("a: !!python/object:os.system {}\n", "is not valid YAML"),
        (BOMB, "more than 100000 values when its YAML aliases are unfolded"),
        ("a: &a [*a]", "more than 100000 values when its YAML aliases are unfolded"),
        ("a: " + "[" * 5_000 + "]" * 5_000, "is nested too deeply"),
        (b"\xff\xfe\x00", "cannot read"),
        ("#" * (MAX_MANIFEST_BYTES + 1), "is larger than"),
        (
            "kind: Pod\napiVersion: v1\n",
            'no matches for kind "Pod" in version "v1": '
            'only kind "InferenceFleet" in version "inferencefleet.io/v1alpha1" is read from files',
        ),
        (yaml.safe_dump({**GOOD, "kind": "WorkerPool"}), 'only kind "InferenceFleet" in version'),
        ("kind: InferenceFleet\n", 'no matches for kind "InferenceFleet" in version ""'),
        ('kind: "\\e[2JPod\\n"\napiVersion: v1\n', r'no matches for kind "\x1b[2JPod\n" in version "v1"'),
        (yaml.safe_dump({**GOOD, "metadata": "good"}), "metadata must be an object"),
        (
            yaml.safe_dump({**GOOD, "metadata": {"generateName": "good-"}}),
            "metadata.generateName: a fleet that is applied needs metadata.name",
        ),
        (
            yaml.safe_dump({**GOOD, "spec": {**GOOD["spec"], "engine": {"maxBatch": 0}}}),
            'The InferenceFleet "good" is invalid: spec.engine.maxBatch: Invalid value: 0: '
            "spec.engine.maxBatch in body should be greater than or equal to 1",
        ),
        (
            yaml.safe_dump({**GOOD, "spec": {}}),
            'The InferenceFleet "good" is invalid: \n* spec.model: Required value\n* spec.tiers: Required value\n* <nil>: ',
        ),
        (
            json.dumps({**GOOD, "metadata": {"name": "\ud800"}}),
            'The InferenceFleet "\\ud800" is invalid: metadata.name: Invalid value: must be text: half a surrogate pair',
        ),
        (
            yaml.safe_dump({**GOOD, "spek": {}}),
            'InferenceFleet in version "v1alpha1" cannot be handled as a InferenceFleet: '
            'strict decoding error: unknown field "spek"',
        ),
    ],
)
def test_refusals_name_the_cause(written, content, cause):
    with pytest.raises(InputError) as refused:
        read_manifest(written(content))
    assert cause in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_missing_file(tmp_path, capsys):
    assert main(["validate", str(tmp_path / "none.yaml")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_validate_says_so_when_all_is_well(written, capsys):
    path = written(yaml.safe_dump(GOOD))
    assert main(["validate", path]) == 0
    assert capsys.readouterr().out == f"{path}: inferencefleet.inferencefleet.io/good is valid\n"


def test_validate_judges_every_file(tmp_path, capsys):
    files = {
        "pod": "kind: Pod\napiVersion: v1\n",
        "good": yaml.safe_dump(GOOD),
        "empty": "",
        "bad": yaml.safe_dump({**GOOD, "spek": {}}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in (*files, "none")]
    assert main(["validate", *paths]) == 2
    said = capsys.readouterr()
    assert said.out == f"{paths[1]}: inferencefleet.inferencefleet.io/good is valid\n"
    pod, empty, bad, none = said.err.splitlines()
    assert pod.startswith(f'fleet: {paths[0]}: no matches for kind "Pod"')
    assert empty == f"fleet: {paths[2]} holds 0 documents; one InferenceFleet is needed"
    assert bad.startswith(f"fleet: {paths[3]}: InferenceFleet in version")
    assert none == f"fleet: cannot read {paths[4]}: No such file or directory"
    assert main(["validate", paths[1], paths[1]]) == 0


def test_validate_warns_of_what_is_legal_and_a_mistake(written, capsys):
    rule = {"when": {"inputTokens": {"ge": 9999}}, "tier": "a"}
    path = written(yaml.safe_dump({**GOOD, "spec": {**GOOD["spec"], "routing": {"tierRules": [rule]}}}))
    words = "spec.routing.tierRules[0].when.inputTokens.ge: 9999 is more than engine.maxModelLen 2048"
    assert main(["validate", path]) == 0
    assert capsys.readouterr().err.startswith(f"Warning: {words}")
    assert main(["validate", path, path]) == 0
    assert capsys.readouterr().err.startswith(f"Warning: {path}: {words}")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_standard_input_is_utf_8_whatever_the_terminal_is(monkeypatch, encoding):
    """In the C locale a file that had an umlaut in a comment was "not valid YAML", and only from a pipe."""
    good = {**GOOD, "metadata": {"name": "good", "annotations": {"owner": "Jürgen"}}}
    raw = yaml.safe_dump(good, allow_unicode=True).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), encoding=encoding, errors="surrogateescape"))
    assert read_manifest("-") == good


def test_a_file_that_is_cut_in_a_character_is_too_large_and_no_bad_text(written):
    with pytest.raises(InputError, match="is larger than"):
        read_manifest(written("é" * MAX_MANIFEST_BYTES))


def test_validate_reads_null_as_absent(written, capsys):
    tier = {"parallelism": {"nodes": None, "tensor": None}, "ratio": {"min": None}, "prefill": {"maxReplicas": 1, "args": None}}
    tiers = [{**GOOD["spec"]["tiers"][0], **tier, "decode": {"maxReplicas": 1}}]
    path = written(yaml.safe_dump({**GOOD, "spec": {**GOOD["spec"], "engine": {"type": "vllm", "args": None}, "tiers": tiers}}))
    assert main(["validate", path]) == 0, capsys.readouterr().err


def test_crds_prints_what_kubectl_takes(capsys):
    assert main(["crds"]) == 0
    names = [document["metadata"]["name"] for document in yaml.safe_load_all(capsys.readouterr().out)]
    assert names == ["inferencefleets.inferencefleet.io", "workerpools.inferencefleet.io"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--port", "0"], "'0' is not a port: 1 to 65535"),
        (["up", "--port", "abc"], "'abc' is not a port: 1 to 65535"),
        (["up", "--port", "\u0661"], "is not a port: 1 to 65535"),
        (["up", "--port", "9" * 5000], "is not a port: 1 to 65535"),
        (["up", "--state", ""], "--state: '' is not a folder"),
        (["up", "--pvc", "claim"], "'claim' is not CLAIM=DIR"),
        ([], "required"),
        (["down"], "invalid choice"),
    ],
)
def test_bad_options_end_with_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "usage: fleet" in said
    assert words in said


def test_what_a_server_wrote_into_a_manifest_creates_a_fleet_all_the_same():
    exported = {
        **GOOD,
        "status": {"observedGeneration": 5},
        "metadata": {
            "name": "good", "namespace": "", "uid": "u", "resourceVersion": "5", "generation": 3, "labels": {"a": "b"},
            "creationTimestamp": "2026-01-31T12:00:00Z", "deletionTimestamp": "2026-01-31T12:00:00Z", "finalizers": ["a/b"],
            "ownerReferences": [{"uid": "x"}], "annotations": None,
        },
    }  # fmt: skip
    assert as_new(exported) == {**GOOD, "metadata": {"name": "good", "namespace": "default", "labels": {"a": "b"}}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: 2024-01-01", 'no matches for kind "2024-01-01"'),
        ("kind: 2024-13-45", 'no matches for kind "2024-13-45"'),
        (f"kind: {'9' * 5000}", "no matches for kind"),
        ("kind: 8:32", 'no matches for kind "8:32"'),
        ("kind: [a]", "no matches for kind"),
        ("kind: .inf", "line 1, column 7: unsupported value: .inf"),
    ],
)
def test_odd_scalars_get_one_clear_line(written, text, words):
    with pytest.raises(InputError) as refused:
        read_manifest(written(text + "\n"))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_null_is_absent_from_what_fleet_up_runs(written, tmp_path):
    """`prefill:` with nothing behind it is valid, as for the API server; `fleet up` ended with a traceback."""
    accelerator = {"type": "gpu", "resource": None}
    tier = {"name": "a", "accelerator": accelerator, "prefill": None, "decode": {}, "kvTransfer": None}
    whole = {**GOOD, "metadata": {"name": "good", "labels": None}, "spec": {**GOOD["spec"], "tiers": [tier]}}
    manifest = as_new(read_manifest(written(yaml.safe_dump(whole))))
    assert manifest["spec"]["tiers"] == [{"name": "a", "accelerator": {"type": "gpu"}, "decode": {}}]
    LocalFleet(manifest=manifest, state_dir=tmp_path, port=1, claims={})
