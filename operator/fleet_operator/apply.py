"""Carries out a plan: writes what differs, deletes what should go; one failure does not hide the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fleet_api.parse import known_status
from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    FLEET,
    NETWORK_POLICY,
    PDB,
    POD,
    POOL,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    Cluster,
    ClusterError,
    ConflictError,
    InvalidError,
    Kind,
    NotFoundError,
    Object,
)
from fleet_operator.compare import contains, difference, satisfied, stamped
from fleet_operator.flip import marks
from fleet_operator.names import APPLIED, policy_name, router_name
from fleet_operator.names import REVISION as REVISION_LABEL
from fleet_operator.names import ROLE as ROLE_LABEL
from fleet_operator.names import TIER as TIER_LABEL
from fleet_operator.render.fabric import render_claims
from fleet_operator.render.fleet import render_budgets, render_documents, render_pool, render_router
from fleet_operator.render.network import render_policy
from fleet_operator.render.revision import render_revision
from fleet_operator.render.worker import render_pod
from fleet_operator.settings import Platform
from fleet_operator.status_pace import StatusPace
from fleet_planner.events import Deed, Problem
from fleet_planner.flip import other
from fleet_planner.reconcile import Plan
from fleet_planner.types import PodWanted, Template

Live = Mapping[tuple[str, str], Object]
"""(kind, name) → object, of the fleet's namespace."""
BY_KIND: dict[str, Kind] = {
    kind.kind: kind
    for kind in (
        CONFIG_MAP,
        CONTROLLER_REVISION,
        DEPLOYMENT,
        NETWORK_POLICY,
        PDB,
        POD,
        POOL,
        ROLE,
        ROLE_BINDING,
        SERVICE,
        SERVICE_ACCOUNT,
    )
}


MADE_ANEW = frozenset({"Service"})


@dataclass(slots=True)
class Outcome:
    """What happened: words for the events, problems for the status."""

    done: list[Deed] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    writes: int = 0

    def fail(self, what: str, error: ClusterError) -> None:
        """One write that did not happen."""
        self.problems.append(Problem(error.reason, f"{what}: {error}"))


