"""What a fleet's routers need on one machine besides its manifest: a key for gossip. TLS is for a cluster."""

from __future__ import annotations

import base64
import secrets
from typing import Any

from fleet_api.v1alpha1 import InferenceFleet
from fleet_cli.errors import InputError


def router_secrets(fleet: InferenceFleet) -> list[dict[str, Any]]:
    """A gossip key of this run alone, where the fleet asks for one; InputError when it asks for TLS or for several
    routers."""
    routing = fleet.spec.routing
    if routing.tls is not None:
        raise InputError("spec.routing.tls: fleet up speaks plain HTTP on this machine's loopback; its certificates are a Secret "
                         "of a cluster")  # fmt: skip
    if routing.replicas > 1:
        raise InputError(
            "spec.routing.replicas: fleet up has one port of this machine and runs one router on it: leave it out or 1"
        )
    if routing.gossip is None:
        return []
    wanted = routing.gossip.key_secret_ref
    data = {wanted.key: base64.b64encode(secrets.token_hex(32).encode()).decode()}
    metadata = {"name": wanted.name, "namespace": fleet.metadata.namespace}
    return [{"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}]
