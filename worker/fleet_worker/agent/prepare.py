"""Model preparation: a source becomes a local folder that an engine can open, or an error that names the cause.

`hf://ORG/NAME[@REVISION]` is fetched (hub.py; HF_ENDPOINT and HF_TOKEN are huggingface_hub's); anything else is a path inside the
pod.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.agent.errors import ModelError
from fleet_worker.agent.hub import HF_SCHEME, fetch
from fleet_worker.config import WorkerConfig
from fleet_worker.weightfiles import Reads, part_of, read_by

MAX_CONFIG_BYTES = 1024 * 1024
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
FETCHED = [*WEIGHT_PATTERNS, "*.json", "*.jinja", "*.txt", "tokenizer.model"]
"""Never *.bin, *.pt or *.py: weights come as safetensors, and code from a model repository is not run."""


def prepare_model(source: str, progress: Callable[[str], None], reads: Reads = "all") -> Path:
    """Local folder of the model; ModelError otherwise. `progress` gets short sentences for /state."""
    folder = fetch(source, progress, FETCHED, reads) if source.startswith(HF_SCHEME) else Path(source)
    progress(f"checking {folder}")
    check_folder(folder)
    return folder


def prepare_for(config: WorkerConfig, progress: Callable[[str], None]) -> Path:
    """The same for a worker: without weights that its engine does not read."""
    return prepare_model(config.model, progress, read_by(config.engine, config.engine_args, config.quantization))


def version_of(source: str, folder: Path) -> str:
    """The commit of a model from the hub, after which its folder is called; of a folder of somebody's nobody knows."""
    return folder.name if source.startswith(HF_SCHEME) else ""


def check_folder(folder: Path) -> None:
    """A folder with a readable config.json and safetensors weights; ModelError names what is missing."""
    try:
        _check_folder(folder)
    except PermissionError as error:
        raise ModelError(f"{error.filename} is not readable by user {os.geteuid()}") from error
    except (OSError, ValueError) as error:  # a link to nowhere, a disk that fails, a path with a null byte
        raise ModelError(f"{getattr(error, 'filename', None) or repr(str(folder))}: {error}") from error


def _check_folder(folder: Path) -> None:
    if not _found(folder):
        raise ModelError(f"model path {folder} does not exist")
    if not folder.is_dir():
        raise ModelError(f"model path {folder} is not a folder")
    os.listdir(folder)  # glob finds nothing in a folder that may not be read
    config = folder / "config.json"
    if not _found(config):
        raise ModelError(f"model path {folder} holds no config.json")
    _check_is_file(config)
    if config.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelError(f"{config} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        parsed = json.loads(config.read_bytes())
    except UNREADABLE as error:
        raise ModelError(f"{config} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict) or not parsed.get("architectures"):
        raise ModelError(f"{config} names no architectures")
    weights = [path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern)]
    if not weights:
        raise ModelError(f"model path {folder} holds no *.safetensors file")
    if (part := part_of([path.name for path in weights])) is not None:
        raise ModelError(f"model path {folder} holds {part}: it is not whole, or is still being copied")
    for path in weights:
        _check_is_file(path)
        path.open("rb").close()  # engines say of a file that they may not read that it does not exist


def _check_is_file(path: Path) -> None:
    """A link that leads to one is one. A folder is not, and who opens a pipe waits for its writer."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ModelError(f"{path} is not a file")


def _found(path: Path) -> bool:
    """Path.exists() of newer Pythons takes what may not be looked at for absent."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
