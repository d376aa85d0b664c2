"""Typed settings of the operator process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fleet_operator.status_pace import COUNTERS_S


@dataclass(frozen=True, slots=True)
class Platform:
    """What differs between a cluster and one machine; everything else is the same code."""

    follow: Literal["kube", "dir"] = "kube"
    """How routers learn of workers: the API server's watch (in a cluster within a second), or the mounted ConfigMap, which only
    the process runtime keeps current at once (a kubelet takes up to a minute)."""
    router_host: str | None = None
    """Address that the router binds; None: all addresses of its pod."""
    router_port: int = 8080
    worker_image: str = "inferencefleet/worker:0.1.0"
    router_image: str = "inferencefleet/router:0.1.0"
    router_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets with registry credentials, of which a namespace with fleets has one at least."""
    renew_routers: bool = False
    """Routers follow this version and that image at once, one by one; else each fleet's stay as they were made."""
    makes_keys: bool = True
    """Fleets whose pods must know each other get a Secret with a key, where they name none."""
    operator_namespace: str | None = None
    """Where the operator runs: from there workers' agents may be reached. None: outside of the cluster, from anywhere."""
    counters_s: float = COUNTERS_S
    """A status of which only counters moved is written this often: a thousand fleets share one API server."""
    drain_most_s: float = 3600.0
    """No worker may take longer to drain, whatever a fleet asks for."""
    leaving_taints: tuple[str, ...] = (
        "ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption",
        "node.cloudprovider.kubernetes.io/shutdown", "cloud.google.com/impending-node-termination",
        "remediator.kubernetes.azure.com/unschedulable", "remediator.aks.microsoft.com/unschedulable",
    )  # fmt: skip
    """Taints of nodes that go away in good order: replacements first."""
    sick_taints: tuple[str, ...] = (
        "node.kubernetes.io/out-of-service", "nvidia.com/gpu-xid", "nvidia.com/gpu-unhealthy", *(
            f"nvidia.com/{what}-error" for what in ("gpu-xid", "gpu-nvlink", "syslog-xid", "gpu")  # NVSentinel's documents
        ),
    )  # fmt: skip
    """Taints of nodes whose devices fail: no new request goes there."""
    sick_conditions: tuple[str, ...] = (
        "GPUXIDError", "XIDError", "GpuCriticalXid", "AcceleratedHardwareReady=False",  # the last one is EKS's
        "XIDErrors", "GPUMissing", "NVLinkStatusInactive",  # AKS's
        "NebiusGPUError", "SysLogsXIDError", "SysLogsSXIDError", "SysLogsGPUFallenOff",  # from the second on NVSentinel's
        *(f"Gpu{part}Watch" for part in ("Mem", "Pcie", "Nvlink", "Inforom", "Sm", "Mcu", "Pmu", "Driver")),
        "NVSwitchFatalError", "NVSwitchDown",
    )  # fmt: skip
    """Node conditions that say the same when True; TYPE=False names one that must be True. Not those of monitors that cannot
    reach what they ask, nor of clocks that are lowered: the devices work."""
