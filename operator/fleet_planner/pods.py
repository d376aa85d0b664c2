"""Which pods to create and which to delete so that each pool has its size."""

from __future__ import annotations

from collections.abc import Sequence

from fleet_planner.types import ObservedPod, PodGone, PodWanted, PoolWanted

ENDED = ("Succeeded", "Failed")


def plan_pods(pool: PoolWanted, pods: Sequence[ObservedPod]) -> tuple[list[PodWanted], list[PodGone]]:
    """Pods of one pool: ended ones are replaced, missing ones get the lowest free ordinals (a terminating pod still holds
    its own), surplus ones go: not ready before ready, young before old."""
    alive = [pod for pod in pods if not pod.terminating and pod.phase not in ENDED]
    gone = [PodGone(pod.name, pod.uid, f"its phase is {pod.phase}") for pod in pods if pod.phase in ENDED and not pod.terminating]
    surplus = sorted(alive, key=lambda pod: (pod.ready, -pod.created_at, -pod.ordinal))[: max(0, len(alive) - pool.replicas)]
    gone += [PodGone(pod.name, pod.uid, f"{len(alive)} pods, {pool.replicas} wanted") for pod in surplus]
    taken = {pod.ordinal for pod in pods}
    free = (ordinal for ordinal in range(len(taken) + pool.replicas + 1) if ordinal not in taken)
    missing = max(0, pool.replicas - len(alive))
    created = [
        PodWanted(f"{pool.name}-{ordinal}", pool.name, pool.tier, pool.role, pool.revision, ordinal)
        for ordinal, _ in zip(free, range(missing), strict=False)
    ]
    return created, gone
