"""safetensors → checked tensors. Nothing but safetensors is ever opened; each tensor's shape is checked before use."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.engine.errors import ModelFilesError
from fleet_worker.engine.files import MAX_INDEX_BYTES, read_bounded
from fleet_worker.engine.modelconfig import ModelConfig

SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}")
"""A file's name in an index."""
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOATS = ("F64", "F32", "BF16", "F16")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model needs, or, of tied embeddings, may have (HEAD), with its shape."""
    c, q, kv = config, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        EMBED: (c.vocab_size, c.hidden),
        "model.norm.weight": (c.hidden,),
        HEAD: (c.vocab_size, c.hidden),
    }
    for layer in range(c.layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (c.hidden,),
            f"{at}.post_attention_layernorm.weight": (c.hidden,),
            f"{at}.self_attn.q_proj.weight": (q, c.hidden),
            f"{at}.self_attn.k_proj.weight": (kv, c.hidden),
            f"{at}.self_attn.v_proj.weight": (kv, c.hidden),
            f"{at}.self_attn.o_proj.weight": (c.hidden, q),
            f"{at}.mlp.gate_proj.weight": (c.intermediate, c.hidden),
            f"{at}.mlp.up_proj.weight": (c.intermediate, c.hidden),
            f"{at}.mlp.down_proj.weight": (c.hidden, c.intermediate),
        }
        if c.qkv_bias:
            shapes |= {f"{at}.self_attn.q_proj.bias": (q,)}
            shapes |= {f"{at}.self_attn.{name}_proj.bias": (kv,) for name in ("k", "v")}
        if c.output_bias:
            shapes[f"{at}.self_attn.o_proj.bias"] = (c.hidden,)
        if c.mlp_bias:
            shapes |= {f"{at}.mlp.{name}_proj.bias": (c.intermediate,) for name in ("gate", "up")}
            shapes[f"{at}.mlp.down_proj.bias"] = (c.hidden,)
    return shapes


def load_weights(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """All tensors in the checkpoint's dtype; ModelFilesError names file and tensor. A head beside tied embeddings counts if it
    differs, as in transformers: a fine-tune of the head alone leaves it there, with the config of before."""
    if config.dtype not in DTYPES:
        raise ModelFilesError(f"{folder}/config.json: dtype {config.dtype} is not supported; supported: {', '.join(DTYPES)}")
    shapes, found = expected_shapes(config), dict[str, torch.Tensor]()
    files = _files(folder)
    for path, holds in files.items():
        wanted = shapes if holds is None else {name: shapes[name] for name in holds & shapes.keys()}
        _load_file(path, wanted, DTYPES[config.dtype], found)
    if config.tied and (HEAD not in found or (EMBED in found and torch.equal(found[HEAD], found[EMBED]))):
        found.pop(HEAD, None)
        del shapes[HEAD]
    missing = sorted(shapes.keys() - found.keys())
    if missing:
        where = next(iter(files)) if len(files) == 1 else folder
        raise ModelFilesError(f"{where}: {len(missing)} tensors are missing, the first is {missing[0]}")
    return found


def weights_digest(config: ModelConfig, weights: Mapping[str, torch.Tensor], text: str = "") -> str:
    """xxh3-128 over all that a prompt's KV depends on: every tensor's name and bytes, the architecture and `text_digest`; 32 hex
    digits. Reads the weights once, at memory speed (about a second per 10 GB). Names of files, commits and headers would not
    tell: a fine-tuned model has the same shapes."""
    found = xxhash.xxh3_128(repr((replace(config, eos_ids=(), bos_id=None), text)).encode())
    for name in sorted(weights):
        tensor = weights[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """By file: which tensors are taken from it, where an index says so. Of one that two files hold we could not choose."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed(folder, index)
    single = folder / "model.safetensors"  # what transformers takes, whatever lies beside it
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFilesError(f"{folder} holds no *.safetensors file")
    return dict.fromkeys(files)


def _indexed(folder: Path, index: Path) -> dict[Path, frozenset[str] | None]:
    try:
        names = json.loads(read_bounded(index, MAX_INDEX_BYTES))["weight_map"]
        by_file: dict[str, set[str]] = {}
        for tensor, name in names.items():
            by_file.setdefault(name, set()).add(tensor)
    except OSError as error:
        raise ModelFilesError(f"{index} cannot be read: {error.strerror}") from error
    except (*UNREADABLE, KeyError, AttributeError, TypeError) as error:
        raise ModelFilesError(f"{index} is not a safetensors index: {error!r}") from error
    if not by_file or any(not isinstance(name, str) or not SHARD.fullmatch(name) for name in by_file):
        raise ModelFilesError(f"{index} names files outside the model folder, or none")
    return {folder / name: frozenset(by_file[name]) for name in sorted(by_file)}


def _load_file(path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, found: dict[str, torch.Tensor]) -> None:
    try:
        with safe_open(str(path), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is not a dict
                if name not in shapes:
                    continue
                if name in found:
                    raise ModelFilesError(f"{path}: tensor {name} is in another file, too; an index has to say which one counts")
                described = opened.get_slice(name)
                if described.get_dtype() not in FLOATS:
                    raise ModelFilesError(f"{path}: tensor {name} is {described.get_dtype()}; supported: {', '.join(FLOATS)}")
                shape = tuple(described.get_shape())
                if shape != shapes[name]:
                    raise ModelFilesError(f"{path}: tensor {name} has shape {list(shape)}, expected {list(shapes[name])}")
                found[name] = _cast(opened.get_tensor(name), dtype, f"{path}: tensor {name}")
    except FileNotFoundError as error:  # what safetensors says of every file that it cannot open
        why = "does not exist" if not path.exists() else f"is not readable by user {os.geteuid()}"
        raise ModelFilesError(f"{path} {why}") from error
    except (SafetensorError, OSError) as error:
        raise ModelFilesError(f"{path} is not a readable safetensors file: {error}") from error


def _cast(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """A copy: what safetensors gives is the file's own memory, which changes when somebody writes over the file."""
    made = tensor.to(dtype, copy=True).contiguous()
    if tensor.dtype != dtype and not bool(torch.isfinite(made).all()):
        raise ModelFilesError(f"{name} holds numbers that are not finite as {dtype}, which config.json asks for")
    return made
