"""A real three-node kind cluster: images, chart, fleet, tokens through the router's Service, a rolling update and a paused node.

Kubelets, containers, Services, DNS and probes are real here; GPUs are imaginary, and torch is mounted from the nodes: 5 GB are
too much for images that are loaded for a test. `make e2e-kind` builds the images.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.fleet import Fleet, manifest
from e2e.helm.chart import CHART, NAMESPACE, RELEASE, helm
from e2e.helm.world import MADE_BY_KUBERNETES, RESTRICTED
from e2e.kind.cluster import MODELS, TORCH, KindCluster
from e2e.test_churn import recording
from fleet_cli.up.bundled import tiny_model

HERE = Path(__file__).resolve().parent
FLEETS = "ml"
TAG = "e2e"
IMAGES = [f"inferencefleet/{name}:{TAG}" for name in ("operator", "router", "worker")]
VALUES = {
    "watchNamespaces": [FLEETS],
    "image": {"repository": "inferencefleet/operator", "tag": TAG},
    "workerImage": {"repository": "inferencefleet/worker", "tag": TAG},
    "routerImage": {"repository": "inferencefleet/router", "tag": TAG},
    "drainTimeoutSeconds": 60,
    "webhooks": {"enabled": True},
}
GPUS_PER_NODE = 8
READY_S = 240.0
PAUSE_S = 15.0
LEASE_LOST = 3
"""Exit code of an operator that led and cannot be sure of it any more."""

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900)]


class InstalledOperator:
    """The chart's Deployment, as `Fleet` wants to know its operator."""

    def __init__(self, cluster: KindCluster) -> None:
        self._cluster = cluster
        self.paused = ""
        """A node that stood still: a leader there has lost its Lease, and must end."""

    def check(self) -> None:
        """RuntimeError when it was restarted, other than by a lost Lease on the paused node."""
        for pod in self._cluster.items("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=operator"):
            ended = [status for status in pod["status"].get("containerStatuses") or [] if status["restartCount"]]
            codes = [status.get("lastState", {}).get("terminated", {}).get("exitCode") for status in ended]
            if codes and not (pod["spec"].get("nodeName") == self.paused and codes == [LEASE_LOST]):
                raise RuntimeError(f"the operator ended with {codes}:\n{self.tail()}")

    def tail(self) -> str:
        return self._cluster.kubectl(
            "-n", NAMESPACE, "logs", "deployment/inferencefleet-operator", "--tail=40", check=False
        ).stdout


class PatientFleet(Fleet):
    """Looks once a second: each look starts kubectl, and the cluster needs the same two cores."""

    def wait(self, what: str, check: Callable[[], bool], timeout_s: float = READY_S) -> None:
        end, looked = time.monotonic() + timeout_s, False
        while not (looked := check()) and time.monotonic() < end:
            time.sleep(1.0)
        self.operator.check()
        if not looked:
            pods = self.kubectl("get", "pods", "-o", "wide")
            raise AssertionError(
                f"{what}: not within {timeout_s:g} s; {json.dumps(self.status())}\n{pods}\n{self.operator.tail()}"
            )


@pytest.fixture(scope="module")
def cluster() -> Iterator[KindCluster]:
    """Three nodes with our images, imaginary GPUs, the mounted torch, and the chart."""
    with KindCluster() as cluster:
        cluster.load(*IMAGES)
        cluster.offer_gpus(GPUS_PER_NODE)
        cluster.kubectl("create", "namespace", NAMESPACE)
        cluster.kubectl("label", "namespace", NAMESPACE, *RESTRICTED)
        cluster.kubectl("create", "namespace", FLEETS)
        run_helm(cluster, "install", RELEASE, str(CHART), "--wait", "--timeout", "120s", values=VALUES)
        yield cluster


