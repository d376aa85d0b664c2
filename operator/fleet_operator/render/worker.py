"""Worker pods: configuration, device request, model volume, probes, hooks, UCX and NIXL environment."""

from __future__ import annotations

from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec import UNSET

from fleet_api.host import host_requests
from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.model import ClaimSource, FileSource, HubSource, ModelCacheSpec, ModelSpec, Source
from fleet_api.v1alpha1.podtemplate import PodTemplateSpec
from fleet_api.v1alpha1.tier import TierSpec
from fleet_operator.cluster.interface import Object
from fleet_operator.cluster.merge import clone
from fleet_operator.names import (
    ADAPTERS,
    COMPAT,
    MEMBER,
    NAMESPACE,
    ORDINAL,
    POOL,
    REVISION,
    ROLE,
    SEED_PEERS,
    TIER,
    labels,
    owner_reference,
)
from fleet_operator.render import fabric
from fleet_operator.render.gang import environment, join_gang
from fleet_operator.render.network import container_ports, worker_ports
from fleet_operator.render.peerkey import guard_hand_off
from fleet_operator.render.placement import affinity
from fleet_operator.render.seed import Live, seed_peers, seed_settings
from fleet_operator.render.template import extend_pod, security
from fleet_operator.settings import Platform
from fleet_planner.adapters import wishes
from fleet_planner.peerkey import hands_over
from fleet_planner.roles import Role
from fleet_planner.types import Template
from fleet_planner.wanted import PodWanted
from fleet_worker.config import (
    ADAPTERS_ENV,
    CONFIG_ENV,
    ROLE_ENV,
    SEED_PEERS_ENV,
    AdapterSettings,
    AdapterWish,
    KvSettings,
    Parallel,
    Ports,
    WorkerConfig,
    encode,
    encode_adapters,
)

MODELS = "/models"
HUB_MOUNT = "/models/hf"
ADAPTER_MOUNT = "/adapters"
GRACE_SLACK_S = 15
"""Seconds after the drain for the engine to stop."""
HUNG_GRACE_S = 60
"""What a worker gets whose probes failed, instead of the drain time. An agent that answered nothing for 20 s begins no drain, and
one whose engine is silent waits for none; its engine ends in 21 s. Not less: where only the agent hangs, or starves and comes
back, the engine goes on meanwhile, and most streams end whole. A drain is cut by no probe: the kubelet asks none of a pod that is
deleted, and one that drains without that (a signal, a change of the role) answers."""
SIDE_CHANNEL_ENV: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
STARTUP_FAILURES = 1_800
"""One-second startup probes: large models take half an hour to load."""


def render_pod(
    fleet: InferenceFleet,
    wanted: PodWanted,
    stored: Object,
    owner: Object,
    leader_uid: str | None = None,
    told: str | None = None,
    live: Live = MappingProxyType({}),
) -> Object:
    """One worker pod of a stored revision (its ControllerRevision), owned by its WorkerPool. Labels and annotations of a
    podTemplate are those of today: they belong to no revision. `leader_uid`: whom it follows; `told`: its adapters, None: the
    spec's; `live`: who is there, and may give it hot prefixes."""
    marks = {TIER: wanted.tier, ROLE: wanted.role, REVISION: wanted.revision, POOL: wanted.pool}
    marks[NAMESPACE] = fleet.metadata.namespace
    added = fleet.tier(wanted.tier).role(wanted.role).pod_template or PodTemplateSpec()
    data = stored["data"]
    told = adapters_told(fleet) if told is None else told
    own = {ORDINAL: str(wanted.ordinal), MEMBER: str(wanted.member), COMPAT: data["compat"]} | ({ADAPTERS: told} if told else {})
    if is_seeded(fleet, wanted.tier) and (peers := seed_peers(wanted, live)):
        own[SEED_PEERS] = peers
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": wanted.name,
            "namespace": fleet.metadata.namespace,
            "labels": {**added.labels, **labels(fleet.metadata.name, **marks)},
            "annotations": {**added.annotations, **data.get("networks", {}), **own},
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": at_ordinal(clone(data["pods"][wanted.role]), wanted.role, wanted.ordinal, data.get("hostPorts")),
    }
    join_gang(pod, wanted, data.get("gangs", {}).get(wanted.role, {}), leader_uid)
    return pod


