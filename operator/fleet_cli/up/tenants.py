"""Tenants of a local fleet: the Secret that a cluster would have, from a file, and a key for `fleet up` itself."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_api.v1alpha1 import InferenceFleet
from fleet_cli.errors import InputError
from fleet_router.admission.tenants import TenantsError, parse_tenants

OWN_TENANT = "fleet-up"
"""What `fleet up` asks as when it proves that its fleet works; known to no other router."""


@dataclass(frozen=True, slots=True, repr=False)
class LocalTenants:
    """What a fleet with tenants needs besides its manifest."""

    secret: dict[str, Any]
    key: str
    """Of OWN_TENANT, made for this run and never shown."""


def local_tenants(fleet: InferenceFleet, file: Path | None) -> LocalTenants | None:
    """None for a fleet that everybody may ask; InputError when the file is missing, not needed or wrong."""
    asked = fleet.spec.tenants
    if asked is None:
        if file is not None:
            raise InputError("--tenants: the manifest has no spec.tenants, so that everybody may ask")
        return None
    name = asked.secret_ref.name
    if file is None:
        raise InputError(f"spec.tenants.secretRef: there is no Secret {name} on this machine; give its file with --tenants FILE")
    try:
        raw = file.read_bytes()
        parse_tenants(raw)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except TenantsError as error:
        raise InputError(f"{file}: {error}") from error
    key = f"sk-{secrets.token_hex(24)}"
    content = json.loads(raw)
    own = {"name": OWN_TENANT, "keys": ["sha256:" + hashlib.sha256(key.encode()).hexdigest()]}
    content["tenants"] = [*(one for one in content.get("tenants", []) if one["name"] != OWN_TENANT), own]
    data = {asked.secret_ref.key: base64.b64encode(json.dumps(content).encode()).decode()}
    metadata = {"name": name, "namespace": fleet.metadata.namespace}
    return LocalTenants({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}, key)
