"""Carries out a plan: writes what differs, deletes what should go; one failure does not hide the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.adapters.told import elsewhere, place_of_pod, worker_told
from fleet_operator.budgets import budgets_due, still_guards
from fleet_operator.claims import put_template, short_of_claims
from fleet_operator.cluster.interface import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    NETWORK_POLICY,
    PDB,
    POD,
    POOL,
    SERVICE,
    ClusterError,
    ConflictError,
    Object,
)
from fleet_operator.compare import contains
from fleet_operator.deeds import member_of, worker_of
from fleet_operator.document_size import fits, too_large
from fleet_operator.fleet_telling import FleetTelling
from fleet_operator.flip import marks
from fleet_operator.fresh import Fresh
from fleet_operator.gangs import PodGroups, spans_nodes
from fleet_operator.kept_revisions import made_again
from fleet_operator.names import ADAPTERS, group_service, policy_name, router_name
from fleet_operator.names import ROLE as ROLE_LABEL
from fleet_operator.older import older
from fleet_operator.outcome import Outcome, StopError
from fleet_operator.ownership import lost_owners, owned, put_back, taken
from fleet_operator.peer_keys import is_due, make_key
from fleet_operator.pool_status import changed_pools, pool_status, takes_pods, tell_pool
from fleet_operator.putting import Live, Pass, Putter
from fleet_operator.render.fabric import render_claims
from fleet_operator.render.fleet import render_budgets, render_documents, render_pool, render_router
from fleet_operator.render.gang import leader_of, render_group_service
from fleet_operator.render.network import render_policy
from fleet_operator.render.prefetch import render_fetch
from fleet_operator.render.revision import place_of, render_revision
from fleet_operator.render.worker import adapters_told, render_pod
from fleet_operator.router_first import kept_words, may_go
from fleet_operator.scale_targets import put_targets, target_statuses, unwanted
from fleet_operator.settings import Platform
from fleet_operator.settled import Settled
from fleet_operator.status_pace import StatusPace
from fleet_operator.write_through import WriteThrough
from fleet_planner.events import Deed
from fleet_planner.reconcile import Plan
from fleet_planner.roles import ROLES
from fleet_planner.types import Template
from fleet_planner.wanted import PodWanted

NO_ADAPTERS = "[]"


class Applier:
    """Applies plans of one cluster."""

    def __init__(self, cluster: WriteThrough, platform: Platform, pace: StatusPace, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._api = Putter(cluster)
        self._platform = platform
        self._pace = pace
        self._groups = PodGroups(cluster, now)
        self._now = now

    async def apply(
        self, fleet: InferenceFleet, raw: Object, plan: Plan, templates: dict[str, Template], live: Live, settled: Settled,
        lost: Collection[tuple[str, str]] = (),
    ) -> Outcome:  # fmt: skip
        """Endpoints first (nobody may be sent to a worker that is about to go), then objects, deletions, creations, status. What
        is `lost` is in `live` only because it is to be made again.

        When the API cannot answer the pass stops there; only the status, which tells why, is still tried."""
        telling = FleetTelling(self._cluster, self._pace, raw, plan.status, settled.words)
        work = Pass(fleet, raw, plan, live, Fresh(self._cluster, raw, live, telling), Outcome(), settled, lost)
        in_order, asked = not lost and settled.all.holds(fleet.spec, plan, live), self._cluster.asked
        with suppress(StopError):
            await (self._key(work) if in_order else self._objects(work, templates))
        if not in_order:
            settled.keep(live)
            if self._cluster.asked == asked:
                settled.all.note(fleet.spec, plan, live, work.outcome)
        if work.outcome.retry_after_s is None and not work.fresh.gone:  # whoever asks for time gets it
            with suppress(StopError):
                await telling.at_last(work.outcome)
        work.outcome.read += work.fresh.read
        work.outcome.gone |= work.fresh.gone
        return work.outcome

    async def _objects(self, work: Pass, templates: dict[str, Template]) -> None:
        routers_told = await self._documents(work)
        if work.plan.ended is not None:  # nothing is made, changed or put back any more
            await self._deletions(work, routers_told)
            return
        stored = await self._revisions(work, templates)
        await self._key(work)
        for wish in render_router(work.fleet, work.raw, self._platform, work.live):
            await self._api.put(wish, work)
        await self._policy(work)
        await self._group_names(work)
        await self._budgets(work)
        pools: dict[str, Object] = {}
        for pool in work.plan.pools:
            made = await self._api.put(render_pool(work.fleet, pool, work.raw), work)
            if made is not None and takes_pods(made, work.outcome):
                pools[pool.name] = made
        await self._targets(work, sized=len(pools) == len(work.plan.pools))
        await self._owners(work, pools)
        if routers_told is not None and fits(work.outcome.problems):
            await self._flips(work.plan, work.fleet.metadata.namespace, pools, work.outcome)
        await self._adapters(work)
        await self._deletions(work, routers_told)
        for fetch in work.plan.fetch:
            await self._create(render_fetch(work.fleet, fetch, work.raw, self._platform), work)
        await self._creations(work, stored, pools)
        await self._pool_status(work)

    async def _documents(self, work: Pass) -> Object | None:
        """What routers are told, as the API has it then. One that is too large is not sent: what is there goes on."""
        wish = render_documents(work.fleet, work.plan, work.raw, work.live)
        problem = too_large(wish, len(work.plan.targets))
        if problem is None:
            return await self._api.put(wish, work)
        work.outcome.problems.append(problem)
        found = await self._api.there(wish, work.outcome)
        return found if found is not None and owned(found, work.raw) else None

    async def _key(self, work: Pass) -> None:
        """The Secret that the fleet's pods share, where it is time to ask for it."""
        memory, now = work.settled.key, self._now()
        due = is_due(work.fleet, memory.looked(now), now, makes_pods=bool(work.plan.create))
        if due and self._platform.makes_keys and work.plan.ended is None and await self._api.is_true(work, sizes=False):
            await make_key(self._cluster, work.fleet, work.raw, memory, work.outcome, now)

    async def _targets(self, work: Pass, *, sized: bool) -> None:
        """Of a fleet that is scaled from outside; one that no role needs goes."""
        await put_targets(work.fleet, work.plan, work.raw, lambda wish: self._api.put(wish, work), sized=sized)
        for left in unwanted(work.plan, work.live, work.raw):
            if await self._api.is_true(work):
                namespace, name, uid = (left["metadata"][part] for part in ("namespace", "name", "uid"))
                await self._api.delete(POOL, namespace, name, uid, "nothing scales its role from outside any more", work.outcome)

    async def _creations(self, work: Pass, stored: Mapping[tuple[str, str], Object], pools: Mapping[str, Object]) -> None:
        """Pods, a leader before those who follow it: they are made with its uid, and not at all without it."""
        leaders, others = dict[str, str](), elsewhere(work.fleet, work.live)
        for wanted in work.plan.create:
            revision, owner = stored.get((wanted.tier, wanted.revision)), pools.get(wanted.pool)
            leader = leaders.get(leader_of(wanted))
            if owner is None or revision is None or (wanted.member > 0 and leader is None) or not await self._api.is_true(work):
                continue
            if not await self._claims(wanted, revision, owner, work):
                continue
            if not await self._groups.put(work.fleet, wanted, revision, owner, work.outcome):
                continue
            told = worker_told(work.fleet, (wanted.tier, wanted.revision), work.live, others)
            made = await self._create(render_pod(work.fleet, wanted, revision, owner, leader, told, work.live), work)
            if made is not None and wanted.member == 0:
                leaders[leader_of(wanted)] = made
        await self._groups.again(work.fleet, work.live, stored, pools, work.outcome)
        for short in short_of_claims(work.live):
            revision, owner = stored.get((short.tier, short.revision)), pools.get(short.pool)
            if owner is not None and revision is not None:
                await self._claims(short, revision, owner, work)

    async def _group_names(self, work: Pass) -> None:
        """The Service of workers over several nodes, or none."""
        if spans_nodes(work.plan, work.live):
            await self._api.put(render_group_service(work.fleet, work.raw), work)
            return
        found = work.live.get((SERVICE.kind, group_service(work.fleet.metadata.name)))
        if found is not None and owned(found, work.raw) and await self._api.is_true(work, sizes=False):
            name, uid = found["metadata"]["name"], found["metadata"]["uid"]
            why = "no worker spans several nodes"
            await self._api.delete(SERVICE, work.fleet.metadata.namespace, name, uid, why, work.outcome)

    async def _deletions(self, work: Pass, told: Object | None) -> None:
        """`told`: the routers' documents as they are now; None when they could not be written."""
        namespace, document = work.fleet.metadata.namespace, router_name(work.fleet.metadata.name)
        going = may_go(work.plan.delete, work.live, told, work.live.get((CONFIG_MAP.kind, document)))
        kept = kept_words(work.plan.delete, going, document)
        (work.outcome.problems if work.outcome.problems else work.outcome.conflicts).extend(kept)
        leaving = list[Object | None]()
        for gone in going:
            pod = work.live.get(("Pod", gone.name))
            if await self._api.is_true(work) and await self._api.delete(
                POD, namespace, gone.name, gone.uid, gone.reason, work.outcome, pod
            ):
                leaving.append(pod)
        await self._groups.drop(namespace, leaving, work.outcome)
        for left in work.plan.pools_gone:
            if await self._api.is_true(work):
                await self._api.delete(POOL, namespace, left.name, left.uid, "its revision is no longer wanted", work.outcome)

    async def _revisions(self, work: Pass, templates: dict[str, Template]) -> dict[tuple[str, str], Object]:
        """Stored templates by (tier, revision), the wanted ones among them: no pod is made before its template is kept."""
        found = {
            at: obj
            for (kind, _), obj in work.live.items()
            if kind == "ControllerRevision" and owned(obj, work.raw) and (at := place_of(obj)) is not None
        }
        lost = {at: obj for at, obj in found.items() if (obj["kind"], obj["metadata"]["name"]) in work.lost}
        wishes = made_again(work.plan, work.live, work.lost, work.raw)
        for at in (at for at in work.plan.keep if at not in found):
            wishes[at] = render_revision(work.fleet, work.fleet.tier(at[0]), templates[at[0]], self._platform, work.raw)
        made = {at: await self._api.put(wish, work) for at, wish in wishes.items()}
        found = {at: obj for at, obj in {**found, **dict.fromkeys(lost), **made}.items() if obj is not None}
        for tier, revision in work.plan.forget:
            gone = found.pop((tier, revision), None)
            if gone is not None and await self._api.is_true(work):
                namespace, name, uid = (gone["metadata"][part] for part in ("namespace", "name", "uid"))
                await self._api.delete(CONTROLLER_REVISION, namespace, name, uid, "beyond the history", work.outcome)
        return found

    async def _policy(self, work: Pass) -> None:
        """The fleet's NetworkPolicy, or none."""
        if work.fleet.spec.network_policy.enabled:
            await self._api.put(render_policy(work.fleet, work.raw, self._platform, older(work.plan, work.live)), work)
            return
        found = work.live.get((NETWORK_POLICY.kind, policy_name(work.fleet.metadata.name)))
        if found is not None and owned(found, work.raw) and await self._api.is_true(work, sizes=False):
            name, uid = found["metadata"]["name"], found["metadata"]["uid"]
            why, namespace = "spec.networkPolicy.enabled is false", work.fleet.metadata.namespace
            await self._api.delete(NETWORK_POLICY, namespace, name, uid, why, work.outcome)

    async def _claims(self, wanted: PodWanted, stored: Object, owner: Object, work: Pass) -> bool:
        """The pool's ResourceClaimTemplate, before a pod that names it; whether that pod may be made."""
        wish = render_claims(work.fleet, wanted, stored, owner)
        if wish is None or not await self._api.is_true(work):
            return True
        return await put_template(self._cluster, wish, owner, work.outcome)

    async def _create(self, pod: Object, work: Pass) -> str | None:
        """The uid of the pod that was made, None when none was."""
        name, outcome = pod["metadata"]["name"], work.outcome
        if not await self._api.is_true(work):
            return None
        try:
            made = await self._cluster.create(pod)
        except ConflictError as error:
            there = await self._api.there(pod, outcome)
            conflict = taken(there, pod) if there is not None else None
            if conflict:
                outcome.problems.append(conflict)
            else:
                outcome.fail(f"Pod {name}", error)  # ours of a life before: the watch will show it
            return None
        except ClusterError as error:
            outcome.fail(f"Pod {name}", error)
            return None
        uid: str = made["metadata"]["uid"]
        outcome.writes += 1
        outcome.done.append(Deed("created", "Pod", name, uid, *worker_of(pod), member=member_of(pod)))
        return uid

    async def _flips(self, plan: Plan, namespace: str, pools: Mapping[str, Object], outcome: Outcome) -> None:
        """Workers that are told another role, only after the routers were told that they drain; and those that have it."""
        for flip in plan.flips:
            await self._api.patch_pod(namespace, flip.name, marks.told(flip), outcome)
        for relabel in plan.relabels:
            pool = pools.get(relabel.pool)
            if pool is not None and await self._api.patch_pod(namespace, relabel.name, marks.relabelled(relabel, pool), outcome):
                why = marks.words(relabel)
                outcome.done.append(Deed("flipped", "Pod", relabel.name, relabel.uid, relabel.tier, relabel.role, why))

    async def _owners(self, work: Pass, pools: Mapping[str, Object]) -> None:
        """A pod whose owner somebody took away would outlive its fleet, with its GPUs."""
        for pod, owner in lost_owners(work.live, pools, work.raw):
            namespace, name, uid = (pod["metadata"][part] for part in ("namespace", "name", "uid"))
            if await self._api.is_true(work) and await self._api.patch_pod(namespace, name, put_back(pod, owner), work.outcome):
                work.outcome.vain += 1
                work.outcome.done.append(Deed("changed", POD.kind, name, uid, undid="metadata.ownerReferences"))

    async def _adapters(self, work: Pass) -> None:
        """Every worker's annotation says which adapters it should have, for when its container starts again. One that had some
        once keeps an empty list: an operator that starts now must still ask it. One of another model keeps what it has."""
        told, namespace = adapters_told(work.fleet), work.fleet.metadata.namespace
        others = elsewhere(work.fleet, work.live)
        for (kind, name), pod in work.live.items():
            meta = pod["metadata"]
            if kind != "Pod" or meta.get("labels", {}).get(ROLE_LABEL) not in ROLES or "deletionTimestamp" in meta:
                continue
            if place_of_pod(pod) in others:
                continue
            has = (meta.get("annotations") or {}).get(ADAPTERS, "")
            if (wanted := told or (has and NO_ADAPTERS)) != has:
                patch = {"metadata": {"uid": meta["uid"], "annotations": {ADAPTERS: wanted}}}
                await self._api.patch_pod(namespace, name, patch, work.outcome)

    async def _budgets(self, work: Pass) -> None:
        """Those that are due. Budgets of tiers that are gone would hold up node drains for ever."""
        wanted, namespace = render_budgets(work.fleet, work.plan, work.raw), work.fleet.metadata.namespace
        for budget in budgets_due(wanted, work.plan, work.live):
            await self._api.put(budget, work)
        kept = {budget["metadata"]["name"] for budget in wanted}
        for (kind, name), found in list(work.live.items()):  # watches feed the cache while a deletion is awaited
            stale = kind == PDB.kind and name not in kept and owned(found, work.raw) and not still_guards(found, work.live)
            if stale and await self._api.is_true(work):
                uid = found["metadata"]["uid"]
                await self._api.delete(PDB, namespace, name, uid, "nothing of the spec needs it", work.outcome)

    async def _pool_status(self, work: Pass) -> None:
        serving = {target.uid for target in work.plan.targets if target.state == "serving"}
        changed = changed_pools(work.outcome.done, work.plan.create)
        for pool in work.plan.pools:
            found = work.live.get(("WorkerPool", pool.name))
            if found is None or pool.name in changed:
                continue
            pods = [o for (kind, _), o in work.live.items() if kind == "Pod" and owned(o, found)]
            wish = pool_status(pods, work.fleet.metadata.name, pool, serving)
            if not contains(found.get("status"), wish):  # a newer operator's words about it stay
                await tell_pool(self._cluster, work.fleet.metadata.namespace, pool.name, wish, work.outcome)
        for name, wish in target_statuses(work.fleet, work.plan, work.live, serving, changed):
            if not contains(work.live[POOL.kind, name].get("status"), wish):
                await tell_pool(self._cluster, work.fleet.metadata.namespace, name, wish, work.outcome)
