"""Puts, changes and deletes one object at a time, as a plan wishes it; a failure is noted in the pass's outcome."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from fleet_api.v1alpha1 import InferenceFleet
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
from fleet_operator.compare import data_patch, difference, merge_patch, satisfied, stamped
from fleet_operator.deeds import member_of, planned_from, undone, worker_of
from fleet_operator.fresh import Fresh
from fleet_operator.outcome import Outcome, StopError, is_denied
from fleet_operator.ownership import name_conflict, of_a_life_before, owned, parted, taken
from fleet_operator.settled import Settled, digest_of
from fleet_operator.write_through import WriteThrough
from fleet_planner.events import ANEW, Deed
from fleet_planner.reconcile import Plan
from fleet_planner.types import Problem

Live = Mapping[tuple[str, str], Object]
"""(kind, name) → object, of the fleet's namespace."""
_WRITTEN = (
    CONFIG_MAP, CONTROLLER_REVISION, DEPLOYMENT, NETWORK_POLICY, PDB, POD, POOL, ROLE, ROLE_BINDING, SERVICE, SERVICE_ACCOUNT,
)  # fmt: skip
BY_KIND: dict[str, Kind] = {kind.kind: kind for kind in _WRITTEN}
MADE_ANEW = frozenset({SERVICE.kind, PDB.kind})
"""What runs nothing: where it cannot be put right by writing it whole, it is deleted."""
MADE_AT_ONCE = frozenset(
    kind.kind for kind in (SERVICE_ACCOUNT, ROLE, ROLE_BINDING, SERVICE, DEPLOYMENT, PDB, NETWORK_POLICY, POOL)
)
"""Made without a look whether somebody else has one of this name (the API refuses to make it then), and taken over before the
first change."""
EDITED = frozenset({CONFIG_MAP.kind, CONTROLLER_REVISION.kind})
"""Made so too, and changed by merge patches: the routers' documents change in every fleet's first minute, and often after, and of
a stored template the API refuses every change but one of its marks, also the same content in another order."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass works with."""

    fleet: InferenceFleet
    raw: Object
    plan: Plan
    live: Live
    fresh: Fresh
    outcome: Outcome
    settled: Settled
    lost: Collection[tuple[str, str]]


