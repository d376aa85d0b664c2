"""What a WorkerPool says of its workers, and whether it may have more."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Final

from fleet_operator.cluster.interface import POD, POOL, Cluster, ClusterError, NotFoundError, Object
from fleet_operator.gangs import count_workers
from fleet_operator.names import GROUP_OF, MEMBER
from fleet_operator.outcome import Outcome
from fleet_planner.events import Deed
from fleet_planner.scale_targets import EVERY_REVISION
from fleet_planner.types import Problem
from fleet_planner.wanted import PodWanted, PoolWanted

FOREGROUND: Final = "foregroundDeletion"
"""The garbage collector's finalizer."""


def changed_pools(done: Iterable[Deed], create: Iterable[PodWanted]) -> set[str]:
    """Pools that this pass made pods for. It saw them without; the next pass, which follows because of those, counts them."""
    made = {deed.name for deed in done if (deed.verb, deed.kind) == ("created", POD.kind)}
    return {wanted.pool for wanted in create if wanted.name in made}


def takes_pods(pool: Object, outcome: Outcome) -> bool:
    """Whether pods may be made in it. Not while it is deleted with `--cascade=foreground`: the garbage collector takes each pod
    of it, new ones, too, and would never come to its end."""
    meta = pool["metadata"]
    if "deletionTimestamp" not in meta or FOREGROUND not in (meta.get("finalizers") or []):
        return True
    words = f"WorkerPool {meta['name']} is being deleted, its pods first (--cascade=foreground); it is made anew when it is gone"
    outcome.conflicts.append(Problem("Conflict", words))
    return False


def pool_status(pods: list[Object], fleet: str, pool: PoolWanted, serving: Container[str]) -> Object:
    """Counts of one pool's workers, and the selector of their (leading) pods that autoscalers read. `serving`: uids of those that
    the routers are told to use."""
    groups = {pod["metadata"]["name"]: (pod["metadata"].get("labels") or {}).get(GROUP_OF) for pod in pods}
    alive, ready, leaving = count_workers(pods, {name: group for name, group in groups.items() if group is not None})
    base = "inferencefleet.io"
    selector = f"{base}/fleet={fleet},{base}/tier={pool.tier},{base}/role={pool.role}"
    selector += f",{base}/revision={pool.revision}" if pool.revision != EVERY_REVISION else ""
    return {
        "replicas": alive,
        "readyReplicas": ready,
        "servingReplicas": sum(pod["metadata"]["uid"] in serving for pod in pods),
        "terminatingReplicas": leaving,
        "selector": selector if pool.nodes == 1 else f"{selector},{MEMBER}=0",
    }


async def tell_pool(cluster: Cluster, namespace: str, name: str, status: Object, outcome: Outcome) -> None:
    """Write it; a pool that is gone has none."""
    try:
        await cluster.patch_status(POOL, namespace, name, status)
        outcome.writes += 1
    except NotFoundError:
        return
    except ClusterError as error:
        outcome.fail(f"status of {POOL.kind} {name}", error)
