"""What a WorkerPool says of its workers. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable

from fleet_operator.cluster.interface import POD, Object
from fleet_operator.gangs import count_workers
from fleet_operator.names import GROUP_OF, MEMBER
from fleet_planner.events import Deed
from fleet_planner.types import PodWanted, PoolWanted


def changed_pools(done: Iterable[Deed], create: Iterable[PodWanted]) -> set[str]:
    """Pools that this pass made pods for. It saw them without; the next pass, which follows because of those, counts them."""
    made = {deed.name for deed in done if (deed.verb, deed.kind) == ("created", POD.kind)}
    return {wanted.pool for wanted in create if wanted.name in made}


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
