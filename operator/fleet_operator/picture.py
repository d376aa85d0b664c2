"""One fleet as the planner sees it, out of the cache and what is remembered of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import Object
from fleet_operator.fleet_state import FleetState, clock_set_s, telemetry_at
from fleet_operator.names import ROLE, ROUTER_ROLE, router_name
from fleet_operator.nodes import NodeView, accused_nodes, changed_nodes, going_away, places, sick_nodes
from fleet_operator.observe import (
    Surroundings,
    observe_fetching,
    observe_pods,
    observe_pools,
    observe_published,
    observe_router,
)
from fleet_operator.peer_keys import is_without
from fleet_operator.render.network import port_of
from fleet_operator.render.port import ADMIN_PORT
from fleet_operator.scale_targets import is_heard, is_target
from fleet_operator.settings import Platform
from fleet_planner.node_conditions import believed
from fleet_planner.prefetch import model_keys
from fleet_planner.types import Demand, Observed, ObservedPod, Template

RUNS: Final = "Running"
Live = Mapping[tuple[str, str], Object]
"""(kind, name) → object, of one fleet."""


@dataclass(frozen=True, slots=True)
class Places:
    """The cluster's nodes."""

    views: Mapping[str, NodeView]
    leaving: Mapping[str, str]
    """Node name → why it goes away."""
    accused: Mapping[str, tuple[str, ...]]
    """Node name → conditions that call its devices bad."""

    @classmethod
    def of(cls, views: Mapping[str, NodeView]) -> Places:
        """As they are now."""
        return cls(views, going_away(views), accused_nodes(views))

    def changed(self, before: Places) -> set[str]:
        """Names of nodes whose workers are to be looked at again."""
        return {*changed_nodes(before.leaving, self.leaving), *changed_nodes(before.accused, self.accused)}

    def made_at(self, name: str) -> float | None:
        """When a node was made, by the API server's clock; None where that is not known."""
        view = self.views.get(name)
        return view.made_at if view is not None else None


def picture(
    fleet: InferenceFleet,
    state: FleetState,
    live: Live,
    where: Places,
    templates: dict[str, Template],
    stored: dict[str, dict[str, Template]],
    heard: Demand | None,
    ahead_s: float,
    *,
    makes_keys: bool = True,
) -> Observed:
    """Everything that a plan follows from; `templates` are the wanted ones by tier, `stored` all by tier and revision. `ahead_s`:
    the wall clock less the monotonic one, now."""
    pods = pods_of(live)
    pools = [obj for (kind, _), obj in live.items() if kind == "WorkerPool"]
    targets = [pool for pool in pools if is_target(pool)]
    sizes = observe_pools(pools if not targets else [pool for pool in pools if pool not in targets])
    return Observed(
        pods=believed(workers(fleet, state, live, where), sizes),
        flips=state.flips,
        nodes=places(where.views) if model_keys(fleet) else None,
        fetching=observe_fetching(pods, where.made_at),
        adapters={**state.published.adapters, **state.adapters.seen},
        pools=sizes,
        targets=observe_pools([target for target in targets if is_heard(fleet, target)]) if targets else (),
        router=observe_router(live.get(("Deployment", router_name(fleet.metadata.name))), _routers(pods)),
        templates=templates,
        stored=stored,
        telemetry=telemetry_at(state, ahead_s),
        telemetry_read=state.telemetry_read,
        memory=state.memory,
        rest=state.rest,
        heard=heard,
        problems=state.problems,
        clock=state.clock,
        clock_set_s=clock_set_s(state.ahead_s, ahead_s),
        makes_keys=makes_keys and not is_without(fleet, state.settled.key),
        resolved=state.known.resolved if state.known is not None else None,
    )


def workers(fleet: InferenceFleet, state: FleetState, live: Live, where: Places) -> tuple[ObservedPod, ...]:
    """Its worker pods, in name order."""
    state.published = observe_published(live.get(("ConfigMap", router_name(fleet.metadata.name))), state.published)
    busy = {name: load for tier in state.telemetry.values() for name, load in tier.busy.items()}
    pods = pods_of(live)
    sick = sick_nodes(where.views, {pod["spec"].get("nodeName") for pod in pods})
    around = Surroundings(state.published.serving, state.published.told, where.leaving, sick, where.accused, busy)
    return observe_pods(pods, around, state.pods)


def router_urls(live: Live, platform: Platform) -> list[str]:
    """Base URLs for scrapes of its routers that run: the plain port also where the other one speaks TLS. A pod has an address
    before its image came, and keeps it in its status when it has ended, while others get it."""
    host, port = platform.router_host, platform.router_port
    said = [(pod, pod.get("status") or {}) for pod in _routers(pods_of(live))]
    found = [(pod, host or ip) for pod, status in said if (ip := status.get("podIP")) and status.get("phase") == RUNS]
    return [f"http://{f'[{at}]' if ':' in at else at}:{port_of(pod, ADMIN_PORT, port)}" for pod, at in found]


def pods_of(live: Live) -> list[Object]:
    """All of its pods: workers, routers, those that fetch a model."""
    return [obj for (kind, _), obj in live.items() if kind == "Pod"]


def _routers(pods: list[Object]) -> list[Object]:
    return [pod for pod in pods if pod["metadata"]["labels"].get(ROLE) == ROUTER_ROLE]
