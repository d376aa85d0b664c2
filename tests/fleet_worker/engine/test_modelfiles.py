"""A model folder that cannot be served is refused by file, field or tensor; what is served equals transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from fleet_worker.config import Ports
from fleet_worker.engine.assemble import assemble, end_ids, load_llama
from fleet_worker.engine.errors import ModelFilesError
from fleet_worker.engine.llama import Chunk
from fleet_worker.engine.modelconfig import read_config, read_defaults
from fleet_worker.engine.sequence import Defaults
from fleet_worker.engine.text import Text, text_digest
from fleet_worker.engine.weights import load_weights, weights_digest
from tests.fleet_worker.engine.test_modelconfig import with_config
from tests.fleet_worker.engine.test_server import CONFIG as CONFIGURATION


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (2, None, (2,)),
        (2, {}, (2,)),
        (2, {"eos_token_id": None}, (2,)),  # incident: null hid config.json's, and answers never ended
        (2, {"eos_token_id": [5, 6]}, (5, 6)),
        ([2, 3], {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": None}, ()),
        (None, None, ()),
        (2, {"eos_token_id": []}, ()),
    ],
)
def test_end_tokens_are_generation_configs_unless_it_says_nothing(
    tmp_path: Path, config: Any, generation: Any, ids: tuple[int, ...]
):
    with_config(tmp_path, eos_token_id=config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_config(tmp_path).eos_ids == ids


@pytest.mark.parametrize(
    ("settings", "vocabulary", "ids"),
    [
        ({"eos_token": "</s>"}, 1024, (1, 2)),
        ({"eos_token": {"content": "</s>", "special": True}}, 1024, (1, 2)),
        ({"eos_token": "<s>"}, 1024, (1,)),
        ({"eos_token": "</s>"}, 2, (1,)),
        ({"eos_token": "<|im_end|>"}, 1024, (1,)),
        ({"eos_token": None}, 1024, (1,)),
        ({}, 1024, (1,)),
    ],
    ids=["another", "described", "the-same", "outside-the-vocabulary", "unknown", "null", "absent"],
)
def test_the_tokenizers_own_end_ends_an_answer_too(
    tiny: Path, tmp_path: Path, settings: dict[str, Any], vocabulary: int, ids: tuple[int, ...]
):
    """Of a model that was tuned for chats, with <|im_end|> in its tokenizer alone, the engine went on behind each answer, with
    the user's next words, to max_tokens; vLLM ends there."""
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    architecture = replace(read_config(with_config(tmp_path, eos_token_id=1)), vocab_size=vocabulary)
    assert end_ids(architecture, Text(tmp_path)) == ids


@pytest.mark.parametrize(
    ("generation", "found"),
    [
        (None, Defaults()),
        ({}, Defaults()),
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, Defaults(0.6, 0.9)),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}, Defaults(0.7, 0.8, 20)),
        ({"temperature": None, "top_p": None, "top_k": -1}, Defaults()),
        ({"temperature": 0, "top_k": 50.0}, Defaults(0, 1.0, 50)),
    ],
)
def test_what_a_models_makers_advise_is_taken_from_its_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], generation: Any, found: Defaults
):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_defaults(tmp_path) == found
    penalty = "NoPenalty: repetition_penalty of generation_config.json: the torch engine has none"
    assert (penalty in capfd.readouterr().err) is bool(generation and "repetition_penalty" in generation)


@pytest.mark.parametrize(
    "generation",
    [
        {"temperature": "0.6"}, {"temperature": -1}, {"temperature": 3}, {"temperature": float("nan")}, {"top_p": 0},
        {"top_p": 2}, {"top_p": True}, {"top_k": -2}, {"top_k": [1]}, {"top_k": float("inf")},
    ],
)  # fmt: skip
def test_what_nobody_can_sample_by_is_refused_by_name(tmp_path: Path, generation: dict[str, Any]):
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(ModelFilesError, match=r"generation_config\.json: "):
        read_defaults(tmp_path)


