"""Adapters in PEFT format for the tiny model, made from a seed, and the same merged into the weights: W + B A alpha / r."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fleet_worker.engine.adapterfiles import CONFIG_FILE, WEIGHTS_FILE
from fleet_worker.tinymodel import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS

SIZES = {
    "q_proj": (HIDDEN, HEADS * HEAD_DIM), "k_proj": (HIDDEN, KV_HEADS * HEAD_DIM), "v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "o_proj": (HEADS * HEAD_DIM, HIDDEN), "gate_proj": (HIDDEN, INTERMEDIATE), "up_proj": (HIDDEN, INTERMEDIATE),
    "down_proj": (INTERMEDIATE, HIDDEN),
}  # fmt: skip
ALL = tuple(SIZES)


def part_of(module: str) -> str:
    return "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"


def make_adapter(
    folder: Path, seed: int, *, rank: int = 8, alpha: float = 16.0, targets: tuple[str, ...] = ALL, **fields: Any
) -> Path:
    """Write an adapter that changes the answers; `fields` go into its configuration as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "target_modules": sorted(targets),
        "bias": "none", "lora_dropout": 0.05, "inference_mode": True, "use_dora": False, "modules_to_save": None,
        "base_model_name_or_path": "tiny", "peft_version": "0.17.0", **fields,
    }  # fmt: skip
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module in targets:
            width, height = SIZES[module]
            at = f"base_model.model.model.layers.{layer}.{part_of(module)}.{module}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * 0.1
            tensors[f"{at}.lora_B.weight"] = torch.randn(height, rank, generator=generator) * 0.05
    save_file(tensors, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
    return folder


def merged(model: Path, adapter: Path, folder: Path) -> Path:
    """A plain model folder that answers as `model` does under `adapter`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    terms = json.loads((adapter / CONFIG_FILE).read_text())
    scaling = terms["lora_alpha"] / (terms["r"] ** 0.5 if terms.get("use_rslora") else terms["r"])
    weights, changes = load_file(str(model / "model.safetensors")), load_file(str(adapter / WEIGHTS_FILE))
    for name, a in changes.items():
        if name.endswith(".lora_A.weight"):
            b = changes[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[target] = weights[target] + (b @ a) * scaling
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
