"""Node conditions that call devices bad: are they believed? Pure.

Devices fail one by one. A condition that calls most nodes of a fleet bad at once is rather the fault of who sets it (a detector
that was upgraded, or lost its driver): to believe it would send all requests to the few that are left, and make anew what works.
So it is suspected: workers serve on, none is replaced for it, and the status says so. The share is the node controller's own, as
for nodes that are not ready. Fleets on few nodes always believe: two of three nodes may well have failed. Taints, which somebody
put on a node on purpose, are always believed, and so is each condition that does not call most nodes bad itself.

Only nodes of the workers that there are to be count, of each pool the oldest. Those made in the place of others count when the
others have gone: what is done because a condition is believed is then never why it is not, for it to be believed again after it
was undone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fleet_planner.replicas import ENDED
from fleet_planner.roles import Role
from fleet_planner.types import ObservedPod, ObservedPool

UNHEALTHY_SHARE = 0.55
"""Of nodes: when more than that seem lost or bad at once, it is rather who says so."""
NODES_LEAST = 5
"""On fewer nodes a fleet believes whatever is said of them."""
Sort = tuple[str, Role, str]
"""Tier, role, revision."""


def believed(pods: tuple[ObservedPod, ...], pools: Sequence[ObservedPool]) -> tuple[ObservedPod, ...]:
    """Those on nodes that a condition calls bad as on failing devices, or, where it calls too many so, as under suspicion."""
    if not any([pod.accused for pod in pods]):
        return pods
    suspected = _suspected(_nodes(pods, pools))
    return tuple([_judged(pod, suspected) if pod.accused else pod for pod in pods])


def _nodes(pods: Sequence[ObservedPod], pools: Sequence[ObservedPool]) -> dict[str, tuple[str, ...]]:
    """Node name → conditions that call it bad; of all nodes with workers that there are to be."""
    sizes: dict[Sort, int] = {(pool.tier, pool.role, pool.revision): pool.replicas for pool in pools}
    workers: dict[Sort, list[ObservedPod]] = {}
    for pod in pods:
        if pod.member == 0 and pod.node is not None and not pod.terminating and pod.phase not in ENDED:
            workers.setdefault((pod.tier, pod.role, pod.revision), []).append(pod)
    for sort, leaders in workers.items():
        leaders.sort(key=lambda pod: (pod.created_at, pod.name))
        del leaders[sizes.get(sort, len(leaders)) :]
    counted = {leader.uid for leaders in workers.values() for leader in leaders}
    return {pod.node: pod.accused for pod in pods if pod.node is not None and (pod.group or pod.uid) in counted}


def _suspected(nodes: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Condition → how many nodes it calls bad, in words; of those that call too many so."""
    if len(nodes) < NODES_LEAST:
        return {}
    counts = Counter([condition for accused in nodes.values() for condition in accused])
    most = UNHEALTHY_SHARE * len(nodes)
    return {
        condition: f"{count} of {len(nodes)} nodes have condition {condition}"
        for condition, count in counts.items()
        if count > most
    }


def _judged(pod: ObservedPod, suspected: Mapping[str, str]) -> ObservedPod:
    trusted = next((condition for condition in pod.accused if condition not in suspected), None)
    if trusted is not None:
        words = pod.sick or f"node {pod.node} has condition {trusted}"
        return replace(pod, sick=words, leaving=words)
    return pod if pod.sick else replace(pod, suspected=suspected[pod.accused[0]])