class Applier:
    """Applies plans of one cluster."""

    def __init__(self, cluster: Cluster, platform: Platform, pace: StatusPace) -> None:
        self._cluster = cluster
        self._platform = platform
        self._pace = pace

    async def apply(self, fleet: InferenceFleet, raw: Object, plan: Plan, templates: dict[str, Template], live: Live) -> Outcome:
        """Endpoints first (nobody may be sent to a worker that is about to go), then objects, deletions, creations, status."""
        outcome = Outcome()
        owner = raw
        routers_told = await self._put(render_documents(fleet, plan, owner, live), owner, live, outcome)
        stored = await self._revisions(fleet, owner, plan, templates, live, outcome)
        for wish in render_router(fleet, owner, self._platform):
            await self._put(wish, owner, live, outcome)
        await self._policy(fleet, owner, live, outcome)
        for budget in render_budgets(fleet, plan, owner):
            await self._put(budget, owner, live, outcome)
        pools: dict[str, Object] = {}
        for pool in plan.pools:
            made = await self._put(render_pool(fleet, pool, owner), owner, live, outcome)
            if made is not None:
                pools[pool.name] = made
        if routers_told is not None:
            await self._flips(plan, fleet.metadata.namespace, pools, outcome)
        for gone in plan.delete:
            pod = live.get(("Pod", gone.name))
            await self._delete(POD, fleet.metadata.namespace, gone.name, gone.uid, gone.reason, outcome, pod)
        for left in plan.pools_gone:
            await self._delete(POOL, fleet.metadata.namespace, left.name, left.uid, "its revision is no longer wanted", outcome)
        for wanted in plan.create:
            revision = stored.get((wanted.tier, wanted.revision))
            if wanted.pool in pools and revision is not None:
                await self._claims(fleet, wanted, revision, pools[wanted.pool], outcome)
                await self._create(render_pod(fleet, wanted, revision, pools[wanted.pool]), outcome)
        await self._prune_budgets(fleet, plan, owner, live, outcome)
        await self._pool_status(fleet, plan, live, outcome)
        await self._status(fleet, raw, plan, outcome)
        return outcome

    async def _revisions(
        self, fleet: InferenceFleet, owner: Object, plan: Plan, templates: dict[str, Template], live: Live, outcome: Outcome
    ) -> dict[tuple[str, str], Object]:
        """Stored templates by (tier, revision), the wanted ones among them: no pod is made before its template is kept."""
        found = {
            (obj["metadata"]["labels"][TIER_LABEL], obj["metadata"]["labels"][REVISION_LABEL]): obj
            for (kind, _), obj in live.items()
            if kind == "ControllerRevision" and _owned(obj, owner)
        }
        for tier, revision in plan.keep:
            if (tier, revision) not in found:
                wish = render_revision(fleet, fleet.tier(tier), templates[tier], self._platform, owner)
                made = await self._put(wish, owner, live, outcome)
                if made is not None:
                    found[tier, revision] = made
        for tier, revision in plan.forget:
            gone = found.pop((tier, revision), None)
            if gone is not None:
                name, uid = gone["metadata"]["name"], gone["metadata"]["uid"]
                await self._delete(CONTROLLER_REVISION, fleet.metadata.namespace, name, uid, "beyond the history", outcome)
        return found

    async def _put(self, wish: Object, owner: Object, live: Live, outcome: Outcome) -> Object | None:
        kind, name = wish["kind"], wish["metadata"]["name"]
        wish = stamped(wish)
        found = live.get((kind, name))
        if found is not None and not _owned(found, owner):
            outcome.problems.append(Problem("NotOurs", f"{kind} {name} exists and belongs to somebody else"))
            return None
        if satisfied(wish, found):
            return found
        try:
            made = await self._cluster.apply(wish)
        except InvalidError as error:
            await self._make_way(wish, found, str(error), outcome)
            return None
        except ClusterError as error:
            outcome.fail(f"{kind} {name}", error)
            return None
        outcome.writes += 1
        if not contains(made, wish):
            await self._make_way(wish, made, "somebody else's entries stand in its lists", outcome)
        verb: Literal["created", "changed"] = "created" if found is None else "changed"
        outcome.done.append(Deed(verb, kind, name, made["metadata"]["uid"], undid=_undid(wish, found)))
        return made

    async def _make_way(self, wish: Object, found: Object | None, why: str, outcome: Outcome) -> None:
        """Server-side apply leaves list entries that others added. A Service with such entries is made anew: it runs nothing;
        of anything else the difference is reported."""
        kind, name = wish["kind"], wish["metadata"]["name"]
        if found is None or kind not in MADE_ANEW:
            outcome.problems.append(Problem("Refused", f"{kind} {name}: {why}"))
            return
        namespace, uid = wish["metadata"]["namespace"], found["metadata"]["uid"]
        await self._delete(BY_KIND[kind], namespace, name, uid, f"made anew: {why}", outcome)

    async def _policy(self, fleet: InferenceFleet, owner: Object, live: Live, outcome: Outcome) -> None:
        """The fleet's NetworkPolicy, or none."""
        if fleet.spec.network_policy.enabled:
            await self._put(render_policy(fleet, owner, self._platform), owner, live, outcome)
            return
        name = policy_name(fleet.metadata.name)
        found = live.get((NETWORK_POLICY.kind, name))
        if found is not None and _owned(found, owner):
            uid, namespace = found["metadata"]["uid"], fleet.metadata.namespace
            await self._delete(NETWORK_POLICY, namespace, name, uid, "spec.networkPolicy.enabled is false", outcome)

    async def _claims(self, fleet: InferenceFleet, wanted: PodWanted, stored: Object, owner: Object, outcome: Outcome) -> None:
        """The pool's ResourceClaimTemplate, before a pod that names it. It is not watched: clusters before 1.34 have no such
        kind, and applying it again writes nothing."""
        wish = render_claims(fleet, wanted, stored, owner)
        if wish is None:
            return
        try:
            await self._cluster.apply(wish)
        except ClusterError as error:
            outcome.fail(f"ResourceClaimTemplate {wanted.pool}", error)

    async def _create(self, pod: Object, outcome: Outcome) -> None:
        name = pod["metadata"]["name"]
        try:
            made = await self._cluster.apply(pod)
        except ClusterError as error:
            outcome.fail(f"Pod {name}", error)
            return
        outcome.writes += 1
        outcome.done.append(Deed("created", "Pod", name, made["metadata"]["uid"], *_worker(pod)))

    async def _flips(self, plan: Plan, namespace: str, pools: Mapping[str, Object], outcome: Outcome) -> None:
        """Workers that are told another role, only after the routers were told that they drain; and those that have it."""
        for flip in plan.flips:
            await self._patch_pod(namespace, flip.name, marks.told(flip), outcome)
        for relabel in plan.relabels:
            pool = pools.get(relabel.pool)
            if pool is not None and await self._patch_pod(namespace, relabel.name, marks.relabelled(relabel, pool), outcome):
                why = f"{other(relabel.role)} → {relabel.role} in {relabel.took_s:.0f} s; {relabel.proof}"
                outcome.done.append(Deed("flipped", "Pod", relabel.name, relabel.uid, relabel.tier, relabel.role, why))

    async def _patch_pod(self, namespace: str, name: str, patch: Object, outcome: Outcome) -> bool:
        try:
            await self._cluster.patch(POD, namespace, name, patch)
        except (NotFoundError, ConflictError, InvalidError):
            return False  # gone, or another pod by now: the next pass sees which
        except ClusterError as error:
            outcome.fail(f"Pod {name}", error)
            return False
        outcome.writes += 1
        return True

    async def _delete(
        self, kind: Kind, namespace: str, name: str, uid: str, reason: str, outcome: Outcome, pod: Object | None = None
    ) -> None:
        try:
            await self._cluster.delete(kind, namespace, name, uid=uid)
        except (NotFoundError, ConflictError):
            return  # gone already, or another object by now: the next pass sees which
        except ClusterError as error:
            outcome.fail(f"deleting {kind.kind} {name}", error)
            return
        outcome.writes += 1
        outcome.done.append(Deed("deleted", kind.kind, name, uid, *_worker(pod), why=reason))

    async def _prune_budgets(self, fleet: InferenceFleet, plan: Plan, owner: Object, live: Live, outcome: Outcome) -> None:
        """Budgets of tiers that are gone would hold up node drains for ever."""
        kept = {budget["metadata"]["name"] for budget in render_budgets(fleet, plan, owner)} | {router_name(fleet.metadata.name)}
        for (kind, name), found in list(live.items()):  # watches feed the cache while a deletion is awaited
            if kind == PDB.kind and name not in kept and _owned(found, owner):
                uid = found["metadata"]["uid"]
                await self._delete(PDB, fleet.metadata.namespace, name, uid, "its tier is not in the spec", outcome)

    async def _pool_status(self, fleet: InferenceFleet, plan: Plan, live: Live, outcome: Outcome) -> None:
        for pool in plan.pools:
            found = live.get(("WorkerPool", pool.name))
            if found is None:
                continue
            pods = [o for (kind, _), o in live.items() if kind == "Pod" and _owned(o, found)]
            wish = pool_status(pods, fleet.metadata.name, pool.tier, pool.role, pool.revision)
            if found.get("status") != wish:
                await self._patch(POOL, fleet.metadata.namespace, pool.name, wish, outcome)

    async def _status(self, fleet: InferenceFleet, raw: Object, plan: Plan, outcome: Outcome) -> None:
        wish, uid, present = plan.status.to_dict(), raw["metadata"]["uid"], raw.get("status")
        if self._pace.is_due(uid, present if present in (None, wish) else known_status(raw), wish):
            await self._patch(FLEET, fleet.metadata.namespace, fleet.metadata.name, wish, outcome)
            self._pace.written(uid)

    async def _patch(self, kind: Kind, namespace: str, name: str, status: Object, outcome: Outcome) -> None:
        try:
            await self._cluster.patch_status(kind, namespace, name, status)
            outcome.writes += 1
        except NotFoundError:
            return
        except ClusterError as error:
            outcome.fail(f"status of {kind.kind} {name}", error)


