"""Rules about kvTransfer, and about what engine and model source must be for a field to mean anything."""

from __future__ import annotations

from fleet_api.rule import Raw, Rule, dig, either

TRANSFER = "spec.tiers[].kvTransfer"
NIC_TRANSPORTS = ("rdma", "auto")
RANKED = ("tensor", "pipeline", "data", "expert")
"""Sizes of parallelism that make an engine of several processes."""


def _only_with(path: str, field: str, chooser: str, value: str, default: str = "") -> Rule:
    """`field` exactly when `chooser` is `value`."""
    return Rule(
        path=path,
        cel=f"has(self.{field}) == (has(self.{chooser}) && self.{chooser} == '{value}')",
        message=f"{field} belongs to {chooser} {value}: give both or neither",
        holds=lambda raw: (field in raw) == (raw.get(chooser, default) == value),
        field=f".{field}",
    )


def _vllm_only(raw: Raw) -> bool:
    if dig(raw, "engine.type", "torch") == "vllm":
        return True
    return not any(
        "quantization" in tier
        or _sizes_ranks(tier)
        or any(_sizes_ranks(tier.get(role, {})) or tier.get(role, {}).get("args") for role in ("prefill", "decode"))
        for tier in raw["tiers"]
    )


def _sizes_ranks(raw: Raw) -> bool:
    """More than nodes: the torch engine computes in one process."""
    return bool(set(raw.get("parallelism", {})) - {"nodes"})


def _vllm_only_cel() -> str:
    sizes = "(!has({0}.parallelism) || (" + " && ".join(f"!has({{0}}.parallelism.{size})" for size in RANKED) + "))"
    role = "(!has(t.{0}) || (" + sizes.format("t.{0}") + " && (!has(t.{0}.args) || size(t.{0}.args) == 0)))"
    return (
        f"{either('engine.type', 'torch')} == 'vllm' || self.tiers.all(t, !has(t.quantization) && {sizes.format('t')} && "
        f"{role.format('prefill')} && {role.format('decode')})"
    )


def _claims_gpu(raw: Raw) -> bool:
    devices = [
        raw["accelerator"],
        *(raw[role]["accelerator"] for role in ("prefill", "decode") if "accelerator" in raw.get(role, {})),
    ]
    if dig(raw, "kvTransfer.via", "") != "dra":
        return True
    if any(device["type"] == "cpu" for device in devices):
        return False
    return dig(raw, "kvTransfer.dra.gpu", None) is None or not any("resource" in device for device in devices)


def _claims_gpu_cel() -> str:
    dra = "has(self.kvTransfer) && has(self.kvTransfer.via) && self.kvTransfer.via == 'dra'"
    gpu = "has(self.kvTransfer.dra) && has(self.kvTransfer.dra.gpu)"
    fits = "({0}.type != 'cpu' && (!({1}) || !has({0}.resource)))"
    roles = [
        f"(!has(self.{role}) || !has(self.{role}.accelerator) || {fits.format(f'self.{role}.accelerator', gpu)})"
        for role in ("prefill", "decode")
    ]
    return f"!({dra}) || ({fits.format('self.accelerator', gpu)} && {' && '.join(roles)})"


FABRIC_RULES: tuple[Rule, ...] = (
    Rule(
        path=TRANSFER,
        cel="!has(self.required) || !self.required || (has(self.transport) && self.transport != 'auto')",
        message="required needs a transport other than auto",
        holds=lambda raw: not raw.get("required") or raw.get("transport", "auto") != "auto",
        field=".required",
    ),
    Rule(
        path=TRANSFER,
        cel="!(has(self.required) && self.required && has(self.transport) && self.transport == 'rdma') || "
        "has(self.resource) || has(self.via)",
        message="required rdma needs a NIC: name its resource, or say via",
        holds=lambda raw: not (raw.get("required") and raw.get("transport") == "rdma") or "resource" in raw or "via" in raw,
        field=".resource",
    ),
    Rule(
        path=TRANSFER,
        cel=f"(!has(self.resource) && !has(self.dra)) || !has(self.transport) || self.transport in {list(NIC_TRANSPORTS)}",
        message="resource and dra ask for a NIC: transport must be rdma or auto",
        holds=lambda raw: ("resource" not in raw and "dra" not in raw) or raw.get("transport", "auto") in NIC_TRANSPORTS,
        field=".transport",
    ),
    Rule(
        path=TRANSFER,
        cel="!has(self.resource) || !has(self.via) || self.via != 'dra'",
        message="with via dra the NIC comes by its DeviceClass: leave out resource",
        holds=lambda raw: "resource" not in raw or raw.get("via") != "dra",
        field=".resource",
    ),
    Rule(
        path=TRANSFER,
        cel="!has(self.count) || has(self.resource) || has(self.dra)",
        message="count needs a resource or dra",
        holds=lambda raw: "count" not in raw or "resource" in raw or "dra" in raw,
        field=".count",
    ),
    Rule(
        path=TRANSFER,
        cel="!has(self.hostPorts) || (has(self.via) && self.via == 'hostNetwork')",
        message="hostPorts belongs to via hostNetwork",
        holds=lambda raw: "hostPorts" not in raw or raw.get("via") == "hostNetwork",
        field=".hostPorts",
    ),
    _only_with(TRANSFER, "network", "via", "multus"),
    _only_with(TRANSFER, "dra", "via", "dra"),
    Rule(
        path="spec.tiers[]",
        cel=_claims_gpu_cel(),
        message="kvTransfer.via dra needs an accelerator other than cpu, and with dra.gpu none with a "
        "resource: the GPU is claimed once",
        holds=_claims_gpu,
        field=".kvTransfer",
    ),
    Rule(
        path="spec",
        cel=_vllm_only_cel(),
        message="quantization, parallelism (but for nodes) and args of a tier apply to engine type vllm only",
        holds=_vllm_only,
        field=".tiers",
    ),
    Rule(
        path="spec",
        cel=f"{either('engine.type', 'torch')} == 'torch' || self.tiers.all(t, !has(t.kvTransfer) || !has(t.kvTransfer.seed))",
        message="kvTransfer.seed applies to engine type torch only",
        holds=lambda raw: (
            dig(raw, "engine.type", "torch") == "torch" or not any("seed" in tier.get("kvTransfer", {}) for tier in raw["tiers"])
        ),
        field=".tiers",
    ),
    Rule(
        path="spec.engine",
        cel="!has(self.kvCacheDtype) || (has(self.type) && self.type == 'vllm')",
        message="kvCacheDtype applies to engine type vllm only",
        holds=lambda raw: "kvCacheDtype" not in raw or raw.get("type", "torch") == "vllm",
        field=".kvCacheDtype",
    ),
    _only_with("spec.model.cache", "path", "type", "nodeLocal"),
    _only_with("spec.model.cache", "claim", "type", "pvc"),
)
