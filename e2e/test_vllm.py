"""Apply → tokens with vLLM workers: the same operator, agent and router, another engine. `make vllm` installs it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from e2e.fleet import Fleet, manifest
from e2e.traffic import Request, read_trace, send_all
from fleet_cli.up.bundled import tiny_model

ROOT = Path(__file__).resolve().parents[1]
READY_S = 400.0
"""Two vLLMs import 20,000 modules on two cores, and the first one's NIXL progress thread takes one of these."""
REQUESTS = 12
LEAST_PROMPT_TOKENS = 256
"""Two of vLLM's CPU blocks of 128 tokens: shorter prompts have no whole block to move."""
MOST_IN, MOST_OUT = 700, 64
"""Limits of the fleet; the trace keeps to them."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def wish(namespace: str) -> dict[str, Any]:
    made = manifest(namespace, tiny_model())
    made["spec"]["engine"] = {"type": "vllm", "maxModelLen": 1024, "args": ["--dtype", "float32"]}
    made["spec"]["tiers"][0] |= {"ratio": {"prefill": 1, "decode": 1, "min": "1:1", "max": "1:1"}}
    made["spec"]["scaling"] = {"mode": "manual"}
    made["spec"]["limits"] = {"maxInputTokens": MOST_IN, "maxOutputTokens": MOST_OUT}
    return made


def test_apply_to_tokens_with_vllm(fleet: Fleet):
    subprocess.run([str(ROOT / "e2e/vllm/get-vllm")], check=True)
    fleet.apply(wish(fleet.namespace))
    fleet.wait_serving(1, 1, READY_S)
    requests = [request for request in read_trace() if len(request.prompt) >= LEAST_PROMPT_TOKENS][:REQUESTS]
    ledger = send_all(fleet.router(), requests, clients=1)
    assert ledger.errors == {}
    alone = f"http://{fleet.pods('prefill')[0]['status']['podIP']}:8000"
    assert ledger.tokens == {request.number: local(alone, request) for request in requests}
    limits_hold(fleet.router(), alone)
    fleet.wait("proof that KV moved", lambda: fleet.condition("Disaggregating")["status"] == "True", 30)
    # counters are written twice a minute: a write per request would be a write for nobody
    fleet.wait("the status to count them", lambda: fleet.status()["tiers"][0]["kv"]["transfers"] >= REQUESTS // 2, 60)
    kv = fleet.status()["tiers"][0]["kv"]
    assert (kv["bytes"] > 0, kv["failed"]) == (True, 0)
    fleet.wait("vLLM's UCX to say its transport", lambda: fleet.condition("TransportVerified")["status"] == "True", 30)
    assert fleet.condition("TransportVerified")["message"] in ("tier gpu: 1 workers use shm", "tier gpu: 1 workers use tcp")
    fleet.delete_and_leave_nothing()


def limits_hold(router: str, worker: str) -> None:
    """The output's by vLLM, which is told at its start; the input's by vLLM's own count, where bytes do not tell."""
    client = OpenAI(base_url=f"{router}/v1", api_key="none", max_retries=0)
    said = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "to the end"}], temperature=0, extra_body={"ignore_eos": True}
    )
    assert (said.usage.completion_tokens, said.choices[0].finish_reason) == (MOST_OUT, "length")
    fits, long = "word " * 150, "word " * 300
    few, many = tokens_of(worker, fits), tokens_of(worker, long)
    assert few <= MOST_IN < len(fits)
    assert client.completions.create(model="tiny", prompt=fits, max_tokens=1).usage.prompt_tokens == few
    assert MOST_IN < many < 1024
    with pytest.raises(BadRequestError, match=f"prompt has {many} tokens; allowed are {MOST_IN}"):
        client.completions.create(model="tiny", prompt=long, max_tokens=1)


def tokens_of(worker: str, prompt: str) -> int:
    answer = httpx.post(f"{worker}/tokenize", json={"model": "tiny", "prompt": prompt}, timeout=30)
    return int(answer.json()["count"])


def local(url: str, request: Request) -> list[int]:
    """The same request on one engine that prefills and decodes itself."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(
        model="tiny", prompt=list(request.prompt), max_tokens=request.max_tokens, temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    return list(answer.choices[0].token_ids)
