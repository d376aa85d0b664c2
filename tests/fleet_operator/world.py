"""A cluster without time: the in-memory store, a reconciler that sees it when told, and a kubelet made of dict edits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from fleet_api.conditions import rfc3339
from fleet_operator.cluster.interface import (
    DEPLOYMENT,
    EVENT,
    FLEET,
    POD,
    POOL,
    ClusterError,
    ConflictError,
    Kind,
    NotFoundError,
    WatchEvent,
)
from fleet_operator.cluster.kinds import SECRET, kind_of
from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.flip.follow import FlipFollower
from fleet_operator.names import FLEET as FLEET_LABEL
from fleet_operator.names import ROLE
from fleet_operator.reconciler import CHILDREN, Reconciler
from fleet_operator.settings import Platform
from fleet_planner.types import RoleLoad, TierTelemetry

NAMESPACE = "ml"
Refusal = Callable[[str, Kind, str], ClusterError | None]
"""(verb, kind, name) → what the API answers instead of doing it."""


def manifest(name: str = "f", **spec: Any) -> dict[str, Any]:
    tiers = [{"name": "t", "accelerator": {"type": "cpu"}}]
    return {
        "apiVersion": FLEET.api_version,
        "kind": FLEET.kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"model": {"source": "file:///m"}, "tiers": tiers, **spec},
    }


class Api:
    """The store as the operator reaches it: counts writes, and refuses what it is told to refuse."""

    def __init__(self, store: MemoryCluster) -> None:
        self._store = store
        self.refuse: Refusal = lambda verb, kind, name: None
        self.writes: list[tuple[str, str, str]] = []
        self.looks: list[tuple[str, str]] = []
        """Reads that are no watch: (verb, kind)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _write(self, verb: str, kind: Kind, name: str) -> None:
        error = self.refuse(verb, kind, name)
        if error is not None:
            raise error
        self.writes.append((verb, kind.kind, name))

    async def find(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        self.looks.append(("find", kind.kind))
        return await self._store.find(kind, namespace, name)

    async def list(self, kind: Kind, *where: Any) -> list[dict[str, Any]]:
        self.looks.append(("list", kind.kind))
        return await self._store.list(kind, *where)

    async def apply(self, obj: dict[str, Any], *, created: bool = False) -> dict[str, Any]:
        self._write("apply", kind_of(obj), obj["metadata"]["name"])
        return await self._store.apply(obj, created=created)

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        self._write("create", kind_of(obj), obj["metadata"]["name"])
        try:
            return await self._store.create(obj)
        except ConflictError:
            if kind_of(obj) == SECRET:  # how the operator, which may not read it, looks whether it is there
                self.writes.pop()
                self.looks.append(("create", SECRET.kind))
            raise

    async def patch(self, kind: Kind, namespace: str, name: str, patch: dict[str, Any]) -> dict[str, Any]:
        self._write("patch", kind, name)
        return await self._store.patch(kind, namespace, name, patch)

    async def delete(self, kind: Kind, namespace: str, name: str, **options: Any) -> None:
        self._write("delete", kind, name)
        await self._store.delete(kind, namespace, name, **options)

    async def patch_status(
        self, kind: Kind, namespace: str, name: str, status: dict[str, Any], *, version: str | None = None
    ) -> dict[str, Any]:
        self._write("status", kind, name)
        return await self._store.patch_status(kind, namespace, name, status, version=version)


class World:
    """Time moves only by `now`; the operator sees what the store held when `look` was called."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        """What the operator's clock says."""
        self.set_s = 0.0
        """By how much that one was set: the API server's is right."""
        self.node = "node"
        self.late: set[str] = set()
        """Names of pods that find none."""
        self.addresses = (f"10.0.{number // 250}.{number % 250 + 1}" for number in count())
        self.flips: FlipFollower | None = None
        uids = (f"00000000-0000-4000-8000-{number:012d}" for number in count(1))
        self.store = MemoryCluster(now=lambda: self.now - self.set_s, new_uid=lambda: next(uids))
        self.user = self.store.writer("somebody-else")
        self.api = Api(self.store)
        self.load: dict[str, TierTelemetry] = {}
        self.platform = Platform()
        self.operator = self.new_operator()

    def new_operator(self) -> Reconciler:
        """As after a restart: nothing is remembered."""
        self._seen: dict[tuple[str, str, str], dict[str, Any]] = {}
        return Reconciler(
            self.api, self.platform, self, namespace=NAMESPACE, now=lambda: self.now, monotonic=lambda: self.now - self.set_s,
            flips=self.flips,
        )  # fmt: skip

    def set_clock(self, by_s: float) -> None:
        """The operator's clock only."""
        self.now += by_s
        self.set_s += by_s

    async def collect(self, *_: Any) -> dict[str, TierTelemetry]:
        return self.load

    async def listen(self, routers: list[str]) -> None:
        """Nobody answers."""

    def measure(self, prefill: float, decode: float) -> None:
        """The load that telemetry reports from now on, as measured now."""
        roles = [RoleLoad(inflight=inflight, measured_at=self.now) for inflight in (prefill, decode)]
        self.load = {"t": TierTelemetry(prefill=roles[0], decode=roles[1])}

    async def look(self) -> None:
        """Every watch delivers what changed since the last look."""
        present: dict[tuple[str, str, str], dict[str, Any]] = {}
        for kind in (FLEET, *CHILDREN):
            for obj in await self.store.list(kind, NAMESPACE):
                key = (kind.kind, obj["metadata"]["name"], obj["metadata"]["uid"])
                present[key] = obj
                if self._seen.get(key) != obj:
                    self.operator.feed(kind, WatchEvent("MODIFIED" if key in self._seen else "ADDED", obj))
            for key in [key for key in self._seen if key[0] == kind.kind and key not in present]:
                replaced = any(other[:2] == key[:2] for other in present)
                if not replaced:
                    self.operator.feed(kind, WatchEvent("DELETED", self._seen[key]))
        self._seen = present

    async def kubelet(self) -> None:
        """Pods run on `node` and are ready, leaving ones are gone, Deployments have their pods."""
        for pod in await self.store.list(POD, NAMESPACE):
            name, meta = pod["metadata"]["name"], pod["metadata"]
            if "deletionTimestamp" in meta:
                await self.user.delete(POD, NAMESPACE, name, grace_s=0)
            elif not pod["spec"].get("nodeName") and name not in self.late:
                await self.user.bind(NAMESPACE, name, self.node)
                ready = {"type": "Ready", "status": "True", "lastTransitionTime": rfc3339(self.now - self.set_s)}
                status = {"phase": "Running", "podIP": next(self.addresses), "conditions": [ready]}
                await self.user.patch_status(POD, NAMESPACE, name, status)
        for deployment in await self.store.list(DEPLOYMENT, NAMESPACE):
            status = {"readyReplicas": deployment["spec"]["replicas"]}
            await self.user.patch_status(DEPLOYMENT, NAMESPACE, deployment["metadata"]["name"], status)

    async def step(self) -> list[tuple[str, str, str]]:
        """One second: telemetry, a pass of everything that changed, kubelets. What the pass wrote."""
        self.now += 1
        self.api.writes.clear()
        await self.look()
        await self.operator.reader.read_due()
        await self.operator.drain()
        written = list(self.api.writes)
        await self.kubelet()
        return written

    async def settle(self, most: int = 12) -> int:
        """Steps until one writes nothing and leaves nothing to see; their number."""
        for step in range(most):
            if not await self.step() and not await self._changed():
                return step
        raise AssertionError(f"still writing after {most} steps: {self.api.writes}")

    async def _changed(self) -> bool:
        """Whether kubelets changed what the operator saw last."""
        found = [obj for kind in (FLEET, *CHILDREN) for obj in await self.store.list(kind, NAMESPACE)]
        return len(found) != len(self._seen) or any(obj not in self._seen.values() for obj in found)

    async def settle_with_telemetry(self, seconds: int = 10) -> None:
        """So many seconds in which the load is measured afresh and stays the same."""
        for _ in range(seconds):
            tier = self.load["t"]
            self.measure(tier.prefill.inflight or 0, tier.decode.inflight or 0)
            await self.step()

    async def touch(self) -> list[tuple[str, str, str]]:
        """A pass over all fleets though nothing changed (resync); what it wrote."""
        self.now += 1
        self.api.writes.clear()
        await self.look()
        for fleet in await self.store.list(FLEET, NAMESPACE):
            self.operator.touch((NAMESPACE, fleet["metadata"]["name"]))
        await self.operator.drain()
        return list(self.api.writes)

    async def workers(self, fleet: str = "f") -> dict[str, int]:
        """Living worker pods by role."""
        pods = await self.store.list(POD, NAMESPACE, {FLEET_LABEL: fleet})
        roles = [pod["metadata"]["labels"][ROLE] for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        return {role: roles.count(role) for role in ("prefill", "decode")}

    async def condition(self, kind: str, fleet: str = "f") -> dict[str, Any]:
        found = (await self.store.get(FLEET, NAMESPACE, fleet)).get("status") or {}
        return next((c for c in found.get("conditions", []) if c["type"] == kind), {"status": "absent"})

    async def pool(self, role: str) -> dict[str, Any]:
        return next(pool for pool in await self.store.list(POOL, NAMESPACE) if pool["spec"]["role"] == role)

    async def events(self) -> list[str]:
        """What users were told, oldest first: type, reason and note."""
        found = sorted(await self.store.list(EVENT, NAMESPACE), key=lambda event: int(event["metadata"]["resourceVersion"]))
        return [f"{event['type']} {event['reason']} {event['note']}" for event in found]

    async def exists(self, kind: Kind, name: str) -> bool:
        try:
            await self.store.get(kind, NAMESPACE, name)
        except NotFoundError:
            return False
        return True


Scenario = Callable[[World], Awaitable[None]]


def play(scenario: Scenario, **spec: Any) -> None:
    """The scenario in a world where fleet `f` has settled."""

    async def whole() -> None:
        world = World()
        await world.user.apply(manifest(**spec))
        await world.settle()
        await scenario(world)

    asyncio.run(whole())
