"""Which nodes go away, and why: what a Node object says, as words. Pure.

A node that leaves in good order (cordoned, tainted by an autoscaler, not ready) has its workers replaced first. A node whose
devices fail gets no new request; conditions that say so are judged fleet by fleet (`fleet_planner/node_conditions.py`). When
most nodes seem not ready at once, it is more likely the control plane that lost them:
nothing is replaced then (the node controller's own rule, zone threshold 55 %).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fleet_operator.cluster.interface import Object
from fleet_operator.observe import timestamp
from fleet_operator.settings import Platform
from fleet_planner.node_conditions import UNHEALTHY_SHARE
from fleet_planner.types import ObservedNode

KNOWN_TAINTS = frozenset((*Platform().leaving_taints, *Platform().sick_taints))
MONITOR_FAILS = "DCGMError"
"""The reason of EKS's monitor when it does not reach DCGM: that says nothing of devices, and EKS repairs nothing for it."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """What matters of one node; empty words: nothing is wrong."""

    leaving: str = ""
    not_ready: str = ""
    sick: str = ""
    """What a taint says of its devices."""
    accused: tuple[str, ...] = ()
    """Conditions that call its devices bad, as TYPE=STATUS."""
    place: ObservedNode | None = None
    """What decides whether a worker may run there."""
    made_at: float | None = None
    """By the API server's clock. Another machine may come under its name."""


def observe_node(node: Object, platform: Platform) -> NodeView:
    """A node's words."""
    name, spec, status = node["metadata"]["name"], node.get("spec") or {}, node.get("status") or {}
    taints = {taint.get("key", "") for taint in spec.get("taints") or [] if not _only_warns(taint)}
    conditions = {c.get("type", ""): c for c in status.get("conditions") or []}
    words = _leaving(name, spec, taints, platform), _not_ready(name, conditions), _sick(name, taints, platform)
    accused = _accused(conditions, platform)
    place = _place(node, leaving=any((*words, accused)))
    return NodeView(*words, accused, place, timestamp(node["metadata"].get("creationTimestamp")))


def _only_warns(taint: Mapping[str, Any]) -> bool:
    """Whoever says that a node goes keeps pods away from it. A taint that somebody named to us counts whatever its effect."""
    return taint.get("effect") == "PreferNoSchedule" and taint.get("key") in KNOWN_TAINTS


def _place(node: Object, *, leaving: bool) -> ObservedNode:
    taints = (
        (taint.get("key", ""), taint.get("value") or "", taint.get("effect", ""))
        for taint in (node.get("spec") or {}).get("taints") or []
    )
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    return ObservedNode(
        name=node["metadata"]["name"],
        labels=node["metadata"].get("labels") or {},
        taints=tuple(taints),
        devices=frozenset(name for name, amount in allocatable.items() if "/" in name and str(amount) != "0"),
        leaving=leaving,
    )


def _leaving(name: str, spec: Mapping[str, Any], taints: set[str], platform: Platform) -> str:
    if spec.get("unschedulable"):
        return f"node {name} is cordoned"
    tainted = sorted(taints.intersection(platform.leaving_taints))
    return f"node {name} has taint {tainted[0]}" if tainted else ""


def _not_ready(name: str, conditions: Mapping[str, Mapping[str, Any]]) -> str:
    ready = conditions.get("Ready", {"status": "True"})
    return "" if ready.get("status") == "True" else f"node {name} is not ready"


def _sick(name: str, taints: set[str], platform: Platform) -> str:
    tainted = sorted(taints.intersection(platform.sick_taints))
    return f"node {name} has taint {tainted[0]}" if tainted else ""


def _accused(conditions: Mapping[str, Mapping[str, Any]], platform: Platform) -> tuple[str, ...]:
    wanted = [(kind, value or "True") for kind, _, value in (one.partition("=") for one in platform.sick_conditions)]
    found = [(kind, value, conditions[kind]) for kind, value in wanted if kind in conditions]
    bad = [f"{kind}={value}" for kind, value, one in found if one.get("status") == value and one.get("reason") != MONITOR_FAILS]
    return tuple(dict.fromkeys(bad))  # somebody may name one that is known


def going_away(nodes: Mapping[str, NodeView]) -> dict[str, str]:
    """Node name → why its workers are to be replaced, whatever its conditions say of devices."""
    lost = sum(bool(view.not_ready) for view in nodes.values())
    believed = lost <= max(1, UNHEALTHY_SHARE * len(nodes))
    words = {name: view.sick or view.leaving or (view.not_ready if believed else "") for name, view in nodes.items()}
    return {name: word for name, word in words.items() if word}


def sick_nodes(nodes: Mapping[str, NodeView], among: Iterable[str | None]) -> dict[str, str]:
    """Node name → what a taint says of its devices; of these nodes."""
    return {name: view.sick for name in among if name and (view := nodes.get(name)) is not None and view.sick}


def accused_nodes(nodes: Mapping[str, NodeView]) -> dict[str, tuple[str, ...]]:
    """Node name → conditions that call its devices bad."""
    return {name: view.accused for name, view in nodes.items() if view.accused}


def changed_nodes(before: Mapping[str, object], after: Mapping[str, object]) -> Iterable[str]:
    """Names of which another thing is said."""
    return (name for name in {*before, *after} if before.get(name) != after.get(name))


def places(nodes: Mapping[str, NodeView]) -> tuple[ObservedNode, ...] | None:
    """Every node in order of names; None when none is known: then the operator may not read them."""
    return tuple(view.place for _, view in sorted(nodes.items()) if view.place is not None) or None
