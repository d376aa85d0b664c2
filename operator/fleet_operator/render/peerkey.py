"""The key that a fleet's pods share, in a pod: a file that may be missing and come later, so that no pod waits for it, and a
variable that images pass over which do not know it."""

from __future__ import annotations

import hashlib
from typing import Final

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.port import PEER_KEY
from fleet_operator.cluster.interface import Object
from fleet_planner.peerkey import told
from fleet_wire.peerkey import HANDOFF_PROOF_ENV, HANDOFF_REQUIRED, PEER_KEY_ENV

KEY: Final = PEER_KEY
MOUNT: Final = "/etc/fleet-peer-key"
VOLUME: Final = "fleet-peer-key"


def peer_key_name(fleet: InferenceFleet) -> str:
    """Of the Secret that the operator makes. A fleet that is deleted and made again has another one: the old one is going."""
    life = hashlib.blake2b(fleet.metadata.uid.encode(), digest_size=4).hexdigest()
    return f"{fleet.metadata.name}-peers-{life}"


def key_in(pods: Object, fleet: str) -> str | None:
    """`told` of the key that pods of these stored specs have, by role; None: they have none, or somebody made those specs."""
    try:
        mounted = next(volume["secret"] for volume in pods["prefill"]["volumes"] if volume["name"] == VOLUME)
        return told(fleet, mounted["secretName"], mounted["items"][0]["key"])
    except (LookupError, TypeError, StopIteration):
        return None


def guard_hand_off(fleet: InferenceFleet, container: Object, spec: Object) -> None:
    """Of a worker: with the key, it gives KV to nobody who does not prove it. Its compatibility hash says so, too."""
    mount_peer_key(fleet, container, spec)
    container["env"] = [*container["env"], {"name": HANDOFF_PROOF_ENV, "value": HANDOFF_REQUIRED}]


def mount_peer_key(fleet: InferenceFleet, container: Object, spec: Object) -> None:
    """Variable, mount and volume."""
    given = fleet.spec.peer_key.secret_ref if fleet.spec.peer_key is not None else None
    name, key = (given.name, given.key) if given is not None else (peer_key_name(fleet), KEY)
    container["env"] = [*container.get("env", []), {"name": PEER_KEY_ENV, "value": f"{MOUNT}/key"}]
    mount = {"name": VOLUME, "mountPath": MOUNT, "readOnly": True}
    container["volumeMounts"] = [*container.get("volumeMounts", []), mount]
    source = {"secretName": name, "items": [{"key": key, "path": "key"}], "defaultMode": 0o444, "optional": True}
    spec["volumes"] = [*spec.get("volumes", []), {"name": VOLUME, "secret": source}]
