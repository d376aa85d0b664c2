"""A real API server accepts what the operator renders: every object of every golden file and of every converted manifest."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from e2e.kube.controlplane import ControlPlane
from fleet_operator.cluster.interface import CLAIM_TEMPLATE
from fleet_operator.cluster.kinds import POD_GROUP_KINDS, kind_of
from tests.fleet_operator.test_conversions import FILES, load, rendered
from tests.fleet_operator.test_golden import GOLDEN

NAMESPACE = "ml"
SAFE = "ml-restricted"
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
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
"""Objects that a user's template names must exist for a pod to be admitted."""
NAMED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
    ("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SAFE, "labels": RESTRICTED}}),
    *(
        (
            f"/api/v1/namespaces/{where}/serviceaccounts",
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
        )
        for where in (NAMESPACE, SAFE)
        for name in ("default", "puller", "deepseek-r1")
    ),
    (
        "/apis/scheduling.k8s.io/v1/priorityclasses",
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 1000},
    ),
    (
        "/apis/node.k8s.io/v1/runtimeclasses",
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"},
    ),
)


@pytest.fixture(scope="module")
def api(control_plane: ControlPlane) -> Iterator[httpx.Client]:
    token = yaml.safe_load(control_plane.kubeconfig.read_text())["users"][0]["user"]["token"]
    trust = ssl.create_default_context(cafile=str(control_plane.ca_file))
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=control_plane.url, verify=trust, headers=headers, timeout=30) as client:
        for path, body in NAMED:
            answer = client.post(path, json=body)
            assert answer.status_code in (201, 409), answer.text
        yield client


def tried(api: httpx.Client, obj: dict[str, Any]) -> httpx.Response:
    """A server-side dry run, unknown fields refused."""
    kind = kind_of(obj)
    group = f"/api/{kind.api_version}" if "/" not in kind.api_version else f"/apis/{kind.api_version}"
    path = f"{group}/namespaces/{obj['metadata'].get('namespace', NAMESPACE)}/{kind.plural}"
    return api.post(path, json=obj, params={"dryRun": "All", "fieldValidation": "Strict"})


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
    assert refused(api, [fleet, *(_fresh(obj) for obj in (*pods, *claims))]) == {}


def _fresh(obj: dict[str, Any]) -> dict[str, Any]:
    """Without what the store added."""
    kept = {
        key: obj["metadata"][key]
        for key in ("name", "namespace", "labels", "annotations", "ownerReferences")
        if key in obj["metadata"]
    }
    spec = {key: value for key, value in obj["spec"].items() if key != "nodeName"}
    return {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": kept, "spec": spec}


def test_claims_are_of_the_version_that_is_served(api: httpx.Client):
    served = api.get(f"/apis/{CLAIM_TEMPLATE.api_version}").json()
    assert CLAIM_TEMPLATE.plural in [resource["name"] for resource in served["resources"]]
