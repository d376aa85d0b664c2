"""The chart on a real control plane by the real helm: the operator's own pod, under the chart's rights, until nothing is left.

Both namespaces enforce the `restricted` Pod Security Standard; the model comes from a PersistentVolumeClaim, hostPath is refused.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import OpenAI

from e2e.fleet import Fleet, tokens
from e2e.helm.audited import AuditedControlPlane, Right
from e2e.helm.chart import BASE, CHART, NAMESPACE, RBAC, RELEASE, ROOT, HelmError, objects, render
from e2e.helm.world import (
    FLEETS,
    OPERATOR,
    VALUES,
    Helm,
    OperatorPods,
    control_plane,
    everything_in,
    granted,
    helm_on,
    pvc_fleet,
    running_nodes,
)
from fleet_operator.names import ADAPTERS, APPLIED

UNSEEN: frozenset[Right] = frozenset(
    {
        # the audit log knows no question that admission asked; test_rights_that_no_request_shows asks them
        ("inferencefleet.io", "inferencefleets/finalizers", "update"),
        ("inferencefleet.io", "workerpools/finalizers", "update"),
        ("", "configmaps", "get"),
        # pods with RDMA and claims are not for a restricted namespace
        ("resource.k8s.io", "resourceclaimtemplates", "create"),
        ("resource.k8s.io", "resourceclaimtemplates", "patch"),
    }
)
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def plane() -> Iterator[AuditedControlPlane]:
    with control_plane() as plane:
        yield plane


@pytest.fixture(scope="module")
def nodes(plane: AuditedControlPlane) -> Iterator[Path]:
    with running_nodes(plane) as folder:
        yield folder


@pytest.fixture(scope="module")
def run_helm(plane: AuditedControlPlane) -> Helm:
    return helm_on(plane)


def test_a_whole_life(plane: AuditedControlPlane, nodes: Path, run_helm: Helm, tmp_path: Path):
    operator = OperatorPods(plane, nodes)
    fleet = Fleet(plane, FLEETS, operator)  # type: ignore[arg-type]
    run_helm("install", RELEASE, str(CHART), "--wait", "--timeout", "90s", values=VALUES)
    run_helm("test", RELEASE, "--timeout", "60s")
    assert pods_of_tests(plane) == []
    assert [ready(pod) for pod in operator.pods()] == [True, True], "one works, one waits, both answer /readyz"

    fleet.apply(pvc_fleet())
    fleet.wait_serving(1, 2)
    tokens_come_through_the_router(fleet)
    a_second_apply_would_change_nothing(plane, tmp_path)
    what_is_taken_away_comes_back(fleet)

    before = worker_uids(fleet)
    a_lost_claim_is_made_again(plane, operator)
    an_upgrade_brings_its_crds(plane, run_helm, operator, tmp_path)
    fleet.wait_serving(1, 2)
    run_helm("rollback", RELEASE, "1", "--wait", "--timeout", "90s")
    assert "fromTheFuture" not in crd_text(plane)
    assert "TESTED" not in env_of(operator)
    fleet.wait_serving(1, 2)
    assert worker_uids(fleet) == before, "neither upgrade nor rollback of the operator restarts a worker or router"
    tokens_come_through_the_router(fleet)

    workers_are_told_of_adapters(fleet)
    the_policy_goes_when_it_is_switched_off(fleet)
    a_renamed_tier_leaves_nothing_behind(fleet)
    rdma_is_refused_here_in_words(fleet)
    fleet.delete_and_leave_nothing()
    nothing_was_refused(plane)
    run_helm("uninstall", RELEASE, "--wait", "--timeout", "60s")
    plane.wait("nothing left but the CRDs", lambda: everything_in(plane) == {}, 60)
    assert plane.kubectl("get", "crd", "-o", "name").stdout.count("inferencefleet.io") == 2

    every_right_is_used(plane)


def ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or [])


def pods_of_tests(plane: AuditedControlPlane) -> list[str]:
    return plane.kubectl("-n", NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/component=test", "-o", "name").stdout.split()


def worker_uids(fleet: Fleet) -> set[str]:
    pods = [pod["metadata"] for role in ("prefill", "decode", "router") for pod in fleet.pods(role)]
    return {pod["uid"] for pod in pods if "deletionTimestamp" not in pod}


def tokens_come_through_the_router(fleet: Fleet) -> None:
    """The official client gets what one engine alone says."""
    client = OpenAI(base_url=f"{fleet.router()}/v1", api_key="none")
    prompt = "The chart installs the operator and the operator installs the rest. " * 8
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=16, temperature=0, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].token_ids == tokens(f"http://{fleet.pods('prefill')[0]['status']['podIP']}:8000", prompt)


def a_second_apply_would_change_nothing(plane: AuditedControlPlane, tmp_path: Path) -> None:
    """GitOps: nothing differs from what was applied, though the operator wrote the status meanwhile."""
    wish = tmp_path / "fleet.yaml"
    wish.write_text(yaml.safe_dump(pvc_fleet()))
    done = plane.kubectl("diff", "--server-side", "-f", str(wish), check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def what_is_taken_away_comes_back(fleet: Fleet) -> None:
    """Each child edited, then deleted, and one made unusable: the operator needs its rights to mend them."""
    for kind in ("serviceaccount", "role", "rolebinding", "deployment", "networkpolicy"):
        name = "loop-workers" if kind == "networkpolicy" else "loop-router"
        plural = kind.replace("policy", "policie") + "s"
        fleet.kubectl("annotate", kind, name, "--overwrite", f"{APPLIED}=edited")
        fleet.wait(f"the {kind} as it was", lambda p=plural: all(applied(o) != "edited" for o in fleet.objects(p)), 30)
    stored = fleet.objects("controllerrevisions")[0]["metadata"]["name"]
    fleet.kubectl("label", "controllerrevision", stored, "inferencefleet.io/revision-")
    fleet.wait("its label", lambda: all(labelled(o) for o in fleet.objects("controllerrevisions")), 30)
    budget = fleet.objects("poddisruptionbudgets")[0]["metadata"]["name"]
    fleet.kubectl("delete", "poddisruptionbudget", budget, "--wait=false")
    service = '{"spec":{"ports":[{"name":"http","port":9999}]}}'
    fleet.kubectl("patch", "service", "loop-router", "--type=merge", "-p", service)
    for kind in ("configmap", "serviceaccount", "role", "rolebinding", "deployment"):
        fleet.kubectl("delete", kind, "loop-router", "--wait=false")
    pool = next(p for p in fleet.objects("workerpools") if p["spec"]["role"] == "decode")
    fleet.kubectl("scale", "wpool", pool["metadata"]["name"], "--replicas=3")
    fleet.wait("a third decode worker", lambda: fleet.serving() == (1, 3))
    fleet.kubectl("scale", "wpool", pool["metadata"]["name"], "--replicas=2")
    fleet.wait_serving(1, 2)
    fleet.wait("the Service as it was", lambda: service_ports(fleet) == [8080], 30)
    a_service_that_nothing_needs_goes(fleet)


def a_service_that_nothing_needs_goes(fleet: Fleet) -> None:
    """That of workers over several nodes, as their last one leaves it."""
    router = next(one for one in fleet.objects("services") if one["metadata"]["name"] == "loop-router")
    meta = {key: router["metadata"][key] for key in ("labels", "ownerReferences")}
    spec = {"clusterIP": "None", "selector": router["spec"]["selector"]}
    fleet.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "loop-workers", **meta}, "spec": spec})
    fleet.wait("it is gone", lambda: [one["metadata"]["name"] for one in fleet.objects("services")] == ["loop-router"], 60)


def applied(found: dict[str, Any]) -> str:
    """The hash of the wish that an object was made from."""
    return str((found["metadata"].get("annotations") or {}).get(APPLIED))


def labelled(found: dict[str, Any]) -> bool:
    return "inferencefleet.io/revision" in found["metadata"]["labels"]


def a_lost_claim_is_made_again(plane: AuditedControlPlane, operator: OperatorPods) -> None:
    """Both Leases deleted by hand, and both operator pods: the next ones need the right to make them."""
    plane.kubectl("-n", FLEETS, "delete", "lease", "inferencefleet-owner")
    plane.kubectl("-n", NAMESPACE, "delete", "pods", "-l", "app.kubernetes.io/component=operator", "--wait=false")
    plane.wait("the namespace's owner", lambda: holder(plane, FLEETS, "inferencefleet-owner") == f"{NAMESPACE}/{OPERATOR}", 90)
    plane.wait("a leader", lambda: bool(holder(plane, NAMESPACE, OPERATOR)), 60)
    operator.check()


def holder(plane: AuditedControlPlane, namespace: str, lease: str) -> str:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease}"
    return plane.get(path).get("spec", {}).get("holderIdentity", "") if plane.exists(path) else ""


def service_ports(fleet: Fleet) -> list[int]:
    return [
        port["port"] for s in fleet.objects("services") if s["metadata"]["name"] == "loop-router" for port in s["spec"]["ports"]
    ]


def an_upgrade_brings_its_crds(plane: AuditedControlPlane, run_helm: Helm, operator: OperatorPods, tmp_path: Path) -> None:
    """A chart of tomorrow: one more field in the CRD, one more variable for the operator, and routers of another image."""
    newer = tmp_path / "inferencefleet"
    shutil.copytree(CHART, newer)
    path = newer / "files/crds/inferencefleets.yaml"
    crd = yaml.safe_load(path.read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["fromTheFuture"] = {"type": "string"}
    path.write_text(yaml.safe_dump(crd))
    more = {**VALUES, "extraEnv": [{"name": "TESTED", "value": "1"}], "routerImage": {"tag": "9.9.9"}}
    run_helm("upgrade", RELEASE, str(newer), "--wait", "--timeout", "90s", values=more)
    assert "fromTheFuture" in crd_text(plane)
    assert env_of(operator)["TESTED"] == "1"


def crd_text(plane: AuditedControlPlane) -> str:
    return plane.kubectl("get", "crd", "inferencefleets.inferencefleet.io", "-o", "yaml").stdout


def env_of(operator: OperatorPods) -> dict[str, str]:
    """What all of them have in common."""
    pods = [{v["name"]: v.get("value", "") for v in pod["spec"]["containers"][0]["env"]} for pod in operator.pods()]
    return {name: value for name, value in pods[0].items() if all(pod.get(name) == value for pod in pods)}


def a_renamed_tier_leaves_nothing_behind(fleet: Fleet) -> None:
    """New pools, templates and budgets; those of the old name are deleted, and so is an unwanted NetworkPolicy."""
    wish = pvc_fleet()
    wish["spec"]["networkPolicy"] = {"enabled": False}
    old, wish["spec"]["tiers"][0]["name"] = wish["spec"]["tiers"][0]["name"], "other"
    kinds = "workerpools,controllerrevisions,poddisruptionbudgets"
    fleet.apply(wish)

    def replaced() -> bool:
        left = fleet.objects(kinds, "-l", f"inferencefleet.io/tier={old}") + fleet.objects("networkpolicies")
        return not left and fleet.serving() == (1, 2)

    assert fleet.objects(kinds, "-l", f"inferencefleet.io/tier={old}")
    fleet.wait("nothing of the old tier", replaced, 120)


def the_policy_goes_when_it_is_switched_off(fleet: Fleet) -> None:
    """And comes back with the next manifest that does not say so."""
    assert len(fleet.objects("networkpolicies")) == 1
    wish = pvc_fleet()
    wish["spec"]["networkPolicy"] = {"enabled": False}
    fleet.apply(wish)
    fleet.wait("no policy", lambda: fleet.objects("networkpolicies") == [], 30)


def workers_are_told_of_adapters(fleet: Fleet) -> None:
    """An annotation of every worker says which it should have: this one is nowhere, so it is told and then taken back."""
    wish = pvc_fleet()
    wish["spec"]["model"]["adapters"] = [{"name": "nowhere", "source": f"{wish['spec']['model']['source']}/nowhere"}]
    fleet.apply(wish)
    fleet.wait("told", lambda: all("nowhere" in text for text in told_adapters(fleet)), 30)
    fleet.apply(pvc_fleet())
    fleet.wait("taken back", lambda: not any("nowhere" in text for text in told_adapters(fleet)), 30)


def told_adapters(fleet: Fleet) -> list[str]:
    pods = [pod for role in ("prefill", "decode") for pod in fleet.pods(role)]
    return [pod["metadata"].get("annotations", {}).get(ADAPTERS, "") for pod in pods]


def rdma_is_refused_here_in_words(fleet: Fleet) -> None:
    """Pod Security `restricted` forbids IPC_LOCK: the status says so. The claim template was written before the pod."""
    wish = pvc_fleet()
    wish["metadata"]["name"] = "fabric"
    tier = wish["spec"]["tiers"][0]
    tier["accelerator"] = {"type": "h200"}
    tier["kvTransfer"] = {"transport": "rdma", "via": "dra", "dra": {"nic": "mrdma.google.com"}}
    wish["spec"]["deletion"] = {"wait": "1h"}  # it has a finalizer, which goes at once: it has no worker
    fleet.apply(wish)

    def told() -> bool:
        status = json.loads(fleet.kubectl("get", "ifleet", "fabric", "-o", "json")).get("status") or {}
        return any(c["type"] == "Provisioned" and "IPC_LOCK" in c["message"] for c in status.get("conditions") or [])

    fleet.wait("the refusal in the status", told, 60)
    assert len(fleet.objects("resourceclaimtemplates")) == 2
    fleet.kubectl("delete", "ifleet", "fabric", "--timeout=60s")
    fleet.wait("its templates gone", lambda: fleet.objects("resourceclaimtemplates") == [], 60)


def nothing_was_refused(plane: AuditedControlPlane) -> None:
    """Asked before the chart is uninstalled: that takes the rights away at once, and the operator's pods a little later."""
    refused = [words for words in plane.refused(NAMESPACE, OPERATOR) if "violates PodSecurity" not in words]
    assert refused == []


