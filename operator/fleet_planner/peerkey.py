"""The key that the pods of one fleet share: who needs it, and what is said where there is none. Pure."""

from __future__ import annotations

from fleet_api.v1alpha1 import InferenceFleet
from fleet_planner.types import Verdict


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
