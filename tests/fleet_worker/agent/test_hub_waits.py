"""A hub that takes a connection and says nothing, as a mirror that stands still, or a firewall that forgot it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet_worker.agent.test_cut_fetch import FILES, address
from tests.hub import Hub, HubHandler
from tests.xethub import XetHandler

IMPATIENT = """
import sys
from fleet_worker.agent import hubwaits
hubwaits.QUIET_S, sys.argv[1:] = 1.0, ["fetch"]
from fleet_worker.__main__ import main
sys.exit(main())
"""
SPEAKS = threading.Event()


class Silent(HubHandler):
    def respond(self) -> None:
        if "/api/" in self.path:
            SPEAKS.wait(60.0)
        super().respond()


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub({"acme/tiny": FILES})
    server.RequestHandlerClass = Silent
    SPEAKS.clear()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    SPEAKS.set()
    server.shutdown()
    server.server_close()


def fetched(hub: Hub, cache: Path) -> tuple[int, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": address(hub), "FLEET_MODEL_CACHE": str(cache), "HF_HOME": str(cache), "FLEET_FETCH": "hf://acme/tiny"}
    done = subprocess.run([sys.executable, "-c", IMPATIENT], env=env, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stderr


def test_a_hub_that_says_nothing_is_one_that_cannot_be_reached(hub: Hub, tmp_path: Path):
    """The worker waited for it, for ever: Preparing, and not a word why."""
    code, words = fetched(hub, tmp_path)
    assert (code, "hf://acme/tiny: the hub cannot be reached" in words) == (2, True), words


@pytest.mark.parametrize("kind", [HubHandler, XetHandler])
def test_while_a_hub_says_nothing_what_is_there_is_enough(hub: Hub, tmp_path: Path, kind: type[HubHandler]):
    """No worker started, though all of the model was in its node's cache."""
    hub.RequestHandlerClass = kind
    assert fetched(hub, tmp_path)[0] == 0
    hub.RequestHandlerClass = Silent
    code, words = fetched(hub, tmp_path)
    assert code == 0, words
