"""Carries out a plan: writes what differs, deletes what should go; one failure does not hide the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.adapters.told import elsewhere, place_of_pod, worker_told
from fleet_operator.budgets import budgets_due, still_guards
from fleet_operator.claims import put_template, short_of_claims
from fleet_operator.cluster.interface import (
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
    ClusterError,
    ConflictError,
    InvalidError,
    Kind,
    NotFoundError,
    Object,
)
from fleet_operator.compare import contains, data_patch, satisfied, stamped
from fleet_operator.deeds import member_of, planned_from, undone, worker_of
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
from fleet_operator.ownership import lost_owners, name_conflict, owned, parted, put_back, taken
from fleet_operator.peer_keys import is_due, make_key
from fleet_operator.pool_status import changed_pools, pool_status, takes_pods, tell_pool
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
from fleet_operator.settled import Settled, digest_of
from fleet_operator.status_pace import StatusPace
from fleet_operator.write_through import WriteThrough
from fleet_planner.events import ANEW, Deed
from fleet_planner.reconcile import Plan
from fleet_planner.types import ROLES, PodWanted, Problem, Template

Live = Mapping[tuple[str, str], Object]
"""(kind, name) → object, of the fleet's namespace."""
_WRITTEN = (
    CONFIG_MAP, CONTROLLER_REVISION, DEPLOYMENT, NETWORK_POLICY, PDB, POD, POOL, ROLE, ROLE_BINDING, SERVICE, SERVICE_ACCOUNT,
)  # fmt: skip
BY_KIND: dict[str, Kind] = {kind.kind: kind for kind in _WRITTEN}
NO_ADAPTERS = "[]"
MADE_ANEW = frozenset({"Service"})
MADE_AT_ONCE = frozenset(
    kind.kind for kind in (SERVICE_ACCOUNT, ROLE, ROLE_BINDING, SERVICE, DEPLOYMENT, PDB, NETWORK_POLICY, POOL)
)
"""Made without a look whether somebody else has one of this name (the API refuses to make it then), and taken over before the
first change."""
EDITED = frozenset({CONFIG_MAP.kind, CONTROLLER_REVISION.kind})
"""Made so too, and changed by merge patches: the routers' documents change in every fleet's first minute, and often after, and of
a stored template the API refuses every change but one of its marks, also the same content in another order."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """What one pass works with."""

    fleet: InferenceFleet
    raw: Object
    plan: Plan
    live: Live
    fresh: Fresh
    outcome: Outcome
    settled: Settled
    lost: Collection[tuple[str, str]]


class Applier:
    """Applies plans of one cluster."""

    def __init__(self, cluster: WriteThrough, platform: Platform, pace: StatusPace, now: Callable[[], float]) -> None:
        self._cluster = cluster
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
        work = _Pass(fleet, raw, plan, live, Fresh(self._cluster, raw, live, telling), Outcome(), settled, lost)
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

    async def _objects(self, work: _Pass, templates: dict[str, Template]) -> None:
        routers_told = await self._documents(work)
        if work.plan.ended is not None:  # nothing is made, changed or put back any more
            await self._deletions(work, routers_told)
            return
        stored = await self._revisions(work, templates)
        await self._key(work)
        for wish in render_router(work.fleet, work.raw, self._platform, work.live):
            await self._put(wish, work)
        await self._policy(work)
        await self._group_names(work)
        await self._budgets(work)
        pools: dict[str, Object] = {}
        for pool in work.plan.pools:
            made = await self._put(render_pool(work.fleet, pool, work.raw), work)
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

    async def _documents(self, work: _Pass) -> Object | None:
        """What routers are told, as the API has it then. One that is too large is not sent: what is there goes on."""
        wish = render_documents(work.fleet, work.plan, work.raw, work.live)
        problem = too_large(wish, len(work.plan.targets))
        if problem is None:
            return await self._put(wish, work)
        work.outcome.problems.append(problem)
        found = await self._there(wish, work.outcome)
        return found if found is not None and owned(found, work.raw) else None

    async def _key(self, work: _Pass) -> None:
        """The Secret that the fleet's pods share, where it is time to ask for it."""
        memory, now = work.settled.key, self._now()
        due = is_due(work.fleet, memory.looked(now), now, makes_pods=bool(work.plan.create))
        if due and self._platform.makes_keys and work.plan.ended is None and await self._true(work, sizes=False):
            await make_key(self._cluster, work.fleet, work.raw, memory, work.outcome, now)

    async def _targets(self, work: _Pass, *, sized: bool) -> None:
        """Of a fleet that is scaled from outside; one that no role needs goes."""
        await put_targets(work.fleet, work.plan, work.raw, lambda wish: self._put(wish, work), sized=sized)
        for left in unwanted(work.plan, work.live, work.raw):
            if await self._true(work):
                namespace, name, uid = (left["metadata"][part] for part in ("namespace", "name", "uid"))
                await self._delete(POOL, namespace, name, uid, "nothing scales its role from outside any more", work.outcome)

    async def _creations(self, work: _Pass, stored: Mapping[tuple[str, str], Object], pools: Mapping[str, Object]) -> None:
        """Pods, a leader before those who follow it: they are made with its uid, and not at all without it."""
        leaders, others = dict[str, str](), elsewhere(work.fleet, work.live)
        for wanted in work.plan.create:
            revision, owner = stored.get((wanted.tier, wanted.revision)), pools.get(wanted.pool)
            leader = leaders.get(leader_of(wanted))
            if owner is None or revision is None or (wanted.member > 0 and leader is None) or not await self._true(work):
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

    async def _group_names(self, work: _Pass) -> None:
        """The Service of workers over several nodes, or none."""
        if spans_nodes(work.plan, work.live):
            await self._put(render_group_service(work.fleet, work.raw), work)
            return
        found = work.live.get((SERVICE.kind, group_service(work.fleet.metadata.name)))
        if found is not None and owned(found, work.raw) and await self._true(work, sizes=False):
            name, uid = found["metadata"]["name"], found["metadata"]["uid"]
            why = "no worker spans several nodes"
            await self._delete(SERVICE, work.fleet.metadata.namespace, name, uid, why, work.outcome)

    async def _deletions(self, work: _Pass, told: Object | None) -> None:
        """`told`: the routers' documents as they are now; None when they could not be written."""
        namespace, document = work.fleet.metadata.namespace, router_name(work.fleet.metadata.name)
        going = may_go(work.plan.delete, work.live, told, work.live.get((CONFIG_MAP.kind, document)))
        kept = kept_words(work.plan.delete, going, document)
        (work.outcome.problems if work.outcome.problems else work.outcome.conflicts).extend(kept)
        for gone in going:
            if await self._true(work):
                pod = work.live.get(("Pod", gone.name))
                await self._delete(POD, namespace, gone.name, gone.uid, gone.reason, work.outcome, pod)
        leaving = (work.live.get(("Pod", gone.name)) for gone in going)
        await self._groups.drop(namespace, leaving, work.outcome)
        for left in work.plan.pools_gone:
            if await self._true(work):
                await self._delete(POOL, namespace, left.name, left.uid, "its revision is no longer wanted", work.outcome)

    async def _true(self, work: _Pass, *, sizes: bool = True) -> bool:
        """Whether the plan was made from what is there now; a conflict when not."""
        try:
            true = await (work.fresh.sizes() if sizes else work.fresh.fleet())
        except ClusterError as error:
            work.outcome.fail("reading what the plan was made from", error)
            return False
        old = Problem("Conflict", f"InferenceFleet {work.fleet.metadata.name} or a pool of it has changed since it was last seen")
        if not true and old not in work.outcome.conflicts:
            work.outcome.conflicts.append(old)
        return true

    async def _revisions(self, work: _Pass, templates: dict[str, Template]) -> dict[tuple[str, str], Object]:
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
        made = {at: await self._put(wish, work) for at, wish in wishes.items()}
        found = {at: obj for at, obj in {**found, **dict.fromkeys(lost), **made}.items() if obj is not None}
        for tier, revision in work.plan.forget:
            gone = found.pop((tier, revision), None)
            if gone is not None and await self._true(work):
                namespace, name, uid = (gone["metadata"][part] for part in ("namespace", "name", "uid"))
                await self._delete(CONTROLLER_REVISION, namespace, name, uid, "beyond the history", work.outcome)
        return found

    async def _put(self, wish: Object, work: _Pass) -> Object | None:
        """The object as wished, written where it differs; None when it could not be."""
        kind, name, outcome = wish["kind"], wish["metadata"]["name"], work.outcome
        digest, seen = digest_of(wish), None if (kind, name) in work.lost else work.live.get((kind, name))
        if work.settled.holds(digest, (kind, name), seen):
            return seen
        wish, found = stamped(wish), seen
        if found is None or not owned(found, work.raw):  # not there, or not ours, as far as the cache knows
            if not await self._true(work, sizes=kind == POOL.kind and not work.fresh.is_first):
                return None
            if found is None and kind in MADE_AT_ONCE | EDITED:
                return await self._made(wish, work)
            found = await self._there(wish, outcome)
            outcome.read += [found] if found is not None else []
        made = await self._as_wished(wish, found, work)
        if made is not None and made is seen:  # as the cache shows it
            work.settled.remember(digest, (kind, name), seen)
        return made

    async def _as_wished(self, wish: Object, found: Object | None, work: _Pass) -> Object | None:
        """What was found, if anything, made what the wish says."""
        kind, name, outcome = wish["kind"], wish["metadata"]["name"], work.outcome
        seen = work.live.get((kind, name))  # before the fleet was read again: it is not being orphaned
        if found is not None and not (owned(found, work.raw) or all(parted(one, wish, work.raw) for one in (seen, found))):
            outcome.problems.append(name_conflict(found, wish))
            return None
        if found is not None and kind == CONTROLLER_REVISION.kind:
            wish = {part: wish[part] for part in ("apiVersion", "kind", "metadata")}
        if satisfied(wish, found):
            return found
        if kind == POOL.kind and not await self._true(work):
            return None
        try:
            made = await self._write(wish, found)
        except InvalidError as error:
            outcome.vain += 1
            await self._make_way(wish, found, str(error), outcome)
            return None
        except ClusterError as error:
            outcome.fail(f"{kind} {name}", error)
            return None
        outcome.writes += 1
        if not contains(made, wish):
            await self._make_way(wish, made, "somebody else's entries stand in its lists", outcome)
        verb: Literal["created", "changed"] = "created" if found is None else "changed"
        undid = undone(wish, found)
        outcome.vain += bool(undid)
        outcome.done.append(Deed(verb, kind, name, made["metadata"]["uid"], undid=undid))
        return made

    async def _write(self, wish: Object, found: Object | None) -> Object:
        """The object as the API has it now; ConflictError when it is not any more what was found."""
        kind = wish["kind"]
        if found is None or kind not in EDITED:
            return await self._cluster.apply(planned_from(wish, found), created=found is not None and kind in MADE_AT_ONCE)
        meta = wish["metadata"]
        try:
            return await self._cluster.patch(BY_KIND[kind], meta["namespace"], meta["name"], data_patch(wish, found))
        except NotFoundError as error:
            raise ConflictError(str(error)) from error

    async def _made(self, wish: Object, work: _Pass) -> Object | None:
        """The object, made by one request where a look and an apply are two; None when it could not be. Only where there is one
        of this name is it looked at."""
        kind, name, outcome = wish["kind"], wish["metadata"]["name"], work.outcome
        try:
            made = await self._cluster.create(wish)
        except ConflictError as error:
            found = await self._there(wish, outcome)
            if kind == POOL.kind and (found is None or taken(found, wish) is None):  # without our label no watch will show it
                work.fresh.made_pool(was_there=True)
            if found is None:  # gone again, or another conflict: the next pass sees which
                outcome.fail(f"{kind} {name}", error)
                return None
            outcome.vain += 1
            outcome.read.append(found)
            return await self._as_wished(wish, found, work)
        except InvalidError as error:
            outcome.vain += 1
            await self._make_way(wish, None, str(error), outcome)
            return None
        except ClusterError as error:
            outcome.fail(f"{kind} {name}", error)
            return None
        if kind == POOL.kind:
            work.fresh.made_pool(was_there=False)
        outcome.writes += 1
        outcome.done.append(Deed("created", kind, name, made["metadata"]["uid"]))
        return made

    async def _there(self, wish: Object, outcome: Outcome) -> Object | None:
        """The object of this name, when there is one that the cache does not show: somebody else's, without our labels, or ours
        of a life before."""
        meta = wish["metadata"]
        try:
            return await self._cluster.find(BY_KIND[wish["kind"]], meta["namespace"], meta["name"])
        except ClusterError as error:
            outcome.fail(f"{wish['kind']} {meta['name']}", error)
            raise StopError from error

    async def _make_way(self, wish: Object, found: Object | None, why: str, outcome: Outcome) -> None:
        """Server-side apply leaves list entries that others added. A Service with such entries is made anew: it runs nothing;
        of anything else the difference is reported."""
        kind, name = wish["kind"], wish["metadata"]["name"]
        if found is None or kind not in MADE_ANEW:
            outcome.problems.append(Problem("Refused", f"{kind} {name}: {why}"))
            return
        namespace, uid = wish["metadata"]["namespace"], found["metadata"]["uid"]
        await self._delete(BY_KIND[kind], namespace, name, uid, f"{ANEW}: {why}", outcome)

    async def _policy(self, work: _Pass) -> None:
        """The fleet's NetworkPolicy, or none."""
        if work.fleet.spec.network_policy.enabled:
            await self._put(render_policy(work.fleet, work.raw, self._platform, older(work.plan, work.live)), work)
            return
        found = work.live.get((NETWORK_POLICY.kind, policy_name(work.fleet.metadata.name)))
        if found is not None and owned(found, work.raw) and await self._true(work, sizes=False):
            name, uid = found["metadata"]["name"], found["metadata"]["uid"]
            why, namespace = "spec.networkPolicy.enabled is false", work.fleet.metadata.namespace
            await self._delete(NETWORK_POLICY, namespace, name, uid, why, work.outcome)

    async def _claims(self, wanted: PodWanted, stored: Object, owner: Object, work: _Pass) -> bool:
        """The pool's ResourceClaimTemplate, before a pod that names it; whether that pod may be made."""
        wish = render_claims(work.fleet, wanted, stored, owner)
        if wish is None or not await self._true(work):
            return True
        return await put_template(self._cluster, wish, owner, work.outcome)

    async def _create(self, pod: Object, work: _Pass) -> str | None:
        """The uid of the pod that was made, None when none was."""
        name, outcome = pod["metadata"]["name"], work.outcome
        if not await self._true(work):
            return None
        try:
            made = await self._cluster.create(pod)
        except ConflictError as error:
            there = await self._there(pod, outcome)
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
            await self._patch_pod(namespace, flip.name, marks.told(flip), outcome)
        for relabel in plan.relabels:
            pool = pools.get(relabel.pool)
            if pool is not None and await self._patch_pod(namespace, relabel.name, marks.relabelled(relabel, pool), outcome):
                why = marks.words(relabel)
                outcome.done.append(Deed("flipped", "Pod", relabel.name, relabel.uid, relabel.tier, relabel.role, why))

    async def _owners(self, work: _Pass, pools: Mapping[str, Object]) -> None:
        """A pod whose owner somebody took away would outlive its fleet, with its GPUs."""
        for pod, owner in lost_owners(work.live, pools, work.raw):
            namespace, name, uid = (pod["metadata"][part] for part in ("namespace", "name", "uid"))
            if await self._true(work) and await self._patch_pod(namespace, name, put_back(pod, owner), work.outcome):
                work.outcome.vain += 1
                work.outcome.done.append(Deed("changed", POD.kind, name, uid, undid="metadata.ownerReferences"))

    async def _adapters(self, work: _Pass) -> None:
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
                await self._patch_pod(namespace, name, patch, work.outcome)

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
        outcome.done.append(Deed("deleted", kind.kind, name, uid, *worker_of(pod), why=reason, member=member_of(pod)))

    async def _budgets(self, work: _Pass) -> None:
        """Those that are due. Budgets of tiers that are gone would hold up node drains for ever."""
        wanted, namespace = render_budgets(work.fleet, work.plan, work.raw), work.fleet.metadata.namespace
        for budget in budgets_due(wanted, work.plan, work.live):
            await self._put(budget, work)
        kept = {budget["metadata"]["name"] for budget in wanted}
        for (kind, name), found in list(work.live.items()):  # watches feed the cache while a deletion is awaited
            stale = kind == PDB.kind and name not in kept and owned(found, work.raw) and not still_guards(found, work.live)
            if stale and await self._true(work):
                uid = found["metadata"]["uid"]
                await self._delete(PDB, namespace, name, uid, "nothing of the spec needs it", work.outcome)

    async def _pool_status(self, work: _Pass) -> None:
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