def is_seeded(fleet: InferenceFleet, tier: str) -> bool:
    """By the spec of today. A stored template that is older asks for nothing, whatever its pod's annotation says."""
    return seed_settings(fleet, fleet.tier(tier)) is not UNSET


def adapters_told(fleet: InferenceFleet) -> str:
    """What a worker's annotation says of its adapters; empty when it should have none."""
    wished = [AdapterWish(name=name, source=source) for name, source in wishes(fleet)]
    return encode_adapters(wished) if wished else ""


def pod_spec(fleet: InferenceFleet, tier: TierSpec, role: Role, template: Template, platform: Platform) -> Object:
    """Everything of a worker pod that its revision fixes, for ordinal 0."""
    model = fleet.model_of(tier)
    volumes, mounts, path = model_volumes(model)
    ports, added = worker_ports(_first_port(tier), role, 0), tier.role(role).pod_template
    config = worker_config(fleet, tier, role, template, platform, path, ports)
    grace_s = round(drain_timeout_s(fleet, tier, platform)) + GRACE_SLACK_S
    hung: Object = {"terminationGracePeriodSeconds": min(grace_s, HUNG_GRACE_S)}
    container = {
        "name": "worker",
        "image": fleet.spec.engine.image or platform.worker_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["fleet-worker"],
        "env": _env(model, config) + environment(config.nodes) + fabric.environment(tier, role),
        "ports": container_ports(ports, on_host=tier.kv_transfer.via == "hostNetwork", nodes=config.nodes),
        "startupProbe": {**_probe(ports, "/started", failures=STARTUP_FAILURES), **hung},
        "readinessProbe": _probe(ports, "/ready", failures=1),
        "livenessProbe": {**_probe(ports, "/live", failures=10), **hung},
        "lifecycle": {"preStop": {"httpGet": {"path": "/drain", "port": ports.agent, "scheme": "HTTP"}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
        "resources": _resources(fleet, tier, role),
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": fabric.capabilities(tier),
        },
    }  # fmt: skip
    limit = {"sizeLimit": tier.shared_memory} if tier.shared_memory is not None else {}
    spec: Object = {
        "containers": [container],
        "volumes": [
            *volumes,
            {"name": "shm", "emptyDir": {"medium": "Memory", **limit}},
            {"name": "tmp", "emptyDir": {}},
        ],
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": security(added, shared_group=_writes_claim(model)),
        **fabric.host_network(tier),
    }
    if (device := tier.device_request(role)) is not None:
        spec["tolerations"] = [{"key": device[0], "operator": "Exists", "effect": "NoSchedule"}]
    if selector := {**tier.accelerator_of(role).node_selector, **(added.node_selector if added is not None else {})}:
        spec["nodeSelector"] = selector
    if near := affinity(fleet, tier, role):
        spec["affinity"] = near
    if claims := fabric.pod_claims(fleet, tier, role, template.revision):
        spec["resourceClaims"] = claims
    if hands_over(fleet):
        guard_hand_off(fleet, container, spec)
    if added is not None:
        extend_pod(spec, added)
    return spec


def drain_timeout_s(fleet: InferenceFleet, tier: TierSpec, platform: Platform) -> float:
    """Longest wait for streams and leases before a worker is told to stop."""
    asked = fleet.spec.rollout.drain_timeout_s(tier.kv_transfer.lease_duration_s, fleet.spec.limits.max_output_tokens)
    return min(asked, platform.drain_most_s)


def _first_port(tier: TierSpec) -> int | None:
    """First of the ports on the host's network; None: every worker has the usual ones."""
    shared = tier.kv_transfer.host_ports
    return shared.first if shared is not None else None


def at_ordinal(spec: Object, role: Role, ordinal: int, first: int | None) -> Object:
    """A stored pod spec with the ports of this worker; changes `spec`."""
    if first is None:
        return spec
    (container,) = spec["containers"]
    variables = {variable["name"]: variable for variable in container["env"]}
    told = msgspec.json.decode(variables[CONFIG_ENV]["value"])
    ranks = told.get("parallel", {}).get("data", 1)
    ports = worker_ports(first, role, ordinal, ranks)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        container[name]["httpGet"]["port"] = ports.agent
    container["lifecycle"]["preStop"]["httpGet"]["port"] = ports.agent
    container["ports"] = container_ports(ports, on_host=True, nodes=told.get("nodes", 1), shared=ranks)
    variables[CONFIG_ENV]["value"] = _with_ports(told, ports)
    if SIDE_CHANNEL_ENV in variables:
        variables[SIDE_CHANNEL_ENV]["value"] = str(ports.side_channel)
    return spec


def _with_ports(told: Object, ports: Ports) -> str:
    """A stored configuration with these ports. Another version of the operator may have written it, for a worker of that version,
    which takes no field that it does not know: nothing is added to it, and nothing of it is lost."""
    mine = msgspec.structs.asdict(ports)
    told["ports"] = {name: mine.get(name, port) for name, port in told["ports"].items()}
    return msgspec.json.encode(told).decode()


def worker_config(
    fleet: InferenceFleet, tier: TierSpec, role: Role, template: Template, platform: Platform, path: str, ports: Ports
) -> WorkerConfig:
    """The agent's configuration."""
    spec, parallel = fleet.spec, tier.parallelism_of(role)
    return WorkerConfig(
        fleet=fleet.metadata.name,
        namespace=fleet.metadata.namespace,
        tier=tier.name,
        role=role,
        revision=template.revision,
        compat=template.compat,
        engine=spec.engine.type,
        engine_args=(*spec.engine.args, *tier.role(role).args),
        parallel=Parallel(tensor=parallel.tensor, pipeline=parallel.pipeline, data=parallel.data, expert=parallel.expert),
        nodes=tier.nodes_of(role),
        quantization=tier.quantization,
        kv_cache_dtype=spec.engine.kv_cache_dtype,
        model=path,
        served_name=fleet.served_name,
        max_model_len=spec.engine.max_model_len,
        max_batch=spec.engine.max_batch,
        max_output_tokens=spec.limits.max_output_tokens,
        drain_timeout_s=drain_timeout_s(fleet, tier, platform),
        ports=ports,
        kv=KvSettings(
            transport=tier.kv_transfer.transport,
            required=tier.kv_transfer.required,
            lease_s=tier.kv_transfer.lease_duration_s,
            block_tokens=spec.engine.block_tokens,
            cache_bytes=spec.engine.cache_bytes,
            seed=seed_settings(fleet, tier),
        ),
        adapters=_adapter_settings(fleet.model_of(tier), spec.engine.type, path),
    )


def _adapter_settings(model: ModelSpec, engine: str, path: str) -> AdapterSettings:
    """`path`: of the model inside the container; adapters lie below it where no root is named."""
    folder = model.adapter_folder
    root = None
    if folder is not None:
        root = path if model.adapter_root is None else _in_container(folder, ADAPTER_MOUNT)
    return AdapterSettings(most=model.adapter_slots(engine), max_rank=model.max_adapter_rank, root=root)


def _env(model: ModelSpec, config: WorkerConfig) -> list[Object]:
    def field(name: str, path: str) -> Object:
        return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}

    return [
        {"name": CONFIG_ENV, "value": encode(config)},
        field("FLEET_POD_NAME", "metadata.name"),
        field("FLEET_POD_UID", "metadata.uid"),
        field("FLEET_POD_IP", "status.podIP"),
        field(ROLE_ENV, f"metadata.labels['{ROLE}']"),
        field(ADAPTERS_ENV, f"metadata.annotations['{ADAPTERS}']"),
        *([field(SEED_PEERS_ENV, f"metadata.annotations['{SEED_PEERS}']")] if config.kv.seed is not UNSET else []),
        field("VLLM_NIXL_SIDE_CHANNEL_HOST", "status.podIP"),
        {"name": SIDE_CHANNEL_ENV, "value": str(config.ports.side_channel)},
        {"name": "HOME", "value": "/tmp"},  # noqa: S108 - the one writable folder of a read-only root
        *token_env(model),
    ]