def pool_status(pods: list[Object], fleet: str, tier: str, role: str, revision: str) -> Object:
    """Counts of one pool, and the selector that autoscalers read."""
    alive = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    ready = sum(
        any(c["type"] == "Ready" and c["status"] == "True" for c in (pod.get("status") or {}).get("conditions") or [])
        for pod in alive
    )
    base = "inferencefleet.io"
    return {
        "replicas": len(alive),
        "readyReplicas": ready,
        "servingReplicas": ready,
        "terminatingReplicas": len(pods) - len(alive),
        "selector": f"{base}/fleet={fleet},{base}/tier={tier},{base}/role={role},{base}/revision={revision}",
    }


def _worker(pod: Object | None) -> tuple[str, str]:
    """(tier, role) of a worker pod, empty words for anything else."""
    labels = (pod["metadata"].get("labels") or {}) if pod is not None else {}
    return labels.get(TIER_LABEL, ""), labels.get(ROLE_LABEL, "")


def _undid(wish: Object, found: Object | None) -> str:
    """Where somebody edited what we applied; empty when it is our wish that changed."""
    applied = ((found or {}).get("metadata", {}).get("annotations") or {}).get(APPLIED)
    return difference(found, wish) if applied == wish["metadata"]["annotations"][APPLIED] else ""


def _owned(found: Object, owner: Object) -> bool:
    references = found["metadata"].get("ownerReferences") or []
    return any(reference.get("uid") == owner["metadata"]["uid"] for reference in references)
