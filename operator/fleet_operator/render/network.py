"""Ports of a worker, and who may reach them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.fabric import HOST_PORT_SLOTS, HOST_PORT_STRIDE
from fleet_api.v1alpha1.tier import Role
from fleet_operator.cluster.interface import Object
from fleet_operator.names import FLEET, OWN_CONTAINERS, ROLE, ROUTER_ROLE, labels, owner_reference, policy_name
from fleet_operator.settings import Platform
from fleet_planner.roles import ROLES
from fleet_worker.config import CONFIG_ENV, Ports

PORTS: Final = Ports()
UCX_TCP_PORTS: Final = (27_000, 28_999)
"""UCX takes any free port for KV over TCP unless it is told these."""
SIDE_CHANNEL_AT: Final = 8
"""Where the side channels begin in a worker's part of hostPorts: one per data parallel rank, so they come last."""
WORKER_ROLES: Final = ["decode", "prefill"]


class _Parallel(msgspec.Struct, frozen=True):
    data: int = 1


class _Shape(msgspec.Struct, frozen=True):
    """What matters here of a stored worker's configuration, also of another operator's."""

    nodes: int = 1
    parallel: _Parallel = _Parallel()


def further_slots(ranks: int) -> int:
    """Parts of hostPorts behind a worker's own into which the side channels of so many data parallel ranks reach."""
    return -(-(SIDE_CHANNEL_AT + ranks) // HOST_PORT_STRIDE) - 1


def worker_ports(first_port: int | None, role: Role, ordinal: int, ranks: int = 1) -> Ports:
    """Ports of one worker; `first_port` None: the usual ones, each pod has its own address.

    On the host's network neighbours get different ones; where two would be equal, the scheduler keeps them on different nodes,
    because the ports are declared as host ports. Those of many data parallel `ranks` stay inside the tier's ports, too.
    """
    if first_port is None:
        return PORTS
    slot = (2 * ordinal + (role == "decode")) % (HOST_PORT_SLOTS - further_slots(ranks))
    first = first_port + slot * HOST_PORT_STRIDE
    return Ports(
        http=first, agent=first + 1, kv_events=first + 2, kv_replay=first + 3, dp_rpc=first + 4, group=first + 5,
        master=first + 6, side_channel=first + SIDE_CHANNEL_AT,
    )  # fmt: skip


def container_ports(ports: Ports, *, on_host: bool, nodes: int = 1, shared: int = 1) -> list[Object]:
    """As the container declares them. `shared`: data parallel ranks of a worker that shares its node by hostPorts. Where their
    side channels reach into the ports of other workers, the first port of each is declared: so the scheduler keeps them apart."""
    named = [
        ("http", ports.http), ("agent", ports.agent), ("kv", ports.side_channel), ("kv-events", ports.kv_events),
        ("kv-replay", ports.kv_replay),
    ]  # fmt: skip
    named += [("group", ports.group), ("master", ports.master)] if nodes > 1 else []
    named += [(f"kv-on-{part}", ports.http + part * HOST_PORT_STRIDE) for part in range(1, further_slots(shared) + 1)]
    host = [{"hostPort": port} if on_host else {} for _, port in named]
    return [{"name": n, "containerPort": p, "protocol": "TCP", **h} for (n, p), h in zip(named, host, strict=True)]


def port_of(pod: Object, name: str, default: int) -> int:
    """What a pod that exists declares: its revision may be older than the spec."""
    for container in pod.get("spec", {}).get("containers") or []:
        for port in container.get("ports") or []:
            if port.get("name") == name and container.get("name", "worker") in OWN_CONTAINERS:
                return int(port["containerPort"])
    return default


def render_policy(fleet: InferenceFleet, owner: Object, platform: Platform, also: Sequence[Object] = ()) -> Object:
    """Nobody but these reaches a worker: workers of the fleet for KV, its routers for requests and to ask who it is, the operator
    for telemetry and to prove a flip. `also`: stored templates, beside the spec's, whose workers are there."""
    name = fleet.metadata.name
    workers = {"matchLabels": {FLEET: name}, "matchExpressions": [{"key": ROLE, "operator": "In", "values": WORKER_ROLES}]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": policy_name(name),
            "namespace": fleet.metadata.namespace,
            "labels": labels(name),
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": {
            "podSelector": workers,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": workers}], **_between_workers(fleet, also)},
                {
                    "from": [{"podSelector": {"matchLabels": {FLEET: name, ROLE: ROUTER_ROLE}}}],
                    "ports": [_port(PORTS.http), _port(PORTS.agent), _port(PORTS.kv_events), _port(PORTS.kv_replay)],
                },
                *_operator(fleet, platform.operator_namespace),
                *_gateways(fleet),
            ],
        },
    }


def _operator(fleet: InferenceFleet, namespace: str | None) -> list[Object]:
    """Agents for it and whoever reads metrics, engines for it alone."""
    if namespace is None:  # outside a cluster it comes from an address that nobody can name here: engines stay closed
        return [{"ports": [_port(PORTS.agent)]}]
    readers = sorted({namespace, *fleet.spec.network_policy.metrics_from})
    return [
        {"from": _namespaces(readers), "ports": [_port(PORTS.agent)]},
        {"from": _namespaces([namespace]), "ports": [_port(PORTS.http)]},
    ]


def _namespaces(names: list[str]) -> list[Object]:
    return [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}} for name in names]


def _gateways(fleet: InferenceFleet) -> list[Object]:
    """Where routers are an Endpoint Picker, it is a gateway that sends requests to workers."""
    picker = fleet.spec.routing.endpoint_picker
    if picker is None:
        return []
    names = sorted(set(picker.gateway_namespaces) or {fleet.metadata.namespace})
    return [{"from": _namespaces(names), "ports": [_port(PORTS.http)]}]


def _between_workers(fleet: InferenceFleet, also: Sequence[Object]) -> Object:
    """KV alone, or everything where a worker spans nodes: its engine's own traffic (NCCL, Gloo) takes any free port."""
    shapes = [(tier.nodes_of(role), tier.parallelism_of(role).data) for tier in fleet.spec.tiers for role in ROLES]
    shapes += [shape for stored in also for shape in _shapes(stored)]
    return {} if any(nodes > 1 for nodes, _ in shapes) else {"ports": _transfer_ports(max(ranks for _, ranks in shapes))}


def _shapes(stored: Object) -> list[tuple[int, int]]:
    """(nodes, data parallel ranks) of the workers of a stored template."""
    specs = stored["data"]["pods"].values()
    told = (variable["value"] for spec in specs for variable in spec["containers"][0]["env"] if variable["name"] == CONFIG_ENV)
    return [(shape.nodes, shape.parallel.data) for shape in (msgspec.json.decode(text, type=_Shape) for text in told)]


def _transfer_ports(ranks: int) -> list[Object]:
    """Side channels, one per data parallel rank, and KV over TCP. RDMA passes by every NetworkPolicy."""
    return [_port(PORTS.side_channel, PORTS.side_channel + ranks - 1), _port(*UCX_TCP_PORTS)]


def _port(first: int, last: int | None = None) -> dict[str, Any]:
    end = {"endPort": last} if last is not None and last > first else {}
    return {"protocol": "TCP", "port": first, **end}