def test_the_engine_of_a_folder_ends_where_its_tokenizer_does(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    built: list[tuple[int, ...]] = []

    def build(_: object, __: object, eos_ids: tuple[int, ...]) -> None:
        built.append(eos_ids)
        raise InterruptedError

    monkeypatch.setattr("fleet_worker.engine.assemble.build_core", build)
    config = msgspec.structs.replace(CONFIGURATION, ports=Ports(http=0))
    with pytest.raises(InterruptedError):
        assemble(config, folder, "127.0.0.1")
    assert built == [(7, 2)]


@pytest.mark.parametrize("given", ["2", [2, True], [2.5], True, {"a": 1}])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path: Path, given: Any):
    with pytest.raises(ModelFilesError, match="eos_token_id"):
        read_config(with_config(tmp_path, eos_token_id=given))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_config_that_is_no_object_names_the_file(tmp_path: Path, raw: bytes):
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_without_end_is_not_read_to_it(tmp_path: Path, name: str):
    """Incident: a file of 100 GB, or /dev/zero behind a link, was read into memory until the kernel ended the worker."""
    with_config(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/dev/zero") if name == "config.json" else (tmp_path / name).write_bytes(b" " * 20_000_000)
    with pytest.raises(ModelFilesError, match=f"{name} has more than 16777216 bytes"):
        read_config(tmp_path)


def spoil(weights: dict[str, torch.Tensor], how: str) -> None:
    at = "model.layers.2.mlp.up_proj.weight"
    if how == "missing":
        del weights[at]
    elif how == "shape":
        weights[at] = weights[at][:10].contiguous()
    else:
        weights[at] = weights[at].to(torch.int8)


@pytest.mark.parametrize(
    ("how", "words"),
    [("missing", "are missing, the first is"), ("shape", "expected \\[688, 256\\]"), ("int8", "is I8; supported")],
)
def test_a_bad_tensor_is_named_with_its_file(tiny: Path, tmp_path: Path, how: str, words: str):
    weights = load_file(tiny / "model.safetensors")
    spoil(weights, how)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelFilesError, match=words) as caught:
        load_weights(tmp_path, read_config(tiny))
    assert "model.safetensors" in str(caught.value)
    assert "model.layers.2.mlp.up_proj.weight" in str(caught.value)


def test_weights_that_overflow_in_the_dtype_that_is_asked_for_are_named(tiny: Path, tmp_path: Path):
    """Incident: finite in the file, infinite in the engine: it got ready, and each request failed."""
    weights = load_file(tiny / "model.safetensors")
    weights["model.norm.weight"][3] = 1e6
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelFilesError, match=r"tensor model\.norm\.weight holds numbers that are not finite as torch\.float16"):
        load_weights(tmp_path, replace(read_config(tiny), dtype="float16"))


@pytest.mark.parametrize("size", [0, 7, 100, 100_000])
def test_a_cut_file_is_named(tiny: Path, tmp_path: Path, size: int):
    (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:size])
    with pytest.raises(ModelFilesError, match=r"model\.safetensors is not a readable safetensors file"):
        load_weights(tmp_path, read_config(tiny))


Header = dict[str, Any]
LIED_OF, OTHER = "model.layers.2.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"


def shifted(header: Header, by: int) -> Header:
    begin, end = header[LIED_OF]["data_offsets"]
    return {"data_offsets": [begin + by, end + by]}


LIES: dict[str, Callable[[Header], Header]] = {
    "overlaps-whole": lambda header: {"data_offsets": header[OTHER]["data_offsets"]},
    "overlaps-by-a-number": lambda header: shifted(header, -4),
    "out-of-range": lambda header: shifted(header, 10**9),
    "negative": lambda header: shifted(header, -(10**9)),
    "backwards": lambda header: {"data_offsets": header[LIED_OF]["data_offsets"][::-1]},
    "no-number": lambda _: {"data_offsets": [0.5, 1]},
    "dtype-of-nobody": lambda _: {"dtype": "F99"},
    "dtype-of-another-size": lambda _: {"dtype": "F16"},
    "dtype-of-the-same-size": lambda _: {"dtype": "I32"},
    "shape-negative": lambda _: {"shape": [-1, 256]},
    "shape-beyond-64-bits": lambda _: {"shape": [2**40, 2**40]},
    "shape-turned": lambda _: {"shape": [256, 688]},
}


