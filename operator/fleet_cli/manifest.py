"""Reading a fleet manifest from a file: YAML in, a dict that the API server would accept out, or its words of refusal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from fleet_cli.errors import InputError
from fleet_cli.kubeyaml import KubeLoader, plain

MAX_MANIFEST_BYTES = 1024 * 1024
"""The API server's own limit lies near: etcd refuses objects above 1.5 MiB."""
MAX_NODES = 100_000
"""Values in a manifest once its aliases are unfolded. Anchors are useful; a few nested ones that unfold to millions are not."""


def read_manifest(path: str) -> dict[str, Any]:
    """The one InferenceFleet of a YAML or JSON file ("-" is standard input), valid; InputError tells what is wrong with it."""
    manifest = _only_document(_load(path), path)
    check(manifest)
    return manifest


def check(manifest: dict[str, Any]) -> None:
    """InputError in the words of the API server (and of kubectl around them) when it would refuse the manifest."""
    from fleet_api.compat import refusals_applied
    from fleet_api.structure import normalised, quoted
    from fleet_api.v1alpha1 import API_VERSION
    from fleet_api.validate import STRICT, refusal, validate

    kind, version = manifest.get("kind"), manifest.get("apiVersion")
    if (kind, version) != ("InferenceFleet", API_VERSION):
        found = f"no matches for kind {quoted(str(kind or ''))} in version {quoted(str(version or ''))}"
        raise InputError(f'{found}: only kind "InferenceFleet" in version "{API_VERSION}" is read from files')
    metadata = manifest.get("metadata")
    if isinstance(metadata, dict) and metadata.get("generateName") and not metadata.get("name"):
        raise InputError("metadata.generateName: a fleet that is applied needs metadata.name")
    errors = validate(manifest) or refusals_applied(normalised(manifest))
    if not errors:
        return
    if errors[0].startswith(STRICT):
        raise InputError(refusal(manifest, errors))
    name = metadata.get("name", "") if isinstance(metadata, dict) else ""
    listed = errors[0] if len(errors) == 1 else "".join(f"\n* {error}" for error in errors)
    raise InputError(f"The InferenceFleet {quoted(str(name))} is invalid: {listed}")


def _load(path: str) -> list[Any]:
    try:
        raw = _standard_input() if path == "-" else _read(Path(path))
        if len(raw) > MAX_MANIFEST_BYTES:
            raise InputError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes")
        text = raw.decode()  # as kubectl, whatever the terminal's encoding is
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"cannot read {path}: {cause}") from error
    try:
        if (found := _json(text)) is not None:
            return [found]
        for document in yaml.compose_all(text, Loader=KubeLoader):
            if _unfolded(document, {}) > MAX_NODES:
                raise InputError(f"{path} holds more than {MAX_NODES} values when its YAML aliases are unfolded")
        return [document for document in yaml.load_all(text, Loader=KubeLoader) if document is not None]
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not valid YAML: {_one_line(error)}") from error
    except RecursionError:
        raise InputError(f"{path} is nested too deeply") from None


def _json(text: str) -> Any:
    """The value of a file that is JSON, which may be indented with tabs; None: read it as YAML, which also says what is wrong."""
    if not text.lstrip("\ufeff \t\r\n").startswith("{"):
        return None

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a key is written twice")
        return found

    def never(constant: str) -> Any:
        raise ValueError(constant)

    try:
        text = text.removeprefix("\ufeff")
        return json.loads(text, object_pairs_hook=once, parse_int=plain, parse_float=plain, parse_constant=never)
    except ValueError:
        return None


def _unfolded(node: yaml.Node | None, known: dict[int, int]) -> int:
    """How many values a node becomes; a node inside itself never ends."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = MAX_NODES + 1  # until it is counted: whoever meets it meanwhile stands inside it
        inside = [child for pair in node.value for child in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_unfolded(child, known) for child in inside)
    return known[id(node)]


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_MANIFEST_BYTES + 1)


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise InputError("cannot read -: standard input is closed")
    return sys.stdin.buffer.read(MAX_MANIFEST_BYTES + 1)


def _only_document(documents: list[Any], path: str) -> dict[str, Any]:
    if len(documents) != 1:
        raise InputError(f"{path} holds {len(documents)} documents; one InferenceFleet is needed")
    (document,) = documents
    if not isinstance(document, dict):
        raise InputError(f"{path} does not hold an object but {type(document).__name__}")
    return document


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())
