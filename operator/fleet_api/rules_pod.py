"""Rules about the pod's shape: devices, parallel sizes, the fabric, and what a podTemplate must leave to the operator."""

from __future__ import annotations

import re
from typing import Any

from fleet_api.rule import Raw, Rule, dig, unless_absent
from fleet_api.rules_fabric import FABRIC_RULES
from fleet_api.rules_gang import gang_rules

ROLES = ("prefill", "decode")
OWNED_ARGS = (
    r"^(--(model|host|port|served.model.name|max.model.len|kv.transfer.config|kv.events.config|tensor.parallel.size"
    r"|pipeline.parallel.size|data.parallel.*|enable.expert.parallel|quantization|kv.cache.dtype|(enable|max|max.cpu).lora.*"
    r"|lora.modules|nnodes|node.rank|master.addr|master.port|headless)|-tp|-pp|-dp|-ep|-q|-n|-r)([=.].*)?$"
)
"""What fields decide: an argument that says otherwise would make router and operator believe something wrong. A dot stands for
- and for _: the API server counts the length of a pattern against the rule's budget."""
OWNED_ENV = (
    "^(FLEET_.*|LWS_.*|HOME|HF_TOKEN|UCX_TLS|UCX_NET_DEVICES|UCX_TCP_PORT_RANGE|UCX_PROTO_INFO|UCX_LOG_FILE"
    "|VLLM_NIXL_SIDE_CHANNEL_HOST|VLLM_NIXL_SIDE_CHANNEL_PORT)$"
)
OWNED_VOLUMES = ("model", "adapters", "shm", "tmp", "fleet-peer-key")
OWNED_PATHS = ("/dev/shm", "/tmp", "/models", "/adapters", "/etc/fleet-peer-key")  # noqa: S108
OWNED_KEYS = "inferencefleet.io/"
MANAGED_BY = "app.kubernetes.io/managed-by"
NETWORKS = "k8s.v1.cni.cncf.io/networks"
VOLUME_SOURCES = ("emptyDir", "persistentVolumeClaim", "hostPath", "configMap", "secret")


def of_role(raw: Raw, role: str, field: str, key: str, default: Any) -> Any:
    """`key` of the role's own `field`, of the tier's when the role has none."""
    own = dig(raw, f"{role}.{field}", None)
    return (own if own is not None else raw.get(field, {})).get(key, default)


def of_role_cel(role: str, field: str, key: str, default: int) -> str:
    """CEL of `of_role`."""
    own, tier = f"self.{role}.{field}", f"self.{field}"
    return (
        f"(has(self.{role}) && has({own}) ? (has({own}.{key}) ? {own}.{key} : {default}) : "
        f"(has({tier}) && has({tier}.{key}) ? {tier}.{key} : {default}))"
    )


def _accelerator_rules(path: str) -> list[Rule]:
    return [
        Rule(
            path=path,
            cel="self.type != 'cpu' || (!has(self.resource) && !has(self.count))",
            message="type cpu asks for no device: leave out resource and count",
            holds=lambda raw: raw["type"] != "cpu" or ("resource" not in raw and "count" not in raw),
        )
    ]


def _parallelism_rules(path: str) -> list[Rule]:
    tensor, data = "(has(self.tensor) ? self.tensor : 1)", "(has(self.data) ? self.data : 1)"
    return [
        Rule(
            path=path,
            cel=f"!has(self.expert) || self.expert == 1 || self.expert == {tensor} * {data}",
            message="expert must be 1 or tensor x data",
            holds=lambda raw: raw.get("expert", 1) in (1, raw.get("tensor", 1) * raw.get("data", 1)),
            field=".expert",
        )
    ]


def _ranks(raw: Raw, role: str) -> int:
    size = 1
    for key in ("tensor", "pipeline", "data"):
        size *= of_role(raw, role, "parallelism", key, 1)
    return size


def _count_rule(role: str) -> Rule:
    count = of_role_cel(role, "accelerator", "count", 0)
    ranks = " * ".join(of_role_cel(role, "parallelism", key, 1) for key in ("tensor", "pipeline", "data"))
    return Rule(
        path="spec.tiers[]",
        cel=unless_absent(
            ("parallelism", f"{role}.parallelism"),
            f"[{count}].exists(count, [{ranks}].exists(ranks, count == 0 || ranks == 1 || count == ranks))",
        ),
        message=f"accelerator.count of {role} workers must be tensor x pipeline x data of their parallelism, or left out",
        holds=lambda raw: of_role(raw, role, "accelerator", "count", 0) in (0, _ranks(raw, role)) or _ranks(raw, role) == 1,
        field=f".{role}",
    )


def _divides(raw: Raw) -> bool:
    prefill, decode = (of_role(raw, role, "parallelism", "tensor", 1) for role in ROLES)
    return bool(min(prefill, decode) < 1 or prefill % decode == 0 or decode % prefill == 0)


def _owned_args(path: str, message: str) -> Rule:
    return Rule(
        path=path,
        cel=f"!has(self.args) || !self.args.exists(a, a.matches(r'{OWNED_ARGS}'))",
        message=message,
        holds=lambda raw: not any(re.search(OWNED_ARGS[:-1] + r"\Z", arg) for arg in raw.get("args", ())),
        field=".args",
    )


