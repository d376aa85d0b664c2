"""What can be known to fail before anything starts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from pathlib import Path

from fleet_api.v1alpha1 import ClaimSource, FileSource, InferenceFleet, Source
from fleet_api.v1alpha1.model import located
from fleet_cli.errors import InputError, RunError


def check_model(fleet: InferenceFleet, claims: Mapping[str, Path]) -> None:
    """InputError when the folder of a tier's model, or of an adapter, is not on this machine; what is inside is the worker's
    business."""
    for index, tier in enumerate(fleet.spec.tiers):
        field = "spec.model.source" if tier.model is None else f"spec.tiers[{index}].model.source"
        _check_source(field, "model", fleet.model_of(tier).location, claims)
    for index, adapter in enumerate(fleet.spec.model.adapters):
        where = located(adapter.source, adapter.revision)
        _check_source(f"spec.model.adapters[{index}].source", "adapter", where, claims)


def _check_source(field: str, what: str, source: Source, claims: Mapping[str, Path]) -> None:
    match source:
        case FileSource(path=path):
            folder = Path(path)
        case ClaimSource(claim=claim, path=path):
            if claim not in claims:
                raise InputError(f"{field}: claim {claim} has no folder on this machine: give --pvc {claim}=DIR")
            folder = claims[claim] / path
        case _:
            return
    try:
        if not folder.exists():
            raise InputError(f"{field}: {what} path {folder} does not exist")
        if not folder.is_dir():
            raise InputError(f"{field}: {what} path {folder} is not a folder")
    except OSError as error:  # a name that is too long, a folder above it that may not be entered
        raise InputError(f"{field}: {what} path {folder}: {error.strerror}") from error


def check_engine(fleet: InferenceFleet, vllm: str | None) -> None:
    """InputError when the fleet wants vLLM and this machine has none."""
    if fleet.spec.engine.type == "vllm" and vllm is None:
        raise InputError("spec.engine.type: vllm is not installed here: run `make vllm`, or set FLEET_VLLM_BIN")


def check_port(port: int) -> None:
    """RunError when the endpoint's port cannot be bound on 127.0.0.1."""
    with socket.socket() as listener:
        # The router binds with this option too: without it a port that only lingers in TIME_WAIT would look busy.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RunError(f"port {port} on 127.0.0.1 is in use: stop what holds it or choose another with --port") from error
            raise RunError(f"port {port} on 127.0.0.1 cannot be used: {error.strerror}") from error
