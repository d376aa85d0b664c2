"""Which files of weights there are: of repositories that hold them twice, as Mistral's do, what an engine does not read is not
fetched (hf:// is a hub on this machine); a folder that holds a part of them is none."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from fleet_worker.agent.errors import ModelError
from fleet_worker.agent.prepare import prepare_model
from fleet_worker.weightfiles import Reads, as_reads, read_by, unread
from tests.fleet_worker.agent.test_prepare import ended, fetch
from tests.hub import Hub

INDEX = b'{"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}'
REST = {"config.json": b'{"architectures":["MistralForCausalLM"]}', "params.json": b"[]", "tokenizer.json": b"{}"}
SHARDS = {"model-00001-of-00002.safetensors": b"half", "model-00002-of-00002.safetensors": b"the other"}
INDEXED = {**SHARDS, "model.safetensors.index.json": INDEX}
CONSOLIDATED = {"consolidated.safetensors": b"both halves"}
TWICE = {**REST, **INDEXED, **CONSOLIDATED}


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub({"acme/tiny": TWICE})
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("reads", "left_out"), [("shards", CONSOLIDATED), ("consolidated", SHARDS), ("all", {}), ("", {}), ("of another version", {})]
)
def test_weights_that_are_there_twice_are_fetched_once(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: str, left_out: dict[str, bytes]
):
    """Of Mistral-Small 47 GB more were fetched, compared and kept than any engine reads."""
    monkeypatch.setenv("FLEET_FETCH_WEIGHTS", reads)
    assert ended(fetch(hub.server_address[1], tmp_path))[0] == 0
    assert sorted(hub.sent) == sorted(TWICE.keys() - left_out.keys())
    assert ended(fetch(1, tmp_path))[0] == 0, "what is read is here: no hub is needed"


def test_what_is_not_read_needs_no_room(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub.sizes["consolidated.safetensors"] = 2**60
    monkeypatch.setenv("FLEET_FETCH_WEIGHTS", "shards")
    assert ended(fetch(hub.server_address[1], tmp_path))[0] == 0


def test_a_cache_that_another_engine_filled_is_not_the_whole_model(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each engine's list is its own; one of everything, as older workers left it, is good for all."""
    port = hub.server_address[1]
    monkeypatch.setenv("FLEET_FETCH_WEIGHTS", "shards")
    assert ended(fetch(port, tmp_path))[0] == 0
    for libraries_own in tmp_path.glob("models--*/trees"):
        shutil.rmtree(libraries_own)
    monkeypatch.setenv("FLEET_FETCH_WEIGHTS", "consolidated")
    code, words = ended(fetch(1, tmp_path))
    assert (code, "was never fetched whole" in words) == (2, True), words
    assert ended(fetch(port, tmp_path))[0] == 0
    assert ended(fetch(1, tmp_path))[0] == 0
    assert sorted(hub.sent) == sorted(TWICE)
    monkeypatch.setenv("FLEET_FETCH_WEIGHTS", "all")
    assert ended(fetch(port, tmp_path))[0] == 0
    for own in (tmp_path / ".inferencefleet").glob("*-shards.files"):
        own.unlink()
    monkeypatch.setenv("FLEET_FETCH_WEIGHTS", "shards")
    assert ended(fetch(1, tmp_path))[0] == 0


@pytest.mark.parametrize(
    ("names", "shards", "consolidated"),
    [
        (TWICE, CONSOLIDATED, SHARDS),
        ({"model.safetensors", *CONSOLIDATED}, CONSOLIDATED, {"model.safetensors"}),
        ({**INDEXED, "consolidated-00001-of-00002.safetensors": b""}, {"consolidated-00001-of-00002.safetensors"}, SHARDS),
        (INDEXED, {}, {}),
        (CONSOLIDATED, {}, {}),
        ({**SHARDS, **CONSOLIDATED}, {}, {}),  # no index says that these are all
        ({**INDEXED, "old/consolidated.safetensors": b""}, {}, {}),
        ({**TWICE, "encoder.safetensors": b""}, CONSOLIDATED, SHARDS),
    ],
)
def test_what_is_left_out(names: dict[str, bytes], shards: dict[str, bytes], consolidated: dict[str, bytes]):
    assert unread(names, "shards") == set(shards)
    assert unread(names, "consolidated") == set(consolidated)
    assert unread(names, "all") == set()


@pytest.mark.parametrize(
    ("engine", "arguments", "quantization", "reads"),
    [
        ("torch", (), None, "shards"),
        ("vllm", (), None, "consolidated"),
        ("vllm", ("--config-format", "hf"), None, "consolidated"),
        ("vllm", ("--load-format", "safetensors"), None, "all"),
        ("vllm", ("--load-format=hf",), None, "all"),
        ("vllm", ("--load_format", "mistral"), None, "all"),
        ("vllm", ("--loa", "hf"), None, "all"),
        ("vllm", (), "bitsandbytes", "all"),
    ],
)
def test_what_an_engine_reads(engine: str, arguments: tuple[str, ...], quantization: str | None, reads: Reads):
    assert read_by(engine, arguments, quantization) == reads
    assert as_reads(reads) == reads


SHARD_NAMES = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (SHARD_NAMES[:2], "holds 2 of the 4 files model-*-of-00004.safetensors"),
        ([SHARD_NAMES[3]], "holds 1 of the 4 files"),
        ([*SHARD_NAMES[:3], "extra.safetensors"], "holds 3 of the 4 files"),
        (SHARD_NAMES, None),
        ([f"model-0000{number}-of-00003.safetensors" for number in range(3)], None),
        ([*SHARD_NAMES[:2], "model.safetensors.index.json"], None),
        ([*SHARD_NAMES[:2], "model.safetensors"], None),
        ([*SHARD_NAMES[:2], "consolidated.safetensors"], None),
    ],
)
def test_a_folder_that_is_being_copied_is_no_model(tmp_path: Path, names: list[str], words: str | None):
    """An index comes behind the shards that it lists. Without it vLLM takes what is there, and of a quantized model it does not
    look whether that is all: half a model answered 200. An index, or weights in one file, decide for themselves."""
    (tmp_path / "config.json").write_bytes(b'{"architectures":["LlamaForCausalLM"]}')
    for name in names:
        (tmp_path / name).write_bytes(b"weights")
    with nullcontext() if words is None else pytest.raises(ModelError, match=re.escape(words or "")):
        prepare_model(str(tmp_path), lambda _: None)
