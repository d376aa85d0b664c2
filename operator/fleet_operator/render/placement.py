"""placement → affinity of a tier's pods, with the terms of a podTemplate behind it."""

from __future__ import annotations

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.tier import Role, TierSpec
from fleet_operator.cluster.interface import Object
from fleet_operator.names import FLEET, NAMESPACE, TIER

WEIGHT = 100
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def affinity(fleet: InferenceFleet, tier: TierSpec, role: Role) -> Object:
    """spec.affinity of a pod; empty when nobody asked for any."""
    found = _placed(fleet, tier)
    template = tier.role(role).pod_template
    if template is not None and template.affinity is not None:
        for kind, terms in template.affinity.model_dump(mode="json", by_alias=True, exclude_defaults=True).items():
            for strength, more in terms.items():
                mine = found.setdefault(kind, {})
                mine[strength] = [*mine.get(strength, []), *more] if isinstance(more, list) else more
    return found


def _placed(fleet: InferenceFleet, tier: TierSpec) -> Object:
    """Near the tier's own workers; with exclusive, far from all others. Routers are nobody's neighbours: they have no tier."""
    wanted = tier.placement
    if wanted is None or wanted.topology_key is None:
        return {}
    name, key = fleet.metadata.name, wanted.topology_key
    near = {"labelSelector": {"matchLabels": {FLEET: name, TIER: tier.name}}, "topologyKey": key}
    required = wanted.policy == "required"
    found: Object = {
        "podAffinity": {REQUIRED: [near]} if required else {PREFERRED: [{"weight": WEIGHT, "podAffinityTerm": near}]}
    }
    if wanted.exclusive:
        namesakes = _namesakes(name, fleet.metadata.namespace, key)
        found["podAntiAffinity"] = {REQUIRED: [_other_fleets(name, key), namesakes, _other_tiers(name, tier.name, key)]}
    return found


def _other_fleets(fleet: str, key: str) -> Object:
    """Workers of other fleets, in this and in every other namespace."""
    others = [{"key": TIER, "operator": "Exists"}, {"key": FLEET, "operator": "NotIn", "values": [fleet]}]
    return {"labelSelector": {"matchExpressions": others}, "namespaceSelector": {}, "topologyKey": key}


def _namesakes(fleet: str, namespace: str, key: str) -> Object:
    """Workers of fleets of this name in other namespaces: by a label of theirs, for kube-scheduler 1.34 to 1.36 misreads a
    namespaceSelector with NotIn (kubernetes#141526). Those that were made before there was such a label are not met."""
    others = [{"key": NAMESPACE, "operator": "Exists"}, {"key": NAMESPACE, "operator": "NotIn", "values": [namespace]}]
    namesakes = {"matchLabels": {FLEET: fleet}, "matchExpressions": others}
    return {"labelSelector": namesakes, "namespaceSelector": {}, "topologyKey": key}


def _other_tiers(fleet: str, tier: str, key: str) -> Object:
    others = [{"key": TIER, "operator": "Exists"}, {"key": TIER, "operator": "NotIn", "values": [tier]}]
    return {"labelSelector": {"matchLabels": {FLEET: fleet}, "matchExpressions": others}, "topologyKey": key}
