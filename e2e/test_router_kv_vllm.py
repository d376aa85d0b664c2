"""KV of real vLLMs that no client asked for or reads: pairs that meet before one needs it, hedged prefill legs, references that
nobody fetches. It moves where the router says so, no token is another one, and nothing is held for longer than a lease: vLLM has
no way to give KV back before."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from e2e.bench.proxies import ours
from e2e.emulated.fleet import until
from e2e.vllm.told import tell
from fleet_cli.up.bundled import tiny_model
from fleet_router.config import HedgeBounds, PrewarmBounds, RouterConfig
from fleet_wire.endpoints import Role
from fleet_worker.config import KvSettings
from tests.conformance.workers import Worker, running, worker_config

ROOT = Path(__file__).resolve().parents[1]
PREFILL, OTHER, DECODE = "127.82.9.1", "127.82.9.2", "127.82.9.3"
ROUTER = "127.82.9.9:8080"
LEASE_S = 8.0
LEASE_LATE_S = 12.0
"""vLLM looks for leases that ran out when it makes a step, and these engines have little CPU."""
PROMPT_TOKENS = 300
"""Two whole blocks of vLLM's on CPU, which are 128 tokens: less does not move."""
CONFIG = RouterConfig(
    fleet="f", served_name="tiny", min_uncached_tokens=0, slow_start_s=0.0, max_input_tokens=1_000, max_output_tokens=64,
    silent_s=60.0,
)  # fmt: skip
MOVED = "vllm:nixl_bytes_transferred_sum"
HELD = "vllm:kv_cache_usage_perc"
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Engines:
    """Three vLLMs under their agents."""

    prefill: Worker
    other: Worker
    decode: Worker

    def nothing_is_held(self) -> None:
        """The prefix cache does not count: it gives way."""
        for one in (self.prefill, self.other, self.decode):
            until(f"{one.ip} holds no KV", lambda one=one: one.metric(HELD) == 0, LEASE_S + LEASE_LATE_S)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    installed = subprocess.run([str(ROOT / "e2e/vllm/get-vllm")], check=True, capture_output=True, text=True)
    env = {"FLEET_VLLM_BIN": str(Path(installed.stdout.strip()) / "vllm"), "OMP_NUM_THREADS": "1"}
    folder, model = tmp_path_factory.mktemp("kv"), tiny_model()
    prefill, decode = (
        worker_config(role, model, engine="vllm", kv=KvSettings(lease_s=LEASE_S), engine_args=("--dtype", "float32"))
        for role in ("prefill", "decode")
    )
    with (
        running(prefill, PREFILL, folder, **env) as one,
        running(prefill, OTHER, folder, **env) as two,
        running(decode, DECODE, folder, **env) as three,
    ):
        yield Engines(one, two, three)


@contextmanager
def routed(folder: Path, prefill: list[Worker], decode: Worker, config: RouterConfig) -> Iterator[None]:
    """A router that knows these."""
    health = f"http://{ROUTER}/health"
    with ours("ours", ROUTER, [f"{one.ip}:8000" for one in prefill], [f"{decode.ip}:8000"], folder, config, ready=health):
        told_of: list[tuple[Role, str]] = [*(("prefill", one.ip) for one in prefill), ("decode", decode.ip)]
        tell(folder / ROUTER.replace(":", "-"), told_of)
        known = len(told_of)
        until("they are known", lambda: told("endpoints{") == known, 60)
        yield


def told(name: str) -> float:
    """A counter of the router."""
    lines = httpx.get(f"http://{ROUTER}/metrics", trust_env=False, timeout=20).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"fleet_router_{name}"))


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 400) for _ in range(PROMPT_TOKENS)]


def asked(url: str, seed: int) -> tuple[str, str]:
    """(text, decision) of 16 greedy tokens."""
    body = {"model": "tiny", "prompt": prompt(seed), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-fleet-explain": "1"}, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.headers.get("x-fleet-decision", "")


def test_vllms_meet_before_a_client_needs_it(tmp_path: Path, engines: Engines):
    """What is said to have met has moved KV."""
    config = msgspec.structs.replace(CONFIG, prewarm=PrewarmBounds(pairs=4, timeout_s=60.0))
    before = engines.decode.metric(MOVED)
    with routed(tmp_path, [engines.prefill], engines.decode, config):
        until("the pair has met", lambda: told('prewarms_total{outcome="done"}') == 1, 120, lambda: "")
        until("KV has moved", lambda: engines.decode.metric(MOVED) > before, 30)
        assert told("arrivals_total") == 0
        text, decision = asked(f"http://{ROUTER}", 1)
        assert f'prefill="{PREFILL}"' in decision
        assert text == asked(engines.prefill.engine, 1)[0]
    engines.nothing_is_held()


def test_a_vllm_that_stands_still_is_hedged_and_keeps_nothing(tmp_path: Path, engines: Engines):
    hedge = HedgeBounds(after=1.0, least_s=0.5, share=0.5)
    config = msgspec.structs.replace(CONFIG, hedge=hedge)
    with routed(tmp_path, [engines.prefill, engines.other], engines.decode, config):
        answers = {seed: asked(f"http://{ROUTER}", seed)[0] for seed in range(100, 112)}  # what a prefill takes is learnt
        servers = [httpx.get(f"{one.agent}/state").json()["engine_pid"] for one in (engines.prefill, engines.other)]
        for number in range(6):
            os.kill(servers[number % 2], signal.SIGSTOP)
            try:
                answers[200 + number] = asked(f"http://{ROUTER}", 200 + number)[0]
            finally:
                os.kill(servers[number % 2], signal.SIGCONT)
        started, won = (told(f'hedges_total{{event="{event}"}}') for event in ("started", "won"))
        print(f"{started:.0f} hedges, {won:.0f} won")
        assert 1 <= won <= started
        until("nothing runs", lambda: told("inflight") == 0, 60)
    assert answers == {seed: asked(engines.decode.engine, seed)[0] for seed in answers}
    engines.nothing_is_held()


def test_kv_that_nobody_reads_goes_with_its_lease(engines: Engines):
    """A prefill leg whose reference nobody fetches."""
    transfer: dict[str, Any] = {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None,
    }  # fmt: skip
    body = {"model": "tiny", "prompt": prompt(300), "max_tokens": 1, "temperature": 0, "kv_transfer_params": transfer}
    assert engines.prefill.post("/v1/completions", body).json()["kv_transfer_params"]["remote_block_ids"]
    assert engines.prefill.metric(HELD) > 0
    engines.nothing_is_held()
