"""What a manifest names and a cluster has: claims, Secrets, ConfigMaps. Here pods would wait for them for ever."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fleet_api.v1alpha1 import ClaimSource, HubSource, InferenceFleet
from fleet_api.v1alpha1.fleet import ROLES
from fleet_api.v1alpha1.model import located
from fleet_api.v1alpha1.podtemplate import PodTemplateSpec
from fleet_cli.errors import InputError

Object = dict[str, Any]
TOKEN_ENV = "HF_TOKEN"  # noqa: S105 - the name of a variable


def hub_secrets(fleet: InferenceFleet, environment: Mapping[str, str]) -> list[Object]:
    """The Secret of the fleet's token, from the variable that huggingface_hub reads; InputError when it is not set."""
    wanted = fleet.spec.model.token_secret_ref
    if wanted is None:
        return []
    token = environment.get(TOKEN_ENV, "").strip()
    if not token:
        raise InputError(f"spec.model.tokenSecretRef: there is no Secret {wanted.name} on this machine: set {TOKEN_ENV}")
    data = {wanted.key: base64.b64encode(token.encode()).decode()}
    metadata = {"name": wanted.name, "namespace": fleet.metadata.namespace}
    return [{"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}]


def check_named(fleet: InferenceFleet, claims: Mapping[str, Path], secrets: Iterable[Object]) -> None:
    """InputError names the first field that asks for what is neither among `claims` nor among `secrets`."""
    keys = {(one["metadata"]["name"], key) for one in secrets for key in one["data"]}
    for field, claim in _claims(fleet):
        if claim not in claims:
            raise InputError(f"{field}: claim {claim} has no folder on this machine: give --pvc {claim}=DIR")
    for field, kind, name, key in _objects(fleet):
        if kind == "ConfigMap" or not any(name == has and key in ("", one) for has, one in keys):
            wanted = f"{kind} {name}" + (f" with a key {key}" if key else "")
            raise InputError(f"{field}: there is no {wanted} on this machine: say its value here, or leave it out")


def _templates(fleet: InferenceFleet) -> Iterator[tuple[str, PodTemplateSpec]]:
    for index, tier in enumerate(fleet.spec.tiers):
        for role in ROLES:
            if (template := getattr(tier, role).pod_template) is not None:
                yield f"spec.tiers[{index}].{role}.podTemplate", template


def _claims(fleet: InferenceFleet) -> Iterator[tuple[str, str]]:
    """(field, claim) of each but those of sources, which preflight looks into."""
    model = fleet.spec.model
    hub = any(isinstance(fleet.model_of(tier).location, HubSource) for tier in fleet.spec.tiers)
    if hub and model.cache is not None and model.cache.type == "pvc" and model.cache.claim is not None:
        yield "spec.model.cache.claim", model.cache.claim
    if model.adapter_root is not None and isinstance(root := located(model.adapter_root, None), ClaimSource):
        yield "spec.model.adapterRoot", root.claim
    for field, template in _templates(fleet):
        for number, volume in enumerate(template.volumes):
            if volume.persistent_volume_claim is not None:
                yield f"{field}.volumes[{number}].persistentVolumeClaim", volume.persistent_volume_claim.claim_name


def _objects(fleet: InferenceFleet) -> Iterator[tuple[str, str, str, str]]:
    """(field, kind, name, key; empty: all of it)."""
    for field, template in _templates(fleet):
        for number, variable in enumerate(template.env):
            at, source = f"{field}.env[{number}].valueFrom", variable.value_from
            if source is not None and (ref := source.secret_key_ref) is not None:
                yield f"{at}.secretKeyRef", "Secret", ref.name, ref.key
            if source is not None and (ref := source.config_map_key_ref) is not None:
                yield f"{at}.configMapKeyRef", "ConfigMap", ref.name, ref.key
        for number, volume in enumerate(template.volumes):
            if volume.secret is not None:
                yield f"{field}.volumes[{number}].secret", "Secret", volume.secret.secret_name, ""
            if volume.config_map is not None:
                yield f"{field}.volumes[{number}].configMap", "ConfigMap", volume.config_map.name, ""
