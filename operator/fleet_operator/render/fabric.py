"""kvTransfer → what a pod needs for it: devices or claims, network, capability, UCX environment."""

from __future__ import annotations

from typing import Final

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.tier import Role, TierSpec
from fleet_operator.cluster.interface import Object
from fleet_operator.names import POOL, REVISION, ROLE, TIER, labels, owner_reference, pool_name
from fleet_operator.render.network import UCX_TCP_PORTS
from fleet_planner.wanted import PodWanted
from fleet_worker.config import ucx_transports

NETWORKS: Final = "k8s.v1.cni.cncf.io/networks"
PCIE_ROOT: Final = "resource.kubernetes.io/pcieRoot"
LOCK_MEMORY: Final = "IPC_LOCK"
"""The one capability that a worker may get, and the one exception from Pod Security `restricted`: NICs read registered memory,
which must not be swapped. Only root has an added capability; others need an unlimited memlock limit of the container runtime."""


def environment(tier: TierSpec, role: Role) -> list[Object]:
    """UCX variables."""
    transfer = tier.kv_transfer
    found: dict[str, str] = {}
    if (allowed := ucx_transports(transfer.transport, required=transfer.required, memory=_memory(tier, role))) is not None:
        found["UCX_TLS"] = allowed
    if allowed is None or "tcp" in allowed.split(","):
        found["UCX_TCP_PORT_RANGE"] = "-".join(map(str, UCX_TCP_PORTS))
    if transfer.net_devices:
        found["UCX_NET_DEVICES"] = ",".join(transfer.net_devices)
    return [{"name": name, "value": value} for name, value in found.items()]


def _memory(tier: TierSpec, role: Role) -> str:
    """Whose memory UCX must be able to touch."""
    device = tier.device_request(role)
    if device is None:
        return ""
    return "rocm" if device[0].startswith("amd.com/") else "cuda"


def devices(tier: TierSpec, role: Role) -> dict[str, str]:
    """Extended resources of one pod's container: GPUs unless a claim brings them, NICs by resource."""
    transfer, gpu, found = tier.kv_transfer, tier.pod_devices(role), {}
    if gpu is not None and not (transfer.dra is not None and transfer.dra.gpu is not None):
        found[gpu[0]] = str(gpu[1])
    if transfer.resource is not None:
        found[transfer.resource] = str(transfer.nics)
    return found


def claim_names(tier: TierSpec, role: Role) -> list[str]:
    """One claim per GPU of the pod, so that each GPU has its NIC next to it; empty without dra."""
    gpu = tier.pod_devices(role)
    return [f"device-{index}" for index in range(gpu[1])] if tier.kv_transfer.dra is not None and gpu is not None else []


def claim_spec(tier: TierSpec) -> Object | None:
    """Content of a ResourceClaimTemplate; None without dra."""
    dra = tier.kv_transfer.dra
    if dra is None:
        return None
    classes = [("gpu", dra.gpu, 1), ("nic", dra.nic, tier.kv_transfer.nics)]
    requests = [
        {"name": name, "exactly": {"deviceClassName": device, "allocationMode": "ExactCount", "count": count}}
        for name, device, count in classes
        if device is not None
    ]
    content: Object = {"requests": requests}
    if dra.gpu is not None:
        content["constraints"] = [{"requests": ["gpu", "nic"], "matchAttribute": PCIE_ROOT}]
    return {"spec": {"devices": content}}


def render_claims(fleet: InferenceFleet, wanted: PodWanted, stored: Object, owner: Object) -> Object | None:
    """The ResourceClaimTemplate of a pool, as its revision stored it; owned by the pool and named like it: neither can change."""
    spec = stored["data"].get("claims")
    if spec is None:
        return None
    own = {TIER: wanted.tier, ROLE: wanted.role, REVISION: wanted.revision, POOL: wanted.pool}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {
            "name": wanted.pool,
            "namespace": fleet.metadata.namespace,
            "labels": labels(fleet.metadata.name, **own),
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": spec,
    }


def pod_claims(fleet: InferenceFleet, tier: TierSpec, role: Role, revision: str) -> list[Object]:
    """spec.resourceClaims of a pod."""
    template = pool_name(fleet.metadata.name, tier.name, role, revision)
    return [{"name": name, "resourceClaimTemplateName": template} for name in claim_names(tier, role)]


def networks(tier: TierSpec) -> dict[str, str]:
    """What multus reads."""
    return {NETWORKS: tier.kv_transfer.network} if tier.kv_transfer.network is not None else {}


def capabilities(tier: TierSpec) -> Object:
    """All are dropped but what RDMA needs."""
    return {"drop": ["ALL"], **({"add": [LOCK_MEMORY]} if tier.kv_transfer.locks_memory else {})}


def host_network(tier: TierSpec) -> Object:
    """Fields of the pod for via hostNetwork."""
    return {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if tier.kv_transfer.via == "hostNetwork" else {}
