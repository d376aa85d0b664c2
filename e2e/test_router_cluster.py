"""A fleet whose router speaks TLS and is an Endpoint Picker, on a real control plane: what becomes of `routing.tls` and
`routing.endpointPicker`, an InferencePool of the real CRD, a real Envoy that asks the picker over TLS, and
`fleet explain --fleet` through kube-apiserver.

InferencePools are the user's own objects (router/README.md has one): the operator makes the Service port that they refer to.
"""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from e2e.certs import Authority
from e2e.envoy_picker import config, envoy
from e2e.fleet import Fleet, manifest
from e2e.kube.controlplane import ControlPlane
from e2e.kube.forward import forwarding
from e2e.kube.nodes import NODES
from e2e.kube.service import Service, free_ports
from fleet_cli.up.bundled import tiny_model

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "secured"
DNS = "loop-router"
PROMPT = "a prompt that is long enough for a prefill worker " * 12
pytestmark = pytest.mark.timeout(400)


def wish() -> dict[str, Any]:
    made = manifest(NAMESPACE, tiny_model())
    made["spec"]["tiers"][0] |= {"ratio": {"prefill": 1, "decode": 1, "min": "1:1", "max": "1:1"}}
    made["spec"]["scaling"] = {"mode": "manual"}
    made["spec"]["routing"] = {"tls": {"secretRef": {"name": "web"}}, "endpointPicker": {}}
    return made


class Secured:
    """The fleet, and who its clients trust."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet, self.folder = fleet, folder
        self.authority = Authority(folder, "web")

    def certificate(self, name: str) -> None:
        """A new one, as a certificate controller would bring it."""
        cert, key = self.authority.leaf(name, DNS, to="tls")
        data = {path.name: base64.b64encode(path.read_bytes()).decode() for path in (cert, key)}
        secret = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": {"name": "web"}, "data": data}
        self.fleet.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(secret))

    def pod(self) -> dict[str, Any]:
        (pod,) = self.fleet.pods("router")
        return pod

    def client(self) -> httpx.Client:
        """Of the port with TLS; who it is comes out of the certificate."""
        context = ssl.create_default_context(cafile=str(self.authority.file))
        return httpx.Client(base_url=f"https://{self.pod()['status']['podIP']}:8080", verify=context, trust_env=False, timeout=60)

    def ask(self, request_id: str) -> httpx.Response:
        body = {"model": "tiny", "prompt": f"{request_id} {PROMPT}", "max_tokens": 4, "temperature": 0}
        with self.client() as client:
            return client.post(
                "/v1/completions", json=body, headers={"x-request-id": request_id}, extensions={"sni_hostname": DNS}
            )

    def served_by(self) -> str:
        """Subject of the certificate."""
        with self.client() as client, client.stream("GET", "/health", extensions={"sni_hostname": DNS}) as answer:
            found = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
            return str(found["subject"][0][0][1])


@pytest.fixture(scope="module")
def secured(
    control_plane: ControlPlane, gpu_nodes: Path, operator: Service, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    control_plane.kubectl("create", "namespace", NAMESPACE)
    account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
    control_plane.wait("its service account", lambda: control_plane.exists(account))
    made = Secured(Fleet(control_plane, NAMESPACE, operator), tmp_path_factory.mktemp("secured"))
    made.certificate("one")
    made.fleet.apply(wish())
    made.fleet.wait_serving(1, 1)
    yield made
    made.fleet.delete_and_leave_nothing()
    control_plane.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def test_the_routers_port_speaks_tls_and_nothing_else(secured: Secured):
    answer = secured.ask("first")
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert secured.served_by() == "one"
    address = secured.pod()["status"]["podIP"]
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{address}:8080/health", trust_env=False)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://{address}:8080/health", trust_env=False)
    assert httpx.get(f"http://{address}:8081/ready", trust_env=False).text == "ready\n"
    assert httpx.post(f"http://{address}:8081/v1/completions", json={}, trust_env=False).status_code == 404
    # the operator scrapes beside TLS: what it says of KV comes from there
    secured.fleet.wait("proof that KV moved", lambda: secured.fleet.condition("Disaggregating")["status"] == "True", 30)
    assert secured.fleet.condition("TelemetryFresh")["status"] == "True", secured.fleet.condition("TelemetryFresh")


def test_a_new_certificate_is_taken_up_without_a_restart(secured: Secured):
    before = [(pod["metadata"]["uid"], status["restartCount"]) for pod in [secured.pod()]
              for status in pod["status"]["containerStatuses"]]  # fmt: skip
    secured.certificate("two")
    secured.fleet.wait("the new certificate", lambda: secured.served_by() == "two", 90)
    assert secured.ask("second").status_code == 200
    after = [(pod["metadata"]["uid"], status["restartCount"]) for pod in [secured.pod()]
             for status in pod["status"]["containerStatuses"]]  # fmt: skip
    assert after == before


def explain(secured: Secured, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a user gives it, whose kubectl is the control plane's."""
    plane = secured.fleet.plane
    path = f"{Path(plane.kubectl_argv()[0]).parent}:{os.environ['PATH']}"
    argv = [sys.executable, "-m", "fleet_cli.main", "explain", *arguments, "-n", NAMESPACE, "--kubeconfig", str(plane.kubeconfig)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=90, env={**os.environ, "PATH": path})


