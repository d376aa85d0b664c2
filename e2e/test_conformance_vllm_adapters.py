"""The adapter conformance suite on vLLM for CPU: the same cases, another engine. `make vllm` installs it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.fleet import tiny_model
from fleet_worker.config import KvSettings
from tests.conformance.adapters import Adapted, AdapterConformance, adapted_pair

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    found = subprocess.run([str(ROOT / "e2e/vllm/get-vllm")], check=True, capture_output=True, text=True)
    env = {"FLEET_VLLM_BIN": str(Path(found.stdout.strip()) / "vllm"), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    folder, settings = tmp_path_factory.mktemp("vllm"), KvSettings(lease_s=10.0)
    exact = ("--dtype", "float32")  # vLLM would take half of it, and other tokens than transformers
    addresses = ("127.82.1.1", "127.82.1.2")
    with adapted_pair(tiny_model(), folder, addresses, env, engine="vllm", engine_args=exact, kv=settings) as made:
        yield made


class TestVllmAdapters(AdapterConformance):
    """Inherits every case."""
