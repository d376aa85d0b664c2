"""Manifest dicts to typed resources: the edge where text becomes values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from fleet_api.compat import refusals
from fleet_api.crd import fleet_schema, pool_schema
from fleet_api.metadata import is_time
from fleet_api.schema import Schema, list_map, structural
from fleet_api.structure import findings, fitting_part, known_fields, normalised
from fleet_api.v1alpha1 import InferenceFleet, WorkerPool
from fleet_api.v1alpha1.base import ApiModel
from fleet_api.v1alpha1.status import FleetStatus, PoolStatus
from fleet_api.validate import validate

_TIMED = {"flip": "failedAt", "zero": "since"}
_ROLLOUT_TIMES = ("stepSince", "progressSince")
_STATUS = {"InferenceFleet": fleet_schema, "WorkerPool": pool_schema}


@cache
def _readable(model: type[ApiModel]) -> Schema:
    """What a status must be to be read. The CRD asks for less: not even a condition's status."""
    schema = structural(model)
    list_map(schema, "conditions", "type")
    return schema


_READABLE = {"InferenceFleet": partial(_readable, FleetStatus), "WorkerPool": partial(_readable, PoolStatus)}


class ManifestError(ValueError):
    """A manifest was refused; `errors` holds one message per problem, each starting with the field's path."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("; ".join(errors))
        self.errors = errors


def parse_fleet(manifest: Mapping[str, Any]) -> InferenceFleet:
    """The fleet of a manifest or API object; ManifestError names each field that is wrong, in the API server's words, and what
    CEL cannot judge (`compat.refusals`)."""
    accepted = _accepted(manifest, "InferenceFleet")
    if errors := refusals(accepted):
        raise ManifestError(errors)
    return InferenceFleet.model_validate(accepted)


def parse_pool(manifest: Mapping[str, Any]) -> WorkerPool:
    """The worker pool of an API object; ManifestError names each field that is wrong, in the API server's words."""
    return WorkerPool.model_validate(_accepted(manifest, "WorkerPool"))


def known_status(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The status without what a newer operator or CRD added (fields, or values that this one does not know), and without times
    that are none (a status that somebody edited or restored); empty when what is left is still not a status of ours.

    A status is the operator's own word, not the user's: after a downgrade it must not stop a fleet that runs.
    """
    status = manifest.get("status")
    if not isinstance(status, Mapping):
        return {}
    kind = str(manifest.get("kind", "InferenceFleet"))
    kept: dict[str, Any] = known_fields(normalised(status), _STATUS[kind]()["properties"]["status"])
    schema = _READABLE[kind]()
    if any(True for _ in findings(kept, schema)):
        kept = fitting_part(kept, schema) or {}
    return _with_times(kept)


def _with_times(status: dict[str, Any]) -> dict[str, Any]:
    """A state of which nobody knows the time is none; a rollout goes on, and its times begin anew."""
    conditions = [one for one in status.get("conditions") or () if is_time(one.get("lastTransitionTime"))]
    tiers = [
        {key: value for key, value in tier.items() if key not in _TIMED or is_time(value.get(_TIMED[key]))}
        for tier in status.get("tiers") or ()
    ]
    for tier in tiers:
        if "rollout" in tier:
            tier["rollout"] = {k: v for k, v in tier["rollout"].items() if k not in _ROLLOUT_TIMES or not v or is_time(v)}
        if not is_time(tier.get("startingSince")):
            tier.pop("startingSince", None)
        if "healing" in tier:
            replaced = tier["healing"].get("replaced") or ()
            tier["healing"] = {"replaced": [one for one in replaced if is_time(one.get("at"))]}
    found = {"conditions": conditions, "tiers": tiers}
    return {key: found.get(key, value) for key, value in status.items()}


def _accepted(manifest: Mapping[str, Any], kind: str) -> dict[str, Any]:
    wish = {name: value for name, value in manifest.items() if name != "status"} | {"kind": kind}
    if errors := validate(wish):
        raise ManifestError(errors)
    accepted: dict[str, Any] = normalised(wish)
    if "status" in manifest:
        accepted["status"] = known_status({**manifest, "kind": kind})
    if not accepted["metadata"].get("namespace", "default"):
        del accepted["metadata"]["namespace"]  # as kubectl: an empty one is none
    return accepted