def run_helm(cluster: KindCluster, command: str, *args: str, values: dict[str, Any] | None = None) -> str:
    home = {f"HELM_{kind}_HOME": str(cluster.dir / "helm" / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
    given = [] if values is None else ["--values", "-"]
    text = None if values is None else yaml.safe_dump(values)
    return helm(
        command, *args, "--namespace", NAMESPACE, *given, env={"KUBECONFIG": str(cluster.kubeconfig), **home}, stdin=text,
        timeout_s=180,
    )  # fmt: skip


@pytest.fixture(scope="module")
def fleet(cluster: KindCluster) -> Fleet:
    """1 prefill and 2 decode workers that serve."""
    fleet = PatientFleet(cluster, FLEETS, InstalledOperator(cluster))  # type: ignore[arg-type]
    fleet.apply(wish())
    fleet.wait_serving(1, 2, READY_S)
    return fleet


def wish() -> dict[str, Any]:
    """Workers that find torch on their node and ask for little of it."""
    made = manifest(FLEETS, tiny_model())
    made["spec"]["model"]["source"] = f"file://{MODELS}/{tiny_model().name}"
    template = {
        "env": [{"name": "PYTHONPATH", "value": "/opt/torch"}, {"name": "OMP_NUM_THREADS", "value": "1"}],
        "volumes": [{"name": "torch", "hostPath": {"path": TORCH, "type": "Directory"}}],
        "volumeMounts": [{"name": "torch", "mountPath": "/opt/torch", "readOnly": True}],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
    }
    for role in ("prefill", "decode"):
        made["spec"]["tiers"][0][role]["podTemplate"] = template
    return made


class Asking:
    """A pod that asks through the Service while the block runs; `answered` and `failed` afterwards."""

    def __init__(self, cluster: KindCluster, name: str, clients: int, node: str | None = None) -> None:
        self._cluster, self._name, self._clients, self._node = cluster, name, clients, node
        self.answered, self.failed, self.slowest_s = 0, ["the pod never said anything"], 0.0

    def __enter__(self) -> Asking:
        script = (HERE / "kind/asking.py").read_text()
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": self._name}, "data": {"asking.py": script}}
        self._cluster.kubectl("-n", FLEETS, "apply", "-f", "-", stdin=yaml.safe_dump_all([config, self._pod()]))
        self.wait_answers(5)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._cluster.kubectl("-n", FLEETS, "exec", self._name, "--", "touch", "/tmp/stop")
            self._cluster.wait("the last answers", lambda: self._last().get("done") is True, 150)
            last = self._last()
            self.answered, self.failed, self.slowest_s = last["answered"], last["failed"], last["slowest_s"]
        self._cluster.kubectl("-n", FLEETS, "delete", f"pod/{self._name}", f"configmap/{self._name}", "--grace-period=1")

    def wait_answers(self, more: int, timeout_s: float = 90) -> None:
        """Until so many more answers came."""
        before = self._last().get("answered", 0)
        self._cluster.wait(f"{more} answers", lambda: self._last().get("answered", 0) >= before + more, timeout_s)

    def _last(self) -> dict[str, Any]:
        lines = self._cluster.kubectl("-n", FLEETS, "logs", self._name, "--tail=1", check=False).stdout.splitlines()
        return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}

    def _pod(self) -> dict[str, Any]:
        container = {
            "name": "asking",
            "image": f"inferencefleet/worker:{TAG}",
            "command": ["python", "/script/asking.py", f"http://loop-router.{FLEETS}.svc:8080/v1", str(self._clients)],
            "env": [{"name": "PYTHONPATH", "value": "/opt/torch"}],
            "volumeMounts": [
                {"name": "script", "mountPath": "/script"},
                {"name": "torch", "mountPath": "/opt/torch", "readOnly": True},
            ],
        }
        volumes = [
            {"name": "script", "configMap": {"name": self._name}},
            {"name": "torch", "hostPath": {"path": TORCH}},
        ]
        spec: dict[str, Any] = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
        if self._node:
            spec["nodeName"] = self._node
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": self._name}, "spec": spec}


def test_smoke_images_run_as_nobody_on_a_read_only_root():
    for image in IMAGES:
        argv = [
            "docker",
            "run",
            "--rm",
            "--read-only",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            "--network=none",
            image,
        ]
        done = subprocess.run([*argv, "--help"], capture_output=True, text=True, timeout=60, check=False)
        assert "usage: fleet-" in done.stdout or "FLEET_WORKER_CONFIG: not set" in done.stderr, f"{image}: {done.stderr}"
        config = json.loads(subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=True).stdout)[0]
        assert config["Config"]["User"] == "65532:65532"
    ask = ["docker", "run", "--rm", "--entrypoint=python", next(image for image in IMAGES if "router" in image), "-c"]
    said = subprocess.run(
        [*ask, "from fleet_router.metrics import COMPILED; print(COMPILED)"], capture_output=True, text=True, check=False
    )
    assert said.stdout == "True\n", said.stderr


