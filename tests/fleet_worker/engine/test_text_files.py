"""Files that tokenizer and chat template are made of, and what a client is told of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fleet_worker.engine.errors import BadRequestError, ModelFilesError
from fleet_worker.engine.text import Text, text_digest


def test_the_client_is_told_what_the_template_did(tiny: Path, tmp_path: Path):
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3)
    with pytest.raises(BadRequestError, match="the chat template refused the messages: it comes to no end"):
        Text(tmp_path).render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_files_without_end_are_not_read_to_it(tiny: Path, tmp_path: Path, name: str):
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    with (tmp_path / name).open("wb") as out:
        out.truncate(10**12)  # nothing of it is on the disk
    for read in (Text, text_digest):
        with pytest.raises(ModelFilesError, match=f"{name} has more than"):
            read(tmp_path)


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param({"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}}, id="cut"),
        pytest.param(
            {"padding": {"strategy": {"Fixed": 512}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                         "pad_type_id": 0, "pad_token": "<unk>"}},
            id="padded",
        ),
    ],
)  # fmt: skip
def test_a_prompt_is_whole_however_its_tokenizer_was_used_in_training(tiny: Path, tmp_path: Path, stored: dict[str, Any]):
    """What `save_pretrained` wrote after a training with truncation cut every prompt, silently: 200, and tokens of its begin."""
    plain = json.loads((tiny / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**plain, **stored}))
    said = "a prompt of more than four tokens, which is to be read to its end"
    assert Text(tmp_path).encode(said) == Text(tiny).encode(said)


def test_a_text_over_which_the_tokenizer_panics_is_the_requests_fault(tiny: Path, tmp_path: Path):
    """What tokenizers raises then is no Exception: a 500 without words and two screens of log each; of a large body it ended the
    process that reads them, and a router took the 503 to another worker, whose process ended, too."""
    plain = json.loads((tiny / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(?:a|a|a)+c"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**plain, "pre_tokenizer": split}))
    text = Text(tmp_path)
    with pytest.raises(BadRequestError, match=r"the tokenizer gave up: .*retry-limit"):
        text.encode("a" * 40)
    assert text.encode("ab") == Text(tmp_path).encode("ab")


def test_a_text_that_is_no_template_is_the_models_fault(tiny: Path, tmp_path: Path):
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for")
    with pytest.raises(ModelFilesError, match="chat template does not compile"):
        Text(tmp_path)
