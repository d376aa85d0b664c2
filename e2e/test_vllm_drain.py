"""The drain of a real vLLM that prefills: it waits for KV that nobody has read, also where a decode worker extends leases."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.conftest import vllm_environment
from fleet_cli.up.bundled import tiny_model
from fleet_worker.config import KvSettings
from tests.conformance.suite import Pair, completion, prefill_leg, tokens
from tests.conformance.workers import Worker, running, worker_config

ROOT = Path(__file__).resolve().parents[1]
LEASE_S = 60.0
"""vLLM's heartbeats extend it by two thirds, every sixth of it. Two cores are less than two vLLMs want: they stand still for
up to 25 s, and with a lease of 20 s its end came before the next heartbeat."""
TOKENS = 900
MOST_BEFORE = 40
"""Requests in the queue before the one that waits, one at a time; as many as last for more than a lease."""
LATE = "Somebody comes for this one when all of the others are done. " * 24

CORES = 4
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        (os.cpu_count() or 1) < CORES,
        reason=f"NOT TESTED on fewer than {CORES} cores: two vLLMs stand still for longer than leases and health checks",
    ),
]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    subprocess.run([str(ROOT / "e2e/vllm/get-vllm")], check=True)
    model, more = tiny_model(), {"engine": "vllm", "kv": KvSettings(lease_s=LEASE_S)}
    prefill = worker_config("prefill", model, drain_timeout_s=280.0, **more)
    decode = worker_config("decode", model, max_batch=1, **more)
    env = vllm_environment() | {"OMP_NUM_THREADS": "1"}
    with running(prefill, "127.82.2.1", tmp_path, **env) as first, running(decode, "127.82.2.2", tmp_path, **env) as second:
        yield first, second


def answered(worker: Worker, body: dict[str, Any]) -> httpx.Response:
    return worker.post("/v1/completions", body, timeout_s=300)


def long_one(number: int) -> dict[str, Any]:
    return completion([9 + number] * 100, max_tokens=TOKENS, ignore_eos=True)


def longer_than_a_lease(worker: Worker) -> int:
    """So many of them last for one and a half leases."""
    begun = time.monotonic()
    assert answered(worker, long_one(MOST_BEFORE)).status_code == 200
    return min(MOST_BEFORE, 1 + math.ceil(1.5 * LEASE_S / (time.monotonic() - begun)))


def known_to(worker: Worker, sent: Sequence[Future[httpx.Response]]) -> float:
    """Requests that came there, those that were answered included."""
    done = sum(one.done() for one in sent)
    return done + worker.metric("vllm:num_requests_running") + worker.metric("vllm:num_requests_waiting")


def soon(check: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not check():
        assert time.monotonic() < end, "not within 60 s"
        time.sleep(0.2)


def test_prefill_stays_until_a_busy_decode_worker_has_read_its_kv(pair: Pair):
    """Incident: it was let go one lease after its last request, while the decode worker extended the lease of one that waited in
    its queue: that one ended with a 500."""
    prefill, decode = pair
    alone = tokens(prefill.post("/v1/completions", completion(LATE)))
    tokens(decode.post("/v1/completions", completion(kv_transfer_params=prefill_leg(prefill))))  # they know one another
    queue = longer_than_a_lease(decode)
    with ThreadPoolExecutor(queue + 1) as pool:
        busy = [pool.submit(answered, decode, long_one(one)) for one in range(queue)]
        soon(lambda: known_to(decode, busy) >= queue)
        reference = prefill_leg(prefill, prompt=LATE)
        leg = pool.submit(answered, decode, completion(LATE, kv_transfer_params=reference))
        soon(lambda: known_to(decode, busy) >= queue + 1)
        said = httpx.get(prefill.agent + "/drain", timeout=300).json()
        prefill.process.terminate()  # as the kubelet does then: what is unread goes with it
        answer = leg.result()
        assert [one.result().status_code for one in busy] == [200] * queue
    assert said["drained"] is True, said
    assert tokens(answer) == alone
    assert said["waited_s"] > LEASE_S + 3, "the queue was too short to show anything"
