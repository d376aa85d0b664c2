"""What a hub says that gives nothing out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet_worker.agent.test_cut_fetch import FILES
from tests.fleet_worker.agent.test_prepare import ended, fetch
from tests.hub import Hub, HubHandler


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub({"acme/tiny": FILES})
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class Refusing(HubHandler):
    """A hub that says what it has, or not even that, and gives out no file."""

    status = 403
    where = "/resolve/"

    def respond(self) -> None:
        if self.where in self.path:
            self.answer(
                self.status, b'{"error":"no more than 7 files"}', {"content-type": "application/json", "Retry-After": "0"}
            )
        else:
            super().respond()


@pytest.mark.parametrize(
    ("status", "where", "told"),
    [
        (403, "/resolve/", "403 Forbidden"),
        (403, "/api/", "403 Forbidden"),
        (429, "/resolve/", "429 Too Many Requests"),
        (429, "/api/", "429 Too Many Requests"),
        (500, "/api/", "Server error '500"),
    ],
)
def test_what_a_hub_answers_is_told(hub: Hub, tmp_path: Path, status: int, where: str, told: str):
    """A token that may not read the files, or too many requests, was 'the hub cannot be reached: check your connection'."""
    hub.RequestHandlerClass = type("Refusing", (Refusing,), {"status": status, "where": where})
    code, words = ended(fetch(hub.server_address[1], tmp_path))
    assert (code, f"BadModel: hf://acme/tiny: the hub answered: {told}" in words) == (2, True), words


@pytest.mark.parametrize("files", [{"tiny.gguf": b"weights", "README.md": b"# tiny"}, {}])
def test_a_repository_that_holds_nothing_of_a_model_is_named(hub: Hub, tmp_path: Path, files: dict[str, bytes]):
    """One of GGUF files alone was 'the hub cannot be reached', as was a whole model that was named as an adapter."""
    hub.repositories = {"acme/tiny": files}
    code, words = ended(fetch(hub.server_address[1], tmp_path))
    assert (code, "BadModel: hf://acme/tiny: the repository holds none of *.safetensors, " in words) == (2, True), words
