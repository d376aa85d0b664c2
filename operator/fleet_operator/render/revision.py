"""Revisions: what a tier's pods are made from, kept as a ControllerRevision so that it can be made again.

A revision is named by a hash over what the user wrote, not over the manifests that follow from it: another version of the
operator that renders pods differently, or has another default image, restarts nothing. Pods of a revision are always made from
the spec that was stored when the revision first appeared, also when a rollout goes back to it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import is_
from types import MappingProxyType
from typing import Any, Final

import msgspec

from fleet_api.compat import kv_settings
from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.tier import PRICE_MOST, TierSpec
from fleet_operator.cluster.interface import Object
from fleet_operator.cluster.merge import clone
from fleet_operator.names import FLEET, GROUP, REVISION, TIER, labels, owner_reference
from fleet_operator.render import fabric
from fleet_operator.render.gang import gang_of
from fleet_operator.render.peerkey import key_in
from fleet_operator.render.worker import pod_spec
from fleet_operator.settings import Platform
from fleet_planner.peerkey import hands_over, wished
from fleet_planner.roles import ROLES
from fleet_planner.types import Template
from fleet_worker.config import CONFIG_ENV, decode, encode

RESTARTED_AT: Final = f"{GROUP}/restarted-at"
"""Annotation of a fleet: another value is another revision, as after `kubectl rollout restart`."""
SPEC_PARTS: Final = ("model", "engine")
"""Parts of a fleet's spec that a running pod cannot change."""
SIZING: Final = frozenset({"replicas", "minReplicas", "maxReplicas", "warm"})
STARTED_ANEW: Final = MappingProxyType({"torch": False, "vllm": True})
"""Engines whose workers can change their role, and whether the engine is started once more for that: vLLM 0.32 is told its role
when it starts."""
KEPT: Final = frozenset({"pods", "compat", "gpus", "nodes"})
"""Every stored template has these; its data cannot be edited (the API server refuses that)."""
BOTH: Final = frozenset(ROLES)
MARKS: Final = frozenset({"labels", "annotations"})
NOT_OF_PODS: Final = frozenset({"ratio", "model", "cost"})
"""Fields of a tier that change no pod; whatever is not named here makes a new revision. The tier's model is in `model`: one that
says what spec.model says changes nothing."""


def revision_inputs(fleet: InferenceFleet, tier: TierSpec, *, keyed: bool = False) -> dict[str, Any]:
    """Everything of a fleet that a tier's pods depend on; what equals its default is left out, so writing it changes nothing.
    `keyed`: its key, too, where that is left out (`_key_apart`)."""
    spec = fleet.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    mine = tier.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    shape = {key: value for key, value in mine.items() if key not in NOT_OF_PODS}
    spec["model"] = fleet.model_of(tier).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    spec["model"].pop("adapters", None)  # they come and go while workers run
    spec["model"].get("cache", {}).pop("prefetch", None)
    for role in ("prefill", "decode"):
        shape[role] = _without_marks({key: value for key, value in shape.get(role, {}).items() if key not in SIZING})
    if keyed or ("peerKey" in spec and fleet.spec.engine.type == "torch" and not _key_apart(fleet, tier)):
        shape["peerKey"] = spec.get("peerKey", {})
    return {
        **{part: spec[part] for part in SPEC_PARTS if part in spec},
        "servedName": fleet.served_name,
        "drainTimeout": fleet.spec.rollout.drain_timeout or "",
        "maxOutputTokens": fleet.spec.limits.max_output_tokens,
        "restartedAt": fleet.metadata.annotations.get(RESTARTED_AT, ""),
        "tier": shape,
    }


def _without_marks(role: dict[str, Any]) -> dict[str, Any]:
    """A role without labels and annotations of its pods: they restart nothing."""
    template = {key: value for key, value in role.get("podTemplate", {}).items() if key not in MARKS}
    rest = {key: value for key, value in role.items() if key != "podTemplate"}
    return {**rest, "podTemplate": template} if template else rest


def _key_apart(fleet: InferenceFleet, tier: TierSpec) -> bool:
    """Where seeding is off, workers once had no key: naming one must not give those another revision that had it all along."""
    seed = tier.kv_transfer.seed
    return fleet.spec.engine.type == "torch" and seed is not None and not seed.enabled