def test_smoke_tokens_through_the_service(cluster: KindCluster, fleet: Fleet):
    run_helm(cluster, "test", RELEASE, "--timeout", "60s")
    with Asking(cluster, "smoke", clients=2) as asking:
        asking.wait_answers(30)
    assert asking.failed == []
    assert asking.answered >= 30
    fleet.wait("proof that KV moved", lambda: fleet.condition("Disaggregating")["status"] == "True", 30)
    nodes = {pod["spec"]["nodeName"] for role in ("prefill", "decode") for pod in fleet.pods(role)}
    assert nodes <= set(cluster.workers())


def test_smoke_a_bad_fleet_is_refused_by_the_webhook(cluster: KindCluster):
    """The API server reaches the operator through its Service, with the certificate that the operator made."""
    bad = wish()
    bad["metadata"]["name"] = "bad"
    bad["spec"]["engine"] |= {"type": "vllm", "args": ["--config", "/etc/vllm.yaml"]}

    def refused() -> bool:
        done = cluster.kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(bad), check=False)
        return done.returncode != 0 and 'admission webhook "fleet.inferencefleet.io" denied the request' in done.stderr

    cluster.wait("a refusal", refused, 60)


def test_rolling_update_under_load(cluster: KindCluster, fleet: Fleet):
    before = workers(fleet)
    changed = wish()
    changed["spec"]["engine"]["maxModelLen"] = 768
    with recording(fleet) as recorder, Asking(cluster, "rolling", clients=4) as asking:
        fleet.apply(changed)
        fleet.wait("new workers alone", lambda: not workers(fleet) & before and fleet.serving() == (1, 2), READY_S)
        asking.wait_answers(20)
    assert asking.failed == []
    assert len(workers(fleet)) == 3
    assert len(recorder.counts) >= 3
    assert recorder.outside() == []


def workers(fleet: Fleet) -> set[str]:
    return {pod["metadata"]["uid"] for role in ("prefill", "decode") for pod in fleet.pods(role)}


def test_paused_node_under_load(cluster: KindCluster, fleet: Fleet):
    """A node stands still with its workers and comes back: what was asked meanwhile is answered, by others or later."""
    router = fleet.pods("router")[0]["spec"]["nodeName"]
    (victim,) = set(cluster.workers()) - {router}
    assert any(pod["spec"]["nodeName"] == victim for role in ("prefill", "decode") for pod in fleet.pods(role))
    fleet.operator.paused = victim  # type: ignore[attr-defined]
    with recording(fleet) as recorder, Asking(cluster, "pausing", clients=4, node=router) as asking:
        cluster.pause(victim)
        try:
            time.sleep(PAUSE_S)
        finally:
            cluster.unpause(victim)
        asking.wait_answers(20)
        fleet.wait_serving(1, 2, READY_S)
    assert asking.failed == []
    assert recorder.outside() == []


def test_smoke_uninstall_leaves_nothing(cluster: KindCluster, fleet: Fleet):
    fleet.kubectl("delete", "ifleet", "loop", "--timeout=90s")
    kinds = "pods,workerpools,deployments,replicasets,services,configmaps,poddisruptionbudgets,roles,rolebindings,serviceaccounts"
    cluster.wait("nothing of the fleet left", lambda: not fleet.objects(kinds, "-l", "inferencefleet.io/fleet=loop"), 90)
    run_helm(cluster, "uninstall", RELEASE, "--wait", "--timeout", "60s")
    cluster.wait("nothing of the chart left", lambda: left(cluster) == set(), 60)
    cluster.kubectl("delete", "crd", "inferencefleets.inferencefleet.io", "workerpools.inferencefleet.io", "--timeout=60s")


def left(cluster: KindCluster) -> set[str]:
    kinds = "deployments,pods,services,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets"
    kinds += ",secrets,leases,persistentvolumeclaims"
    found = [o for namespace in (NAMESPACE, FLEETS) for o in cluster.items(kinds, "-n", namespace)]
    wide = cluster.items("clusterroles,clusterrolebindings,mutatingwebhookconfigurations,validatingwebhookconfigurations")
    ours = {o["metadata"]["name"] for o in wide if "inferencefleet" in o["metadata"]["name"]}
    return ({f"{o['kind']}/{o['metadata']['name']}" for o in found} - MADE_BY_KUBERNETES) | ours
