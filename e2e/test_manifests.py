"""The API server refuses what `fleet validate` refuses, byte for byte, and accepts what it accepts."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from e2e.kube.controlplane import ControlPlane
from fleet_api.validate import refusal, validate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fleet_api"))
from bad_manifests import BAD, GOOD_CHANGES, manifest

FLEETS = "/apis/inferencefleet.io/v1alpha1/namespaces/default/inferencefleets"
POOLS = "/apis/inferencefleet.io/v1alpha1/namespaces/default/workerpools"
pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def api(control_plane: ControlPlane) -> Iterator[httpx.Client]:
    token = yaml.safe_load(control_plane.kubeconfig.read_text())["users"][0]["user"]["token"]
    trust = ssl.create_default_context(cafile=str(control_plane.ca_file))
    strict = {"fieldValidation": "Strict"}
    with httpx.Client(
        base_url=control_plane.url, verify=trust, headers={"Authorization": f"Bearer {token}"}, params=strict
    ) as client:
        yield client


@contextmanager
def created(api: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[None]:
    """The object exists inside the block: an operator of another test must not find it."""
    answer = api.post(path, json=body)
    assert answer.status_code == 201, answer.text
    try:
        yield
    finally:
        assert api.delete(f"{path}/{body['metadata']['name']}").status_code == 200


def test_every_bad_manifest_is_refused_in_the_same_words(api):
    differing = {}
    for name, changes in BAD:
        spoiled = manifest(changes)
        answer = api.post(FLEETS, params={"dryRun": "All"}, json=spoiled).json()
        causes = [f"{cause['field']}: {cause['message']}" for cause in answer.get("details", {}).get("causes", [])]
        theirs = sorted(causes) or [answer["message"]]
        ours = validate(spoiled)
        if theirs != (sorted(ours) if causes else [refusal(spoiled, ours)]):
            differing[name] = (ours, theirs)
    assert differing == {}


def test_every_good_manifest_is_accepted_and_stored_as_written(api):
    for name, changes in GOOD_CHANGES:
        good = manifest(changes)
        answer = api.post(FLEETS, params={"dryRun": "All"}, json=good)
        assert answer.status_code == 201, f"{name}: {answer.text}"
        if name != "null is absent":
            assert answer.json()["spec"] == good["spec"], f"{name}: defaults were written into the spec"


@pytest.mark.parametrize("name", ["no model source", "no router", "unknown field in spec", "replicas outside the bounds"])
def test_the_command_line_says_what_kubectl_says(control_plane, tmp_path, name):
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps(manifest(dict(BAD)[name])))
    theirs = control_plane.kubectl("create", "-f", str(path), check=False)
    ours = subprocess.run(
        [sys.executable, "-m", "fleet_cli.main", "validate", str(path)], capture_output=True, text=True, check=False
    )
    assert (theirs.returncode, ours.returncode) == (1, 2)
    frame = f'Error from server (BadRequest): error when creating "{path}": '
    assert ours.stderr.removeprefix("fleet: ").strip() == theirs.stderr.removeprefix(frame).strip()


def test_explain_reads_well(control_plane):
    explained = control_plane.kubectl("explain", "ifleet.spec.tiers.ratio.min").stdout
    assert "Fewest prefill workers per decode worker, as prefill:decode. Default: 1:4." in explained


def test_a_pool_scales_and_its_identity_is_fixed(api, control_plane):
    spec = {"fleet": "f", "tier": "t", "role": "decode", "revision": "0123abcd", "replicas": 1}
    pool = {"apiVersion": "inferencefleet.io/v1alpha1", "kind": "WorkerPool", "metadata": {"name": "p"}, "spec": spec}
    with created(api, POOLS, pool):
        control_plane.kubectl("scale", "wpool/p", "--replicas=3")
        assert control_plane.get(f"{POOLS}/p")["spec"]["replicas"] == 3
        refused = control_plane.kubectl("patch", "wpool/p", "--type=merge", "-p", '{"spec": {"tier": "other"}}', check=False)
    assert "only replicas may change" in refused.stderr


def test_status_is_a_subresource_and_the_columns_show_it(api, control_plane):
    ready = {
        "type": "Ready", "status": "True", "reason": "AllGood", "message": "", "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    summary = {"prefill": "1/1", "decode": "2/2", "ratio": "1:2"}
    status = {"status": {"summary": summary, "conditions": [ready], "resolved": {"any": {"thing": 1}}}}
    # what kubectl prints is asked for with the patch itself: another test's operator may write its status right behind it
    headers = {"content-type": "application/merge-patch+json", "accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    with created(api, FLEETS, manifest((("metadata.name", "shown"),))):
        answer = api.patch(f"{FLEETS}/shown/status", content=json.dumps(status), headers=headers)
        assert answer.status_code == 200, answer.text
        header = control_plane.kubectl("get", "ifleet", "shown").stdout.splitlines()[0]
    table = answer.json()
    assert header.split() == ["NAME", "READY", "REASON", "PREFILL", "DECODE", "RATIO", "MODEL", "AGE"]
    shown = [column["name"].upper() for column in table["columnDefinitions"] if not column["priority"]]
    assert shown == header.split()
    assert table["rows"][0]["cells"][:7] == ["shown", "True", "AllGood", "1/1", "2/2", "1:2", "file:///models/tiny"]
