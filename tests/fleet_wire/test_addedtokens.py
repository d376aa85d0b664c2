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


WRITES = (
    "{{ messages[0].content }}|{{ bos_token }}|{{ eos_token }}|{{ sep_token }}|{{ cls_token }}|{{ image_token }}|{{ end_token }}|"
    "{{ sep_token is defined }}"
)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bos_token": None},
        {"bos_token": ""},
        {"sep_token": "</s>", "cls_token": LISTED | {"__type": "AddedToken", "content": "<s>"}},
        {"extra_special_tokens": {"image_token": START}},
        {"extra_special_tokens": [START]},
        {"end_token": "</s>", "add_bos_token": True},
    ],
)
def test_a_template_is_given_the_special_tokens_that_transformers_gives_it(tmp_path: Path, settings: dict[str, Any]):
    """All but four were empty in the prompt: 200, and an answer to another one."""
    from transformers import AutoTokenizer

    folder = model(tmp_path, "", settings | {"chat_template": WRITES})
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    asked = [{"role": "user", "content": "hello"}]
    want = AutoTokenizer.from_pretrained(folder).apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert Text(folder).render_chat(asked) == want
    files = {name: (folder / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    assert Tokeniser(files).render(json.dumps(asked).encode()) == want


def test_no_special_token_takes_the_place_of_what_a_template_is_given(tmp_path: Path):
    folder = model(tmp_path, "", {"extra_special_tokens": {"messages": "<s>"}, "chat_template": WRITES})
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert Text(folder).render_chat([{"role": "user", "content": "hello"}]).startswith("hello|<s>")


@pytest.mark.parametrize("listed", [[1], {"a": LISTED}, {"5": "<s>"}, {"5": {}}, {"5": LISTED | {"lstrip": 7}}])
def test_a_list_of_tokens_that_is_none_names_the_file(tmp_path: Path, listed: Any):
    folder = model(tmp_path, "", {"added_tokens_decoder": listed})
    with pytest.raises(ModelFilesError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        Text(folder)