def parts(tiny: Path) -> tuple[Header, bytes]:
    raw = (tiny / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def put(folder: Path, header: bytes, data: bytes, size: int | None = None) -> None:
    told = len(header) if size is None else size
    (folder / "model.safetensors").write_bytes(told.to_bytes(8, "little") + header + data)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_file_that_lies_of_a_tensor_is_named(tiny: Path, tmp_path: Path, lie: Callable[[Header], Header]):
    header, data = parts(tiny)
    header[LIED_OF] |= lie(header)
    put(tmp_path, json.dumps(header).encode(), data)
    with pytest.raises(ModelFilesError, match=r"model\.safetensors"):
        load_weights(tmp_path, read_config(tiny))


@pytest.mark.parametrize("size", [0, 10, 10**8, 2**63, 2**64 - 1])
def test_a_file_that_lies_of_its_header_is_named(tiny: Path, tmp_path: Path, size: int):
    header, data = parts(tiny)
    put(tmp_path, json.dumps(header).encode(), data, size)
    with pytest.raises(ModelFilesError, match=r"model\.safetensors is not a readable safetensors file"):
        load_weights(tmp_path, read_config(tiny))


@pytest.mark.parametrize("header", [b"[]", b"null", b"{}", b"\xff" * 50, b'{"a":' * 100_000, b'{"a":{}}'])
def test_a_header_that_is_none_is_named(tiny: Path, tmp_path: Path, header: bytes):
    put(tmp_path, header, b"\0" * 64)
    with pytest.raises(ModelFilesError, match=r"model\.safetensors is not a readable safetensors file"):
        load_weights(tmp_path, read_config(tiny))


def test_bytes_that_no_tensor_has_are_no_models(tiny: Path, tmp_path: Path):
    header, data = parts(tiny)
    put(tmp_path, json.dumps(header).encode(), data + b"\0" * 64)
    with pytest.raises(ModelFilesError, match=r"model\.safetensors is not a readable safetensors file"):
        load_weights(tmp_path, read_config(tiny))


def two_files(tiny: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Both hold every tensor; those of the second are doubled."""
    weights = load_file(tiny / "model.safetensors")
    save_file(weights, folder / "one.safetensors")
    save_file({name: tensor * 2 for name, tensor in weights.items()}, folder / "two.safetensors")
    return weights


def test_of_two_files_that_hold_a_tensor_the_one_of_the_index_counts(tiny: Path, tmp_path: Path):
    """Incident: the last one by name did, whatever the index said: another model, and nobody knew."""
    weights = two_files(tiny, tmp_path)
    files = {name: ("one" if at % 2 else "two") + ".safetensors" for at, name in enumerate(sorted(weights))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    found = load_weights(tmp_path, read_config(tiny))
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor * (1 if files[name][:3] == "one" else 2))


def test_of_two_files_that_hold_a_tensor_none_is_chosen_without_an_index(tiny: Path, tmp_path: Path):
    weights = two_files(tiny, tmp_path)
    with pytest.raises(ModelFilesError, match=r"two\.safetensors: tensor .* is in another file, too"):
        load_weights(tmp_path, read_config(tiny))
    shutil.copy(tiny / "model.safetensors", tmp_path)  # what lies beside it counts for nothing, as with transformers
    assert torch.equal(load_weights(tmp_path, read_config(tiny))[LIED_OF], weights[LIED_OF])


@pytest.mark.parametrize("name", ["gone.safetensors", "a\0.safetensors", "x" * 5_000, "", "a\ud800", ".hidden", "a/b", "a\nb"])
def test_an_index_that_names_what_is_no_file_here_is_named(tiny: Path, tmp_path: Path, name: str):
    """Incident: of a name that is too long the engine said that its address was in use."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {LIED_OF: name}}))
    with pytest.raises(ModelFilesError, match="does not exist" if name[:4] == "gone" else "names files outside the model folder"):
        load_weights(tmp_path, read_config(tiny))


def test_a_tensor_that_the_index_puts_elsewhere_is_missing(tiny: Path, tmp_path: Path):
    weights = two_files(tiny, tmp_path)
    files = dict.fromkeys(weights, "one.safetensors")
    del files[LIED_OF]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ModelFilesError, match=f"1 tensors are missing, the first is {LIED_OF}"):
        load_weights(tmp_path, read_config(tiny))


def test_an_index_cannot_name_files_elsewhere(tiny: Path, tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ModelFilesError, match="outside the model folder"):
        load_weights(tmp_path, read_config(tiny))


@pytest.mark.parametrize(
    "raw", [b"[]", b"7", b'{"weight_map":{"a":1}}', b'{"weight_map":{"a":[]}}', b"[" * 100_000, b"\xff", None]
)
def test_an_index_that_is_none_is_named(tiny: Path, tmp_path: Path, raw: bytes | None):
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(raw or b"")
    if raw is None:
        index.write_bytes(b'{"weight_map":{"a":"b.safetensors","c":1}}')
    with pytest.raises(ModelFilesError, match=r"index\.json"):
        load_weights(tmp_path, read_config(tiny))


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("chat_template.jinja", b"\xff"),
        ("chat_template.jinja", b"{{" + b"(" * 5_000 + b"1" + b")" * 5_000 + b"}}"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"a":"\xff"}'),
    ],
)
def test_text_files_that_cannot_be_read_are_named(tiny: Path, tmp_path: Path, name: str, raw: bytes):
    """Exit code 2 and the file's name, not a traceback and one start after the other."""
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ModelFilesError, match=name if raw[:1] != b"{" or name[0] == "t" else "chat template"):
        Text(tmp_path)


