"""How many workers the routers' document has room for: it is one ConfigMap, and the API server takes no more than 1 MiB in one.
Pure.

It is not spread over several: routers of before follow the one, and would lose the workers that are in another, and what two
objects say is never said at once. So no tier grows beyond what fits (`CapacityLimited` says so); what is there already stays.
"""

from __future__ import annotations

from typing import Final

from fleet_api.v1alpha1 import InferenceFleet
from fleet_planner.roles import ROLES
from fleet_planner.scale_targets import target_name

MOST_BYTES: Final = 1_048_576
"""All values of a ConfigMap together, as the API server counts them."""
GROWTH_BYTES: Final = 917_504
"""Tiers grow up to 7/8 of that. The rest is for what comes beside them: the surge of a rollout, workers that drain or are absent,
the routers' configuration, which has some tens of kilobytes at the most."""
WORKER_BYTES: Final = 352
"""One worker without its name, its tier and its adapters: an IPv6 address and the longest words of each field."""
ADAPTER_BYTES: Final = 70
"""Beside an adapter's name: its digest, quotes, a colon and a comma."""
ORDINAL_BYTES: Final = len("-00000000-9999")


def worker_bytes(fleet: InferenceFleet) -> int:
    """At most, of one worker of this fleet in the document."""
    model = fleet.spec.model
    names = sorted((len(adapter.name) for adapter in model.adapters), reverse=True)
    loaded = names[: model.adapter_slots(fleet.spec.engine.type)]
    named = max(
        len(target_name(fleet.metadata.name, tier.name, role)) + len(tier.name) for tier in fleet.spec.tiers for role in ROLES
    )
    return WORKER_BYTES + ORDINAL_BYTES + named + sum(loaded) + ADAPTER_BYTES * len(loaded)


def workers_most(fleet: InferenceFleet) -> int:
    """So many may be made for load or somebody's /scale, of all tiers together."""
    return GROWTH_BYTES // worker_bytes(fleet)
