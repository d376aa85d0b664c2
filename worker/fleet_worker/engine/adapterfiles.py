"""An adapter folder in PEFT's format → checked tensors. What we cannot apply exactly is refused by name.

Fields are those of peft.LoraConfig; whatever is not known here must say nothing (null, false or empty), because a field that
changes the arithmetic and is passed over would give wrong tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.adapterstart import changes_base
from fleet_worker.engine.errors import BadAdapterError, UnknownAdapterError
from fleet_worker.engine.lora import Adapter, Delta
from fleet_worker.engine.modelconfig import ModelConfig

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
MAX_CONFIG_BYTES: Final = 1024 * 1024
HEADER_BYTES: Final = 16 * 1024 * 1024
"""Room for the names in a safetensors file, beside its numbers."""
MAX_TOLD: Final = 200
"""Characters of a name that is none."""
FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
SAYS_NOTHING: Final = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode", "lora_dropout", "task_type",
    "peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "layers_to_transform", "layers_pattern", "bias",
    "init_lora_weights", "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
})  # fmt: skip
"""Fields that change nothing at inference, or that are looked at one by one below."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What adapter_config.json says."""

    rank: int
    scaling: float
    targets: frozenset[str]
    layers: frozenset[int] | None


def load_adapter(name: str, folder: Path, config: ModelConfig, dtype: torch.dtype, max_rank: int) -> Adapter:
    """The adapter in this folder; BadAdapterError names the file and what is wrong with it, UnknownAdapterError the folder."""
    if not folder.is_dir():
        raise UnknownAdapterError(f"The lora adapter '{name}' cannot be found at {folder}.", "lora_path")
    raw = read_bytes(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
    terms = parse_terms(raw, folder / CONFIG_FILE, max_rank)
    shapes = expected(config, terms)
    most = HEADER_BYTES + 4 * sum(rows * columns for rows, columns in shapes.values())
    path = folder / WEIGHTS_FILE
    weights = read_bytes(path, most)
    tensors = _checked(weights, path, shapes)
    digest = hashlib.sha256(hashlib.sha256(raw).digest() + hashlib.sha256(weights).digest()).hexdigest()
    deltas: dict[tuple[int, str], tuple[Delta, ...]] = {}
    for layer, module in sorted({(layer, module) for layer, module, _ in shapes}):
        projection, at = _place(config, module)
        a = _cast(tensors[layer, module, "A"], 1.0, dtype, f"{path}: lora_A of layer {layer} {module}")
        b = _cast(tensors[layer, module, "B"], terms.scaling, dtype, f"{path}: lora_B of layer {layer} {module}")
        deltas[layer, projection] = (*deltas.get((layer, projection), ()), Delta(a, b, at))
    return Adapter(name, digest, str(folder), terms.rank, deltas)


def _cast(tensor: torch.Tensor, scaling: float, dtype: torch.dtype, name: str) -> torch.Tensor:
    """As the engine computes with it; BadAdapterError when a number of it is then none."""
    made = (tensor.float() * scaling).to(dtype).contiguous()
    if not bool(torch.isfinite(made).all()):
        raise BadAdapterError(f"{name} overflows as {dtype} with a scaling of {scaling:g}")
    return made


def read_bytes(path: Path, most: int) -> bytes:
    """A bounded file; BadAdapterError says that it is not there, not readable, or too large."""
    try:
        with path.open("rb") as opened:
            found = opened.read(most + 1)
    except FileNotFoundError as error:
        raise BadAdapterError(f"{path} does not exist") from error
    except OSError as error:
        raise BadAdapterError(f"{path} is not readable by user {os.geteuid()}: {error.strerror}") from error
    if len(found) > most:
        raise BadAdapterError(f"{path} has more than {most} bytes: more than an adapter of its rank can have")
    return found


def parse_terms(raw: bytes, path: Path, max_rank: int) -> Terms:
    """adapter_config.json; BadAdapterError names the field."""
    try:
        found = json.loads(raw)
    except UNREADABLE as error:
        raise BadAdapterError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadAdapterError(f"{path} is not a JSON object")
    _refuse_unsupported(found, path)
    rank, alpha = found.get("r"), found.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise BadAdapterError(f"{path}: r is {rank!r}, a whole number above 0 is needed")
    if rank > max_rank:
        raise BadAdapterError(f"{path}: r is {rank}; at most {max_rank} is served (model.maxAdapterRank)")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise BadAdapterError(f"{path}: lora_alpha is {alpha!r}, a number is needed")
    if isinstance(alpha, int) and abs(alpha) > sys.float_info.max:
        raise BadAdapterError(f"{path}: lora_alpha is too large a number")
    if not math.isfinite(alpha):
        raise BadAdapterError(f"{path}: lora_alpha is {alpha!r}, a number is needed")
    scaling = alpha / (math.sqrt(rank) if found.get("use_rslora") else rank)
    return Terms(rank, scaling, _targets(found, path), _layers(found, path))


def _refuse_unsupported(found: Mapping[str, Any], path: Path) -> None:
    if found.get("peft_type") != "LORA":
        raise BadAdapterError(f"{path}: peft_type {found.get('peft_type')!r} is not supported; supported: LORA")
    if found.get("task_type") not in (None, "CAUSAL_LM"):
        raise BadAdapterError(f"{path}: task_type {found['task_type']!r} is not supported; supported: CAUSAL_LM")
    if found.get("bias", "none") != "none":
        raise BadAdapterError(f"{path}: bias {found['bias']!r} is not supported; supported: none")
    if why := changes_base(found):
        raise BadAdapterError(f"{path}: {why}")
    for field in sorted(found.keys() - SAYS_NOTHING):
        if found[field]:
            raise BadAdapterError(f"{path}: {field} is not supported")


def _targets(found: Mapping[str, Any], path: Path) -> frozenset[str]:
    targets = found.get("target_modules")
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise BadAdapterError(f"{path}: target_modules must be a list of names")
    if unknown := sorted(set(targets) - {*ATTENTION, *MLP}):
        raise BadAdapterError(f"{path}: target_modules {unknown[0]!r} is not supported; supported: {', '.join(ATTENTION + MLP)}")
    return frozenset(targets)


def _layers(found: Mapping[str, Any], path: Path) -> frozenset[int] | None:
    if found.get("layers_pattern") not in (None, "", "layers", ["layers"], []):
        raise BadAdapterError(f"{path}: layers_pattern {found['layers_pattern']!r} is not supported; supported: layers")
    layers = found.get("layers_to_transform")
    if layers is None:
        return None
    layers = [layers] if isinstance(layers, int) else layers
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, int) for layer in layers):
        raise BadAdapterError(f"{path}: layers_to_transform must be a list of numbers")
    return frozenset(layers)