def every_right_is_used(plane: AuditedControlPlane) -> None:
    """Taking any verb away would break this test's life: the operator really asked for each one."""
    used, rights = plane.asked(NAMESPACE, OPERATOR), granted(render(VALUES))
    assert rights - used - UNSEEN == set(), "granted and never used"
    assert used - rights == set(), "used and not granted?"


ROUTER_ROLE = {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["x-router"], "verbs": ["get", "list", "watch"]}
RIGHTS_BY_DEED: list[tuple[Right, str]] = [
    (("", "configmaps", "create"), "ConfigMap"),
    (("inferencefleet.io", "inferencefleets/finalizers", "update"), "ConfigMap"),
    (("inferencefleet.io", "workerpools/finalizers", "update"), "Pod"),
    (("", "configmaps", "get"), "Role"),
    (("", "configmaps", "list"), "Role"),
    (("", "configmaps", "watch"), "Role"),
    (("resource.k8s.io", "resourceclaimtemplates", "create"), "ResourceClaimTemplate"),
    (("resource.k8s.io", "resourceclaimtemplates", "patch"), "ResourceClaimTemplate"),
]
"""(right, kind that the operator cannot write without it)."""


@pytest.fixture(scope="module")
def probe(plane: AuditedControlPlane) -> Callable[[Right | None, str], str]:
    """Write an object as an account with the operator's rights but one; what the API server says. Nothing stays: dry run."""
    plane.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
    owned = ["-n", FLEETS, "apply", "--server-side", "--dry-run=server", "-f", "-"]
    # the admission plugin learns of new kinds a little later than the rest of the API server
    plane.wait(
        "owners to be known", lambda: plane.kubectl(*owned, stdin=yaml.safe_dump(child("Pod")), check=False).returncode == 0
    )
    names = (row for row in range(1_000))

    def write(without: Right | None, kind: str) -> str:
        name = f"probe-{next(names)}"
        rules = [
            {"apiGroups": [g], "resources": [r], "verbs": [v]}
            for g, r, v in sorted(granted(render(VALUES)))
            if (g, r, v) != without
        ]
        account = {"kind": "ServiceAccount", "name": name, "namespace": FLEETS}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
        given = [
            {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": name}, "rules": rules},
            {
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": name},
                "roleRef": role, "subjects": [account],
            },
        ]  # fmt: skip
        plane.kubectl("-n", FLEETS, "apply", "-f", "-", stdin=yaml.safe_dump_all(given))
        wish = [
            "-n",
            FLEETS,
            "apply",
            "--server-side",
            "--dry-run=server",
            f"--as=system:serviceaccount:{FLEETS}:{name}",
            "-f",
            "-",
        ]
        done = plane.kubectl(*wish, stdin=yaml.safe_dump(child(kind)), check=False)
        plane.kubectl("-n", FLEETS, "delete", "role,rolebinding", name)
        return "" if done.returncode == 0 else done.stderr

    return write


def child(kind: str) -> dict[str, Any]:
    """What the operator makes of this kind, as small as the API server takes it."""
    owner = {"apiVersion": "inferencefleet.io/v1alpha1", "name": "x", "uid": "0", "controller": True, "blockOwnerDeletion": True}
    owner["kind"] = "WorkerPool" if kind in ("Pod", "ResourceClaimTemplate") else "InferenceFleet"
    versions = {"Role": "rbac.authorization.k8s.io/v1", "ResourceClaimTemplate": "resource.k8s.io/v1"}
    meta = {"name": "x-router", "ownerReferences": [owner]}
    body: dict[str, Any] = {"apiVersion": versions.get(kind, "v1"), "kind": kind, "metadata": meta}
    if kind == "Role":
        return body | {"rules": [ROUTER_ROLE]}
    if kind == "ResourceClaimTemplate":
        gpu = {"name": "gpu", "exactly": {"deviceClassName": "gpu.example.com", "allocationMode": "ExactCount", "count": 1}}
        return body | {"spec": {"spec": {"devices": {"requests": [gpu]}}}}
    if kind == "Pod":
        return body | {"spec": safe_pod()}
    return body


def safe_pod() -> dict[str, Any]:
    chart = next(o for o in objects(render(VALUES)) if o["kind"] == "Deployment")
    spec: dict[str, Any] = chart["spec"]["template"]["spec"]
    return spec | {"serviceAccountName": "default"}


@pytest.mark.parametrize(("right", "kind"), RIGHTS_BY_DEED, ids=[f"{r[2]} {r[1]}" for r, _ in RIGHTS_BY_DEED])
def test_rights_that_no_request_shows(probe: Callable[[Right | None, str], str], right: Right, kind: str):
    assert probe(None, kind) == ""
    refusal = probe(right, kind).lower()
    assert "forbidden" in refusal or "cannot set blockownerdeletion" in refusal, refusal


def test_the_webhooks_secret_may_be_made_again(plane: AuditedControlPlane):
    """Somebody deleted it. The operator, which makes all that is in it, had no right to: once its pods were other ones nobody
    answered reviews."""
    rendered = objects(render({**VALUES, "webhooks": {"enabled": True}, "peerKeys": {"create": False}}))
    text = yaml.safe_dump_all([o for o in rendered if o["kind"] in ("ServiceAccount", "Role", "RoleBinding")])
    wish = next(o for o in rendered if o["kind"] == "Secret")
    account = f"--as=system:serviceaccount:{NAMESPACE}:{OPERATOR}"
    apply = (account, "apply", "--server-side", "--dry-run=server", "-f", "-")
    plane.kubectl("apply", "-f", "-", stdin=text)
    try:
        assert "serverside-applied" in plane.kubectl(*apply, stdin=yaml.safe_dump(wish)).stdout
        wish["metadata"]["name"] = "another"
        assert "forbidden" in plane.kubectl(*apply, stdin=yaml.safe_dump(wish), check=False).stderr
    finally:
        plane.kubectl("delete", "-f", "-", stdin=text)


RENDERED = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "tests/charts/values").glob("*.yaml"))}
WATCHED_BY = {"prometheusRule": {"enabled": True, "runbookUrl": "https://wiki/runbook"}, "dashboards": {"enabled": True}}
MONITORED = {"metrics": {**RENDERED["everything"]["metrics"], **WATCHED_BY}}


