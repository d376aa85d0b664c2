"""Manifest dicts to typed resources: the edge where text becomes values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet_api.structure import normalised
from fleet_api.v1alpha1 import InferenceFleet, WorkerPool
from fleet_api.validate import validate


class ManifestError(ValueError):
    """A manifest was refused; `errors` holds one message per problem, each starting with the field's path."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("; ".join(errors))
        self.errors = errors


def parse_fleet(manifest: Mapping[str, Any]) -> InferenceFleet:
    """The fleet of a manifest or API object; ManifestError names each field that is wrong, in the API server's words."""
    return InferenceFleet.model_validate(_accepted(manifest, "InferenceFleet"))


def parse_pool(manifest: Mapping[str, Any]) -> WorkerPool:
    """The worker pool of an API object; ManifestError names each field that is wrong, in the API server's words."""
    return WorkerPool.model_validate(_accepted(manifest, "WorkerPool"))


def _accepted(manifest: Mapping[str, Any], kind: str) -> dict[str, Any]:
    if errors := validate({**manifest, "kind": kind}):
        raise ManifestError(errors)
    accepted: dict[str, Any] = normalised(manifest)
    if not accepted["metadata"].get("namespace", "default"):
        del accepted["metadata"]["namespace"]  # as kubectl: an empty one is none
    return accepted
