"""The loop: watches feed a cache, changed fleets are planned and applied, telemetry is read beside it.

Level-based: an event only says which fleet to look at again. One fleet is reconciled at a time; a failure of one fleet waits
with a growing delay and does not hold up the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fleet_api.conditions import set_condition
from fleet_api.parse import ManifestError, parse_fleet
from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.apply import Applier, Outcome
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
    Object,
    WatchEvent,
)
from fleet_operator.compare import contains
from fleet_operator.names import FLEET as FLEET_LABEL
from fleet_operator.names import MANAGED_BY, MANAGER, ROUTER_ROLE, router_name
from fleet_operator.names import ROLE as ROLE_LABEL
from fleet_operator.nodes import NodeView, changed_nodes, going_away, observe_node, sick_nodes
from fleet_operator.observe import Surroundings, observe_pods, observe_pools, observe_router, observe_serving
from fleet_operator.recorder import Recorder, present_status
from fleet_operator.render.revision import observe_revisions, template_of
from fleet_operator.settings import Platform
from fleet_planner.events import Problem, sizing_of
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.types import Observed, ScaleMemory, Template, TierTelemetry

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
RESYNC_S = 30.0
"""Every fleet is looked at this often without any event: a missed event is corrected by then."""
BACKOFF_FIRST_S = 0.5
BACKOFF_MOST_S = 30.0
LOG = logging.getLogger("fleet.operator")

Key = tuple[str, str]
"""(namespace, name) of a fleet."""


class Telemetry(Protocol):
    """Reads the load of one fleet's tiers."""

    async def collect(self, fleet: InferenceFleet, pods: list[Object], routers: list[str]) -> dict[str, TierTelemetry]:
        """By tier; a tier that cannot be read is absent."""
        ...