def revision_of(fleet: InferenceFleet, tier: TierSpec) -> str:
    """Name of the revision that the spec asks for, as far as the spec alone can tell (see `template_of`)."""
    return _digest(revision_inputs(fleet, tier))[:8]


def _with_its_key(fleet: InferenceFleet, tier: TierSpec, stored: dict[str, Template], revision: str) -> str:
    """`revision`, or the one with the fleet's key in its name where pods of that name have another key than the spec asks for.
    Those without any keep their revision: an upgrade restarts nothing, and the status tells of them."""
    plain = stored.get(revision)
    if not stored or not _key_apart(fleet, tier) or (plain is not None and plain.key in (None, wished(fleet))):
        return revision
    keyed = _digest(revision_inputs(fleet, tier, keyed=True))[:8]
    return revision if plain is None and keyed not in stored else keyed


def template_of(
    fleet: InferenceFleet, tier: TierSpec, stored: dict[str, Template], platform: Platform, revision: str = ""
) -> Template:
    """The template that the spec asks for: the stored one when this revision existed before. `revision`: `revision_of`, where
    the caller knows it already."""
    revision = _with_its_key(fleet, tier, stored, revision or revision_of(fleet, tier))
    if revision in stored:
        return stored[revision]
    prefill, decode = (device[1] if (device := tier.device_request(role)) is not None else 0 for role in ROLES)
    number = 1 + max((template.number for template in stored.values()), default=0)
    nodes = tier.nodes_of("prefill"), tier.nodes_of("decode")
    price = tier.cost.per_gpu_hour if tier.cost is not None else None
    compat = compat_of(fleet, tier, platform)
    key = wished(fleet) if hands_over(fleet) else None
    template = Template(revision, compat, gpus=(prefill, decode), nodes=nodes, number=number, price=price, key=key)
    if not _flippable(fleet, tier, template, platform):
        return template
    return replace(template, flippable=True, starts_anew=STARTED_ANEW[fleet.spec.engine.type])


def _flippable(fleet: InferenceFleet, tier: TierSpec, template: Template, platform: Platform) -> bool:
    """The pods of both roles are equal apart from the role, one pod and equal devices each, and the engine can do both."""
    if fleet.spec.engine.type not in STARTED_ANEW or set(template.nodes) != {1} or len(set(template.gpus)) != 1:
        return False
    prefill, decode = (pod_spec(fleet, tier, role, template, platform) for role in ROLES)
    return _without_role(prefill) == _without_role(decode) and tier.prefill.pod_template == tier.decode.pod_template


def _without_role(spec: Object) -> Object:
    """A worker pod's spec, its configuration as that of a prefill worker."""
    plain: Object = clone(spec)
    for container in plain["containers"]:
        for item in container.get("env", ()):
            if item["name"] == CONFIG_ENV:
                item["value"] = encode(msgspec.structs.replace(decode(item["value"]), role="prefill"))
    return plain


def compat_of(fleet: InferenceFleet, tier: TierSpec, platform: Platform) -> str:
    """Equal on both sides of a hand-off, or no KV moves."""
    model = fleet.model_of(tier)
    agreed: dict[str, Any] = {
        "engine": fleet.spec.engine.type,
        "image": fleet.spec.engine.image or platform.worker_image,
        "model": model.source,
        "revision": model.revision,
        "block_tokens": fleet.spec.engine.block_tokens,
        "kv_cache_dtype": fleet.spec.engine.kv_cache_dtype,
        "quantization": tier.quantization,
    }
    spec = fleet.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if settings := kv_settings(spec, fleet.spec.tiers.index(tier)):  # fleets without any keep the hash that they always had
        agreed["kv"] = settings
    if hands_over(fleet):  # workers that ask for a proof never pair with those that know none, nor with those of another Secret
        named = fleet.spec.peer_key
        agreed["proven"] = named.secret_ref.to_dict() if named is not None else {}
    return _digest(agreed)[:16]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def revision_name(fleet: str, tier: str, revision: str) -> str:
    """Name of the ControllerRevision."""
    return f"{fleet}-{tier}-{revision}"


