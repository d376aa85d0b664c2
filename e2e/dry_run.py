"""Objects that a real API server is asked about and never keeps: what a pod's admission wants to be there, and the question."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import yaml

from e2e.kube.controlplane import ControlPlane
from fleet_operator.cluster.kinds import kind_of

NAMESPACE = "ml"
SAFE = "ml-restricted"
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
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
"""Objects that a user's template names must exist for a pod to be admitted."""


@contextmanager
def asked(control_plane: ControlPlane) -> Iterator[httpx.Client]:
    """The administrator's client, with everything of NAMED there."""
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


def fresh(obj: dict[str, Any]) -> dict[str, Any]:
    """Without what the store added."""
    kept = {
        key: obj["metadata"][key]
        for key in ("name", "namespace", "labels", "annotations", "ownerReferences")
        if key in obj["metadata"]
    }
    spec = {key: value for key, value in obj["spec"].items() if key != "nodeName"}
    return {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": kept, "spec": spec}