@pytest.fixture(scope="module")
def monitoring(plane: AuditedControlPlane) -> None:
    """The Prometheus operator's kinds."""
    script = [str(ROOT / "e2e/kube/get-prometheus-crds")]
    folder = subprocess.run(script, check=True, capture_output=True, text=True).stdout.strip()
    plane.kubectl("apply", "--server-side", "-f", folder)
    for kind in ("servicemonitors", "podmonitors", "prometheusrules"):
        plane.wait(f"the CRD of {kind}", lambda kind=kind: plane.kubectl("get", kind, check=False).returncode == 0)


@pytest.mark.usefixtures("monitoring")
@pytest.mark.parametrize("values", [*RENDERED.values(), MONITORED], ids=[*RENDERED, "monitored"])
def test_a_restricted_namespace_takes_every_rendering(plane: AuditedControlPlane, values: dict[str, Any]):
    rendered = [o for o in objects(render(values)) if o["kind"] != "Pod"]  # a Pod is what the first test made
    done = plane.kubectl(
        "apply", "--server-side", "--dry-run=server", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump_all(rendered)
    )
    assert done.stderr == "", "a warning of the Pod Security Standard or of the API"
    assert len(done.stdout.splitlines()) == len(rendered)


def test_kustomize_base_without_helm(plane: AuditedControlPlane, nodes: Path):
    """For `kubectl apply -k` and Argo CD: the operator comes up, sees all namespaces, and a second apply would change nothing."""
    operator = OperatorPods(plane, nodes)
    apply = ["--server-side", "--force-conflicts", "-k", str(BASE)]
    before = set(plane.refused(NAMESPACE, OPERATOR))  # of another test's life
    plane.kubectl("apply", *apply)
    try:
        plane.kubectl("-n", NAMESPACE, "rollout", "status", f"deployment/{OPERATOR}", "--timeout=60s")
        operator.check()
        assert set(plane.refused(NAMESPACE, OPERATOR)) <= before
        done = plane.kubectl("diff", *apply, check=False)
        assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
        account = f"--as=system:serviceaccount:{NAMESPACE}:{OPERATOR}"
        assert plane.kubectl("auth", "can-i", "list", "inferencefleets", "--all-namespaces", account).stdout.strip() == "yes"
    finally:
        plane.kubectl("delete", "-f", str(BASE / "operator.yaml"), "-f", str(RBAC / "operator.yaml"), "--wait=false")