def token_env(model: ModelSpec) -> list[Object]:
    """What fetches from the hub: the token, and where files are kept."""
    token, hub = model.token_secret_ref, isinstance(model.location, HubSource)
    secret = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token.to_dict()}}] if token is not None else []
    return [*secret, *([{"name": "FLEET_MODEL_CACHE", "value": HUB_MOUNT}] if hub else [])]


def _probe(ports: Ports, path: str, *, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": ports.agent, "scheme": "HTTP"},
        "periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": failures, "successThreshold": 1,
    }  # fmt: skip


def _resources(fleet: InferenceFleet, tier: TierSpec, role: Role) -> Object:
    """The devices, and what the engine needs of the host."""
    engine = fleet.spec.engine
    found: Object = {"requests": host_requests(engine.type, engine.cache_bytes, on_cpu=tier.device_request(role) is None)}
    if devices := fabric.devices(tier, role):
        found = {"limits": devices, "requests": {**found["requests"], **devices}}
    if names := fabric.claim_names(tier, role):
        found["claims"] = [{"name": name} for name in names]
    return found


def model_volumes(model: ModelSpec) -> tuple[list[Object], list[Object], str]:
    """(volumes, mounts, model path inside the container): the model, and the adapters where they have a root of their own."""
    source = model.location
    root = model.adapter_folder if model.adapter_root is not None else None
    if isinstance(source, HubSource):
        volume, mount, path = _hub(source, model.cache)
    else:
        folder = source.claim if isinstance(source, ClaimSource) else PurePosixPath(source.path).name
        volume, mount, path = _folder("model", source, f"{MODELS}/{folder}")
    if root is None:
        return [volume], [mount], path
    more, more_mount, _ = _folder("adapters", root, ADAPTER_MOUNT)
    return [volume, more], [mount, more_mount], path


