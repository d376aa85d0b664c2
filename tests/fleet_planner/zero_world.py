"""A cluster without time that does what plans say, and routers that hold what nobody can answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fleet_api.parse import parse_fleet
from fleet_planner.memory import RestMemory
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.types import Demand, Observed, ObservedPod, ObservedPool, RoleLoad, RouterView, Template
from fleet_planner.types import TierTelemetry as Telemetry

NOW = 1_000_000.0
IDLE_S = 60.0
OLD, NEW = "aaaaaaaa", "bbbbbbbb"


def fleet(
    tiers: list[dict[str, Any]] | None = None, status: Any = None, rollout: Any = None, telemetry: Any = None, **scaling: Any
):
    to_zero = {"toZero": {"enabled": True, "idle": "60s"}}
    manifest = {
        "apiVersion": "inferencefleet.io/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": "f", "namespace": "n"},
        "spec": {
            "model": {"source": "file:///m"},
            "tiers": [
                {"accelerator": {"type": "cpu"}, "decode": {"minReplicas": 2}, **tier} for tier in tiers or [{"name": "t"}]
            ],
            "scaling": {**to_zero, **scaling},
            "rollout": rollout or {},
            "telemetry": telemetry or {},
        },
    }
    found = parse_fleet(manifest)
    return found.model_copy(update={"status": status}) if status is not None else found


@dataclass
class World:
    """A cluster that does what the plan says, and routers that hold what nobody can answer."""

    spec: Any = field(default_factory=fleet)
    now: float = NOW
    observed: Observed = field(default_factory=Observed)
    running: float = 0.0
    runs: tuple[float, float] = (0.0, 0.0)
    """In flight on prefill and on decode workers, beside what runs on both."""
    held: int = 0
    arrivals: float | None = 0.0
    readable: bool = True
    fits: bool = True
    """There are nodes for new pods."""
    nodes: tuple[int, int] = (1, 1)
    """Pods of one prefill and of one decode worker."""
    served: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """By tier: what the routers were told to use, pass after pass."""

    def __post_init__(self) -> None:
        templates = {tier.name: Template(OLD, "c", nodes=self.nodes) for tier in self.spec.spec.tiers}
        self.observed = Observed(templates=templates, router=RouterView(1, 1))

    def read(self) -> None:
        """Telemetry as of now."""
        demand = Demand(self.held, self.arrivals, self.now)
        prefill, decode = (RoleLoad(inflight=self.running + runs, measured_at=self.now) for runs in self.runs)
        known = {tier.name: Telemetry(prefill, decode, demand=demand) for tier in self.spec.spec.tiers}
        self.observed = replace(self.observed, telemetry=known if self.readable else {})

    def plan(self) -> Plan:
        self.read()
        return reconcile(self.spec, self.observed, self.now)

    def step(self, seconds: float = 1.0) -> Plan:
        """One pass, carried out; the status is written. Pods that were created are ready when `ready` says so."""
        self.now += seconds
        plan = self.plan()
        self.served.append({tier.name: counts(plan, tier.name) for tier in self.spec.spec.tiers})
        gone = {item.uid for item in plan.delete}
        serving = {target.uid for target in plan.targets if target.state == "serving"}
        pods = [replace(pod, serving=pod.uid in serving) for pod in self.observed.pods if pod.uid not in gone]
        pods += [self.new_pod(wanted) for wanted in plan.create]
        pools = tuple(
            ObservedPool(p.name, f"u{p.name}", p.role, p.tier, p.revision, p.replicas, p.replicas, p.size) for p in plan.pools
        )
        stored = {tier: {**self.observed.stored.get(tier, {}), t.revision: t} for tier, t in self.observed.templates.items()}
        self.observed = replace(self.observed, pods=tuple(pods), pools=pools, memory=plan.memory, rest=plan.rest, stored=stored)
        self.spec = self.spec.model_copy(update={"status": plan.status})
        return plan

    def new_pod(self, wanted: Any) -> ObservedPod:
        where = (
            {"node": "n", "phase": "Running", "ip": "10.0.0.1"} if self.fits else {"node": None, "phase": "Pending", "ip": None}
        )
        return ObservedPod(
            name=wanted.name, uid=f"{wanted.name}@{self.now}", role=wanted.role, tier=wanted.tier, revision=wanted.revision,
            ordinal=wanted.ordinal, ready=False, terminating=False, created_at=self.now, ready_since=None, compat="c",
            member=wanted.member,
            unschedulable=not self.fits, message="" if self.fits else "0/2 nodes are available", **where,
        )  # fmt: skip

    def ready(self, role: str | None = None, tier: str | None = None) -> None:
        """Pods with a node of this role are ready from now on."""
        pods = tuple(
            replace(pod, ready=True, ready_since=self.now)
            if pod.role == (role or pod.role) and pod.tier == (tier or pod.tier) and pod.node and not pod.ready
            else pod
            for pod in self.observed.pods
        )
        self.observed = replace(self.observed, pods=pods)

    def settle(self, steps: int = 4) -> Plan:
        for _ in range(steps):
            plan = self.step()
            self.ready()
        return plan

    def restart(self) -> None:
        """A new operator remembers nothing."""
        self.observed = replace(self.observed, memory={}, rest=RestMemory(), heard=None)

    def rest(self) -> Plan:
        """Up, and then idle until it is at zero."""
        self.settle()
        for _ in range(int(IDLE_S) + 2):
            plan = self.step()
        assert not self.observed.pods
        return plan

    def workers(self, revision: str | None = None) -> int:
        return sum(pod.revision == (revision or pod.revision) for pod in self.observed.pods)


def counts(plan: Plan, tier: str) -> tuple[int, int]:
    roles = [target.role for target in plan.targets if target.tier == tier and target.state == "serving"]
    return roles.count("prefill"), roles.count("decode")


def condition(plan: Plan, kind: str) -> tuple[str, str]:
    found = plan.status.condition(kind)
    assert found is not None
    return found.status, found.reason