@dataclass(slots=True)
class _State:
    """What is kept between passes; all of it may be lost."""

    telemetry: dict[str, TierTelemetry] = field(default_factory=dict)
    memory: dict[str, ScaleMemory] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    failures: int = 0
    read_at: float = float("-inf")
    reading: bool = False


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
    ) -> None:
        self._cluster = cluster
        self._platform = platform
        self._telemetry = telemetry
        self._namespace = namespace
        self._now = now
        self._applier = Applier(cluster, platform)
        self._recorder = Recorder(cluster, now)
        self._objects: dict[Key, dict[tuple[str, str], Object]] = {}
        self._fleets: dict[Key, Object] = {}
        self._states: dict[Key, _State] = {}
        self._nodes: dict[str, NodeView] = {}
        self._leaving: dict[str, str] = {}
        self._dirty: set[Key] = set()
        self._wake = asyncio.Event()
        self._synced: set[str] = set()

    # -- feeding ----------------------------------------------------------------------------------------------------
    def feed(self, kind: Kind, event: WatchEvent) -> None:
        """One change, from whichever watch: kopf's, or ours."""
        if event.type == "SYNCED":
            self._synced.add(kind.kind)
            self._wake.set()
            return
        meta = event.object["metadata"]
        namespace = meta.get("namespace", "default")
        if kind == FLEET:
            self._feed_fleet((namespace, meta["name"]), event)
            return
        if kind == NODE:
            self._feed_node(meta["name"], event)
            return
        fleet = (meta.get("labels") or {}).get(FLEET_LABEL)
        if fleet is None:
            return
        key = (namespace, fleet)
        objects = self._objects.setdefault(key, {})
        if event.type == "DELETED":
            objects.pop((kind.kind, meta["name"]), None)
        else:
            objects[kind.kind, meta["name"]] = event.object
        self.touch(key)

    def _feed_fleet(self, key: Key, event: WatchEvent) -> None:
        if event.type == "DELETED":
            self._fleets.pop(key, None)
            self._states.pop(key, None)
            self._recorder.forget(event.object["metadata"]["uid"])
        else:
            self._fleets[key] = event.object
        self.touch(key)

    def _feed_node(self, name: str, event: WatchEvent) -> None:
        """Nodes change all the time; a fleet is looked at again only when one of its own begins or ceases to go away."""
        if event.type == "DELETED":
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = observe_node(event.object, self._platform)
        before, self._leaving = self._leaving, going_away(self._nodes)
        changed = set(changed_nodes(before, self._leaving))
        for key, objects in self._objects.items() if changed else ():
            if any(kind == "Pod" and obj["spec"].get("nodeName") in changed for (kind, _), obj in objects.items()):
                self.touch(key)

    def touch(self, key: Key) -> None:
        """Look at this fleet again."""
        self._dirty.add(key)
        self._wake.set()

    # -- running ----------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Until cancelled: own watches, work and telemetry."""
        async with asyncio.TaskGroup() as group:
            for kind in (FLEET, *CHILDREN, NODE):
                group.create_task(self._watch(kind), name=f"watch-{kind.plural}")
            group.create_task(self.work(), name="reconcile")
            group.create_task(self.read_telemetry(), name="telemetry")

    async def _watch(self, kind: Kind) -> None:
        selector = None if kind in (FLEET, NODE) else {MANAGED_BY: MANAGER}
        async for event in self._cluster.watch(kind, None if kind == NODE else self._namespace, selector):
            self.feed(kind, event)

    async def work(self) -> None:
        """Reconcile dirty fleets for ever, every fleet at least each RESYNC_S. Nothing is done before every kind was listed
        once: an empty cache must not look like an empty cluster."""
        while True:
            try:
                async with asyncio.timeout(RESYNC_S):
                    await self._wake.wait()
            except TimeoutError:
                self._dirty.update(self._fleets)
            self._wake.clear()
            if not self._synced >= {kind.kind for kind in (FLEET, *CHILDREN)}:
                continue
            await self.drain()

    async def drain(self) -> None:
        """Reconcile until no fleet is dirty."""
        while self._dirty:
            await self._one(self._dirty.pop())

    async def _one(self, key: Key) -> None:
        raw = self._fleets.get(key)
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            return  # children go by garbage collection; recreating one would fight it
        state = self._states.setdefault(key, _State())
        try:
            outcome = await self.reconcile_once(key, raw, state)
        except ClusterError as error:
            outcome = Outcome(problems=[Problem(error.reason, f"{error.reason}: {error}")])
            await self._recorder.record(raw, None, outcome, {})
        if outcome.done:
            LOG.info("fleet=%s/%s %s", *key, "; ".join(map(str, outcome.done)))
        self._after(key, state, outcome)

    def _after(self, key: Key, state: _State, outcome: Outcome) -> None:
        problems = tuple(map(str, outcome.problems))
        if problems:
            state.failures += 1
            delay_s = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2 ** (state.failures - 1))
            if problems != state.problems:
                LOG.warning("fleet=%s/%s problems=%s retry_s=%s", *key, "; ".join(problems), delay_s)
            asyncio.get_running_loop().call_later(delay_s, self.touch, key)
        else:
            state.failures = 0
        if problems != state.problems:
            state.problems = problems
            self.touch(key)

    async def reconcile_once(self, key: Key, raw: Object, state: _State) -> Outcome:
        """Plan and apply one fleet."""
        try:
            fleet = parse_fleet(raw)
        except ManifestError as error:
            return await self._not_accepted(key, raw, error)
        live = self._objects.get(key, {})
        stored = observe_revisions(obj for (kind, _), obj in live.items() if kind == "ControllerRevision")
        templates = {t.name: template_of(fleet, t, stored.get(t.name, {}), self._platform) for t in fleet.spec.tiers}
        plan: Plan = reconcile(fleet, self._observed(fleet, state, templates, stored, live), self._now())
        state.memory = plan.memory
        outcome = await self._applier.apply(fleet, raw, plan, templates, live)
        await self._recorder.record(raw, plan.status, outcome, sizing_of(fleet, plan.reasons))
        return outcome

    def _observed(
        self,
        fleet: InferenceFleet,
        state: _State,
        templates: dict[str, Template],
        stored: dict[str, dict[str, Template]],
        live: Mapping[tuple[str, str], Object],
    ) -> Observed:
        pods = [obj for (kind, _), obj in live.items() if kind == "Pod"]
        routers = [pod for pod in pods if pod["metadata"]["labels"].get(ROLE_LABEL) == ROUTER_ROLE]
        documents = live.get(("ConfigMap", router_name(fleet.metadata.name)))
        return Observed(
            pods=observe_pods(pods, Surroundings(observe_serving(documents), self._leaving, sick_nodes(self._nodes))),
            pools=observe_pools(obj for (kind, _), obj in live.items() if kind == "WorkerPool"),
            router=observe_router(live.get(("Deployment", router_name(fleet.metadata.name))), routers),
            templates=templates,
            stored=stored,
            telemetry=state.telemetry,
            memory=state.memory,
            problems=state.problems,
        )

    async def _not_accepted(self, key: Key, raw: Object, error: ManifestError) -> Outcome:
        """An invalid spec that got past the API server: say so, leave what runs alone."""
        status = dict(raw.get("status") or {})
        generation = raw["metadata"].get("generation", 0)
        present = present_status(raw)
        conditions = set_condition(
            present.conditions, "Accepted", "False", "Invalid", "; ".join(error.errors), generation=generation, now=self._now()
        )
        after = present.model_copy(update={"conditions": conditions, "observed_generation": generation})
        outcome = Outcome()
        if not contains(status, after.to_dict()):
            await self._cluster.patch_status(FLEET, *key, after.to_dict())
            outcome.writes += 1
        await self._recorder.record(raw, after, outcome, {})
        return outcome

    # -- telemetry --------------------------------------------------------------------------------------------------
    async def read_telemetry(self) -> None:
        """Read each fleet's load on its interval, for ever; a source that hangs costs its own fleet only."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(0.5)
                for reading in self._due():
                    group.create_task(reading)

    async def read_due(self) -> None:
        """Read the load of every fleet whose interval is over, and wait for it."""
        await asyncio.gather(*self._due())

    def _due(self) -> list[Coroutine[Any, Any, None]]:
        """One reading per fleet that is not being read already."""
        found = []
        for key, raw in self._fleets.items():
            state = self._states.get(key)
            if state is not None and not state.reading and "deletionTimestamp" not in raw["metadata"]:
                state.reading = True
                found.append(self._read(key, raw, state))
        return found

    async def _read(self, key: Key, raw: Object, state: _State) -> None:
        try:
            fleet = parse_fleet(raw)
            now = self._now()
            if now - state.read_at < fleet.spec.telemetry.interval_s:
                return
            state.read_at = now
            pods = [obj for (kind, _), obj in self._objects.get(key, {}).items() if kind == "Pod"]
            state.telemetry = await self._telemetry.collect(fleet, pods, self._router_urls(pods))
            self.touch(key)
        except ManifestError:
            return  # its condition says so
        finally:
            state.reading = False

    def _router_urls(self, pods: list[Object]) -> list[str]:
        host, port = self._platform.router_host, self._platform.router_port
        routers = [pod for pod in pods if pod["metadata"]["labels"].get(ROLE_LABEL) == ROUTER_ROLE]
        addresses = [ip for pod in routers if (ip := (pod.get("status") or {}).get("podIP"))]
        return [f"http://{host or address}:{port}" for address in addresses]
