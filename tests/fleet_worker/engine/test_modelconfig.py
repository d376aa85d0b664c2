"""What a model's config.json may say: what cannot be computed exactly is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet_worker.engine.errors import ModelFilesError
from fleet_worker.engine.modelconfig import read_config
from fleet_worker.tinymodel import CONFIG


def with_config(folder: Path, **change: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM, Mistral"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is not supported; supported"),
        ({"architectures": 5}, "architecture \\? is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"a": 1}}, "quantization_config"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window attention"),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window attention"),  # transformers: 4096 unless it says null
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 64, "use_sliding_window": False},
            "sliding_window attention",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "sliding_window attention"),
        # transformers goes by the type: Granite has multipliers, Gemma another norm, both under Llama's names of tensors
        ({"model_type": "granite"}, "model_type 'granite' is not that of LlamaForCausalLM, which is 'llama'"),
        ({"model_type": "qwen2"}, "model_type 'qwen2' is not that of LlamaForCausalLM"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None, "model_type": "llama"}, "which is 'mistral'"),
        ({"model_type": ["llama"]}, "model_type \\['llama'\\] is not that of"),
        ({"is_causal": False}, "is_causal False is not supported; supported: True"),  # transformers: each token sees all others
        ({"is_causal": None}, "is_causal None is not supported"),  # there too: null is not true
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type=yarn"),
        # vLLM goes by layer_types in all three, transformers in one; by the others vLLM or transformers alone
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 8}, "layer_types has 'sliding_attention'; supported: full"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "layer_types": ["full_attention", "chunked_attention"],
            },
            "layer_types has 'chunked_attention'",
        ),
        ({"layer_types": "full_attention"}, "layer_types 'full_attention' is no list"),
        ({"per_layer_config": {"0": {"rms_norm_eps": 0.5}}}, "per_layer_config .* is not supported"),
        ({"logit_scale": 0.25}, "logit_scale 0.25 is not supported; supported: None, 1"),
        ({"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 64}}, "llama_4_scaling .* is not supported"),
        # one rotation for each kind of layer: all were rotated by the default base
        (
            {"rope_theta": None, "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}},
            "full_attention of rope_parameters: another rotation for some layers is not supported",
        ),
        ({"rope_scaling": {"sliding_attention": None, "full_attention": {"rope_theta": 5e5}}}, "full_attention of rope_scaling"),
        # vLLM rotates this part of each head alone
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported; supported: None, 1"),
        (
            {"partial_rotary_factor": 1, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5 is not supported",
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads is 0, at least 1"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, at least 1"),
        ({"hidden_size": 0}, "hidden_size is 0, at least 1"),
        ({"hidden_size": 2.5}, "hidden_size 2.5 is no whole number"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"head_dim": 33}, "head_dim 33 is odd"),
        ({"vocab_size": "many"}, "vocab_size 'many' is no finite number"),
        ({"eos_token_id": 4096}, "eos_token_id \\[4096\\] is outside the vocabulary of 1024"),
        ({"rope_scaling": 7}, "rope_scaling 7 is no object"),
        ({"rope_parameters": [1]}, "rope_parameters \\[1\\] is no object"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, at most 1024"),
        ({"vocab_size": 10**10}, "vocab_size is 10000000000, at most"),
        ({"hidden_size": 10**7, "head_dim": 32}, "hidden_size is 10000000, at most"),
        ({"intermediate_size": 10**9}, "intermediate_size is 1000000000, at most"),
        ({"num_attention_heads": 10**6}, "num_attention_heads is 1000000, at most"),
        ({"head_dim": 10**6}, "head_dim is 1000000, at most"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000, at most"),
        ({"vocab_size": 1e400}, "vocab_size inf is no finite number"),
        ({"eos_token_id": list(range(2_000))}, "eos_token_id"),
    ],
)
def test_a_config_that_cannot_be_run_exactly_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str):
    with pytest.raises(ModelFilesError, match=words):
        read_config(with_config(tmp_path, **change))


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "x", True, 10**400])
@pytest.mark.parametrize(
    "field", ["rms_norm_eps", "rope_theta", *(f"rope_scaling.{name}" for name in LLAMA3 if name != "rope_type")]
)
def test_a_number_with_which_every_answer_is_nonsense_is_refused_by_name(tmp_path: Path, field: str, value: Any):
    outer, _, inner = field.partition(".")
    with pytest.raises(ModelFilesError, match=f"config.json: {field} "):
        read_config(with_config(tmp_path, **{outer: {**LLAMA3, inner: value} if inner else value}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"rope_theta": 0}, "rope_theta 0 is not above 0"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": float("nan")}}, "rope_theta nan is no finite number"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1}}, "low_freq_factor 1 is not below high_freq_factor 1"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0.5}}, "embeddings 0.5 is no whole number"),
    ],
)
def test_numbers_of_rotation_and_norm_that_divide_by_zero_are_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str):
    with pytest.raises(ModelFilesError, match=words):
        read_config(with_config(tmp_path, **change))


@pytest.mark.parametrize(("older", "newer", "counts"), [("float32", "bfloat16", "bfloat16"), ("float16", None, "float16")])
def test_of_both_names_of_the_dtype_the_newer_counts_as_in_transformers(tmp_path: Path, older: str, newer: Any, counts: str):
    from transformers import AutoConfig

    with_config(tmp_path, torch_dtype=older, dtype=newer)
    assert read_config(tmp_path).dtype == counts
    assert AutoConfig.from_pretrained(tmp_path).dtype == getattr(torch, counts)


def test_a_number_is_the_same_however_it_is_written(tmp_path: Path):
    """Workers of one model compare digests that are made of it."""
    whole = repr(read_config(with_config(tmp_path, rope_theta=500_000, rope_scaling=LLAMA3)))
    real = {name: value if name == "rope_type" else float(value) for name, value in LLAMA3.items()}
    assert (
        repr(read_config(with_config(tmp_path, rope_theta=5e5, rope_scaling=real, hidden_size=float(CONFIG["hidden_size"]))))
        == whole
    )
    assert "rope_theta=500000.0" in whole
    assert "RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)" in whole
