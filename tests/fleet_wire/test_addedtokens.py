"""Tokens that tokenizer_config.json names beside tokenizer.json's, in engine and router as in transformers (and so in vLLM)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fleet_cli.up.bundled import tiny_model
from fleet_router.tokeniser import Tokeniser
from fleet_worker.engine.errors import ModelFilesError
from fleet_worker.engine.text import Text

START = "<|im_start|>"
LISTED = {"content": START, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
SAID = f"hello</s>  {START}user, {START} you<|im_end|>"


def model(folder: Path, without: str, settings: dict[str, Any]) -> Path:
    """The tiny model, in whose vocabulary the token is that is not among those that were added."""
    shutil.copytree(tiny_model(), folder, dirs_exist_ok=True)
    plain = json.loads((folder / "tokenizer.json").read_text())
    plain["added_tokens"] = [token for token in plain["added_tokens"] if token["content"] != without]
    if without == START:
        last = next(name for name, number in plain["model"]["vocab"].items() if number == 1023)
        plain["model"]["merges"] = [pair for pair in plain["model"]["merges"] if "".join(pair) != last]
        plain["model"]["vocab"] = {name: n for name, n in plain["model"]["vocab"].items() if n != 1023} | {START: 1023}
    (folder / "tokenizer.json").write_text(json.dumps(plain))
    before = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(before | settings))
    return folder


@pytest.mark.parametrize(
    ("without", "settings"),
    [
        ("", {}),
        ("</s>", {}),
        (START, {"added_tokens_decoder": {"1023": LISTED}}),
        ("", {"added_tokens_decoder": {"1025": LISTED | {"content": "<|im_end|>"}, "1024": LISTED}}),
        ("", {"added_tokens_decoder": {"1024": LISTED | {"special": False, "lstrip": True}}}),
        ("", {"added_tokens_decoder": {"1024": LISTED | {"special": False}}, "eos_token": START}),
        ("", {"added_tokens_decoder": {"2": LISTED | {"content": "</s>", "rstrip": True}}}),
        (START, {"additional_special_tokens": [START]}),
        (START, {"extra_special_tokens": [START], "additional_special_tokens": ["<|im_end|>"]}),
        ("", {"split_special_tokens": True}),
        ("", {"split_special_tokens": True, "added_tokens_decoder": {"1024": LISTED | {"special": False}}}),
        ("", {"extra_special_tokens": {"begin": START}, "end_token": "<|im_end|>"}),
        ("", {"eos_token": LISTED | {"__type": "AddedToken", "content": "<|im_end|>"}}),
    ],
)
def test_tokens_that_tokenizer_config_names_are_those_of_transformers(tmp_path: Path, without: str, settings: dict[str, Any]):
    """Incident: of a fine-tune that was given the tokenizer.json of its base model the chat template's <|im_start|> was seven
    tokens that mean nothing: 200, and an answer to another prompt."""
    from transformers import AutoTokenizer

    folder = model(tmp_path, without, settings)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Text(folder)
    want = theirs(SAID, add_special_tokens=False)["input_ids"]
    assert ours.encode(SAID, add_special=False) == want
    assert ours.decode(want) == theirs.decode(want, skip_special_tokens=True)
    files = {name: (folder / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    assert Tokeniser(files).encode([SAID]) == [want]


@pytest.mark.parametrize("listed", [[1], {"a": LISTED}, {"5": "<s>"}, {"5": {}}, {"5": LISTED | {"lstrip": 7}}])
def test_a_list_of_tokens_that_is_none_names_the_file(tmp_path: Path, listed: Any):
    folder = model(tmp_path, "", {"added_tokens_decoder": listed})
    with pytest.raises(ModelFilesError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        Text(folder)