def test_the_operator_says_what_its_account_lacks(plane: AuditedControlPlane, nodes: Path, run_helm: Helm):
    """`helm test` is red, in the API server's words, when somebody took the rights away."""
    run_helm("install", RELEASE, str(CHART), "--take-ownership", values=VALUES)
    try:
        plane.kubectl("-n", FLEETS, "delete", "rolebinding", f"{NAMESPACE}-{OPERATOR}")
        with pytest.raises(HelmError):
            run_helm("test", RELEASE, "--timeout", "90s")
        logs = nodes.glob(f"*/logs/{OPERATOR}-test/installed.log")  # one of a test before it may lie on another node
        assert "inferencefleets in ml: Forbidden" in max(logs, key=lambda log: log.stat().st_mtime).read_text()
    finally:
        run_helm("uninstall", RELEASE)
        plane.kubectl("-n", NAMESPACE, "delete", "pod", f"{OPERATOR}-test", "--ignore-not-found")


def test_crds_that_kubectl_made_join_the_release(plane: AuditedControlPlane, run_helm: Helm):
    """As charts/README.md has it. Helm 4 refused it when they were of another version: the schema was kubectl's."""
    said = re.search(r"`helm install (--[^`]*)`", (ROOT / "charts/README.md").read_text())
    assert said
    crd = yaml.safe_load((ROOT / "crds/inferencefleets.yaml").read_text())
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"] = "that of another version"
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump(crd))
    try:
        run_helm("install", RELEASE, str(CHART), *said[1].split(), values=VALUES)
        assert "that of another version" not in crd_text(plane)
    finally:
        run_helm("uninstall", RELEASE)