def expected(config: ModelConfig, terms: Terms) -> dict[tuple[int, str, str], tuple[int, int]]:
    """Shape of every tensor that the adapter must have, by layer, module and side."""
    q, kv, hidden, inner = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.hidden, config.intermediate
    sizes = {
        "q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden),
        "gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden),
    }  # fmt: skip
    layers = range(config.layers) if terms.layers is None else sorted(terms.layers)
    if any(not 0 <= layer < config.layers for layer in layers):
        raise BadAdapterError(f"layers_to_transform names layers outside 0..{config.layers - 1}")
    shapes: dict[tuple[int, str, str], tuple[int, int]] = {}
    for layer in layers:
        for module in sorted(terms.targets):
            shapes[layer, module, "A"] = (terms.rank, sizes[module][0])
            shapes[layer, module, "B"] = (sizes[module][1], terms.rank)
    return shapes


def _checked(
    weights: bytes, path: Path, shapes: Mapping[tuple[int, str, str], tuple[int, int]]
) -> dict[tuple[int, str, str], torch.Tensor]:
    """Every expected tensor and nothing else."""
    try:
        tensors = load(weights)
    except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise BadAdapterError(f"{path} is not a readable safetensors file: {error}") from error
    names = {name: key for key in shapes for name in _names(*key)}
    found: dict[tuple[int, str, str], torch.Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        key = names.get(name)
        if key is None:
            raise BadAdapterError(f"{path}: tensor {name[:MAX_TOLD]} is not one that r, target_modules and the model ask for")
        if key in found:
            raise BadAdapterError(f"{path}: tensor {name} is there twice, with and without its adapter's name")
        if tuple(tensor.shape) != shapes[key]:
            raise BadAdapterError(f"{path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shapes[key])}")
        if tensor.dtype not in FLOATS:
            raise BadAdapterError(f"{path}: tensor {name} is {tensor.dtype}; supported: float32, float16, bfloat16")
        if not bool(torch.isfinite(tensor).all()):
            raise BadAdapterError(f"{path}: tensor {name} holds numbers that are not finite")
        found[key] = tensor
    if missing := sorted(shapes.keys() - found.keys()):
        layer, module, side = missing[0]
        raise BadAdapterError(f"{path}: {len(missing)} tensors are missing, the first is lora_{side} of layer {layer} {module}")
    return found


def _names(layer: int, module: str, side: str) -> tuple[str, str]:
    """What a tensor may be called: PEFT's files leave out the adapter's own name, others hold it."""
    block = "self_attn" if module in ATTENTION else "mlp"
    at = f"base_model.model.model.layers.{layer}.{block}.{module}.lora_{side}"
    return f"{at}.weight", f"{at}.default.weight"


def _place(config: ModelConfig, module: str) -> tuple[str, int]:
    """Fused projection and first column of a module's part in it."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "q_proj": ("qkv", 0), "k_proj": ("qkv", q), "v_proj": ("qkv", q + kv), "o_proj": ("out", 0),
        "gate_proj": ("gate_up", 0), "up_proj": ("gate_up", config.intermediate), "down_proj": ("down", 0),
    }[module]  # fmt: skip
