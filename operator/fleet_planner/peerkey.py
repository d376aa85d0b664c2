"""The key that the pods of one fleet share: who needs it, and what is said where there is none. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from fleet_api.v1alpha1 import InferenceFleet
from fleet_planner.types import ObservedPod, Template, Verdict

OWN: Final = ""
"""`told` of the Secret that the operator makes."""


def gossips(fleet: InferenceFleet) -> bool:
    """Several router pods, which were given no key for gossip alone."""
    return fleet.spec.routing.replicas > 1 and fleet.spec.routing.gossip is None


def hands_over(fleet: InferenceFleet) -> bool:
    """Workers that give KV to those that prove the key. vLLM's side channel is NIXL's own, and knows none."""
    return fleet.spec.engine.type == "torch"


def seeds(fleet: InferenceFleet) -> bool:
    """Workers that ask each other for hot prefixes."""
    guarded = fleet.spec.network_policy.enabled
    return hands_over(fleet) and any(t.kv_transfer.seeding(guarded=guarded).enabled for t in fleet.spec.tiers)


def needs_key(fleet: InferenceFleet) -> bool:
    """Something of this fleet is off, or open, without one."""
    return gossips(fleet) or hands_over(fleet)


def told(fleet: str, secret: str, key: str) -> str:
    """Which key pods have. The operator's is one, whatever the uid of the fleet that it was made for: a fleet that is restored
    with its workers restarts none of them."""
    return OWN if re.fullmatch(rf"{re.escape(fleet)}-peers-[0-9a-f]{{8}}", secret) else f"{secret}/{key}"


def wished(fleet: InferenceFleet) -> str:
    """The key that new pods get."""
    named = fleet.spec.peer_key
    return OWN if named is None else told(fleet.metadata.name, named.secret_ref.name, named.secret_ref.key)


def pending(
    fleet: InferenceFleet,
    pods: Sequence[ObservedPod],
    stored: Mapping[str, Mapping[str, Template]],
    wanted: Mapping[str, Template],
) -> Verdict | None:
    """The condition PeerKey while workers have another key than spec.peerKey names: a pod keeps what it was made with. `wanted`:
    by tier, what new ones are made from; that is older than keys where an operator from before them made it."""
    if fleet.spec.peer_key is None or not hands_over(fleet):
        return None
    workers = [pod for pod in pods if not pod.terminating and not pod.member and pod.revision in stored.get(pod.tier, {})]
    have = [stored[pod.tier][pod.revision].key for pod in workers]
    late, bare = sum(key != wished(fleet) for key in have), have.count(None)
    if not late:
        return None
    others = [f"{late - bare} have another key"] if late > bare else []
    others += [f"{bare} have none and give KV to whoever reaches them"] if bare else []
    never = sorted(name for name, template in wanted.items() if template.key is None)
    until = (
        f"the revision of tier {', '.join(never)} is older than keys: another value of the annotation "
        "inferencefleet.io/restarted-at replaces its workers"
        if never
        else "the rollout replaces them"
    )
    words = f"of {len(workers)} workers {' and '.join(others)}, not the one that spec.peerKey names; {until}"
    return "False", "PeerKeyPending", words


def peer_key(fleet: InferenceFleet, *, makes_keys: bool) -> Verdict | None:
    """The condition PeerKey, which is there only while something is off for want of a key, or may be: a Secret made before
    the right to make it was taken away serves on, and whether it is there only a right that the operator never has would tell."""
    if makes_keys or fleet.spec.peer_key is not None or not needs_key(fleet):
        return None
    without = [
        *(["its routers do not gossip"] if gossips(fleet) else []),
        *(["new workers begin cold"] if seeds(fleet) else []),
        *(["its workers give KV to whoever reaches them"] if hands_over(fleet) else []),
    ]
    return (
        "False",
        "NoPeerKey",
        f"{' and '.join(without)}, unless the Secret {fleet.metadata.name}-peers-... of before is still there: the operator "
        "makes no keys (the chart's peerKeys.create is false), or may not make Secrets here; make one with a line of 32 random "
        "bytes or more, and name it in spec.peerKey.secretRef",
    )
