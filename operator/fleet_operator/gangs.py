"""Objects that workers over several nodes need beside their pods: the Service of their names, and PodGroups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from fleet_api.conditions import rfc3339
from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.claims import MARKS
from fleet_operator.cluster.interface import POD, Cluster, ClusterError, Kind, NotFoundError, Object
from fleet_operator.cluster.kinds import POD_GROUP_KINDS
from fleet_operator.names import ASKED_AGAIN, FLEET, MANAGED_BY, POOL, REVISION, ROLE, TIER
from fleet_operator.older import older
from fleet_operator.outcome import Outcome
from fleet_operator.ownership import lonely, name_conflict, owned
from fleet_operator.render.gang import pod_group_of, render_pod_group
from fleet_planner.reconcile import Plan
from fleet_planner.wanted import PodWanted

AGAIN_S: Final = 20.0
"""A PodGroup of a worker that waits is written again this often at most; each pass does it that comes later."""
DEAF: Final = frozenset({"coscheduling"})
"""Schedulers that may not hear of a new node: scheduler-plugins (0.34.7, `EventsToRegister` of coscheduling) tries pods that it
refused because of their group again when a pod is made or a PodGroup changes, else after five minutes."""


def spans_nodes(plan: Plan, live: Mapping[tuple[str, str], Object]) -> bool:
    """Whether some worker needs names for its pods, be it of a tier that left the spec. `live`: (kind, name) → object."""
    return any(pool.nodes > 1 for pool in plan.pools) or any(max(stored["data"]["nodes"]) > 1 for stored in older(plan, live))


class PodGroups:
    """Those of one cluster. They are not watched, because most clusters have no such kind."""

    def __init__(self, cluster: Cluster, now: Callable[[], float]) -> None:
        self._cluster, self._now = cluster, now
        self._put_at: dict[tuple[str, str], float] = {}
        """(namespace, name), of those that were put less than AGAIN_S ago."""

    async def put(
        self, fleet: InferenceFleet, wanted: PodWanted, stored: Object, owner: Object, outcome: Outcome, *, again: bool = False
    ) -> bool:
        """The worker's PodGroup, before any of its pods: a scheduler that does not know the group would place them one by one.
        False: it could not be written, and no pod may be made."""
        gang = stored["data"].get("gangs", {}).get(wanted.role, {})
        wish = render_pod_group(fleet, wanted, gang, owner)
        if wish is None or wanted.member > 0:
            return True
        if again and gang["podGroup"] in DEAF:
            wish["metadata"]["annotations"] = {ASKED_AGAIN: rfc3339(self._now())}
        try:
            found = await self._there(POD_GROUP_KINDS[gang["podGroup"]], fleet.metadata.namespace, wish["metadata"]["name"])
            if found is not None and not (owned(found, owner) or lonely(found, wish, owner)):
                outcome.problems.append(name_conflict(found, wish))
                return False
            await self._cluster.apply(wish)
        except ClusterError as error:
            outcome.fail(f"PodGroup {wish['metadata']['name']} (placement.podGroup {gang['podGroup']})", error)
            return False
        self._put_at[fleet.metadata.namespace, wish["metadata"]["name"]] = self._now()
        return True

    async def again(
        self,
        fleet: InferenceFleet,
        live: Mapping[tuple[str, str], Object],
        stored: Mapping[tuple[str, str], Object],
        pools: Mapping[str, Object],
        outcome: Outcome,
    ) -> None:
        """Of workers that wait for nodes, each now and then: if somebody deleted one, no node would ever be found, and some
        schedulers look again only when it changes. `stored`: by (tier, revision); `pools`: by name."""
        now = self._now()
        self._put_at = {key: at for key, at in self._put_at.items() if now - AGAIN_S < at <= now}
        for wanted in waiting_leaders(live):
            revision, owner = stored.get((wanted.tier, wanted.revision)), pools.get(wanted.pool)
            known = (fleet.metadata.namespace, wanted.name) in self._put_at
            if revision is not None and owner is not None and not known:
                await self.put(fleet, wanted, revision, owner, outcome, again=True)

    async def drop(self, namespace: str, pods: Iterable[Object | None], outcome: Outcome) -> None:
        """Of workers that were told to go; not one of somebody else that has such a name."""
        leaving = {found: pod for pod in pods if pod is not None and (found := pod_group_of(pod)) is not None}
        for (kind, name), pod in leaving.items():
            try:
                there = await self._there(POD_GROUP_KINDS[kind], namespace, name)
                if there is not None and _went_with(there, pod):
                    await self._cluster.delete(POD_GROUP_KINDS[kind], namespace, name, uid=there["metadata"]["uid"])
            except NotFoundError:
                continue
            except ClusterError as error:
                outcome.fail(f"deleting PodGroup {name}", error)

    async def _there(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The PodGroup of this name, whosever it is. A patch of nothing looks at it: the operator has no right to read them."""
        try:
            return await self._cluster.patch(kind, namespace, name, {})
        except NotFoundError:
            return None


def _went_with(group: Object, pod: Object) -> bool:
    """A PodGroup is of the pool of this pod that goes, or it has our marks and nobody owns it any more."""
    if any(owned(group, {"metadata": owner}) for owner in pod["metadata"].get("ownerReferences") or []):
        return True
    has, labels = group["metadata"], pod["metadata"]["labels"]
    marked = all((has.get("labels") or {}).get(key) == labels.get(key) for key in (MANAGED_BY, FLEET, TIER, ROLE))
    return marked and not has.get("ownerReferences")


def waiting_leaders(live: Mapping[tuple[str, str], Object]) -> list[PodWanted]:
    """One per worker with a PodGroup that has a pod without a node, and none that goes or that no scheduler may see yet.
    `live`: (kind, name) → object."""
    workers: dict[str, list[Object]] = {}
    for (kind, _), pod in live.items():
        if kind == POD.kind and (found := pod_group_of(pod)) is not None:
            workers.setdefault(found[1], []).append(pod)
    leaders = []
    for name, pods in sorted(workers.items()):
        elsewhere = any("deletionTimestamp" in pod["metadata"] or pod["spec"].get("schedulingGates") for pod in pods)
        of, place = pods[0]["metadata"]["labels"], name.rpartition("-")[2]
        ours = of.keys() >= MARKS and place.isascii() and place.isdigit()  # else somebody edited its labels
        if ours and not elsewhere and not all(pod["spec"].get("nodeName") for pod in pods):
            leaders.append(PodWanted(name, of[POOL], of[TIER], of[ROLE], of[REVISION], int(place)))
    return leaders


def count_workers(pods: Iterable[Object], of: Mapping[str, str]) -> tuple[int, int, int]:
    """(workers, ready workers, workers on their way out) of a pool. `of`: pod name → its worker's name, where that differs."""
    groups: dict[str, list[Object]] = {}
    for pod in pods:
        groups.setdefault(of.get(pod["metadata"]["name"], pod["metadata"]["name"]), []).append(pod)
    staying = [group for group in groups.values() if not any("deletionTimestamp" in pod["metadata"] for pod in group)]
    return len(staying), sum(all(map(_is_ready, group)) for group in staying), len(groups) - len(staying)


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions)
