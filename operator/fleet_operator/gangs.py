"""Objects that workers over several nodes need beside their pods: the Service of their names, and PodGroups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import Cluster, ClusterError, NotFoundError, Object
from fleet_operator.cluster.kinds import POD_GROUP_KINDS
from fleet_operator.outcome import Outcome
from fleet_operator.render.gang import pod_group_of, render_pod_group
from fleet_planner.reconcile import Plan
from fleet_planner.types import PodWanted


def spans_nodes(plan: Plan) -> bool:
    """Whether some worker needs names for its pods."""
    return any(pool.nodes > 1 for pool in plan.pools)


async def put_pod_group(
    cluster: Cluster, fleet: InferenceFleet, wanted: PodWanted, stored: Object, owner: Object, outcome: Outcome
) -> bool:
    """The worker's PodGroup, before any of its pods: a scheduler that does not know the group would place them one by one. False:
    it could not be written, and no pod may be made. It is not watched, because most clusters have no such kind."""
    wish = render_pod_group(fleet, wanted, stored["data"].get("gangs", {}).get(wanted.role, {}), owner)
    if wish is None or wanted.member > 0:
        return True
    try:
        await cluster.apply(wish)
    except ClusterError as error:
        outcome.fail(f"PodGroup {wish['metadata']['name']}", error)
        return False
    return True


async def drop_pod_groups(cluster: Cluster, namespace: str, pods: Iterable[Object | None], outcome: Outcome) -> None:
    """PodGroups of workers that were told to go."""
    for kind, name in sorted({found for pod in pods if pod is not None and (found := pod_group_of(pod)) is not None}):
        try:
            await cluster.delete(POD_GROUP_KINDS[kind], namespace, name)
        except NotFoundError:
            continue
        except ClusterError as error:
            outcome.fail(f"deleting PodGroup {name}", error)


def count_workers(pods: Iterable[Object], of: Mapping[str, str]) -> tuple[int, int, int]:
    """(workers, ready workers, workers on their way out) of a pool. `of`: pod name → its worker's name, where that differs."""
    groups: dict[str, list[Object]] = {}
    for pod in pods:
        groups.setdefault(of.get(pod["metadata"]["name"], pod["metadata"]["name"]), []).append(pod)
    staying = [group for group in groups.values() if not any("deletionTimestamp" in pod["metadata"] for pod in group)]
    return len(staying), sum(all(map(_is_ready, group)) for group in staying), len(groups) - len(staying)


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
