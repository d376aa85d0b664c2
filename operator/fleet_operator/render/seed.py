"""Whom a new worker may take hot prefixes from: those that were ready when its pod was made. Pure.

Each is asked whether it fits (compatibility hash, weights, blocks) before it gives anything, so that a name that is out of date
costs a moment of the new worker's time and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET, UnsetType

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.tier import TierSpec
from fleet_operator.cluster.interface import POD, Object
from fleet_operator.names import MEMBER, REVISION, ROLE, TIER
from fleet_operator.render.network import PORTS, port_of
from fleet_planner.wanted import PodWanted
from fleet_wire.address import authority
from fleet_worker.config import MOST_SEED_PEERS, SeedSettings

Live = Mapping[tuple[str, str], Object]


def seed_settings(fleet: InferenceFleet, tier: TierSpec) -> SeedSettings | UnsetType:
    """What a worker's configuration says of seeding; unset where it is off, and with engines that have no interface for it."""
    seed = tier.kv_transfer.seeding(guarded=fleet.spec.network_policy.enabled)
    if not seed.enabled or fleet.spec.engine.type != "torch":
        return UNSET
    return SeedSettings(share=seed.max_percent / 100, timeout_s=seed.timeout_s)


def seed_peers(wanted: PodWanted, live: Live) -> str:
    """The annotation of a new pod: ADDRESS:PORT of ready workers of its tier, role and revision, with commas between; empty where
    there is none. Each new worker begins at another one, for one gives to one reader at a time."""
    if wanted.member:
        return ""
    alike = [pod for (kind, name), pod in sorted(live.items()) if kind == POD.kind and _gives(pod, wanted)]
    first = wanted.ordinal % len(alike) if alike else 0
    chosen = [*alike[first:], *alike[:first]][:MOST_SEED_PEERS]
    return ",".join(authority(pod["status"]["podIP"], port_of(pod, "kv", PORTS.side_channel)) for pod in chosen)


def _gives(pod: Object, wanted: PodWanted) -> bool:
    meta, status = pod["metadata"], pod.get("status") or {}
    marks, notes = meta.get("labels") or {}, meta.get("annotations") or {}
    if (marks.get(TIER), marks.get(ROLE), marks.get(REVISION)) != (wanted.tier, wanted.role, wanted.revision):
        return False
    if "deletionTimestamp" in meta or meta["name"] == wanted.name or notes.get(MEMBER, "0") != "0" or not status.get("podIP"):
        return False
    conditions = status.get("conditions") or []
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
