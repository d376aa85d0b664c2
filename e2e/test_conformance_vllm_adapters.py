"""Adapters on vLLM for CPU are refused, in words, before any engine starts. With a GPU the suite of tests/conformance/adapters.py
is for them, which no machine here has: on CPU six of its seven cases passed, and `test_both_in_one_batch` showed requests for the
base model answered under an adapter (slot -1 is the last slot in vLLM 0.32's lora/ops/torch_ops)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fleet_cli.up.bundled import tiny_model
from fleet_worker.config import AdapterSettings
from tests.conformance.workers import spawn, worker_config

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


def test_adapters_without_a_gpu_are_named_and_exit_2(tmp_path: Path):
    found = subprocess.run([str(ROOT / "e2e/vllm/get-vllm")], check=True, capture_output=True, text=True)
    settings = AdapterSettings(most=2, max_rank=16, root=str(tmp_path))
    config = worker_config("decode", tiny_model(), engine="vllm", adapters=settings)
    worker = spawn(config, "127.82.1.1", tmp_path, FLEET_VLLM_BIN=str(Path(found.stdout.strip()) / "vllm"))
    assert worker.process.wait(60) == 2
    assert "vLLM without a GPU answers requests for the base model under an adapter" in worker.log.read_text()
