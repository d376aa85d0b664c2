"""config.json → typed architecture; what we cannot run exactly is refused by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.engine.errors import ModelFilesError
from fleet_worker.engine.files import MAX_CONFIG_BYTES, read_bounded
from fleet_worker.engine.sequence import Defaults

MOST = {
    "vocab_size": ("vocab_size", 2**22), "hidden": ("hidden_size", 2**17), "intermediate": ("intermediate_size", 2**19),
    "layers": ("num_hidden_layers", 1024), "heads": ("num_attention_heads", 4096), "kv_heads": ("num_key_value_heads", 4096),
    "head_dim": ("head_dim", 8192), "max_positions": ("max_position_embeddings", 2**24),
}  # fmt: skip
"""By our name: the field's, and its bound, some times what any model has. Names of tensors and tables of positions are made from
these numbers before a file of weights is looked at."""
MAX_ROTARY = 2**32
"""Positions times head_dim: two tables of so many numbers."""
MAX_EOS_IDS = 1024
MAX_TEMPERATURE = 2.0
"""As for requests."""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p")
WINDOW = 4096
"""Tokens that a model with sliding attention sees where its config does not say: transformers' default; null says all."""
SUPPORTED: Final = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}
"""Architectures that vLLM goes by, each with the type that transformers goes by."""
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "is_causal": (True,), "partial_rotary_factor": (None, 1), "per_layer_config": (None, {}), "logit_scale": (None, 1),
    "llama_4_scaling": (None,),
}  # fmt: skip
"""Fields by which transformers or vLLM compute these architectures in another way than we do, and what asks for ours."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1 frequency scaling (factor, low and high frequency factors, original context in tokens)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    dtype: str
    eos_ids: tuple[int, ...]
    bos_id: int | None


def read_config(folder: Path) -> ModelConfig:
    """Parse config.json (and generation_config.json for end tokens); ModelFilesError names the field."""
    raw = _read_json(folder / "config.json")
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else "?"
    if not isinstance(architecture, str) or architecture not in SUPPORTED:
        raise ModelFilesError(
            f"{folder}/config.json: architecture {architecture} is not supported; supported: {', '.join(SUPPORTED)}"
        )
    try:
        _refuse_unlike(raw, architecture)
        return _checked(_typed(raw, architecture, _eos_ids(raw, folder)))
    except ValueError as error:
        raise ModelFilesError(f"{folder}/config.json: {error}") from error


def _refuse_unlike(raw: dict[str, Any], architecture: str) -> None:
    """ValueError for the first field that asks for another arithmetic than ours."""
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; supported: silu")
    for name, said in [*raw.items(), *_rope(raw).items()]:
        if said not in (neutral := NEUTRAL.get(name, (said,))):
            raise ValueError(f"{name} {said!r} is not supported; supported: {', '.join(map(str, neutral))}")
    if raw.get("sliding_window", WINDOW) and (architecture == "MistralForCausalLM" or raw.get("use_sliding_window")):
        raise ValueError("sliding_window attention is not supported")
    if not isinstance(layers := raw.get("layer_types") or [], list):
        raise ValueError(f"layer_types {layers!r} is no list")
    if other := [layer for layer in layers if layer != "full_attention"]:
        raise ValueError(f"layer_types has {other[0]!r}; supported: full_attention")
    kind, ours = raw.get("model_type"), SUPPORTED[architecture]
    if kind not in (None, ours):
        raise ValueError(
            f"model_type {kind!r} is not that of {architecture}, which is {ours!r}: nothing says which of them counts"
        )
    if raw.get("quantization_config"):
        raise ValueError("quantization_config is not supported by the torch engine")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bounded(path, MAX_CONFIG_BYTES))
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelFilesError(f"{path} is not a JSON object")
    return found


def _typed(raw: dict[str, Any], architecture: str, eos_ids: tuple[int, ...]) -> ModelConfig:
    hidden, heads = _whole(raw.get("hidden_size"), "hidden_size"), _whole(raw.get("num_attention_heads"), "num_attention_heads")
    rope = _rope(raw)
    thetas = (rope.get("rope_theta"), raw.get("rope_theta"), 10_000.0)
    qwen = architecture == "Qwen2ForCausalLM"
    return ModelConfig(
        architecture=architecture,
        vocab_size=_whole(raw.get("vocab_size"), "vocab_size"),
        hidden=hidden,
        intermediate=_whole(raw.get("intermediate_size"), "intermediate_size"),
        layers=_whole(raw.get("num_hidden_layers"), "num_hidden_layers"),
        heads=heads,
        kv_heads=_whole(raw.get("num_key_value_heads") or heads, "num_key_value_heads"),
        head_dim=_whole(raw.get("head_dim") or hidden // max(heads, 1), "head_dim"),
        max_positions=_whole(raw.get("max_position_embeddings"), "max_position_embeddings"),
        norm_eps=_real(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        rope_theta=_above_0(next(theta for theta in thetas if theta is not None), "rope_theta"),
        rope_scaling=_rope_scaling(rope, raw.get("original_max_position_embeddings")),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=qwen or bool(raw.get("attention_bias", False)),
        output_bias=not qwen and bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_ids=eos_ids,
        bos_id=raw.get("bos_token_id"),
    )


def _checked(config: ModelConfig) -> ModelConfig:
    """Numbers that would only fail inside a step; ValueError names the field."""
    for name, (field, most) in MOST.items():
        if getattr(config, name) < 1:
            raise ValueError(f"{field} is {getattr(config, name)}, at least 1 is needed")
        if getattr(config, name) > most:
            raise ValueError(f"{field} is {getattr(config, name)}, at most {most} is served")
    if config.max_positions * config.head_dim > MAX_ROTARY:
        raise ValueError(f"max_position_embeddings {config.max_positions} with head_dim {config.head_dim}: too large a table")
    if len(config.eos_ids) > MAX_EOS_IDS:
        raise ValueError(f"eos_token_id lists {len(config.eos_ids)} tokens, at most {MAX_EOS_IDS} are served")
    if config.heads % config.kv_heads:
        raise ValueError(f"num_attention_heads {config.heads} is no multiple of num_key_value_heads {config.kv_heads}")
    if config.norm_eps < 0:
        raise ValueError(f"rms_norm_eps {config.norm_eps} is negative")
    if config.head_dim % 2:
        raise ValueError(f"head_dim {config.head_dim} is odd")
    if any(not 0 <= token < config.vocab_size for token in config.eos_ids):
        raise ValueError(f"eos_token_id {list(config.eos_ids)} is outside the vocabulary of {config.vocab_size}")
    return config


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """One of both, as transformers and vLLM read them."""
    name = "rope_scaling" if _object(raw, "rope_scaling") else "rope_parameters"
    found = _object(raw, name)
    for key, value in found.items():
        if isinstance(value, dict):
            raise ValueError(f"{key} of {name}: another rotation for some layers is not supported")
    return found


def _rope_scaling(raw: dict[str, Any], original: Any) -> RopeScaling | None:
    """`original`: the context beside the scaling, which goes before the one in it."""
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_scaling.rope_type={kind} (supported: default, llama3)")
    context = "original_max_position_embeddings"
    given = {name: raw.get(name) for name in ("factor", "low_freq_factor", "high_freq_factor")} | {
        context: original or raw.get(context)
    }
    factor, low, high, positions = (_above_0(found, f"rope_scaling.{name}") for name, found in given.items())
    if low >= high:
        raise ValueError(f"rope_scaling.low_freq_factor {low:g} is not below high_freq_factor {high:g}")
    return RopeScaling(factor, low, high, _whole(positions, "rope_scaling.original_max_position_embeddings"))


def _object(raw: dict[str, Any], name: str) -> dict[str, Any]:
    found = raw.get(name) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{name} {found!r} is no object")
    return found


def _whole(found: Any, name: str) -> int:
    if (number := _real(found, name)) != int(number):
        raise ValueError(f"{name} {found!r} is no whole number")
    return int(number)


def _above_0(found: Any, name: str) -> float:
    if (number := _real(found, name)) <= 0:
        raise ValueError(f"{name} {found!r} is not above 0")
    return number


def _real(found: Any, name: str) -> float:
    """A number that is finite: with any other one each answer is nonsense, or none. A float however it was written: digests of
    models are made of it."""
    if found is None:
        raise ValueError(f"{name} is missing")
    if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) < sys.float_info.max:
        raise ValueError(f"{name} {found!r} is no finite number")
    return float(found)


def read_defaults(folder: Path) -> Defaults:
    """generation_config.json's sampling; ModelFilesError where it is none. Penalties, which this engine has not, are told of."""
    given = _generation(folder)
    if ours := [name for name in PENALTIES if given.get(name) not in (None, 1, 1.0, 0, 0.0)]:
        words = f"{', '.join(ours)} of generation_config.json: the torch engine has none, vLLM would go by it"
        print(f"NoPenalty: {words}", file=sys.stderr, flush=True)
    try:
        temperature, top_p, top_k = (given.get(name) for name in ("temperature", "top_p", "top_k"))
        made = Defaults(
            _number(temperature, 1.0, "temperature"), _number(top_p, 1.0, "top_p"), int(_number(top_k, 0, "top_k"))
        )  # fmt: skip
        if not (0 <= made.temperature <= MAX_TEMPERATURE and 0 < made.top_p <= 1 and -1 <= made.top_k <= MOST["vocab_size"][1]):
            raise ValueError(f"temperature {made.temperature}, top_p {made.top_p}, top_k {made.top_k} are out of their bounds")
    except (ValueError, OverflowError) as error:
        raise ModelFilesError(f"{folder}/generation_config.json: {error}") from error
    return replace(made, top_k=max(0, made.top_k))


def _number(found: Any, otherwise: float, name: str) -> float:
    if found is None:
        return otherwise
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(f"{name} {found!r} is no number")
    return found


def _generation(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return _read_json(path) if path.is_file() else {}


def _eos_ids(raw: dict[str, Any], folder: Path) -> tuple[int, ...]:
    found = _generation(folder).get("eos_token_id")
    if found is None:  # null there says as little as nothing
        found = raw.get("eos_token_id")
    if found is None:
        return ()
    ids = found if isinstance(found, list) else [found]
    if any(type(token) is not int for token in ids):
        raise ValueError(f"eos_token_id {found!r} is neither a token id nor a list of them")
    return tuple(ids)
