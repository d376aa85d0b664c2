"""Worker pods: configuration, device request, model volume, probes, hooks, UCX and NIXL environment."""

from __future__ import annotations

import copy
from pathlib import PurePosixPath
from typing import Final

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.model import ClaimSource, FileSource, HubSource
from fleet_api.v1alpha1.tier import TierSpec
from fleet_operator.cluster.interface import Object
from fleet_operator.names import COMPAT, MEMBER, ORDINAL, POOL, REVISION, ROLE, TIER, labels
from fleet_operator.settings import Platform
from fleet_planner.types import PodWanted, Role, Template
from fleet_worker.config import CONFIG_ENV, KvSettings, Ports, WorkerConfig, encode

PORTS = Ports()
MODELS = "/models"
GRACE_SLACK_S = 15
"""Seconds after the drain for the engine to stop."""
POD_SECURITY: Final[Object] = {
    "runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
"""Without a group of its own a container runs in group 0."""
MIB: Final = 1024 * 1024
HOST_REQUESTS: Final = {"torch": (1, 1024 * MIB), "vllm": (2, 4096 * MIB)}
"""Cores and bytes of the host that an engine needs beside devices, cache and weights. Without any request a worker, and the GPU
that it holds, is the first that a node in need of memory evicts. No limits: the weights' size is not known here."""
STARTUP_FAILURES = 1_800
"""One-second startup probes: large models take half an hour to load."""


def render_pod(fleet: InferenceFleet, wanted: PodWanted, stored: Object, owner: Object) -> Object:
    """One worker pod of a stored revision (its ControllerRevision), owned by its WorkerPool."""
    marks = {TIER: wanted.tier, ROLE: wanted.role, REVISION: wanted.revision, POOL: wanted.pool}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": wanted.name,
            "namespace": fleet.metadata.namespace,
            "labels": labels(fleet.metadata.name, **marks),
            "annotations": {ORDINAL: str(wanted.ordinal), MEMBER: str(wanted.member), COMPAT: stored["data"]["compat"]},
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": copy.deepcopy(stored["data"]["pods"][wanted.role]),
    }


def owner_reference(owner: Object) -> Object:
    """Controller reference: deletion cascades."""
    meta = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": meta["name"], "uid": meta["uid"],
        "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip


def pod_spec(fleet: InferenceFleet, tier: TierSpec, role: Role, template: Template, platform: Platform) -> Object:
    """Everything of a worker pod that its revision fixes."""
    volume, mount, path = _model(fleet)
    container = {
        "name": "worker",
        "image": fleet.spec.engine.image or platform.worker_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["fleet-worker"],
        "env": _env(worker_config(fleet, tier, role, template, platform, path), tier),
        "ports": [
            {"name": "http", "containerPort": PORTS.http, "protocol": "TCP"},
            {"name": "agent", "containerPort": PORTS.agent, "protocol": "TCP"},
            {"name": "kv", "containerPort": PORTS.side_channel, "protocol": "TCP"},
            {"name": "kv-events", "containerPort": PORTS.kv_events, "protocol": "TCP"},
            {"name": "kv-replay", "containerPort": PORTS.kv_replay, "protocol": "TCP"},
        ],
        "startupProbe": _probe("/started", failures=STARTUP_FAILURES),
        "readinessProbe": _probe("/ready", failures=1),
        "livenessProbe": _probe("/live", failures=10),
        "lifecycle": {"preStop": {"httpGet": {"path": "/drain", "port": PORTS.agent, "scheme": "HTTP"}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [mount, {"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
        "resources": _resources(fleet, tier),
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
    }  # fmt: skip
    spec: Object = {
        "containers": [container],
        "volumes": [
            volume,
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "tmp", "emptyDir": {}},
        ],
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": round(drain_timeout_s(fleet, tier, platform)) + GRACE_SLACK_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
    }
    if tier.accelerator.device_request is not None:
        spec["tolerations"] = [{"key": tier.accelerator.device_request[0], "operator": "Exists", "effect": "NoSchedule"}]
    return spec


def drain_timeout_s(fleet: InferenceFleet, tier: TierSpec, platform: Platform) -> float:
    """Longest wait for streams and leases before a worker is told to stop."""
    asked = fleet.spec.rollout.drain_timeout_s(tier.kv_transfer.lease_duration_s, fleet.spec.limits.max_output_tokens)
    return min(asked, platform.drain_most_s)


def worker_config(
    fleet: InferenceFleet, tier: TierSpec, role: Role, template: Template, platform: Platform, path: str
) -> WorkerConfig:
    """The agent's configuration."""
    spec = fleet.spec
    return WorkerConfig(
        fleet=fleet.metadata.name,
        namespace=fleet.metadata.namespace,
        tier=tier.name,
        role=role,
        revision=template.revision,
        compat=template.compat,
        engine=spec.engine.type,
        engine_args=tuple(spec.engine.args),
        model=path,
        served_name=fleet.served_name,
        max_model_len=spec.engine.max_model_len,
        max_batch=spec.engine.max_batch,
        max_output_tokens=spec.limits.max_output_tokens,
        drain_timeout_s=drain_timeout_s(fleet, tier, platform),
        ports=PORTS,
        kv=KvSettings(
            transport=tier.kv_transfer.transport,
            lease_s=tier.kv_transfer.lease_duration_s,
            block_tokens=spec.engine.block_tokens,
            cache_bytes=spec.engine.cache_bytes,
        ),
    )


def _env(config: WorkerConfig, tier: TierSpec) -> list[Object]:
    def field(name: str, path: str) -> Object:
        return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}

    env = [
        {"name": CONFIG_ENV, "value": encode(config)},
        field("FLEET_POD_NAME", "metadata.name"),
        field("FLEET_POD_UID", "metadata.uid"),
        field("FLEET_POD_IP", "status.podIP"),
        field("VLLM_NIXL_SIDE_CHANNEL_HOST", "status.podIP"),
        {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(PORTS.side_channel)},
        {"name": "HOME", "value": "/tmp"},  # noqa: S108 - the one writable folder of a read-only root
    ]
    if (allowed := _ucx_transports(tier)) is not None:
        env.append({"name": "UCX_TLS", "value": allowed})
    return env


def _ucx_transports(tier: TierSpec) -> str | None:
    """What UCX may use; None: everything. Without cuda_copy it cannot touch the memory of a device at all."""
    allow = {"shm": "sm,self", "tcp": "tcp,self", "rdma": "rc,dc,ud,cuda_ipc,gdr_copy,sm,self"}
    allowed = allow.get(tier.kv_transfer.transport)
    return allowed if allowed is None or tier.accelerator.device_request is None else f"{allowed},cuda_copy"


def _probe(path: str, *, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": PORTS.agent, "scheme": "HTTP"},
        "periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": failures, "successThreshold": 1,
    }  # fmt: skip


def _resources(fleet: InferenceFleet, tier: TierSpec) -> Object:
    """The device, and what the engine needs of the host; on a CPU tier the KV cache lies in the host's memory."""
    device = tier.accelerator.device_request
    cores, memory = HOST_REQUESTS[fleet.spec.engine.type]
    memory += fleet.spec.engine.cache_bytes if device is None else 0
    host = {"cpu": str(cores), "memory": f"{-(-memory // MIB)}Mi"}
    if device is None:
        return {"requests": host}
    devices = {device[0]: str(device[1])}
    return {"limits": devices, "requests": {**host, **devices}}


def _model(fleet: InferenceFleet) -> tuple[Object, Object, str]:
    """(volume, mount, model path inside the container)."""
    source = fleet.spec.model.location
    if isinstance(source, FileSource):
        at = f"{MODELS}/{PurePosixPath(source.path).name}"
        volume = {"name": "model", "hostPath": {"path": source.path, "type": ""}}
        return volume, {"name": "model", "mountPath": at, "readOnly": True}, at
    if isinstance(source, ClaimSource):
        at = f"{MODELS}/{source.claim}"
        volume = {"name": "model", "persistentVolumeClaim": {"claimName": source.claim, "readOnly": True}}
        return volume, {"name": "model", "mountPath": at, "readOnly": True}, f"{at}/{source.path}".rstrip("/")
    return _hub(source)


def _hub(source: HubSource) -> tuple[Object, Object, str]:
    at = f"{MODELS}/hf"
    return {"name": "model", "emptyDir": {}}, {"name": "model", "mountPath": at}, f"hf://{source.repository}@{source.revision}"
