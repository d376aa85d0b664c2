"""Pods that fetch a tier's model into a node's cache: with image, account, volume, user, token, tolerations of its workers."""

from __future__ import annotations

from typing import Final

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.podtemplate import PodTemplateSpec
from fleet_operator.cluster.interface import Object
from fleet_operator.names import FETCH, FETCH_CONTAINER, FETCH_NODE, FETCH_ROLE, ROLE, TIER, labels, owner_reference
from fleet_operator.render.template import extend_volumes, rendered, security, tolerations
from fleet_operator.render.worker import model_volumes, token_env
from fleet_operator.settings import Platform
from fleet_planner.prefetch import model_key
from fleet_planner.roles import ROLES
from fleet_planner.types import FetchWanted
from fleet_worker.config import FETCH_ENV
from fleet_worker.weightfiles import WEIGHTS_ENV, Reads, read_by

REQUESTS: Final = {"cpu": "200m", "memory": "512Mi"}
DEADLINE_S: Final = 6 * 3600
"""A fetch that takes longer has failed."""


def render_fetch(fleet: InferenceFleet, wanted: FetchWanted, owner: Object, platform: Platform) -> Object:
    """One pod, bound to its node by affinity, so that the scheduler still has its say."""
    tier = fleet.tier(wanted.tier)
    added = [template for role in ROLES if (template := tier.role(role).pod_template) is not None]
    template = added[0] if added else PodTemplateSpec()
    model = fleet.model_of(tier)
    volumes, mounts, source = model_volumes(model)
    devices = dict.fromkeys(device[0] for role in ROLES if (device := tier.device_request(role)) is not None)
    spec: Object = {
        "containers": [
            {
                "name": FETCH_CONTAINER,
                "image": fleet.spec.engine.image or platform.worker_image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["fleet-worker", "fetch"],
                "env": [
                    {"name": FETCH_ENV, "value": source},
                    {"name": WEIGHTS_ENV, "value": _read(fleet, wanted.key)},
                    {"name": "HOME", "value": "/tmp"},  # noqa: S108 - the one writable folder of a read-only root
                    *token_env(model),
                    *(rendered(variable) for variable in template.env),
                ],
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": [*mounts[:1], {"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
                "resources": {"requests": REQUESTS},
                "securityContext": {
                    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
        "volumes": [*volumes[:1], {"name": "tmp", "emptyDir": {}}],
        "restartPolicy": "Never",
        "activeDeadlineSeconds": DEADLINE_S,
        "terminationGracePeriodSeconds": 5,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": security(template, shared_group=False),
        "affinity": _only(wanted.node),
    }  # fmt: skip
    extend_volumes(spec, template, claims=False)  # its variables may name files there, such as the certificates of a proxy
    own = [{"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in devices]
    if found := [*own, *(toleration for one in added for toleration in tolerations(one))]:
        spec["tolerations"] = [toleration for index, toleration in enumerate(found) if toleration not in found[:index]]
    if template.service_account_name is not None:  # for its pull rights; no token is mounted
        spec["serviceAccountName"] = template.service_account_name
    if template.image_pull_secrets:
        spec["imagePullSecrets"] = [rendered(secret) for secret in template.image_pull_secrets]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": wanted.name,
            "namespace": fleet.metadata.namespace,
            "labels": labels(fleet.metadata.name, **{TIER: wanted.tier, ROLE: FETCH_ROLE, FETCH: wanted.key}),
            "annotations": {FETCH_NODE: wanted.node},
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": spec,
    }


def _read(fleet: InferenceFleet, key: str) -> Reads:
    """What of a model the engines of all tiers that have it read."""
    engine, found = fleet.spec.engine, set[Reads]()
    for tier in fleet.spec.tiers:
        if model_key(fleet.model_of(tier)) == key:
            found |= {read_by(engine.type, (*engine.args, *tier.role(role).args), tier.quantization) for role in ROLES}
    return found.pop() if len(found) == 1 else "all"


def fetches_ahead(raw: Object) -> bool:
    """Whether a fleet, as the API has it, may have such pods. It may be one that was stored before its CRD was what it is."""
    found: object = raw
    for name in ("spec", "model", "cache"):
        found = found.get(name) if isinstance(found, dict) else None
    return isinstance(found, dict) and found.get("type") == "nodeLocal"


def _only(node: str) -> Object:
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