def test_fleet_explain_finds_the_routers_of_a_fleet_in_a_cluster(secured: Secured, tmp_path: Path):
    subprocess.run([str(ROOT / "e2e/kube/get-kwok")], check=True, stdout=subprocess.DEVNULL)
    assert secured.ask("explained").status_code == 200
    pods = {role: secured.fleet.pods(role)[0]["metadata"]["name"] for role in ("prefill", "decode")}
    pod = secured.pod()
    address = {pod["metadata"]["name"]: pod["status"]["podIP"]}
    with forwarding(secured.fleet.plane, tmp_path, NODES, NAMESPACE, address, [8081]):
        secured.fleet.plane.wait("forwarding", lambda: explain(secured, "--fleet", "loop").returncode == 0, 60)
        told = explain(secured, "explained", "--fleet", "loop")
        assert told.returncode == 0, told.stderr
        assert f"remote prefill, {pods['prefill']} -> {pods['decode']}," in told.stdout
        unknown = explain(secured, "nobody-knows", "--fleet", "loop")
        assert (unknown.returncode != 0, "no router has a record" in unknown.stderr) == (True, True), unknown
        assert "no router of a fleet other runs there" in explain(secured, "x", "--fleet", "other").stderr


def pool() -> dict[str, Any]:
    """The InferencePool of router/README.md, for this fleet."""
    text = (ROOT / "router/README.md").read_text()
    found = re.search(r"(?m)^    apiVersion: inference\.networking\.k8s\.io/v1\n(?:    .*\n)+", text)
    assert found is not None
    return dict(yaml.safe_load(found[0].replace("llama", "loop").replace("namespace: ml", f"namespace: {NAMESPACE}")))


def test_an_inference_pool_and_an_envoy_that_asks_the_picker_over_tls(secured: Secured, tmp_path: Path):
    """Stage one: the pool is taken by the real CRD, selects the decode pods and names a port that the Service has. Stage two:
    Envoy, told what the pool says, gets tokens; the picker decided and prefilled elsewhere."""
    plane, fleet = secured.fleet.plane, secured.fleet
    crds = subprocess.run([str(ROOT / "e2e/kube/get-inference-crds")], check=True, capture_output=True, text=True).stdout.strip()
    plane.kubectl("apply", "--server-side", "-f", f"{crds}/inference.networking.k8s.io_inferencepools.yaml")
    plane.wait("the CRD", lambda: plane.kubectl("get", "inferencepools", check=False).returncode == 0)
    fleet.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(pool()))
    spec = json.loads(fleet.kubectl("get", "inferencepool", "loop", "-o", "json"))["spec"]
    labels = ",".join(f"{name}={value}" for name, value in spec["selector"]["matchLabels"].items())
    decode = [pod["status"]["podIP"] for pod in fleet.objects("pods", "-l", labels)]
    assert decode == [pod["status"]["podIP"] for pod in fleet.pods("decode")]
    service = json.loads(fleet.kubectl("get", "service", spec["endpointPickerRef"]["name"], "-o", "json"))["spec"]
    (port,) = [one for one in service["ports"] if one["port"] == spec["endpointPickerRef"]["port"]["number"]]
    assert (port["targetPort"], port["protocol"]) == ("grpc-ext-proc", "TCP")
    picker = f"{secured.pod()['status']['podIP']}:9002"
    at, admin = (f"127.0.0.1:{one}" for one in free_ports(2))
    bootstrap = config(at, admin, picker, [f"{ip}:{spec['targetPorts'][0]['number']}" for ip in decode], fail_open=False,
                       body="FULL_DUPLEX_STREAMED", ca=secured.authority.file, picker_name=DNS)  # fmt: skip
    before = remote(secured)
    with envoy(at, admin, tmp_path, bootstrap) as url:
        body = {"model": "tiny", "prompt": f"through Envoy {PROMPT}", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert answer.headers.get("x-gateway-destination-endpoint-served", f"{decode[0]}:8000") == f"{decode[0]}:8000"
    assert remote(secured) == before + 1


def remote(secured: Secured) -> float:
    """Prompts that went to a prefill worker."""
    text = httpx.get(f"http://{secured.pod()['status']['podIP']}:8081/metrics", trust_env=False).text
    found = re.search(r"^fleet_router_remote_prefill_total (\S+)$", text, re.M)
    assert found is not None, text[:2000]
    return float(found[1])
