"""Which nodes go away, and why: what a Node object says, as words. Pure.

A node that leaves in good order (cordoned, tainted by an autoscaler, not ready) has its workers replaced first. A node whose
devices fail gets no new request. When most nodes seem not ready at once, it is more likely the control plane that lost them:
nothing is replaced then (the node controller's own rule, zone threshold 55 %).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fleet_operator.cluster.interface import Object
from fleet_operator.observe import timestamp
from fleet_operator.settings import Platform
from fleet_planner.types import ObservedNode

UNHEALTHY_SHARE = 0.55
KNOWN_TAINTS = frozenset((*Platform().leaving_taints, *Platform().sick_taints))
MONITOR_FAILS = "DCGMError"
"""The reason of EKS's monitor when it does not reach DCGM: that says nothing of devices, and EKS repairs nothing for it."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """What matters of one node; empty words: nothing is wrong."""

    leaving: str = ""
    not_ready: str = ""
    sick: str = ""
    place: ObservedNode | None = None
    """What decides whether a worker may run there."""
    made_at: float | None = None
    """By the API server's clock. Another machine may come under its name."""


def observe_node(node: Object, platform: Platform) -> NodeView:
    """A node's words."""
    name, spec, status = node["metadata"]["name"], node.get("spec") or {}, node.get("status") or {}
    taints = {taint.get("key", "") for taint in spec.get("taints") or [] if not _only_warns(taint)}
    conditions = {c.get("type", ""): c for c in status.get("conditions") or []}
    words = _leaving(name, spec, taints, platform), _not_ready(name, conditions), _sick(name, taints, conditions, platform)
    return NodeView(*words, _place(node, leaving=any(words)), timestamp(node["metadata"].get("creationTimestamp")))


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


def _sick(name: str, taints: set[str], conditions: Mapping[str, Mapping[str, Any]], platform: Platform) -> str:
    tainted = sorted(taints.intersection(platform.sick_taints))
    if tainted:
        return f"node {name} has taint {tainted[0]}"
    for wanted in platform.sick_conditions:
        kind, _, value = wanted.partition("=")
        found = conditions.get(kind)
        if found is not None and found.get("status") == (value or "True") and found.get("reason") != MONITOR_FAILS:
            return f"node {name} has condition {kind}={found['status']}"
    return ""


def going_away(nodes: Mapping[str, NodeView]) -> dict[str, str]:
    """Node name → why its workers are to be replaced."""
    lost = sum(bool(view.not_ready) for view in nodes.values())
    believed = lost <= max(1, UNHEALTHY_SHARE * len(nodes))
    words = {name: view.sick or view.leaving or (view.not_ready if believed else "") for name, view in nodes.items()}
    return {name: word for name, word in words.items() if word}


def sick_nodes(nodes: Mapping[str, NodeView], among: Iterable[str | None]) -> dict[str, str]:
    """Node name → what is wrong with its devices; of these nodes."""
    return {name: view.sick for name in among if name and (view := nodes.get(name)) is not None and view.sick}


def changed_nodes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterable[str]:
    """Names whose words differ."""
    return (name for name in {*before, *after} if before.get(name) != after.get(name))


def places(nodes: Mapping[str, NodeView]) -> tuple[ObservedNode, ...] | None:
    """Every node in order of names; None when none is known: then the operator may not read them."""
    return tuple(view.place for _, view in sorted(nodes.items()) if view.place is not None) or None
