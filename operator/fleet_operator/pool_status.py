"""What a WorkerPool says of its workers. Pure."""

from __future__ import annotations

from collections.abc import Container

from fleet_operator.cluster.interface import Object
from fleet_operator.gangs import count_workers
from fleet_operator.names import GROUP_OF, MEMBER
from fleet_planner.types import PoolWanted


def pool_status(pods: list[Object], fleet: str, pool: PoolWanted, serving: Container[str]) -> Object:
    """Counts of one pool's workers, and the selector of their (leading) pods that autoscalers read. `serving`: uids of those that
    the routers are told to use."""
    groups = {pod["metadata"]["name"]: (pod["metadata"].get("labels") or {}).get(GROUP_OF) for pod in pods}
    alive, ready, leaving = count_workers(pods, {name: group for name, group in groups.items() if group is not None})
    base = "inferencefleet.io"
    selector = f"{base}/fleet={fleet},{base}/tier={pool.tier},{base}/role={pool.role},{base}/revision={pool.revision}"
    return {
        "replicas": alive,
        "readyReplicas": ready,
        "servingReplicas": sum(pod["metadata"]["uid"] in serving for pod in pods),
        "terminatingReplicas": leaving,
        "selector": selector if pool.nodes == 1 else f"{selector},{MEMBER}=0",
    }
