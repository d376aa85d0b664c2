"""What a lab needs beside its namespace: nodes that only its own pods go to, and devices that a claim can be given."""

from __future__ import annotations

from typing import Any

from e2e.faultproxy import kubelet
from e2e.faultproxy.lab import Lab

OWN = "example.com/lab"
"""Label and taint of a lab's own nodes: its namespace."""
DRA = "/apis/resource.k8s.io/v1"


def node_name(lab: Lab, letter: str) -> str:
    return f"{kubelet.NAME}-{lab.namespace}-{letter}"


def add_node(lab: Lab, letter: str, pods: int = 100) -> None:
    """A ready node for the pods of this lab."""
    name = node_name(lab, letter)
    taint = {"key": OWN, "value": lab.namespace, "effect": "NoSchedule"}
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {OWN: lab.namespace}},
        "spec": {"taints": [taint]},
    }
    lab.admin("POST", "/api/v1/nodes", node).raise_for_status()
    capacity = {**kubelet.CAPACITY, "pods": str(pods)}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "paper"}
    lab.admin.merge(
        f"/api/v1/nodes/{name}/status", {"status": {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}}
    )
    lab.until_without_operator("a node that takes pods", lambda: _takes_pods(lab, name), 30)


def _takes_pods(lab: Lab, name: str) -> bool:
    taints = lab.admin.get(f"/api/v1/nodes/{name}")["spec"].get("taints") or []
    return [taint["key"] for taint in taints] == [OWN]


def cordon(lab: Lab, letter: str) -> None:
    lab.admin.merge(f"/api/v1/nodes/{node_name(lab, letter)}", {"spec": {"unschedulable": True}})


def remove_node(lab: Lab, letter: str) -> None:
    lab.admin("DELETE", f"/api/v1/nodes/{node_name(lab, letter)}").raise_for_status()


def on_own_nodes(lab: Lab) -> dict[str, Any]:
    """A spec whose workers run on the lab's own nodes."""
    place = {
        "nodeSelector": {OWN: lab.namespace},
        "tolerations": [{"key": OWN, "operator": "Exists", "effect": "NoSchedule"}],
    }
    roles = {role: {"podTemplate": place} for role in ("prefill", "decode")}
    return {"tiers": [{"name": "t", "accelerator": {"type": "cpu"}, **roles}]}


def fetched_ahead(lab: Lab) -> dict[str, Any]:
    """The same, with a model that every node fetches before."""
    cache = {"type": "nodeLocal", "path": "/cache", "prefetch": {"wait": "5s"}}
    return {**on_own_nodes(lab), "model": {"source": "hf://acme/tiny", "cache": cache}}


def add_devices(lab: Lab, count: int = 8) -> None:
    """GPUs and NICs on the paper node, a class of each for this lab."""
    for kind in ("gpu", "nic"):
        name = f"{kind}.{lab.namespace}.example.com"
        chosen = [{"cel": {"expression": f'device.driver == "{name}"'}}]
        devices = [{"name": f"d{at}", "attributes": {"resource.kubernetes.io/pcieRoot": {"string": f"pci0000:{at:02d}"}}}
                   for at in range(count)]  # fmt: skip
        pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
        for plural, spec in (
            ("deviceclasses", {"selectors": chosen}),
            ("resourceslices", {"driver": name, "nodeName": kubelet.NAME, "pool": pool, "devices": devices}),
        ):
            made = {"metadata": {"name": name}, "spec": spec}
            lab.admin("POST", f"{DRA}/{plural}", made).raise_for_status()


def with_claims(lab: Lab) -> dict[str, Any]:
    """A spec whose workers claim those."""
    classes = {kind: f"{kind}.{lab.namespace}.example.com" for kind in ("gpu", "nic")}
    transfer = {"transport": "rdma", "required": False, "via": "dra", "dra": classes}
    return {"tiers": [{"name": "t", "accelerator": {"type": "h100"}, "kvTransfer": transfer}]}