@pytest.mark.parametrize(("verb", "role", "may"), [("list", "view", True), ("create", "view", False), ("create", "edit", True)])
def test_aggregated_roles(plane: AuditedControlPlane, verb: str, role: str, may: bool):
    """rbac.aggregate: the built-in roles of a namespace's users reach fleets."""
    rendered = [
        o
        for o in objects(render({"rbac": {"aggregate": True}}))
        if "-edit" in o["metadata"]["name"] or "-view" in o["metadata"]["name"]
    ]
    text = yaml.safe_dump_all(rendered)
    plane.kubectl("apply", "-f", "-", stdin=text)
    plane.kubectl("-n", FLEETS, "create", "rolebinding", "somebody", f"--clusterrole={role}", "--user=somebody")
    try:
        plane.wait("the controller's aggregation", lambda: may_list(plane, role), 30)
        asked = plane.kubectl("-n", FLEETS, "auth", "can-i", verb, "inferencefleets", "--as=somebody", check=False)
        assert asked.stdout.strip() == ("yes" if may else "no")
    finally:
        plane.kubectl("-n", FLEETS, "delete", "rolebinding", "somebody")
        plane.kubectl("delete", "-f", "-", stdin=text)


def may_list(plane: AuditedControlPlane, role: str) -> bool:
    rules = json.loads(plane.kubectl("get", "clusterrole", role, "-o", "json").stdout)["rules"]
    return any("inferencefleets" in rule["resources"] for rule in rules)
