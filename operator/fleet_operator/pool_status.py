"""What a WorkerPool says of its workers. Pure."""

from __future__ import annotations

from fleet_operator.cluster.interface import Object
from fleet_operator.gangs import count_workers
from fleet_operator.names import GROUP_OF, MEMBER
from fleet_planner.types import PoolWanted


def pool_status(pods: list[Object], fleet: str, pool: PoolWanted) -> Object:
    """Counts of one pool's workers, and the selector of their (leading) pods that autoscalers read."""
    groups = {pod["metadata"]["name"]: (pod["metadata"].get("labels") or {}).get(GROUP_OF) for pod in pods}
    alive, ready, leaving = count_workers(pods, {name: group for name, group in groups.items() if group is not None})
    base = "inferencefleet.io"
    selector = f"{base}/fleet={fleet},{base}/tier={pool.tier},{base}/role={pool.role},{base}/revision={pool.revision}"
    return {
        "replicas": alive,
        "readyReplicas": ready,
        "servingReplicas": ready,
        "terminatingReplicas": leaving,
        "selector": selector if pool.nodes == 1 else f"{selector},{MEMBER}=0",
    }
