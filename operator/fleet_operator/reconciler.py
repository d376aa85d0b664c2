"""The loop: watches feed a cache, changed fleets are planned and applied, telemetry is read beside it.

Level-based: an event only says which fleet to look at again. Some fleets are reconciled at the same time, each by one pass at a
time; a failure of one fleet waits with a growing delay and does not hold up the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from fleet_api.conditions import rfc3339, set_condition
from fleet_api.parse import ManifestError
from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.status import FleetStatus
from fleet_operator.adapters.follow import AdapterFollower
from fleet_operator.apply import Applier
from fleet_operator.cluster.interface import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    FLEET,
    NETWORK_POLICY,
    NODE,
    PDB,
    POD,
    POOL,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    Cluster,
    ClusterError,
    Kind,
    Listed,
    NotFoundError,
    Object,
    UnavailableError,
    WatchEvent,
)
from fleet_operator.cluster.kinds import kind_of
from fleet_operator.compare import contains
from fleet_operator.finalizer import as_asked, ending_of, is_ending, is_going, kept_by_others, release, same_wish, still_ours
from fleet_operator.fleet_objects import FleetObjects
from fleet_operator.fleet_state import FleetState, aged, heed, is_restless
from fleet_operator.flip.follow import FlipFollower
from fleet_operator.health.logs import about
from fleet_operator.health.passes import Passes, Unmeasured
from fleet_operator.kept_revisions import lost_templates, needed_templates, unmakeable
from fleet_operator.known_fleet import parse_again
from fleet_operator.known_nodes import KnownNodes
from fleet_operator.leftovers import Leftovers
from fleet_operator.names import MANAGED_BY, MANAGER
from fleet_operator.outcome import Outcome, in_words_of
from fleet_operator.ownership import without_strangers
from fleet_operator.picture import Places, picture, pods_of
from fleet_operator.pod_marks import put_back, rightful
from fleet_operator.pool_names import as_named
from fleet_operator.putting import Live
from fleet_operator.reading import Known, Reader, Sources, Telemetry
from fleet_operator.recorder import Recorder, present_status
from fleet_operator.render.prefetch import fetches_ahead
from fleet_operator.render.revision import template_of
from fleet_operator.settings import Platform
from fleet_operator.status_pace import StatusPace
from fleet_operator.work_queue import Key, WorkQueue
from fleet_operator.write_through import WriteThrough
from fleet_planner.ending import Ended, EndingMemory
from fleet_planner.events import sizing_of
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.types import Problem

CHILDREN: tuple[Kind, ...] = (
    POOL,
    POD,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    CONFIG_MAP,
    SERVICE,
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    PDB,
    NETWORK_POLICY,
)
FOLLOWED = frozenset({FLEET, *CHILDREN})
"""Kinds that are watched in any case. Claims and PodGroups are not: most clusters have none."""
RESYNC_S = 30.0
"""Every fleet is looked at this often without any event."""
TICK_S = 0.01
"""A timer may go off a moment before the wall clock says so."""
AT_ONCE = 16
"""Fleets that are reconciled at the same time: most of a pass is waiting for the API server."""
PATIENCE = 3
"""Conflicts are in order, each means that the picture was old; told when so many passes in a row ended in one."""
LOG = logging.getLogger("fleet.operator")


class Reconciler:
    """Reconciles every fleet that its watches show."""

    def __init__(
        self,
        cluster: Cluster,
        platform: Platform,
        telemetry: Telemetry,
        *,
        namespace: str | None = None,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        owns: Callable[[str], bool] = lambda namespace: True,
        passes: Passes | None = None,
        flips: FlipFollower | None = None,
        adapters: AdapterFollower | None = None,
    ) -> None:
        """`owns` says whether fleets of a namespace are ours now; `touch_namespace` when that changes."""
        self.closed: set[str] = set()
        """Namespaces that may not be read yet: to a cache that is not complete their fleets would look as if they had nothing."""
        self._claimed = owns
        self._passes = passes or Unmeasured()
        self._cluster = cluster
        self._platform = platform
        self._namespace = namespace
        self._now = now
        self._monotonic = monotonic
        self._objects = FleetObjects()
        self.leftovers = Leftovers(self._objects, self._owns)
        self._writer = WriteThrough(cluster, self._written, self._asked_to_go, self._not_there)
        self._pace = StatusPace(now, platform.counters_s)
        self._applier = Applier(self._writer, platform, self._pace, now)
        self._recorder = Recorder(cluster, now, told=self._passes.told)
        self._states: dict[Key, FleetState] = {}
        self._nodes = KnownNodes(platform)
        self._places = Places.of(self._nodes.views)
        self._queue = WorkQueue(time.monotonic)
        self._turn = asyncio.Lock()
        """Whose pass begins next."""
        self._later_at: dict[Key, float] = {}
        """When a fleet must be looked at though nothing happens, on the clock that nobody sets."""
        self._unlisted = {kind.kind for kind in (FLEET, *CHILDREN)}
        self._complete = asyncio.Event()
        known = Known(self._objects, self._states, lambda: self._places, self._is_ours, self.touch)
        sources = Sources(telemetry, flips or FlipFollower(), adapters or AdapterFollower())
        self.reader = Reader(known, sources, platform, now, monotonic)

    # -- feeding ----------------------------------------------------------------------------------------------------
    def expect(self, kinds: Collection[Kind]) -> None:
        """Nothing is done before these, too, were listed once."""
        self._unlisted |= {kind.kind for kind in kinds}

    def feed(self, kind: Kind, event: WatchEvent) -> None:
        """One change, from whichever watch: kopf's, or ours."""
        try:
            self._take(kind, event)
        except Exception:  # as in a pass: one object that nobody foresaw must not end the operator of all others
            meta = event.object.get("metadata") or {}
            where = meta.get("namespace", ""), meta.get("name", "")
            LOG.exception("%s %s/%s could not be taken in", kind.kind, *where, extra=about(where[0]))
            self._passes.ended(self._passes.began(), ["InternalError"], failed=True)

    def _take(self, kind: Kind, event: WatchEvent) -> None:
        if event.type == "SYNCED":
            self._unlisted.discard(kind.kind)
            if not self._unlisted:
                self._complete.set()
            return
        if kind == NODE:
            if self._nodes.take(event):
                self._nodes_changed()
            return
        if (before := self._objects.lost(kind, event)) is not None:
            self.touch(before)
        key = self._objects.take(kind, event)
        if key is None:
            return
        if kind == FLEET and event.type == "DELETED":
            self._states.pop(key, None)
            self._queue.forget(key)
            self._later_at.pop(key, None)
            self._forget(key, event.object["metadata"]["uid"])
        self.touch(key)

    def missed(self, kind: Kind, listed: Listed, within: Collection[str] = ()) -> tuple[list[Key], list[Object]]:
        """See `FleetObjects.missed`."""
        if kind == NODE:
            return self._nodes.missed(listed)
        return self._objects.missed(kind, listed, within)

    def _written(self, kind: Kind, made: Object) -> None:
        if kind in FOLLOWED:  # of another kind nobody would ever tell that it is gone
            self.feed(kind, WatchEvent("MODIFIED", made))

    def _asked_to_go(self, kind: Kind, name: str, uid: str | None) -> None:
        key = self._objects.mark_leaving(kind, name, uid, rfc3339(self._now()))
        if key is not None:
            self.touch(key)

    def _not_there(self, kind: Kind, namespace: str | None, name: str) -> None:
        if (found := self._objects.child(kind, namespace, name)) is not None:
            self.feed(kind, WatchEvent("DELETED", found))
            self._objects.unsure(found)

    def _nodes_changed(self) -> None:
        """Nodes change all the time; a fleet is looked at again only when one of its own begins or ceases to go away, or to be
        called bad."""
        before, self._places = self._places, Places.of(self._nodes.views)
        touched = self._objects.fleets_on(self._places.changed(before))
        for key in [*touched, *(key for key, raw in self._objects.fleets.items() if fetches_ahead(raw))]:
            self.touch(key)

    def touch(self, key: Key) -> None:
        """Look at this fleet again."""
        self._queue.add(key)

    def touch_namespace(self, namespace: str) -> None:
        """Look at every fleet of a namespace again."""
        for key in [key for key in self._objects.fleets if key[0] == namespace]:
            self.touch(key)

    def open(self, namespace: str) -> None:
        """Everything of a namespace that was closed is in the cache now."""
        self.closed.discard(namespace)
        self.touch_namespace(namespace)

    # -- what others may see ----------------------------------------------------------------------------------------
    @property
    def synced(self) -> bool:
        """Whether every kind was listed once."""
        return not self._unlisted

    async def wait_synced(self) -> None:
        """Until every kind was listed once."""
        await self._complete.wait()

    def backlog(self) -> tuple[int, float]:
        """Fleets that wait for a pass, and for how long the one that waits longest has waited, seconds."""
        return self._queue.backlog()

    def ours(self) -> list[Object]:
        """Fleets that are ours, as the cache has them."""
        return [raw for (namespace, _), raw in self._objects.fleets.items() if self._owns(namespace)]

    def ownerless(self) -> int:
        """Pods of fleets that are gone, which nobody owns."""
        return len(self.leftovers.found()) if self.synced else 0

    # -- running ----------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Until cancelled: own watches, work and telemetry."""
        async with asyncio.TaskGroup() as group:
            for kind in (FLEET, *CHILDREN, NODE):
                group.create_task(self._watch(kind), name=f"watch-{kind.plural}")
            group.create_task(self.work(), name="reconcile")
            group.create_task(self.reader.run(), name="telemetry")

    async def _watch(self, kind: Kind) -> None:
        selector = None if kind in (FLEET, NODE) else {MANAGED_BY: MANAGER}
        async for event in self._cluster.watch(kind, None if kind == NODE else self._namespace, selector):
            self.feed(kind, event)

    async def work(self) -> None:
        """Reconcile fleets that changed for ever, every fleet at least each RESYNC_S. Nothing is done before every kind was
        listed once: an empty cache must not look like an empty cluster."""
        await self.wait_synced()
        async with asyncio.TaskGroup() as group:
            for number in range(AT_ONCE):
                group.create_task(self._work_on(), name=f"reconcile-{number}")
            while True:
                self._passes.turned()
                self.leftovers.tell()
                await asyncio.sleep(RESYNC_S)
                for key in self._objects.fleets:
                    self.touch(key)

    async def _work_on(self) -> None:
        """At most one pass begins per turn of the loop: one that writes nothing never waits, and a thousand of those in a row
        would keep the answers that others wait for."""
        while True:
            async with self._turn:
                await asyncio.sleep(0)
                key = await self._queue.take()
            await self._pass(key)

    async def drain(self) -> None:
        """Reconcile one after the other until no fleet is to be looked at."""
        self._look_at_due()
        while (key := self._queue.take_any()) is not None:
            await self._pass(key)

    async def _pass(self, key: Key) -> None:
        begun = time.monotonic()
        try:
            await self._passes.weighed(self._one(key))
        finally:
            self._queue.done(key, time.monotonic() - begun)
            self._passes.turned()

    async def _one(self, key: Key) -> None:
        raw = self._objects.fleets.get(key)
        if raw is None:
            return
        if not self._owns(key[0]):  # when it comes back, what is kept would be of before somebody else had it
            if self._states.pop(key, None) is not None:
                self._forget(key, raw["metadata"]["uid"])
            return
        state = self._state_of(key, raw)
        if (wait_s := state.pace.wait_s(self._monotonic())) > 0:
            self._later(key, wait_s)
            return
        begun, failed = self._passes.began(), False
        try:
            outcome = await self.reconcile_once(key, raw, state)
        except ClusterError as error:
            failed = True
            outcome = Outcome(problems=[Problem(error.reason, f"{error.reason}: {error}")], vain=1)
            outcome.stopped = isinstance(error, UnavailableError)
            await self._tell_failed(key, raw, outcome)
        except Exception as error:  # one fleet that nobody foresaw must not end all others
            failed = True
            LOG.exception("fleet=%s/%s could not be reconciled", *key, extra=about(*key))
            outcome = Outcome(problems=[Problem("InternalError", f"the operator failed on this fleet: {type(error).__name__}")])
            await self._tell_failed(key, raw, outcome)
        self._passes.ended(begun, [problem.reason for problem in outcome.problems], failed=failed)
        if outcome.done:
            LOG.info("fleet=%s/%s %s", *key, "; ".join(map(str, outcome.done)), extra=about(*key))
        for found in outcome.read:
            self.feed(kind_of(found), WatchEvent("MODIFIED", found))
        if outcome.gone:
            self.feed(FLEET, WatchEvent("DELETED", raw))
            self._objects.unsure(raw)
        self._after(key, raw, state, outcome)

    async def _tell_failed(self, key: Key, raw: Object, outcome: Outcome) -> None:
        """As an event, if that can be: the telling may be what failed."""
        try:
            await self._recorder.record(raw, None, outcome, {})
        except Exception:
            LOG.exception("fleet=%s/%s its failure could not be told", *key, extra=about(*key))

    def _state_of(self, key: Key, raw: Object) -> FleetState:
        """What is kept of this fleet: nothing of another one of its name whose end nobody told."""
        if (state := self._states.get(key)) is not None:
            if state.known is None or state.known.raw["metadata"]["uid"] == raw["metadata"]["uid"]:
                return state
            self._forget(key, state.known.raw["metadata"]["uid"])
        self._states[key] = fresh = FleetState()
        return fresh

    def _forget(self, key: Key, uid: str) -> None:
        self._recorder.forget(uid)
        self._pace.forget(uid)
        self.reader.hearing.forget(key)

    def _after(self, key: Key, raw: Object, state: FleetState, outcome: Outcome) -> None:
        if self._states.get(key) is not state:  # it went during its pass, and what that wrote down goes, too
            self._forget(key, raw["metadata"]["uid"])
            return
        troubled = bool(outcome.problems or outcome.conflicts)
        delay_s = state.pace.after(
            self._monotonic(), troubled=troubled, stopped=outcome.stopped, vain=outcome.vain, asked_s=outcome.retry_after_s
        )
        lasting = outcome.conflicts if state.pace.failures > PATIENCE else []
        problems = (*outcome.problems, *lasting)
        for left_s in (delay_s, state.turned_away.left_s):
            if left_s is not None:
                self._later(key, left_s)
        if problems != state.problems:
            if problems:
                words, first = "; ".join(map(str, problems)), about(*key, reason=problems[0].reason, error=str(problems[0]))
                LOG.warning("fleet=%s/%s problems=%s retry_s=%s", *key, words, delay_s, extra=first)
            state.problems = problems
            self.touch(key)

    def _later(self, key: Key, delay_s: float) -> None:
        """Look again after this time, or before when something happens or was asked for."""
        self._later_at[key] = min(self._monotonic() + delay_s, self._later_at.get(key, float("inf")))
        asyncio.get_running_loop().call_later(delay_s + TICK_S, self._look_at_due)

    def _look_at_due(self) -> None:
        now = self._monotonic()
        for key in [key for key, at in self._later_at.items() if at <= now]:
            del self._later_at[key]
            self.touch(key)

    async def reconcile_once(self, key: Key, raw: Object, state: FleetState) -> Outcome:
        """Plan and apply one fleet."""
        if is_going(raw):  # children go by garbage collection; recreating one would fight it
            return await self._say(key, raw, kept_by_others(raw, present_status(raw), self._now()))
        try:
            state.known = parse_again(state.known, raw, state.settled.words)
        except ManifestError as error:
            return await (as_asked(self._writer, raw, None) if is_ending(raw) else self._not_accepted(key, raw, error))
        kept = await as_asked(self._writer, raw, state.known.fleet)
        if kept.writes or kept.gone:  # the next pass is made from what it is now
            return kept
        fleet, live = state.known.fleet, self._objects.children(key)
        live = still_ours(raw, live) if is_ending(raw) else live
        live |= (lost := lost_templates(state.needed, live))
        live, misnamed = as_named(live, raw)
        if misnamed and not is_ending(raw):
            righted, live = await state.fights.put_back(self._writer, live, misnamed, raw, self._monotonic())
            kept.add(righted)
            if state.fights.wait_s is not None:
                self._later(key, state.fights.wait_s)
        live, edited = rightful(live, raw, state.marks)
        live = without_strangers(live, raw)
        if edited and not is_ending(raw):
            kept.add(await put_back(self._writer, edited))
        stored = state.stored.look([obj for (kind, _), obj in live.items() if kind == "ControllerRevision"])
        wanted = state.known.revisions
        templates = {
            t.name: template_of(fleet, t, stored.get(t.name, {}), self._platform, wanted[t.name]) for t in fleet.spec.tiers
        }
        heard = self.reader.hearing.heard(key)
        now = self._now()
        ahead_s = now - self._monotonic()
        observed = picture(
            fleet, state, live, self._places, templates, stored, heard, ahead_s, makes_keys=self._platform.makes_keys
        )  # fmt: skip
        heed(state, observed := state.turned_away.look(aged(state, observed, now), self._monotonic()))
        ending = ending_of(fleet, raw, state.published.named, state.ending)
        state.ending = state.ending if ending is not None else EndingMemory(wanted_at=now)
        plan: Plan = reconcile(fleet, observed, now, ending)
        state.ahead_s, state.clock = ahead_s, plan.clock
        state.memory, state.rest, state.restless = plan.memory, plan.rest, is_restless(plan.status)
        self.reader.hearing.follow(key, plan.status)
        if plan.ended is not None:
            return await self._end(key, raw, fleet, state, plan, plan.ended, live)
        there, at = {obj["metadata"]["uid"] for obj in pods_of(live)}, self._monotonic()
        state.settled.key.fleets = len(self._objects.fleets)
        asked, held = state.refusals.held(plan.create, there, at)
        asks = plan if asked == plan.create else replace(plan, create=asked)
        outcome = await self._applier.apply(fleet, raw, asks, templates, live, state.settled, lost.keys())
        state.needed = needed_templates(plan, live, raw)
        state.refusals.note(asked, outcome.problems, there, fleet.spec.scaling.capacity_wait_s, at)
        outcome.add(kept)
        problems = in_words_of(state.problems, [*outcome.problems, *held, *unmakeable(key[1], plan, live)])
        outcome.problems = state.refusals.in_order(problems, plan.create)
        status = state.settled.words.last or plan.status
        lasts = state.pace.failures >= PATIENCE and outcome.conflicts
        told = replace(outcome, problems=[*outcome.problems, *outcome.conflicts]) if lasts else outcome
        if self._recorder.has_news(raw, status, told):
            await self._recorder.record(raw, status, told, sizing_of(fleet, plan.reasons))
        return outcome

    async def _end(
        self, key: Key, raw: Object, fleet: InferenceFleet, state: FleetState, plan: Plan, ended: Ended, live: Live
    ) -> Outcome:
        """One pass of a fleet that was deleted and drains."""
        state.ending, outcome = ended.memory, Outcome()
        if ended.late or not ended.release:  # else nothing is left that anybody could be told of
            outcome = await self._applier.apply(fleet, raw, plan, {}, live, state.settled)
            if self._recorder.has_news(raw, plan.status, outcome):
                await self._recorder.record(raw, plan.status, outcome, {})
        now = self._objects.fleets.get(key, raw)  # with the status that this pass has written
        if ended.release and same_wish(now, raw) and not outcome.gone and not outcome.stopped:
            before = len(outcome.problems)
            await release(self._writer, now, live, outcome, late=ended.late)
            if outcome.problems[before:]:  # nothing but this tells why a fleet whose workers are gone does not go
                await self._recorder.record(raw, plan.status, outcome, {})
        elif ended.left_s < RESYNC_S:
            self._later(key, ended.left_s)
        return outcome

    async def _not_accepted(self, key: Key, raw: Object, error: ManifestError) -> Outcome:
        """An invalid spec that got past the API server: say so, leave what runs alone. Nobody repairs or scales it meanwhile:
        it is not Ready, whatever it was."""
        generation, now, words = raw["metadata"].get("generation", 0), self._now(), "; ".join(error.errors)
        present = present_status(raw)
        found = set_condition(present.conditions, "Accepted", "False", "Invalid", words, generation=generation, now=now)
        unready = f"spec refused, what runs goes on unattended: {words}"
        conditions = set_condition(found, "Ready", "False", "NotAccepted", unready, generation=generation, now=now)
        return await self._say(key, raw, present.model_copy(update={"conditions": conditions, "observed_generation": generation}))

    async def _say(self, key: Key, raw: Object, status: FleetStatus) -> Outcome:
        """One pass that does nothing else."""
        outcome, wish = Outcome(), status.to_dict()
        if not contains(raw.get("status") or {}, wish):
            try:
                await self._writer.patch_status(FLEET, *key, wish)
            except NotFoundError:
                return Outcome(gone=True)
            outcome.writes += 1
        await self._recorder.record(raw, status, outcome, {})
        return outcome

    def _owns(self, namespace: str) -> bool:
        return namespace not in self.closed and self._claimed(namespace)

    def _is_ours(self, key: Key) -> bool:
        raw = self._objects.fleets.get(key)
        return raw is not None and not is_going(raw) and self._owns(key[0])
