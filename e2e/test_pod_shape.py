"""A real API server accepts what the operator renders: every object of every golden file and of every converted manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from e2e.dry_run import SAFE, asked, fresh, tried
from e2e.kube.controlplane import ControlPlane
from fleet_operator.cluster.interface import CLAIM_TEMPLATE
from fleet_operator.cluster.kinds import POD_GROUP_KINDS, kind_of
from tests.fleet_operator.test_conversions import FILES, load, rendered
from tests.fleet_operator.test_golden import GOLDEN

CONTROL = re.compile(r"(?:^|\), )([a-zA-Z !=]+?) \(")
"""Each thing that the standard's verdict names is followed by its details."""
FILES_OF_NODES, RDMA, HOST = {"restricted volume types"}, {"unrestricted capabilities"}, {"host namespaces", "hostPort"}
ASKED_FOR = {
    "torch-cpu": FILES_OF_NODES, "two-models": FILES_OF_NODES, "tenants": FILES_OF_NODES,  # file:// is a hostPath
    "multus-template": FILES_OF_NODES | RDMA | {"runAsNonRoot != true"},  # runAsUser: 0
    "torch-gang-dra": FILES_OF_NODES | RDMA, "vllm-dra": RDMA,
    "vllm-rdma-required": FILES_OF_NODES | RDMA, "vllm-rdma-two-tiers": FILES_OF_NODES | RDMA,
    "vllm-host-network": RDMA | HOST, "vllm-two-nodes": RDMA | HOST,
}  # fmt: skip
"""Golden files whose fleets ask for what the standard forbids, and what that is. All others are taken without a warning."""
NOT_SERVED = set(POD_GROUP_KINDS.values())
"""Not by this server: Kubernetes' own PodGroup is alpha (`test_gang_scheduling.py` has a server with it), those of
scheduler-plugins and Volcano come with their add-ons, which no test here has."""
pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def api(control_plane: ControlPlane) -> Iterator[httpx.Client]:
    with asked(control_plane) as client:
        yield client


def refused(api: httpx.Client, objects: list[dict[str, Any]]) -> dict[str, str]:
    """What the server says to the objects that it does not take."""
    answers = {f"{obj['kind']} {obj['metadata']['name']}": tried(api, obj) for obj in objects}
    return {name: answer.text[:500] for name, answer in answers.items() if answer.status_code != 201}


def against_restricted(api: httpx.Client, objects: list[dict[str, Any]]) -> set[str]:
    """What the Pod Security Standard has against the objects: pods are refused, what makes pods is warned of."""
    found: set[str] = set()
    for obj in objects:
        answer = tried(api, {**obj, "metadata": {**obj["metadata"], "namespace": SAFE}})
        words = answer.headers.get("warning", "") if answer.status_code == 201 else answer.json()["message"]
        if words:
            _, verdict, why = words.partition('PodSecurity "restricted:latest": ')
            assert verdict, words
            found |= set(CONTROL.findall(why))
    return found


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_server_takes_every_golden_object(api: httpx.Client, path: Path):
    objects = list(yaml.safe_load_all(path.read_text()))
    served = [obj for obj in objects if kind_of(obj) not in NOT_SERVED]
    assert len(served) > 8
    assert refused(api, served) == {}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_s4_a_restricted_namespace_takes_all_but_what_users_asked_for(api: httpx.Client, path: Path):
    objects = [obj for obj in yaml.safe_load_all(path.read_text()) if kind_of(obj) not in NOT_SERVED]
    assert against_restricted(api, objects) == ASKED_FOR.get(path.stem, set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_server_takes_the_pods_of_every_conversion(api: httpx.Client, path: Path):
    fleet = load(path)["fleet"]
    pods, claims = rendered(fleet)
    assert refused(api, [fleet, *(fresh(obj) for obj in (*pods, *claims))]) == {}


def test_claims_are_of_the_version_that_is_served(api: httpx.Client):
    served = api.get(f"/apis/{CLAIM_TEMPLATE.api_version}").json()
    assert CLAIM_TEMPLATE.plural in [resource["name"] for resource in served["resources"]]
