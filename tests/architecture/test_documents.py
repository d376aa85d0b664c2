"""What READMEs say that a program can judge: their examples are fleets, their links lead somewhere, their fields are there."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from fleet_api.validate import validate
from fleet_operator.settings import Platform
from fleet_router.admission.tenants import Tenant
from tests.architecture.test_layout import ROOT, tracked

DOCUMENTS = tracked("*.md")
EXAMPLE = re.compile(r"^```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
OF_OTHERS = {"scrape_configs", "scaleTargetRef"}
"""First keys of examples of Prometheus' and of an HPA's."""
TIERS = [{"name": "h100", "accelerator": {"type": "h100-sxm"}, "cost": {"perGpuHour": 3.5}}]


def examples() -> list[Any]:
    texts = [(path, text) for path in DOCUMENTS for text in EXAMPLE.findall(path.read_text())]
    found = [(path, yaml.safe_load(textwrap.dedent(text))) for path, text in texts]
    return [
        pytest.param(example, id=f"{path.relative_to(ROOT)}: {next(iter(example))}")
        for path, example in found if not OF_OTHERS & example.keys()
    ]  # fmt: skip


def whole(example: dict[str, Any], engine: str) -> dict[str, Any]:
    """The fleet of whose spec an example is a part."""
    spec = example.get("spec", example)
    tiers = [{**TIERS[0], **tier} for tier in spec.get("tiers", TIERS)]
    model = {"source": "hf://org/model", **spec.get("model", {})}
    return {
        "apiVersion": "inferencefleet.io/v1alpha1", "kind": "InferenceFleet", "metadata": {"name": "llama", "namespace": "ml"},
        "spec": {"engine": {"type": engine}, **spec, "model": model, "tiers": tiers},
    }  # fmt: skip


@pytest.mark.parametrize("example", examples())
def test_an_example_is_a_valid_fleet_of_one_of_the_engines(example: dict[str, Any]):
    refused = [validate(whole(example, engine)) for engine in ("torch", "vllm")]
    assert [] in refused


@pytest.mark.parametrize("example", [one for one in examples() if one.values[0].get("kind") == "InferenceFleet"])
def test_a_whole_fleet_says_what_its_workers_need_beside_the_images_that_are_built(example: dict[str, Any]):
    """README.md's first fleet asked for vLLM, which the worker's image has not, and for a model that is given to nobody unnamed:
    who followed it to the end had workers that ended again and again."""
    model, engine = example["spec"]["model"], example["spec"].get("engine", {})
    assert engine.get("type", "torch") == "torch" or "image" in engine
    assert not model["source"].startswith("hf://meta-llama/") or "tokenSecretRef" in model


def slugs(text: str) -> set[str]:
    """Anchors that GitHub gives to headings."""
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_to_a_heading(path: Path):
    links = [link.partition("#") for link in LINK.findall(path.read_text()) if not link.startswith("http")]
    ends = [(path.parent / name if name else path, anchor) for name, _, anchor in links]
    assert [str(end) for end, anchor in ends if not end.exists() or (anchor and anchor not in slugs(end.read_text()))] == []


SECRETS = r"""#!/bin/sh
case "$*" in
  "get secret -n ml -o name") printf 'secret/%s\n' hf-token llama-peers-0a1b2c3d my-llama-peers-4e5f6071 ;;
  "get secret/llama-peers-0a1b2c3d -n ml "*) printf first | base64 ;;
  patch*) printf '%s\n' "$*" ;;
esac
"""
"""A kubectl of a namespace with two fleets, of which one's name ends with the other's."""


def test_a_key_is_rotated_by_what_stands_there_and_no_other_fleets_is(tmp_path: Path):
    """Of `llama` and `my-llama` the keys of both were replaced in one step, the old ones forgotten, by the way to rotate one."""
    text = (ROOT / "operator/README.md").read_text().split("#### How do I rotate it?")[1]
    (tmp_path / "kubectl").write_text(SECRETS)
    (tmp_path / "kubectl").chmod(0o755)
    lines = text.split("```\n")[1].replace("FLEET", "llama").replace("-n NS", "-n ml")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run(["bash", "-c", lines], env=path, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(
        r'patch secret/llama-peers-0a1b2c3d -n ml -p \{"stringData":\{"key":"first\\n[0-9a-f]{64}\\n"\}\}\n', said
    )


def test_what_tells_of_a_bad_node_is_listed():
    platform, text = Platform(), (ROOT / "operator/README.md").read_text()
    marks = (*platform.leaving_taints, *platform.sick_taints, *platform.sick_conditions)
    assert [mark for mark in marks if f"`{mark.partition('=')[0]}`" not in text] == []


def test_each_field_of_a_tenant_is_explained():
    table = (ROOT / "router/README.md").read_text().split("| field of a tenant |")[1].split("\n\n")[0]
    first_cells = " ".join(line.split(" | ")[0] for line in table.splitlines()[2:])
    assert re.findall(r"`(\w+)`", first_cells) == [field.encode_name for field in msgspec.structs.fields(Tenant)]
