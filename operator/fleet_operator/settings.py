"""Typed settings of the operator process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
    drain_timeout_s: float = 30.0
    """Longest wait for streams and leases before a worker is told to stop."""
