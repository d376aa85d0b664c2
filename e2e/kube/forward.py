"""`kubectl port-forward` into pods of our own nodes: kwok's server answers for their kubelets, which have none.

From kubectl to kube-apiserver to kwok all is real; kwok then connects to the pod's address, as a kubelet does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from e2e.certs import Authority
from e2e.kube.controlplane import ControlPlane
from e2e.kube.kwok import kwok_assets
from e2e.kube.service import Service, free_ports

NOBODY = {"kind": "Stage", "apiVersion": "kwok.x-k8s.io/v1alpha1", "metadata": {"name": "nobody"},
          "spec": {"resourceRef": {"apiGroup": "v1", "kind": "Node"}, "next": {}}}  # fmt: skip
"""kwok does not start without a stage; this one does nothing to the nodes that it manages, which are none."""


def _forwards(namespace: str, pods: Mapping[str, str], ports: Sequence[int]) -> str:
    """A configuration object per pod (name → address)."""
    return yaml.safe_dump_all([NOBODY, *(
        {
            "kind": "ClusterPortForward",
            "apiVersion": "kwok.x-k8s.io/v1alpha1",
            "metadata": {"name": pod},
            "spec": {
                "selector": {"matchNamespaces": [namespace], "matchNames": [pod]},
                "forwards": [{"ports": [port], "target": {"port": port, "address": address}} for port in ports],
            },
        }
        for pod, address in pods.items()
    )])  # fmt: skip


@contextmanager
def forwarding(
    plane: ControlPlane, folder: Path, nodes: Sequence[str], namespace: str, pods: Mapping[str, str], ports: Sequence[int]
) -> Iterator[None]:
    """While the block runs, ports of these pods (name → address) can be forwarded."""
    (port,) = free_ports(1)
    cert, key = Authority(folder, "kubelets").leaf("kubelet", "127.0.0.1")
    (folder / "kwok.yaml").write_text(_forwards(namespace, pods, ports))
    argv = [
        str(kwok_assets() / "kwok"), f"--kubeconfig={plane.kubeconfig}", "--manage-nodes-with-label-selector=kwok=nobody",
        f"--config={folder / 'kwok.yaml'}", f"--server-address=127.0.0.1:{port}", f"--node-port={port}",
        f"--tls-cert-file={cert}", f"--tls-private-key-file={key}",
    ]  # fmt: skip
    status = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }
    for node in nodes:
        plane.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
    server = Service("kwok", argv, folder / "kwok.log")
    plane.services.append(server)
    try:
        yield
    finally:
        server.stop()
        plane.services.remove(server)
