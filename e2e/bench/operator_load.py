"""What `make bench-operator` applies, and how it sees that all of it is Ready: the same pods as Deployments and as fleets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fleet_operator.cluster.interface import DEPLOYMENT, FLEET, Kind, Object
from fleet_operator.cluster.kube import KubeCluster

FLEETS = 1_000
PREFILL, DECODE = 3, 4
PODS_PER_FLEET = PREFILL + DECODE + 1
"""With the router's: as many as two Deployments have."""
PODS_PER_DEPLOYMENT = 4
FLEETS_PER_NAMESPACE = 10
"""Kubernetes' own controllers look at every Service and every budget of a namespace for each pod event."""
APPLIED_AT_ONCE = 16
MOST_S = 1_800.0


def namespace_of(fleet: int) -> str:
    """Where the fleet of this number lives, and its half Deployments."""
    return f"bench-{fleet // FLEETS_PER_NAMESPACE:03d}"


def fleet(number: int) -> Object:
    """One fleet of 7 worker pods and a router; telemetry and scaling as by default."""
    tier = {
        "name": "gpu",
        "accelerator": {"type": "h100-sxm"},
        "ratio": {"prefill": PREFILL, "decode": DECODE},
        "prefill": {"replicas": PREFILL},
        "decode": {"replicas": DECODE},
    }
    return {
        "apiVersion": FLEET.api_version,
        "kind": FLEET.kind,
        "metadata": {"name": f"f{number:04d}", "namespace": namespace_of(number)},
        "spec": {"model": {"source": "file:///models/tiny", "servedName": "tiny"}, "tiers": [tier]},
    }


def deployment(number: int, spec: Object) -> Object:
    """Half a fleet: workers with the spec of `worker_spec`, kept by a Deployment."""
    labels = {f"inferencefleet.io/{key}": "d" for key in ("fleet", "tier", "role", "revision", "pool")}
    labels |= {"app.kubernetes.io/managed-by": "bench", "app": f"d{number:04d}"}
    return {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        "metadata": {"name": f"d{number:04d}", "namespace": namespace_of(number // 2)},
        "spec": {
            "replicas": PODS_PER_DEPLOYMENT,
            "selector": {"matchLabels": {"app": f"d{number:04d}"}},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def worker_spec(pod: Object) -> Object:
    """The spec of a worker pod as the operator made it, fit for a Deployment's template."""
    return {key: value for key, value in pod["spec"].items() if key not in {"nodeName", "priority", "preemptionPolicy"}}


def deployment_is_ready(found: Object) -> bool:
    """All of its pods are, and it says so."""
    return bool((found.get("status") or {}).get("readyReplicas") == found["spec"]["replicas"])


def fleet_is_ready(found: Object) -> bool:
    """Ready=True and every worker serves: more than Ready alone, which needs one worker of each role."""
    status = found.get("status") or {}
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or [])
    tiers: list[dict[str, Any]] = status.get("tiers") or []
    counts = [(tier["prefill"].get("serving", 0), tier["decode"].get("serving", 0)) for tier in tiers]
    return ready and counts == [(PREFILL, DECODE)]


async def apply_until_ready(cluster: KubeCluster, kind: Kind, wishes: list[Object], is_ready: Callable[[Object], bool]) -> float:
    """Seconds from the first apply until every object is ready, by the API server's own watch; TimeoutError."""
    waiting = {(wish["metadata"]["namespace"], wish["metadata"]["name"]) for wish in wishes}
    gate, synced = asyncio.Semaphore(APPLIED_AT_ONCE), asyncio.Event()

    async def follow() -> None:
        async for event in cluster.watch(kind):
            if event.type == "SYNCED":
                synced.set()
            elif event.type != "DELETED" and is_ready(event.object):
                waiting.discard((event.object["metadata"]["namespace"], event.object["metadata"]["name"]))
                if not waiting:
                    return

    async def put(wish: Object) -> None:
        async with gate:
            await cluster.apply(wish)

    following = asyncio.create_task(follow())
    await synced.wait()
    begun = time.monotonic()
    await asyncio.gather(*map(put, wishes))
    try:
        async with asyncio.timeout(MOST_S):
            await following
    except TimeoutError:
        raise TimeoutError(f"{len(waiting)} of {len(wishes)} {kind.plural} not ready: {sorted(waiting)[:3]}") from None
    return time.monotonic() - begun