def _folder(name: str, source: FileSource | ClaimSource, at: str) -> tuple[Object, Object, str]:
    """A folder of the node, or a claim, mounted at `at` for reading."""
    if isinstance(source, FileSource):
        volume: Object = {"name": name, "hostPath": {"path": source.path, "type": ""}}
    else:
        volume = {"name": name, "persistentVolumeClaim": {"claimName": source.claim, "readOnly": True}}
    return volume, {"name": name, "mountPath": at, "readOnly": True}, _in_container(source, at)


def _in_container(source: Source, at: str) -> str:
    """Where a mounted source lies: a claim is mounted as a whole."""
    return f"{at}/{source.path}".rstrip("/") if isinstance(source, ClaimSource) else at


def _hub(source: HubSource, cache: ModelCacheSpec | None) -> tuple[Object, Object, str]:
    volume: Object = {"name": "model", "emptyDir": {}}
    if cache is not None and cache.type == "nodeLocal":
        volume = {"name": "model", "hostPath": {"path": cache.path, "type": "DirectoryOrCreate"}}
    elif cache is not None and cache.type == "pvc":
        volume = {"name": "model", "persistentVolumeClaim": {"claimName": cache.claim}}
    return volume, {"name": "model", "mountPath": HUB_MOUNT}, f"hf://{source.repository}@{source.revision}"


def _writes_claim(model: ModelSpec) -> bool:
    return model.cache is not None and model.cache.type == "pvc"
