"""What a fleet's objects say, freed from what differs between two equal fleets: uids, addresses, times, generated names."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fleet_operator.names import SEED_PEERS

Objects = dict[tuple[str, str], dict[str, Any]]
"""(kind, name) -> object."""
VOLATILE_META = frozenset({
    "uid", "resourceVersion", "creationTimestamp", "managedFields", "generation", "selfLink", "namespace", "deletionTimestamp",
    "deletionGracePeriodSeconds",
})  # fmt: skip
NUDGE = "example.com/nudge"
"""A note on a fleet that means nothing."""
VOLATILE_NOTES = frozenset({"inferencefleet.io/applied", SEED_PEERS, NUDGE})
"""Whom a new worker may ask for hot prefixes: who was ready in the moment in which its pod was made."""
HASH = "pod-template-hash"
"""Of a router's pods: another one for the same template when a ReplicaSet of a Deployment of the same name is still being
collected (the controller's collisionCount). The Deployment, with its template, is compared itself."""
VOLATILE_SPEC = frozenset({"clusterIP", "clusterIPs", "ipFamilies", "nodeName"})
TIMES = frozenset(
    {
        "lastTransitionTime",
        "lastHeartbeatTime",
        "startTime",
        "startedAt",
        "lastProbeTime",
        "observedGeneration",
        "progressSince",
        "stepSince",
        "since",
    }
)


def comparable(objects: Objects, also: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Equal for equal fleets. `also` replaces further texts, e.g. a namespace or a revision by a word."""
    swaps = dict(also or {})
    for (kind, name), found in objects.items():
        swaps[found["metadata"]["uid"]] = f"uid-of-{kind}-{_stable_name(found)}"
        if address := (found.get("status") or {}).get("podIP"):
            swaps[address] = f"address-of-{_stable_name(found)}"
        if "generateName" in found["metadata"]:
            swaps[name] = _stable_name(found)
        if template := (found["metadata"].get("labels") or {}).get(HASH):
            swaps[template] = "TEMPLATE"
    bare = [(f"{kind}/{_stable_name(o)}", _bare(o)) for (kind, _), o in objects.items()]
    twice = Counter(key for key, _ in bare)
    text = json.dumps({**dict(bare), **{f"{key} twice": count for key, count in twice.items() if count > 1}}, sort_keys=True)
    for old in sorted(swaps, key=len, reverse=True):
        text = text.replace(old, swaps[old])
    text = re.sub(r"kube-api-access-[a-z0-9]{5}", "kube-api-access", text)
    text = re.sub(r"-peers-[0-9a-f]{8}\b", "-peers-LIFE", text)  # the Secret of this life of the fleet
    text = re.sub(r'(\\"seal\\":\\")[0-9a-f]{16}', r"\1SEAL", text)  # of a template that names it
    found: dict[str, Any] = json.loads(text)
    return found


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two comparable states differ, one line each."""
    if isinstance(left, dict) and isinstance(right, dict):
        lines = []
        for key in sorted(left.keys() | right.keys()):
            lines += differences(left.get(key, "absent"), right.get(key, "absent"), f"{path}.{key}" if path else key)
        return lines
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return [line for i, (a, b) in enumerate(zip(left, right, strict=True)) for line in differences(a, b, f"{path}[{i}]")]
    return [] if left == right else [f"{path}: {json.dumps(left)[:300]} != {json.dumps(right)[:300]}"]


def _stable_name(found: Mapping[str, Any]) -> str:
    meta = found["metadata"]
    return str(meta["generateName"] + "*" if "generateName" in meta else meta["name"])


def _bare(found: dict[str, Any]) -> dict[str, Any]:
    meta = copy.deepcopy({key: value for key, value in found["metadata"].items() if key not in VOLATILE_META})
    for owner in meta.get("ownerReferences", []):
        owner.pop("uid")  # the sweep judges who owns what by name; a Deployment's ReplicaSet is not among our objects
    notes = {key: value for key, value in (meta.pop("annotations", None) or {}).items() if key not in VOLATILE_NOTES}
    spec = {key: value for key, value in (found.get("spec") or {}).items() if key not in VOLATILE_SPEC}
    rest = {key: value for key, value in found.items() if key not in ("metadata", "spec", "status")}
    kept = {**rest, "metadata": {**meta, "annotations": notes}, "spec": spec}
    if found["kind"] == "ConfigMap":
        kept["data"] = {name: json.loads(text) for name, text in found.get("data", {}).items()}
    if found["kind"] in ("InferenceFleet", "WorkerPool"):
        kept["status"] = _timeless(found.get("status") or {})
    bare: dict[str, Any] = kept
    return bare


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if key not in TIMES}
    if isinstance(value, list):
        return [_timeless(item) for item in value]
    return value
