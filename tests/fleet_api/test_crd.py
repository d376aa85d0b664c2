"""Generated CRDs: up to date, complete, without defaults."""

from __future__ import annotations

import pytest

from fleet_api import crd
from fleet_api.schema import at


def nodes(schema, path=""):
    yield path, schema
    for key, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{key}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}[]")


@pytest.mark.parametrize("name", ["inferencefleets.yaml", "workerpools.yaml"])
def test_golden(name):
    assert (crd.CRD_FOLDER / name).read_text() == crd.files()[name], "run `make crds` and read the difference"


@pytest.mark.parametrize("schema", [crd.fleet_schema(), crd.pool_schema()], ids=["fleet", "pool"])
def test_every_field_is_explained_bounded_and_without_default(schema):
    for path, node in nodes(schema):
        assert "default" not in node, path
        if path.startswith((".spec", ".status")) and not path.endswith("[]"):
            assert node.get("description", "").endswith("."), path
        if not path.startswith(".spec"):
            continue
        if node.get("x-kubernetes-int-or-string"):
            assert {"minimum", "maximum", "maxLength", "pattern"} <= set(node), path
            assert "type" not in node, path
            continue
        if node["type"] == "string":
            assert "maxLength" in node or "enum" in node or node.get("pattern", "").endswith("{8}$"), path
        if node["type"] == "integer":
            assert {"minimum", "maximum"} <= set(node), path
        if node["type"] == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_lists_that_apply_merges_by_key():
    schema = crd.fleet_schema()
    assert at(schema, "spec.tiers")["x-kubernetes-list-map-keys"] == ["name"]
    assert at(schema, "status.conditions")["x-kubernetes-list-map-keys"] == ["type"]


def test_a_status_is_written_whole_but_for_its_conditions():
    """Else the API server keeps a note of every leaf of it, and reads and writes them all at every write."""
    status = at(crd.fleet_schema(), "status")["properties"]
    kinds = {name: node.get("x-kubernetes-map-type") or node.get("x-kubernetes-list-type") for name, node in status.items()}
    assert kinds.pop("conditions") == "map"
    assert {name for name, kind in kinds.items() if kind != "atomic"} == {
        name for name, node in status.items() if node["type"] not in ("object", "array")
    }


def test_scale_and_names():
    version = crd.pool_crd()["spec"]["versions"][0]
    assert version["subresources"]["scale"]["specReplicasPath"] == ".spec.replicas"
    assert crd.fleet_crd()["spec"]["names"]["shortNames"] == ["ifleet"]
    columns = [
        column["name"]
        for column in crd.fleet_crd()["spec"]["versions"][0]["additionalPrinterColumns"]
        if "priority" not in column
    ]
    assert columns == ["Ready", "Reason", "Prefill", "Decode", "Ratio", "Model", "Age"]


def test_check_finds_a_changed_file_and_writing_repairs_it(tmp_path, capsys):
    assert crd.main(["--folder", str(tmp_path)]) == 0
    assert crd.main(["--check", "--folder", str(tmp_path)]) == 0
    (tmp_path / "workerpools.yaml").write_text("edited by hand")
    assert crd.main(["--check", "--folder", str(tmp_path)]) == 1
    assert "workerpools.yaml is out of date" in capsys.readouterr().err
    assert crd.main(["--folder", str(tmp_path)]) == 0
    assert crd.main(["--check", "--folder", str(tmp_path)]) == 0