def _keys_free(name: str, also: str) -> Rule:
    def holds(raw: Raw) -> bool:
        return not any(key.startswith(OWNED_KEYS) or key == also for key in raw.get(name, ()))

    return Rule(
        path="",
        cel=f"!has(self.{name}) || self.{name}.all(k, !k.startsWith('{OWNED_KEYS}') && k != '{also}')",
        message=f"{name} of {OWNED_KEYS.rstrip('/')} and {also} are the operator's",
        holds=holds,
        field=f".{name}",
    )


def _path_free(mount: Raw) -> bool:
    path = mount["mountPath"]
    return not any(path == owned or path.startswith(f"{owned}/") for owned in OWNED_PATHS)


def _mounted_exist(raw: Raw) -> bool:
    names = {volume["name"] for volume in raw.get("volumes", ())}
    return all(mount["name"] in names for mount in raw.get("volumeMounts", ()))


def _template_rules(path: str) -> list[Rule]:
    free = " && ".join(f"m.mountPath != '{p}' && !m.mountPath.startsWith('{p}/')" for p in OWNED_PATHS)
    rules = [
        _keys_free("labels", MANAGED_BY),
        _keys_free("annotations", NETWORKS),
        Rule(
            path="",
            cel=f"!has(self.env) || self.env.all(e, !e.name.matches('{OWNED_ENV}'))",
            message="env must not set what the operator sets: FLEET_*, LWS_*, HOME, HF_TOKEN (model.tokenSecretRef), UCX_TLS and "
            "other UCX and NIXL variables of kvTransfer",
            holds=lambda raw: not any(re.search(OWNED_ENV, var["name"]) for var in raw.get("env", ())),
            field=".env",
        ),
        Rule(
            path="",
            cel=f"!has(self.volumes) || self.volumes.all(v, !(v.name in {list(OWNED_VOLUMES)}))",
            message="volumes called " + ", ".join(OWNED_VOLUMES) + " are the operator's",
            holds=lambda raw: not any(volume["name"] in OWNED_VOLUMES for volume in raw.get("volumes", ())),
            field=".volumes",
        ),
        Rule(
            path="",
            cel=f"!has(self.volumeMounts) || self.volumeMounts.all(m, {free})",
            message="volumeMounts at " + ", ".join(OWNED_PATHS) + " are the operator's",
            holds=lambda raw: all(_path_free(mount) for mount in raw.get("volumeMounts", ())),
            field=".volumeMounts",
        ),
        Rule(
            path="",
            cel="!has(self.volumeMounts) || "
            "self.volumeMounts.all(m, has(self.volumes) && self.volumes.exists(v, v.name == m.name))",
            message="every volumeMount needs a volume of this name in volumes",
            holds=_mounted_exist,
            field=".volumeMounts",
        ),
    ]
    found = [Rule(path, rule.cel, rule.message, rule.holds, rule.field) for rule in rules]
    present = ", ".join(f"has(self.{source})" for source in VOLUME_SOURCES)
    return [
        *found,
        Rule(
            path=f"{path}.env[]",
            cel="has(self.value) != has(self.valueFrom)",
            message="exactly one of value and valueFrom",
            holds=lambda raw: ("value" in raw) != ("valueFrom" in raw),
        ),
        Rule(
            path=f"{path}.env[].valueFrom",
            cel="has(self.secretKeyRef) != has(self.configMapKeyRef)",
            message="exactly one of secretKeyRef and configMapKeyRef",
            holds=lambda raw: ("secretKeyRef" in raw) != ("configMapKeyRef" in raw),
        ),
        Rule(
            path=f"{path}.volumes[]",
            cel=f"[{present}].filter(s, s).size() == 1",
            message="exactly one of " + ", ".join(VOLUME_SOURCES),
            holds=lambda raw: sum(source in raw for source in VOLUME_SOURCES) == 1,
        ),
    ]


def _role_rules(role: str) -> list[Rule]:
    path = f"spec.tiers[].{role}"
    return [
        *_accelerator_rules(f"{path}.accelerator"),
        *_parallelism_rules(f"{path}.parallelism"),
        _count_rule(role),
        _owned_args(path, "args must not set what other fields set, such as parallelism, engine.maxModelLen or kvTransfer"),
        *_template_rules(f"{path}.podTemplate"),
    ]


POD_RULES: tuple[Rule, ...] = (
    *_accelerator_rules("spec.tiers[].accelerator"),
    *_parallelism_rules("spec.tiers[].parallelism"),
    Rule(
        path="spec.tiers[]",
        cel=unless_absent(
            ("parallelism", "prefill.parallelism", "decode.parallelism"),
            f"[{of_role_cel('prefill', 'parallelism', 'tensor', 1)}].exists(p, "
            f"[{of_role_cel('decode', 'parallelism', 'tensor', 1)}].exists(d, p < 1 || d < 1 || p % d == 0 || d % p == 0))",
        ),
        message="of the tensor parallel sizes of prefill and decode one must divide the other: KV heads are handed over in whole",
        holds=_divides,
        field=".parallelism",
    ),
    _owned_args("spec.engine", "args must not set what other fields set, such as tiers[].parallelism, maxModelLen or kvTransfer"),
    *_role_rules("prefill"),
    *_role_rules("decode"),
    *gang_rules(of_role, of_role_cel),
    *FABRIC_RULES,
)
