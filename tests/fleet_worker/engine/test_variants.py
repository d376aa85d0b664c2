"""What a model's config may say, and what its checkpoint may hold beside it: logits equal those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fleet_worker.engine.llama import Chunk, Llama
from fleet_worker.engine.modelconfig import read_config
from fleet_worker.engine.weights import load_weights
from tests.fleet_worker.engine.test_modelconfig import with_config

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
WIDE = {"rope_type": "default", "rope_theta": 5e5}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama3-rope": {"rope_scaling": LLAMA3},
    "theta-nested": {"rope_theta": None, "rope_parameters": WIDE},
    "theta-twice": {"rope_theta": 1e4, "rope_parameters": WIDE},
    "theta-in-scaling": {"rope_theta": None, "rope_scaling": {**LLAMA3, "rope_theta": 5e5}},
    "scaling-and-parameters": {"rope_scaling": LLAMA3, "rope_parameters": WIDE},
    "context-beside-scaling": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
    "all-layers-full": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "layer_types": ["full_attention"] * 4, "sliding_window": 8,
    },
    "whole-heads": {"partial_rotary_factor": 1.0},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "bfloat16": {"torch_dtype": "bfloat16"},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_for_every_supported_variant(tmp_path: Path, variant: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    with_config(tmp_path, **VARIANTS[variant])
    config = AutoConfig.from_pretrained(tmp_path)
    torch.manual_seed(3)
    dtype = torch.bfloat16 if variant == "bfloat16" else torch.float32
    theirs = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)  # zeros would hide a bias that is never added
    theirs.save_pretrained(tmp_path)
    with_config(tmp_path, **VARIANTS[variant])
    mine = read_config(tmp_path)
    model = Llama(mine, load_weights(tmp_path, mine), 16)
    tokens = torch.randint(3, 1024, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        want = theirs.eval()(torch.tensor([tokens])).logits[0, -1].float()
        got = model.forward(tokens, [Chunk(0, 300, tuple(range(19)))], model.new_pool(19))[0]
    assert (got - want).abs().max() <= (0.05 if variant == "bfloat16" else 1e-4) * want.abs().max()


@pytest.mark.parametrize("is_other", [False, True])
def test_a_head_beside_tied_embeddings_counts_if_it_differs_as_in_transformers(tmp_path: Path, is_other: bool):
    from transformers import AutoConfig, AutoModelForCausalLM

    with_config(tmp_path, tie_word_embeddings=True)
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)
    weights = {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}
    if is_other:  # what a fine-tune of the head alone leaves, with the config of before
        weights["lm_head.weight"].normal_(std=0.02)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs, mine = AutoModelForCausalLM.from_pretrained(tmp_path), read_config(tmp_path)
    loaded = load_weights(tmp_path, mine)
    with torch.inference_mode():
        want = theirs.eval()(torch.tensor([[5, 6, 7]])).logits[0, -1].float()
        model = Llama(mine, loaded, 16)
        got = model.forward([5, 6, 7], [Chunk(0, 3, (0,))], model.new_pool(1))[0]
    assert ("lm_head.weight" in loaded) is is_other
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