class Putter:
    """Writes objects of one cluster."""

    def __init__(self, cluster: WriteThrough) -> None:
        self._cluster = cluster

    async def is_true(self, work: Pass, *, sizes: bool = True) -> bool:
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

    async def put(self, wish: Object, work: Pass) -> Object | None:
        """The object as wished, written where it differs; None when it could not be."""
        kind, name, outcome = wish["kind"], wish["metadata"]["name"], work.outcome
        digest, seen = digest_of(wish), None if (kind, name) in work.lost else work.live.get((kind, name))
        if work.settled.holds(digest, (kind, name), seen):
            return seen
        wish, found = stamped(wish), seen
        if found is None or not owned(found, work.raw):  # not there, or not ours, as far as the cache knows
            if not await self.is_true(work, sizes=kind == POOL.kind and not work.fresh.is_first):
                return None
            if found is None and kind in MADE_AT_ONCE | EDITED:
                return await self._made(wish, work)
            found = await self.there(wish, outcome)
            outcome.read += [found] if found is not None else []
        made = await self._as_wished(wish, found, work)
        if made is not None and made is seen:  # as the cache shows it
            work.settled.remember(digest, (kind, name), seen)
        return made

    async def _as_wished(self, wish: Object, found: Object | None, work: Pass) -> Object | None:
        """What was found, if anything, made what the wish says."""
        kind, name, outcome = wish["kind"], wish["metadata"]["name"], work.outcome
        seen = work.live.get((kind, name))  # before the fleet was read again: it is not being orphaned
        if found is not None and not (owned(found, work.raw) or all(parted(one, wish, work.raw) for one in (seen, found))):
            passing = of_a_life_before(found, work.fleet.metadata.name)
            (outcome.conflicts if passing else outcome.problems).append(name_conflict(found, wish))
            return None
        if found is not None and kind == CONTROLLER_REVISION.kind:
            wish = {part: wish[part] for part in ("apiVersion", "kind", "metadata")}
        if satisfied(wish, found):
            return found
        if kind == POOL.kind and not await self.is_true(work):
            return None
        try:
            made = await self._write(wish, found)
        except InvalidError as error:
            outcome.vain += 1
            if (whole := await self._make_way(wish, found, str(error), work)) is None:
                return None
            made = whole
        except ClusterError as error:
            outcome.fail(f"{kind} {name}", error)
            return None
        else:
            outcome.writes += 1
            if not satisfied(wish, made):
                made = await self._make_way(wish, made, _unlike(made, wish), work) or made
        _note(wish, found, made, outcome)
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

    async def _made(self, wish: Object, work: Pass) -> Object | None:
        """The object, made by one request where a look and an apply are two; None when it could not be. Only where there is one
        of this name is it looked at."""
        kind, name, outcome = wish["kind"], wish["metadata"]["name"], work.outcome
        try:
            made = await self._cluster.create(wish)
        except ConflictError as error:
            found = await self.there(wish, outcome)
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
            await self._make_way(wish, None, str(error), work)
            return None
        except ClusterError as error:
            outcome.fail(f"{kind} {name}", error)
            return None
        if kind == POOL.kind:
            work.fresh.made_pool(was_there=False)
        outcome.writes += 1
        outcome.done.append(Deed("created", kind, name, made["metadata"]["uid"]))
        if not satisfied(wish, made):
            outcome.vain += 1
            made = await self._make_way(wish, made, _unlike(made, wish), work) or made
        return made

    async def there(self, wish: Object, outcome: Outcome) -> Object | None:
        """The object of this name, when there is one that the cache does not show: somebody else's, without our labels, or ours
        of a life before."""
        meta = wish["metadata"]
        try:
            return await self._cluster.find(BY_KIND[wish["kind"]], meta["namespace"], meta["name"])
        except ClusterError as error:
            outcome.fail(f"{wish['kind']} {meta['name']}", error)
            raise StopError from error

    async def _make_way(self, wish: Object, found: Object | None, why: str, work: Pass) -> Object | None:
        """Server-side apply leaves what others added, and refuses an entry with the name of ours or a budget's other bound beside
        it. A Service or budget is written whole then, which is given back: a Service keeps its address. Where the API cannot do
        that it is made anew. Of anything else the difference is reported, and of what a webhook changes or a policy refuses."""
        kind, name, outcome = wish["kind"], wish["metadata"]["name"], work.outcome
        if found is not None and kind in MADE_ANEW and not is_denied(why):
            try:
                made = await self._cluster.patch(BY_KIND[kind], wish["metadata"]["namespace"], name, _whole(wish, found))
            except (NotFoundError, ConflictError):
                return None  # gone, or another one by now: the next pass sees which
            except InvalidError as error:
                if not is_denied(why := str(error)):
                    namespace, uid = wish["metadata"]["namespace"], found["metadata"]["uid"]
                    await self.delete(BY_KIND[kind], namespace, name, uid, f"{ANEW}: {why}", outcome)
                    return None
            except ClusterError as error:
                outcome.fail(f"{kind} {name}", error)
                return None
            else:
                outcome.writes += 1
                if satisfied(wish, made):
                    return made
                outcome.vain += 1
        outcome.problems.append(Problem("Refused", f"{kind} {name}: {why}"))
        return None

    async def patch_pod(self, namespace: str, name: str, patch: Object, outcome: Outcome) -> bool:
        """Merge this into a pod; whether it has it now."""
        try:
            await self._cluster.patch(POD, namespace, name, patch)
        except (NotFoundError, ConflictError, InvalidError):
            return False  # gone, or another pod by now: the next pass sees which
        except ClusterError as error:
            outcome.fail(f"Pod {name}", error)
            return False
        outcome.writes += 1
        return True

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, reason: str, outcome: Outcome, pod: Object | None = None
    ) -> bool:
        """Delete the very object of this uid; whether it goes now, or is gone. `pod`: as it was, for the words about it."""
        try:
            await self._cluster.delete(kind, namespace, name, uid=uid)
        except NotFoundError:
            return True
        except ConflictError:
            return False  # another object by now: the next pass sees which
        except ClusterError as error:
            outcome.fail(f"deleting {kind.kind} {name}", error)
            return False
        outcome.writes += 1
        outcome.done.append(Deed("deleted", kind.kind, name, uid, *worker_of(pod), why=reason, member=member_of(pod)))
        return True


def _note(wish: Object, found: Object | None, made: Object, outcome: Outcome) -> None:
    """What was done. An edit that stands as it did, because it is made again on the way of each write, was not undone: a problem
    tells of it."""
    verb: Literal["created", "changed"] = "created" if found is None else "changed"
    undid = undone(wish, found)
    outcome.vain += bool(undid)
    if not undid or satisfied(wish, made):
        outcome.done.append(Deed(verb, wish["kind"], wish["metadata"]["name"], made["metadata"]["uid"], undid=undid))


def _whole(wish: Object, found: Object) -> Object:
    """The merge patch that makes this very budget the wish, or the lists and the selector of this very Service those of the wish:
    it has an address and more that only the API knows."""
    meta = {key: value for key, value in wish["metadata"].items() if key not in {"name", "namespace"}}
    spec = merge_patch(found["spec"], wish["spec"])
    if wish["kind"] == SERVICE.kind:
        spec = {**wish["spec"], "selector": spec["selector"]}
    return {"metadata": {**meta, "uid": found["metadata"]["uid"]}, "spec": spec}


def _unlike(made: Object, wish: Object) -> str:
    """What the API made of a write, in words."""
    why = "an admission webhook or a policy of the cluster changes it, or somebody else's entries stand in it"
    return f"{difference(made, wish)} is not as it was written: {why}"
