"""What tests of the engine share: the tiny model and its weights, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet_cli.up.bundled import tiny_model
from fleet_worker.engine.llama import Llama
from fleet_worker.engine.modelconfig import read_config
from fleet_worker.engine.weights import load_weights

BLOCK = 16
"""Tokens per KV block."""


@pytest.fixture(scope="session")
def tiny() -> Path:
    return tiny_model()


@pytest.fixture(scope="session")
def llama(tiny: Path) -> Llama:
    config = read_config(tiny)
    return Llama(config, load_weights(tiny, config), BLOCK)
