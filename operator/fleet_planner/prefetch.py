"""Which nodes fetch the models of their tiers before workers start there, and when new workers wait for that. Pure.

Fetching is done by a pod per node and model; one that succeeded is the record that its node has this model. Nodes fetch as soon
as they can get workers, not when somebody scales up, so that most scale-ups find them ready. Repairs never wait, nor does a tier
that wakes from zero (`reconcile`); scale-ups and rollouts wait for a bounded time: a worker fetches by itself what is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.model import HubSource, ModelSpec, PrefetchSpec
from fleet_api.v1alpha1.podtemplate import Toleration
from fleet_api.v1alpha1.tier import TierSpec
from fleet_planner.replicas import Replica
from fleet_planner.roles import ROLES, Role
from fleet_planner.types import FetchPod, FetchWanted, Observed, ObservedNode, Template, Verdict
from fleet_planner.wanted import PodGone, PodWanted

RETRY_S = 120.0
"""A node that could not fetch tries again after this long; so does one whose pod found no place."""
BEGIN_S = 1800.0
"""A pod on its node may take this long to begin: images have ten gigabytes and more, and a pod that goes ends its pull."""
MESSAGE_MOST = 300
At = tuple[str, str]
"""(key of a model, node)."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """What should be. `waiting`: tiers with nodes that still fetch, while the time for that is not over. `lacking`: by tier, the
    key of its model and since when a node lacks it, to be remembered."""

    create: tuple[FetchWanted, ...] = ()
    delete: tuple[PodGone, ...] = ()
    waiting: frozenset[str] = frozenset()
    lacking: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    verdict: Verdict | None = None


def model_keys(fleet: InferenceFleet) -> dict[str, str]:
    """By tier, what names its model; tiers whose model is not fetched ahead are not there."""
    if fleet.spec.model.cache is None:  # no tier has another
        return {}
    return {tier.name: key for tier in fleet.spec.tiers if (key := model_key(fleet.model_of(tier))) is not None}


def model_key(model: ModelSpec) -> str | None:
    """Names what nodes fetch; None: nothing is fetched ahead (the cache is not the nodes', or there is none)."""
    source, cache = model.location, model.cache
    if cache is None or cache.type != "nodeLocal" or not isinstance(source, HubSource):
        return None
    return hashlib.sha256(f"{source.repository}@{source.revision}\0{cache.path}".encode()).hexdigest()[:8]


def fetch_name(fleet: str, key: str, node: str) -> str:
    """Name of the pod, at most 54 characters."""
    return f"{fleet}-fetch-{key}-{hashlib.sha256(node.encode()).hexdigest()[:8]}"


def fetched_by(fleet: str, name: str) -> str | None:
    """Key of the model that a pod of this name fetches; None: it fetches none."""
    begin = f"{fleet}-fetch-"
    return name.removeprefix(begin).partition("-")[0] if name.startswith(begin) else None


def plan_prefetch(fleet: InferenceFleet, observed: Observed, now: float) -> Prefetch:
    """Without nodes that can be read nothing is fetched ahead, and nobody waits."""
    keys, nodes, fetching = model_keys(fleet), observed.nodes, observed.fetching
    if not keys:
        return Prefetch(delete=tuple(_gone(pod, "nothing is fetched ahead any more") for pod in fetching if not pod.terminating))
    if nodes is None:
        return Prefetch(verdict=("Unknown", "NodesUnknown", "the operator may not read nodes: workers fetch by themselves"))
    spec = (fleet.spec.model.cache.prefetch if fleet.spec.model.cache is not None else None) or PrefetchSpec()
    wanted = _wanted(fleet, keys, nodes)
    names = {node.name for node in nodes}
    stale, taken = _stale(fetching, set(keys.values()), names, wanted.keys()), {(pod.key, pod.node) for pod in fetching}
    going = {pod.name for pod in fetching if pod.terminating} | {gone.name for gone in stale}
    mine = {(pod.key, pod.node): pod for pod in fetching if (pod.key, pod.node) in wanted and pod.name not in going}
    fetched = {at for at, pod in mine.items() if pod.phase == "Succeeded"} | _loaded(keys, observed)
    failed = {at: pod for at, pod in mine.items() if _failed(pod, now) and at not in fetched}
    pending = wanted.keys() - fetched - failed.keys()
    busy = sum(pod.phase in ("Pending", "Running") for at, pod in mine.items() if at not in failed)
    free = [at for at in wanted if at in pending and at not in taken][: max(0, spec.parallel - busy)]
    lacking = _lacking(fleet, keys, {name for at in wanted.keys() - fetched for name in wanted[at]}, observed, now)
    in_time = {name for name, (_, since) in lacking.items() if now - since < spec.wait_s}
    return Prefetch(
        create=tuple(FetchWanted(fetch_name(fleet.metadata.name, *at), at[1], at[0], wanted[at][0]) for at in free),
        delete=(*stale, *_again(failed.values(), now)),
        waiting=frozenset(name for at in pending for name in wanted[at] if name in in_time),
        lacking=lacking,
        verdict=_verdict(wanted.keys() - fetched, failed, wanted.keys()),
    )


def _wanted(fleet: InferenceFleet, keys: Mapping[str, str], nodes: Sequence[ObservedNode]) -> dict[At, list[str]]:
    """What each node should have, and the tiers that this is for: the first tiers' models first."""
    found: dict[At, list[str]] = {}
    for key in dict.fromkeys(keys.values()):
        tiers = [tier for tier in fleet.spec.tiers if keys.get(tier.name) == key]
        for node in sorted(nodes, key=lambda node: node.name):
            if names := [tier.name for tier in tiers if suits(tier, node)]:
                found[key, node.name] = names
    return found


def _loaded(keys: Mapping[str, str], observed: Observed) -> set[At]:
    """Where a ready worker of the wanted revision has the model of its tier."""
    return {
        (keys[pod.tier], pod.node)
        for pod in observed.pods
        if pod.ready and pod.node and pod.tier in keys and pod.revision == _revision(pod.tier, observed.templates)
    }


def suits(tier: TierSpec, node: ObservedNode) -> bool:
    """Whether a worker of either role could be scheduled there, as far as selectors, taints and kinds of devices say."""
    return not node.leaving and any(_suits_role(tier, role, node) for role in ROLES)


def _suits_role(tier: TierSpec, role: Role, node: ObservedNode) -> bool:
    added, device = tier.role(role).pod_template, tier.device_request(role)
    selector = {**tier.accelerator_of(role).node_selector, **(added.node_selector if added is not None else {})}
    if any(node.labels.get(label) != value for label, value in selector.items()):
        return False
    claimed = tier.kv_transfer.dra is not None and tier.kv_transfer.dra.gpu is not None
    if device is not None and not claimed and device[0] not in node.devices:
        return False
    own = (Toleration(key=device[0], operator="Exists", effect="NoSchedule"),) if device is not None else ()
    tolerations = (*own, *(added.tolerations if added is not None else ()))
    return all(effect == "PreferNoSchedule" or tolerated((k, v, effect), tolerations) for k, v, effect in node.taints)


def tolerated(taint: tuple[str, str, str], tolerations: Iterable[Toleration]) -> bool:
    """Kubernetes' rule: key (absent: every one), effect (absent: every one), and the value unless the operator is Exists."""
    key, value, effect = taint
    return any(
        (t.key == key or (not t.key and t.operator == "Exists"))
        and t.effect in (None, effect)
        and (t.operator == "Exists" or (t.value or "") == value)
        for t in tolerations
    )


def _revision(tier: str, templates: Mapping[str, Template]) -> str | None:
    return templates[tier].revision if tier in templates else None


def _failed(pod: FetchPod, now: float) -> bool:
    """It ended badly, no place was found for it, or it cannot begin: its kubelet says why, or says nothing for too long."""
    patience_s = BEGIN_S if pod.placed and not pod.message else RETRY_S
    return pod.phase == "Failed" or (pod.phase == "Pending" and now - pod.created_at >= patience_s)


def _why_failed(pod: FetchPod) -> str:
    if pod.message or pod.phase != "Pending":
        return pod.message or "its pod failed"
    return f"its pod did not begin within {BEGIN_S:.0f} s" if pod.placed else "no place was found for its pod"


def _stale(fetching: Iterable[FetchPod], keys: set[str], names: set[str], wanted: Set[At]) -> list[PodGone]:
    """Records of another model, and of nodes that are gone, or that are other machines by now; what cannot fetch where nothing is
    to be fetched any more."""
    return [_gone(pod, why) for pod in fetching if not pod.terminating and (why := _why_stale(pod, keys, names, wanted))]


def _why_stale(pod: FetchPod, keys: set[str], names: set[str], wanted: Set[At]) -> str:
    """Empty: it is not."""
    if pod.key not in keys:
        return "another model is served"
    if pod.node not in names:
        return "its node is gone"
    if pod.outlived:
        return "its node was made anew"
    is_idle = pod.phase == "Failed" or (pod.phase == "Pending" and not pod.placed)
    return "its node gets no workers now" if is_idle and (pod.key, pod.node) not in wanted else ""


def _again(failed: Iterable[FetchPod], now: float) -> list[PodGone]:
    return [_gone(pod, "it is tried again") for pod in failed if now - pod.created_at >= RETRY_S]


def _gone(pod: FetchPod, why: str) -> PodGone:
    return PodGone(pod.name, pod.uid, why)


def _lacking(
    fleet: InferenceFleet, keys: Mapping[str, str], names: Set[str], observed: Observed, now: float
) -> dict[str, tuple[str, float]]:
    """By tier, of the tiers `names`: each model has its own time, from when it was first wanted. A node that can never fetch one
    leaves nothing of that one's time, and all of the next one's."""
    found: dict[str, tuple[str, float]] = {}
    for name in names:
        before = observed.memory[name].lacking if name in observed.memory else (keys[name], _told(fleet, now))
        known = before is not None and before[0] == keys[name]
        found[name] = keys[name], min(before[1], now) if before is not None and known else now
    return found


def _told(fleet: InferenceFleet, now: float) -> float:
    """For an operator that has just started: when nodes began to lack a model of this same spec, as the status says."""
    found = fleet.status.condition("ModelCached")
    if found is None or found.status != "False" or found.observed_generation != fleet.metadata.generation:
        return now
    try:
        return datetime.fromisoformat(found.last_transition_time.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return now


def _verdict(lacking: Set[At], failed: Mapping[At, FetchPod], everywhere: Set[At]) -> Verdict:
    """A node counts when it has the models of all tiers that may get workers there."""
    if not everywhere:
        return "Unknown", "NoNodes", "no node can get workers now"
    nodes, without = {node for _, node in everywhere}, {node for _, node in lacking}
    what = "the model" if len({key for key, _ in everywhere}) == 1 else "the models of their tiers"
    count = f"{len(nodes) - len(without)} of {len(nodes)} nodes have {what}"
    if failed:
        by_node = {pod.node: pod for _, pod in sorted(failed.items(), reverse=True)}
        node, pod = min(by_node.items())
        more = f" and {len(by_node) - 1} more" if len(by_node) > 1 else ""
        return "False", "PrefetchFailed", f"{count}; node {node}{more}: {_why_failed(pod)}"[:MESSAGE_MOST]
    if lacking:
        return "False", "Prefetching", count
    return "True", "Cached", count


def held_back(tier: TierSpec, observed: Observed, waiting: frozenset[str], fleet: InferenceFleet) -> Observed:
    """The picture from which a tier is planned: while nodes still fetch for a revision that has no worker yet, the one before it
    is the wanted one, so that the rollout begins when the model is there. A paused fleet begins none, and is not to go back."""
    wanted, before = observed.templates[tier.name], _stable(tier, fleet, observed)
    begun = any(pod.tier == tier.name and pod.revision == wanted.revision for pod in observed.pods)
    waits = tier.name in waiting and not (begun or fleet.spec.rollout.paused)
    if not waits or before is None or before.revision == wanted.revision:
        return observed
    return replace(observed, templates={**observed.templates, tier.name: before}, awaited=wanted.revision)


def _stable(tier: TierSpec, fleet: InferenceFleet, observed: Observed) -> Template | None:
    """The revision that has workers and was last rolled out to its end. None also when the wanted one was rolled back: nobody
    goes there, and a plan that does not see that it is wanted would forget that it failed."""
    found = next((status.rollout for status in fleet.status.tiers if status.name == tier.name), None)
    if found is None or found.failed == observed.templates[tier.name].revision:
        return None
    if not any(pod.tier == tier.name and pod.revision == found.stable for pod in observed.pods):
        return None
    return observed.stored.get(tier.name, {}).get(found.stable)


def repairs(
    create: Sequence[PodWanted], gone: Set[str], workers: Iterable[Replica], size: tuple[int, int], whole: tuple[int, int]
) -> tuple[PodWanted, ...]:
    """Of the pods to create, in their order, those that do not wait: they replace workers that were there, or belong to a rollout
    that has begun. `gone`: uids that are deleted now; `whole`: workers that were there at once, of the `size` that is wanted."""
    staying = [one.role for one in workers if one.alive and not one.leaving and gone.isdisjoint(pod.uid for pod in one.pods)]
    made: set[str] = set()
    for role, wanted, there in zip(ROLES, size, whole, strict=True):
        names = [pod.name for pod in create if pod.role == role and pod.member == 0]
        made.update(names[: max(0, there - staying.count(role), len(names) - (wanted - there))])
    return tuple(pod for pod in create if (pod.name if pod.member == 0 else pod.name.rpartition("-")[0]) in made)


def reached(tier: TierSpec, size: tuple[int, int], observed: Observed, fleet: InferenceFleet) -> tuple[int, int]:
    """Workers that were there at once, up to the present size; an operator that has just started knows those that were ready."""
    ready = next(((known.prefill.ready, known.decode.ready) for known in fleet.status.tiers if known.name == tier.name), (0, 0))
    before = observed.memory[tier.name].reached if tier.name in observed.memory else ready
    alive = [
        sum(p.tier == tier.name and p.role == role and not p.terminating and not p.member for p in observed.pods)
        for role in ROLES
    ]
    return min(size[0], max(before[0], alive[0])), min(size[1], max(before[1], alive[1]))
