"""Whoever answers as the hub names blobs and commits, and the library makes paths of both: nothing is written outside of the
cache."""

from __future__ import annotations

import json
import re
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import huggingface_hub
import huggingface_hub.file_download
import pytest

from fleet_worker.agent.hubnames import WATCHED, watch_names
from tests.fleet_worker.agent.test_prepare import COMMIT, FILES, prepare
from tests.hub import Hub, HubHandler

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
OUTSIDE = "../../../../outside"


@contextmanager
def hub(kind: type[HubHandler]) -> Iterator[Hub]:
    server = Hub({"acme/tiny": FILES}, COMMIT)
    server.RequestHandlerClass = kind
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class Blob(HubHandler):
    """The hash of a file leads elsewhere."""

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        elsewhere = {"ETag": f'"{OUTSIDE}"'} if "ETag" in headers and "tokenizer.json" in self.path else {}
        super().answer(status, body, {**headers, **elsewhere})


class Linked(HubHandler):
    """So does the one of large files, which counts before it."""

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        elsewhere = {"X-Linked-ETag": f'"{OUTSIDE}"'} if "model.safetensors" in self.path else {}
        super().answer(status, body, {**headers, **elsewhere})


class Commit(HubHandler):
    """So does the commit."""

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        if "/revision/" in self.path:
            body = json.dumps({**json.loads(body), "sha": OUTSIDE}).encode()
        super().answer(status, body, headers)

    def of_repository(self, path: str, repository: str, files: Any) -> None:
        super().of_repository(unquote(path).replace(OUTSIDE, COMMIT), repository, files)


@pytest.mark.parametrize("kind", [Blob, Linked, Commit])
def test_a_name_that_leads_out_of_the_cache_is_refused(kind: type[HubHandler], tmp_path: Path):
    """With HOME in reach a file of a mirror's choice became code of the engine that was started next."""
    cache = tmp_path / "node" / "cache"
    cache.mkdir(parents=True)
    with hub(kind) as server:
        done = prepare("hf://acme/tiny", server.server_address[1], cache)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and cache not in path.parents] == []
    assert done.returncode == 1
    assert f"hf://acme/tiny: the hub did not answer as one does: ValueError: it gives the name '{OUTSIDE}'" in done.stderr


def test_another_version_of_the_library_still_fetches_and_says_what_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It is a function of the library's own, and images of vLLM bring their version of it."""
    monkeypatch.delattr(huggingface_hub.file_download, "_get_metadata_or_catch_error")
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", huggingface_hub.HfApi.repo_info)
    watch_names()
    assert hasattr(huggingface_hub.HfApi.repo_info, WATCHED)
    assert "huggingface_hub has no _get_metadata_or_catch_error: names that a hub gives are not looked at" in caplog.text


@pytest.mark.parametrize("extra", ["worker", "vllm"])
def test_the_oldest_library_that_may_be_installed_can_tell_what_it_would_fetch(extra: str):
    """`dry_run`, which each fetch begins with, came with 1.0. Beside an older one, as vLLM's images of transformers 4 have it, a
    worker was installed without a word, and then fetched no model."""
    (bound,) = (found[1] for text in extras()[extra] if (found := re.match(r"huggingface-hub>=(\d+)", text)))
    assert int(bound) >= 1


def extras() -> dict[str, list[str]]:
    found: dict[str, list[str]] = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    return found
