"""Manifest dicts to typed resources: the edge where text becomes values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fleet_api.v1alpha1 import InferenceFleet, WorkerPool


class ManifestError(ValueError):
    """A manifest was refused; `errors` holds one message per problem, each starting with the field's path."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("; ".join(errors))
        self.errors = errors


def parse_fleet(manifest: Mapping[str, Any]) -> InferenceFleet:
    """The fleet of a manifest or API object; ManifestError names each field that is wrong."""
    try:
        return InferenceFleet.model_validate(dict(manifest))
    except ValidationError as error:
        raise ManifestError(_messages(error)) from error


def parse_pool(manifest: Mapping[str, Any]) -> WorkerPool:
    """The worker pool of an API object; ManifestError names each field that is wrong."""
    try:
        return WorkerPool.model_validate(dict(manifest))
    except ValidationError as error:
        raise ManifestError(_messages(error)) from error


def _messages(error: ValidationError) -> list[str]:
    return [f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}" for problem in error.errors()]
