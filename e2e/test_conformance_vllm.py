"""The engine conformance suite on vLLM for CPU: the same cases, another engine. `make vllm` installs it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet_cli.up.bundled import tiny_model
from fleet_worker.config import KvSettings
from tests.conformance.suite import Conformance, Pair
from tests.conformance.workers import running, worker_config

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    found = subprocess.run([str(ROOT / "e2e/vllm/get-vllm")], check=True, capture_output=True, text=True)
    vllm = Path(found.stdout.strip()) / "vllm"
    model, folder = tiny_model(), tmp_path_factory.mktemp("vllm")
    settings = KvSettings(lease_s=10.0)
    env = {"FLEET_VLLM_BIN": str(vllm), "OMP_NUM_THREADS": "1"}
    prefill = worker_config("prefill", model, engine="vllm", kv=settings)
    decode = worker_config("decode", model, engine="vllm", kv=settings)
    with running(prefill, "127.82.0.1", folder, **env) as first, running(decode, "127.82.0.2", folder, **env) as second:
        yield first, second


class TestVllm(Conformance):
    """Inherits every case."""
