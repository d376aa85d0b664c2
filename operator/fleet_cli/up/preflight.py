"""What can be known to fail before anything starts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from pathlib import Path

from fleet_api.v1alpha1 import ClaimSource, FileSource, InferenceFleet
from fleet_cli.errors import InputError, RunError


def check_model(fleet: InferenceFleet, claims: Mapping[str, Path]) -> None:
    """InputError when the model's folder is not on this machine; what is inside is the worker's business."""
    match fleet.spec.model.location:
        case FileSource(path=path):
            folder = Path(path)
        case ClaimSource(claim=claim, path=path):
            if claim not in claims:
                raise InputError(f"spec.model.source: claim {claim} has no folder on this machine: give --pvc {claim}=DIR")
            folder = claims[claim] / path
        case _:
            return
    if not folder.exists():
        raise InputError(f"spec.model.source: model path {folder} does not exist")
    if not folder.is_dir():
        raise InputError(f"spec.model.source: model path {folder} is not a folder")


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
