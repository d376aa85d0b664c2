"""What an adapter folder may say: everything that could not be applied exactly is refused with the file and the field's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fleet_worker.engine.adapterfiles import CONFIG_FILE, WEIGHTS_FILE, load_adapter
from fleet_worker.engine.errors import BadAdapterError, UnknownAdapterError
from fleet_worker.engine.lora import Adapter
from fleet_worker.engine.modelconfig import _typed
from fleet_worker.tinymodel import CONFIG
from tests.adapters import make_adapter

TINY = _typed(CONFIG, "LlamaForCausalLM", (2,))
FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


def load(folder: Path, max_rank: int = 64) -> Adapter:
    return load_adapter("a", folder, TINY, torch.float32, max_rank)


def retensor(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(str(folder / WEIGHTS_FILE))
    change(tensors)
    save_file(tensors, str(folder / WEIGHTS_FILE))


FIELDS: dict[str, tuple[dict[str, object], str]] = {
    "dora": ({"use_dora": True}, "use_dora is not supported"),
    "bias": ({"bias": "all"}, "bias 'all' is not supported; supported: none"),
    "lora-bias": ({"lora_bias": True}, "lora_bias is not supported"),
    "modules-to-save": ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    "rank-pattern": ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is not supported"),
    "alpha-pattern": ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern is not supported"),
    "a-field-of-the-future": ({"use_magic": True}, "use_magic is not supported"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base model"),
    "lora-ga": ({"init_lora_weights": "lora_ga"}, "init_lora_weights 'lora_ga' changes the base model"),
    "another-method": ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported; supported: LORA"),
    "another-task": ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' is not supported"),
    "other-target": ({"target_modules": ["q_proj", "lm_head"]}, "target_modules 'lm_head' is not supported"),
    "pattern-target": ({"target_modules": ".*proj"}, "target_modules must be a list of names"),
    "no-rank": ({"r": 0}, "r is 0, a whole number above 0 is needed"),
    "rank-text": ({"r": "8"}, "r is '8'"),
    "rank-over-the-bound": ({"r": 128}, "r is 128; at most 64 is served (model.maxAdapterRank)"),
    "alpha-not-a-number": ({"lora_alpha": "much"}, "lora_alpha is 'much'"),
    "alpha-beyond-any-float": ({"lora_alpha": 10**400}, "lora_alpha is too large a number"),
    "alpha-infinite": ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
    "rank-that-the-tensors-do-not-have": ({"r": 4}, "has shape [8, 688], expected [4, 688]"),
    "layer-that-is-not-there": ({"layers_to_transform": [9]}, "layers_to_transform names layers outside 0..3"),
    "fewer-targets-than-tensors": ({"target_modules": ["q_proj"]}, "is not one that r, target_modules and the model ask for"),
}


@pytest.mark.parametrize(("fields", "words"), FIELDS.values(), ids=FIELDS)
def test_a_configuration_that_cannot_be_applied_exactly_is_refused(tmp_path: Path, fields: dict[str, object], words: str):
    folder = make_adapter(tmp_path / "a", 1)
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**config, **fields}))
    with pytest.raises(BadAdapterError) as refused:
        load(folder)
    assert words in str(refused.value)


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[FIRST]


def widen(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST] = torch.zeros(8, 700)


def count(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST] = torch.zeros(8, 688, dtype=torch.int32)


def break_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST][0, 0] = float("nan")


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(8, 256)


def rename(to: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[to] = tensors.pop(FIRST)

    return change


def twice(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST.replace(".weight", ".default.weight")] = tensors[FIRST] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop, "1 tensors are missing, the first is lora_A of layer 0 down_proj"),
        (widen, "down_proj.lora_A.weight has shape [8, 700], expected [8, 688]"),
        (count, "is torch.int32; supported: float32"),
        (break_number, "holds numbers that are not finite"),
        (add, "tensor base_model.model.lm_head.lora_A.weight is not one that"),
        (rename(FIRST.replace("layers.0", "layers." + "9" * 5_000)), "is not one that"),
        (rename(FIRST.replace("layers.0", "layers.00")), "layers.00.mlp.down_proj.lora_A.weight is not one that"),
        (rename(FIRST.replace("layers.0", "layers.\N{ARABIC-INDIC DIGIT ZERO}")), "is not one that"),
        (rename(FIRST.replace("mlp", "self_attn")), "self_attn.down_proj.lora_A.weight is not one that"),
        (twice, "down_proj.lora_A.weight is there twice"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], words: str
):
    folder = make_adapter(tmp_path / "a", 1)
    retensor(folder, change)
    with pytest.raises(BadAdapterError) as refused:
        load(folder)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("side", "number", "alpha", "dtype"),
    [
        ("B", 3e38, 64, torch.float32),
        ("B", 6e4, 64, torch.float16),
        ("A", 1e5, 1, torch.float16),
        ("B", 0.0, 1e300, torch.float32),
    ],
    ids=["scaled", "scaled-and-cast", "cast", "scaled-by-more-than-a-float"],
)
def test_numbers_that_overflow_when_they_are_scaled_or_cast_are_refused_by_name(
    tmp_path: Path, side: str, number: float, alpha: float, dtype: torch.dtype
):
    """Incident: finite in the file, infinite in the engine: loaded as fine, and every request under it failed."""
    folder, name = make_adapter(tmp_path / "a", 1, alpha=alpha), FIRST.replace("lora_A", f"lora_{side}")

    def put(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][0, 0] = number

    retensor(folder, put)
    with pytest.raises(BadAdapterError) as refused:
        load_adapter("a", folder, TINY, dtype, 64)
    assert f"lora_{side} of layer 0 " in str(refused.value)
    assert "overflows" in str(refused.value)


def cut(folder: Path) -> None:
    path = folder / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-1000])


def garbage(folder: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes(b"\xff" * 4096)


def grow(folder: Path) -> None:
    with (folder / WEIGHTS_FILE).open("ab") as out:
        out.truncate(64 * 1024 * 1024)


def no_json(folder: Path) -> None:
    (folder / CONFIG_FILE).write_text("{")


def no_weights(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut, "adapter_model.safetensors is not a readable safetensors file"),
        (garbage, "adapter_model.safetensors is not a readable safetensors file"),
        (grow, "more than an adapter of its rank can have"),
        (no_json, "adapter_config.json is not valid JSON"),
        (no_weights, "adapter_model.safetensors does not exist"),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path: Path, change: Callable[[Path], None], words: str):
    folder = make_adapter(tmp_path / "a", 1)
    change(folder)
    with pytest.raises(BadAdapterError) as refused:
        load(folder)
    assert words in str(refused.value)


def test_a_folder_that_is_not_there_is_said_to_be_so(tmp_path: Path):
    with pytest.raises(UnknownAdapterError, match="cannot be found at"):
        load(tmp_path / "nowhere")


def test_some_layers_only(tmp_path: Path):
    folder = make_adapter(tmp_path / "a", 1, layers_to_transform=[1, 2])

    def keep(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.0." in name or ".layers.3." in name]:
            del tensors[name]

    retensor(folder, keep)
    assert {layer for layer, _ in load(folder).deltas} == {1, 2}


def test_the_digest_is_of_both_files(tmp_path: Path):
    one, same = load(make_adapter(tmp_path / "1", 1)), load(make_adapter(tmp_path / "2", 1))
    other_weights, other_alpha = load(make_adapter(tmp_path / "3", 2)), load(make_adapter(tmp_path / "4", 1, alpha=8))
    assert one.digest == same.digest
    assert len({one.digest, other_weights.digest, other_alpha.digest}) == 3
