"""Claims that the operator renders, allocated by a real scheduler: each GPU gets the NIC of its own PCIe root, nothing twice."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from e2e.kube.controlplane import ControlPlane
from tests.fleet_operator.test_conversions import rendered

NAMESPACE, NODE = "ml", "dra-node"
GPU, NIC = "gpu.nvidia.com", "mrdma.google.com"
ROOT = "resource.kubernetes.io/pcieRoot"
ROOTS = 6
WITHIN_S = 60
FLEET = {
    "apiVersion": "inferencefleet.io/v1alpha1", "kind": "InferenceFleet", "metadata": {"name": "dra", "namespace": NAMESPACE},
    "spec": {
        "model": {"source": "file:///m"}, "engine": {"type": "vllm"},
        "tiers": [{
            "name": "t", "accelerator": {"type": "h200"}, "ratio": {"decode": 1}, "parallelism": {"tensor": 2},
            "decode": {"parallelism": {"tensor": 4}}, "prefill": {"maxReplicas": 1},
            "kvTransfer": {"transport": "rdma", "required": True, "via": "dra", "dra": {"gpu": GPU, "nic": NIC}},
        }],
    },
}  # fmt: skip


def device_class(name: str) -> dict[str, Any]:
    selector = {"cel": {"expression": f'device.driver == "{name}"'}}
    spec = {"selectors": [selector]}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": name}, "spec": spec}


def slice_of(driver: str) -> dict[str, Any]:
    """One device per PCIe root; NICs in the other order, so that equal numbers would be wrong."""
    roots = list(range(ROOTS)) if driver == GPU else list(reversed(range(ROOTS)))
    devices = [{"name": f"d{at}", "attributes": {ROOT: {"string": f"pci0000:{root:02d}"}}} for at, root in enumerate(roots)]
    pool = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": f"{NODE}-{driver}"},
        "spec": {"driver": driver, "nodeName": NODE, "pool": pool, "devices": devices},
    }  # fmt: skip


@pytest.fixture
def api(control_plane: ControlPlane) -> Iterator[httpx.Client]:
    """A client, and a node with GPUs and NICs that leaves with the test."""
    token = yaml.safe_load(control_plane.kubeconfig.read_text())["users"][0]["user"]["token"]
    trust = ssl.create_default_context(cafile=str(control_plane.ca_file))
    headers = {"Authorization": f"Bearer {token}"}
    amounts = {"cpu": "64", "memory": "1Ti", "pods": "110"}
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": ""}
    with httpx.Client(base_url=control_plane.url, verify=trust, headers=headers, timeout=30) as client:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        made = [("/api/v1/nodes", NODE, node)]
        made += [("/apis/resource.k8s.io/v1/deviceclasses", name, device_class(name)) for name in (GPU, NIC)]
        made += [("/apis/resource.k8s.io/v1/resourceslices", f"{NODE}-{name}", slice_of(name)) for name in (GPU, NIC)]
        for path, _, body in made:
            answer = client.post(path, json=body)
            assert answer.status_code == 201, answer.text
        status = {"status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}}
        patched = {"content-type": "application/merge-patch+json"}
        assert client.patch(f"/api/v1/nodes/{NODE}/status", content=json.dumps(status), headers=patched).status_code == 200
        try:
            yield client
        finally:
            for path, name, _ in reversed(made):
                client.delete(f"{path}/{name}")


def create(api: httpx.Client, namespace: str, objects: list[dict[str, Any]]) -> list[str]:
    """The objects, without owners; their paths."""
    paths = []
    for obj in objects:
        group = "/api/v1" if obj["apiVersion"] == "v1" else f"/apis/{obj['apiVersion']}"
        path = f"{group}/namespaces/{namespace}/{obj['kind'].lower()}s"
        meta = {"name": obj["metadata"]["name"], "labels": obj["metadata"]["labels"]}
        spec = {key: value for key, value in obj["spec"].items() if key != "nodeName"}
        answer = api.post(path, json={"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": meta, "spec": spec})
        assert answer.status_code == 201, answer.text
        paths.append(f"{path}/{meta['name']}")
    return paths


def allocated(api: httpx.Client, namespace: str, count: int) -> list[list[dict[str, Any]]]:
    """The devices of every allocated claim, once there are so many."""
    deadline, found = time.monotonic() + WITHIN_S, []
    while time.monotonic() < deadline:
        claims = api.get(f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims").json()["items"]
        found = [c["status"]["allocation"]["devices"]["results"] for c in claims if (c.get("status") or {}).get("allocation")]
        if len(found) == count:
            return found
        time.sleep(0.2)
    raise AssertionError(f"{len(found)} of {count} claims allocated")


def test_every_gpu_gets_the_nic_of_its_own_root(api: httpx.Client, namespace: str):
    pods, templates = rendered(FLEET)
    paths = create(api, namespace, [*templates, *pods])
    try:
        results = allocated(api, namespace, 6)  # one per GPU: 2 of the prefill worker, 4 of the decode worker
        taken = []
        for devices in results:
            by_request = {device["request"]: device["device"] for device in devices}
            gpu, nic = int(by_request["gpu"][1:]), int(by_request["nic"][1:])
            assert gpu == ROOTS - 1 - nic, "GPU and NIC on different roots"
            taken.append(gpu)
        assert sorted(taken) == list(range(ROOTS))
        for path in paths[len(templates) :]:
            pod = api.get(path).json()
            assert pod["spec"].get("nodeName") == NODE, pod["status"]
    finally:
        for path in reversed(paths):
            api.delete(path, params={"gracePeriodSeconds": 0})
