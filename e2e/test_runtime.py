"""The process runtime as the kubelet of a real cluster: real scheduler, real controllers, real processes."""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from e2e.kube.controlplane import ALLOW_ENV, ControlPlane, refuse_strangers
from e2e.kube.nodes import NODES

pytestmark = pytest.mark.smoke

SERVE = """
import http.server, os
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(os.environ['HOSTNAME'].encode())
    def log_message(self, *a): pass
http.server.HTTPServer((os.environ['FLEET_BIND_HOST'], 8000), H).serve_forever()
"""
WHO_AM_I = """
import os, ssl, sys, urllib.error, urllib.request
token = open(os.environ['FLEET_KUBE_TOKEN_FILE']).read()
url = os.environ['FLEET_KUBE_URL'] + '/api/v1/nodes'
request = urllib.request.Request(url, headers={'Authorization': 'Bearer ' + token})
try:
    urllib.request.urlopen(request, context=ssl.create_default_context(cafile=os.environ['FLEET_KUBE_CA_FILE']))
except urllib.error.HTTPError as error:
    sys.exit(error.read().decode())
"""


def apply(plane: ControlPlane, namespace: str, manifest: dict) -> None:
    plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(manifest))


def pods(plane: ControlPlane, namespace: str) -> list[dict]:
    return plane.get(f"/api/v1/namespaces/{namespace}/pods")["items"]


def container(code: str, **more) -> dict:
    return {"name": "main", "image": "none", "command": ["python", "-c", code], **more}


def pod(name: str, spec: dict) -> dict:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def alive(uid: str) -> bool:
    """Whether a process of this pod exists."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f":{uid}:".encode() in (entry / "environ").read_bytes():
                return True
        except OSError:
            continue
    return False


def test_a_deployment_runs_on_gpu_nodes_and_leaves_nothing(control_plane, gpu_nodes, namespace):
    gpu = {"limits": {"nvidia.com/gpu": "3"}}
    probe = {"httpGet": {"port": 8000}, "periodSeconds": 1}
    template = {
        "metadata": {"labels": {"app": "web"}},
        "spec": {"containers": [container(SERVE, resources=gpu, readinessProbe=probe)], "terminationGracePeriodSeconds": 5},
    }
    spec = {"replicas": 3, "selector": {"matchLabels": {"app": "web"}}, "template": template}
    apply(control_plane, namespace, {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": spec})

    def ready() -> bool:
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/web"
        return control_plane.get(path).get("status", {}).get("readyReplicas") == 2

    control_plane.wait("two ready replicas", ready)
    running = [one for one in pods(control_plane, namespace) if one["status"]["phase"] == "Running"]
    assert {one["spec"]["nodeName"] for one in running} == set(NODES)
    for one in running:
        with urllib.request.urlopen(f"http://{one['status']['podIP']}:8000/", timeout=10) as answer:
            assert answer.read().decode() == one["metadata"]["name"]
    [pending] = [one for one in pods(control_plane, namespace) if one["status"]["phase"] == "Pending"]
    control_plane.wait(
        "the scheduler's words", lambda: "Insufficient nvidia.com/gpu" in json.dumps(pods(control_plane, namespace))
    )
    assert not pending["spec"].get("nodeName")

    control_plane.kubectl("delete", "deployment", "web", "-n", namespace)
    control_plane.wait("all pods to leave", lambda: pods(control_plane, namespace) == [])
    assert not any(alive(one["metadata"]["uid"]) for one in running)


def test_a_pod_speaks_to_the_api_as_its_service_account(control_plane, gpu_nodes, namespace):
    apply(control_plane, namespace, pod("asks", {"containers": [container(WHO_AM_I)], "restartPolicy": "Never"}))
    control_plane.wait("the pod's end", lambda: pods(control_plane, namespace)[0]["status"]["phase"] == "Failed")
    [status] = pods(control_plane, namespace)[0]["status"]["containerStatuses"]
    assert f'User \\"system:serviceaccount:{namespace}:default\\" cannot list' in status["state"]["terminated"]["message"]
    log = next(gpu_nodes.glob("*/logs/asks/main.log"))
    assert "Forbidden" in log.read_text()


def test_a_port_in_use_is_named_in_the_pods_status(control_plane, gpu_nodes, namespace):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code = f"import socket; s = socket.socket(); s.bind(('127.0.0.1', {taken.getsockname()[1]}))"
        apply(control_plane, namespace, pod("second", {"containers": [container(code)], "restartPolicy": "Never"}))
        control_plane.wait("its end", lambda: pods(control_plane, namespace)[0]["status"]["phase"] == "Failed")
    [status] = pods(control_plane, namespace)[0]["status"]["containerStatuses"]
    assert "Address already in use" in status["state"]["terminated"]["message"]


def test_the_harness_refuses_other_clusters(control_plane, tmp_path, monkeypatch):
    refuse_strangers(control_plane.kubeconfig)
    foreign = tmp_path / "kubeconfig"
    foreign.write_text(
        "current-context: production\nclusters: [{name: p, cluster: {server: 'https://127.0.0.1:6443'}}]\n", encoding="utf-8"
    )
    with pytest.raises(PermissionError, match=f"set {ALLOW_ENV}=production"):
        refuse_strangers(foreign)
    monkeypatch.setenv(ALLOW_ENV, "production")
    refuse_strangers(foreign)


def test_a_control_plane_leaves_nothing():
    with ControlPlane() as plane:
        pids, folder = [service.pid for service in plane.services], plane.dir
        assert len(pids) == 4
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert not folder.exists()


def test_the_api_client_is_small(control_plane):
    """Resident memory of a process that uses only the Kubernetes store: well inside the operator's 150 MB."""
    code = (
        "import asyncio, sys; from pathlib import Path; from fleet_operator.cluster.kube import KubeCluster;"
        "from fleet_operator.cluster.interface import POD\n"
        "async def main():\n"
        "    c = await KubeCluster.connect(Path(sys.argv[1])); await c.list(POD); await c.close()\n"
        # not ru_maxrss: that one survives exec, so that it would show pytest's size
        "asyncio.run(main()); print(int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) // 1024)"
    )
    argv = [sys.executable, "-c", code, str(control_plane.kubeconfig)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True, env=dict(os.environ))
    print(f"resident: {done.stdout.strip()} MiB")
    assert int(done.stdout) < 100
