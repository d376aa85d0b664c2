"""The chart with what its default leaves out: `scope: cluster`, namespaces by label, webhooks. Each right that this adds is used
in the operator's life; the audit log says so. (`rbac.podGroups`: test_gang_schedulers.py.)

No Service can be reached from the API server here, so that it passes the webhooks over (`failurePolicy: Ignore`); the test asks
them as it would, with the certificates that it would trust. `test_admission.py` has webhooks that it does reach.
"""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.fleet import Fleet
from e2e.helm.audited import AuditedControlPlane
from e2e.helm.chart import CHART, NAMESPACE, RELEASE, objects, render
from e2e.helm.world import (
    FLEETS,
    OPERATOR,
    VALUES,
    OperatorPods,
    control_plane,
    everything_in,
    granted,
    helm_on,
    pvc_fleet,
    running_nodes,
)

pytestmark = pytest.mark.timeout(400)
WIDE: dict[str, Any] = {"scope": "cluster", "namespaceSelector": {"team": "ml"}, "webhooks": {"enabled": True}}
CLAIM = f"/apis/coordination.k8s.io/v1/namespaces/{FLEETS}/leases/inferencefleet-owner"


@pytest.fixture(scope="module")
def plane() -> Iterator[AuditedControlPlane]:
    with control_plane() as plane:
        yield plane


@pytest.fixture(scope="module")
def nodes(plane: AuditedControlPlane) -> Iterator[Path]:
    with running_nodes(plane) as folder:
        yield folder


def test_a_life_with_webhooks_and_labelled_namespaces(plane: AuditedControlPlane, nodes: Path):
    operator, run_helm = OperatorPods(plane, nodes), helm_on(plane)
    fleet = Fleet(plane, FLEETS, operator)  # type: ignore[arg-type]
    plane.kubectl("label", "namespace", FLEETS, "team=ml")
    run_helm("install", RELEASE, str(CHART), "--wait", "--timeout", "90s", values=WIDE)
    run_helm("test", RELEASE, "--timeout", "60s")
    plane.wait("both configurations trust the operator", lambda: all(bundles(plane)), 60)
    fleet.apply(pvc_fleet())
    fleet.wait_serving(1, 2)
    a_scale_beyond_the_bounds_is_refused(plane, fleet, operator)
    a_namespace_without_its_label_is_let_go(plane, fleet)
    fleet.delete_and_leave_nothing()
    refused = plane.refused(NAMESPACE, OPERATOR)
    run_helm("uninstall", RELEASE, "--wait", "--timeout", "60s")
    plane.wait("its claim alone is left", lambda: everything_in(plane) == {FLEETS: ["Lease/inferencefleet-owner"]}, 60)
    plane.kubectl("delete", "lease", "inferencefleet-owner", "-n", FLEETS)  # as charts/README.md has it
    assert everything_in(plane) == {}

    assert refused == []
    used, rights = plane.asked(NAMESPACE, OPERATOR), granted(render(WIDE))
    more = rights - granted(render(VALUES))
    assert len(more) == 12, "what webhooks and labels of namespaces add"
    assert more - used == set(), "granted and never used"
    assert used - rights == set(), "used and not granted?"


def bundles(plane: AuditedControlPlane) -> list[str]:
    """caBundle of every webhook; empty where nobody wrote one."""
    kinds = "mutatingwebhookconfigurations,validatingwebhookconfigurations"
    found = json.loads(plane.kubectl("get", kinds, "-o", "json").stdout)["items"]
    return [hook["clientConfig"].get("caBundle", "") for one in found for hook in one["webhooks"]] or [""]


def a_scale_beyond_the_bounds_is_refused(plane: AuditedControlPlane, fleet: Fleet, operator: OperatorPods) -> None:
    """Asked as the API server would: by the Service's name, trusting the caBundle, of each operator pod."""
    (service,) = [o["metadata"]["name"] for o in objects(render(WIDE)) if o["kind"] == "Service" and "webhook" in str(o["spec"])]
    trusted = {base64.b64decode(bundle).decode() for bundle in bundles(plane)}
    pool = next(p["metadata"]["name"] for p in fleet.objects("workerpools") if p["spec"]["role"] == "decode")
    request = {
        "uid": "u-1", "kind": {"kind": "Scale"}, "operation": "UPDATE", "userInfo": {"username": "ada"}, "namespace": FLEETS,
        "name": pool, "object": {"spec": {"replicas": 100}}, "oldObject": {"spec": {"replicas": 2}}, "dryRun": False,
    }  # fmt: skip
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    context = ssl.create_default_context(cadata="".join(trusted))
    for pod in operator.pods():
        url, named = f"https://{pod['status']['podIP']}:9443/validate/scale", {"sni_hostname": f"{service}.{NAMESPACE}.svc"}
        with httpx.Client(verify=context, trust_env=False) as client:
            answer = client.post(url, json=review, extensions=named).raise_for_status().json()["response"]
        assert not answer["allowed"]
        assert "maxReplicas" in answer["status"]["message"]


def a_namespace_without_its_label_is_let_go(plane: AuditedControlPlane, fleet: Fleet) -> None:
    """Its claim goes, its workers stay; with the label it is ours again."""
    before = {pod["metadata"]["uid"] for pod in fleet.pods("decode")}
    assert plane.exists(CLAIM)
    plane.kubectl("label", "namespace", FLEETS, "team-")
    plane.wait("the claim is released", lambda: not plane.exists(CLAIM), 60)
    plane.kubectl("label", "namespace", FLEETS, "team=ml")
    plane.wait("claimed again", lambda: plane.exists(CLAIM), 60)
    fleet.wait_serving(1, 2)
    assert {pod["metadata"]["uid"] for pod in fleet.pods("decode")} == before