def render_revision(fleet: InferenceFleet, tier: TierSpec, template: Template, platform: Platform, owner: Object) -> Object:
    """The ControllerRevision of a revision that is new. Its data can never be changed."""
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": revision_name(fleet.metadata.name, tier.name, template.revision),
            "namespace": fleet.metadata.namespace,
            "labels": labels(fleet.metadata.name, **{TIER: tier.name, REVISION: template.revision}),
            "ownerReferences": [owner_reference(owner)],
        },
        "revision": template.number,
        "data": {
            "compat": template.compat,
            "gpus": list(template.gpus),
            "nodes": list(template.nodes),
            "flippable": template.flippable,
            **({"startsAnew": True} if template.starts_anew else {}),
            **({"perGpuHour": _written(template.price)} if template.price is not None else {}),
            "pods": {role: pod_spec(fleet, tier, role, template, platform) for role in ROLES},
            "inputs": revision_inputs(fleet, tier, keyed=template.revision != revision_of(fleet, tier)),
            **_fabric_of(tier),
        },
    }


def _fabric_of(tier: TierSpec) -> dict[str, Any]:
    """What of fabric and groups is not in a pod's spec; absent where the tier does not ask for it."""
    transfer, claims = tier.kv_transfer, fabric.claim_spec(tier)
    gangs = {role: gang for role in ROLES if (gang := gang_of(tier, role))}
    return {
        **({"gangs": gangs} if gangs else {}),
        **({"networks": networks} if (networks := fabric.networks(tier)) else {}),
        **({"hostPorts": transfer.host_ports.first} if transfer.host_ports is not None else {}),
        **({"claims": claims} if claims is not None else {}),
    }


def observe_revisions(objects: Iterable[Object]) -> dict[str, dict[str, Template]]:
    """By tier and revision; an object that is not one of ours is passed over."""
    found: dict[str, dict[str, Template]] = {}
    for obj in objects:
        at, data = place_of(obj), obj.get("data") or {}
        if at is not None:
            template = Template(
                at[1], data["compat"], tuple(data["gpus"]), tuple(data["nodes"]), int(obj.get("revision", 0)),
                data.get("flippable") is True, data.get("startsAnew") is True,  # workers of older operators cannot
                _price(data.get("perGpuHour")),  # nor did they keep one
                key_in(data["pods"], obj["metadata"]["labels"].get(FLEET, "")),
            )  # fmt: skip
            found.setdefault(at[0], {})[at[1]] = template
    return found


@dataclass(slots=True)
class RevisionsSeen:
    """Of one fleet: the stored templates as they were last observed, and from what. Objects of the cache never change in place.
    All of it may be lost: then they are read once more."""

    objects: list[Object] = field(default_factory=list)
    found: dict[str, dict[str, Template]] = field(default_factory=dict)

    def look(self, objects: list[Object]) -> dict[str, dict[str, Template]]:
        """Like `observe_revisions`."""
        if len(objects) != len(self.objects) or not all(map(is_, objects, self.objects)):
            self.objects, self.found = objects, observe_revisions(objects)
        return self.found


def _written(price: float) -> float | int:
    """As the API server writes it (`cluster.kube_http.as_go_writes`)."""
    return int(price) if price.is_integer() else price


def _price(told: object) -> float | None:
    """None where it is none: somebody may have made that object."""
    if isinstance(told, bool) or not isinstance(told, int | float):
        return None
    return float(told) if 0 <= told <= PRICE_MOST else None


def place_of(stored: Object) -> tuple[str, str] | None:
    """(tier, revision) of a stored template; None: somebody took its labels, it is none of ours, or somebody made it by hand, and
    no pod can be made from it."""
    marks, data = stored["metadata"].get("labels") or {}, stored.get("data") or {}
    ours = TIER in marks and REVISION in marks and isinstance(data, dict) and data.keys() >= KEPT
    return (marks[TIER], marks[REVISION]) if ours and _is_whole(data) else None


def _is_whole(data: dict[str, Any]) -> bool:
    """Its counts are a pair of counts, both roles have pods, and what it was made from can be looked up, if it says that."""
    counted = _is_pair(data["gpus"]) and _is_pair(data["nodes"])
    named = isinstance(data["compat"], str) and isinstance(data["pods"], dict) and data["pods"].keys() >= BOTH
    return counted and named and isinstance(made := data.get("inputs", {}), dict) and isinstance(made.get("model", {}), dict)


def _is_pair(told: object) -> bool:
    """Of whole numbers, each at least 0; True is none."""
    if not isinstance(told, list) or len(told) != len(BOTH):
        return False
    first, second = told
    return type(first) is int and type(second) is int and first >= 0 and second >= 0