@pytest.mark.parametrize("change", ["one-bit", "name", "shape", "dtype", "architecture"])
def test_the_digest_of_weights_tells_what_kv_depends_on(tiny: Path, change: str):
    """Incident: workers of one compatibility hash whose branch had moved between two starts handed KV over."""
    config = read_config(tiny)
    weights = load_weights(tiny, config)
    before = weights_digest(config, weights)
    name = "model.layers.2.mlp.up_proj.weight"
    changed = {**weights, name: weights[name].clone()}
    assert weights_digest(replace(config, eos_ids=(5,)), changed) == before
    if change == "one-bit":
        changed[name].view(torch.uint8)[-1, -1] ^= 1
    elif change == "name":
        changed["another"] = changed.pop(name)
    elif change == "shape":
        changed[name] = changed[name].reshape(-1)
    elif change == "dtype":
        changed[name] = changed[name].view(torch.int32)
    else:
        config = replace(config, rope_theta=config.rope_theta + 1)
    assert weights_digest(config, changed) != before


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_another_tokenizer_or_template_is_another_version_of_the_model(tiny: Path, tmp_path: Path, name: str):
    """It makes another prompt of the same request: KV of one is no KV of the other."""
    found = [text_digest(tmp_path)]
    for raw in (b"", b"a", b"b"):
        (tmp_path / name).write_bytes(raw)
        found.append(text_digest(tmp_path))
    assert len(set(found)) == 3  # absent and empty say the same
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    before = load_llama(folder, read_config(folder), 16).weights_digest
    (folder / name).write_bytes(b"{}")
    assert load_llama(folder, read_config(folder), 16).weights_digest != before


def test_weights_of_half_precision_have_a_digest(tiny: Path):
    config = read_config(tiny)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_weights(tiny, config).items()}
    assert weights_digest(config, weights) != weights_digest(
        config, {name: tensor.to(torch.float16) for name, tensor in weights.items()}
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_that_is_written_over_changes_no_engine_that_runs(tiny: Path, tmp_path: Path, dtype: str):
    """Incident: safetensors maps files, so that a new version saved into the folder was half of the running model (the half that
    is not copied into joined matrices), with the digest of before; where the file was cut first, the engine died."""
    shutil.copy(tiny / "config.json", tmp_path)
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(tiny / "model.safetensors").items()}
    save_file(weights, file := tmp_path / "model.safetensors")
    model = load_llama(tmp_path, replace(read_config(tmp_path), dtype=dtype), 16)
    asked, pool = ([5, 6, 7], [Chunk(0, 3, (0,))]), model.new_pool(1)
    before = model.forward(*asked, pool)
    with file.open("r+b") as opened:  # as `cp` does it
        opened.write(bytes(file.stat().st_size))
    assert torch.equal(model.forward(*asked, pool), before)
