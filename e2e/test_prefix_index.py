"""The precise index against real torch workers: a router that sent nothing knows where KV is, forgets a dead worker's and
learns the next life's."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fleet_cli.up.bundled import tiny_model
from fleet_router.config import RouterConfig
from fleet_router.config import encode as encode_config
from fleet_wire.endpoints import ENDPOINTS_KEY, ROUTER_CONFIG_KEY, Endpoints
from fleet_wire.endpoints import encode as encode_endpoints
from tests.conformance.workers import Worker, endpoint_of, spawn, stop, wait_ready, worker_config

IPS = ("127.85.0.1", "127.85.0.2", "127.85.0.3")
ROUTER = "127.85.0.9:8080"
WORDS = "the router knows which worker holds the blocks of this long prompt because the worker said so itself "


@contextlib.contextmanager
def router(workers: list[Worker], folder: Path, config: RouterConfig) -> Iterator[None]:
    """fleet-router over decode workers alone, following a folder."""
    found = tuple(endpoint_of(worker) for worker in workers)
    (folder / ROUTER_CONFIG_KEY).write_text(encode_config(config))
    (folder / ENDPOINTS_KEY).write_bytes(encode_endpoints(Endpoints(fleet="suite", namespace="default", workers=found)))
    host, port = ROUTER.split(":")
    argv = [sys.executable, "-m", "fleet_router", "--follow", f"dir:{folder}", "--host", host, "--port", port]
    with (folder / "router.log").open("wb") as log:
        running = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        running.terminate()
        running.wait(40)
        text = (folder / "router.log").read_text()
        assert running.returncode == 0, text
        assert "Traceback" not in text, text


def metric(pattern: str) -> float:
    found = re.search(pattern, httpx.get(f"http://{ROUTER}/metrics", timeout=5, trust_env=False).text, re.M)
    return float(found[1]) if found else -1.0


def until(what: str, pattern: str, value: float, deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if metric(pattern) == value:
                return
        assert time.monotonic() < end, f"{what}: not within {deadline_s} s"
        time.sleep(0.1)


def ask(at: str, prompt: str) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"http://{at}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text


LIVE = r'^fleet_router_kv_streams\{state="live"\} (\d+)'
BLOCKS = r"^fleet_router_kv_blocks (\d+)"


@pytest.mark.timeout(400)
def test_a_router_knows_what_it_never_sent(tmp_path: Path):
    config = RouterConfig(fleet="suite", served_name="tiny", prefix_index="precise", max_input_tokens=1024, slow_start_s=0.0)
    workers = [spawn(worker_config("decode", tiny_model()), ip, tmp_path) for ip in IPS]
    try:
        for worker in workers:
            wait_ready(worker)
        for i, worker in enumerate(workers):
            ask(f"{worker.ip}:8000", f"{i} {WORDS * 6}")  # behind the router's back, before it lives
        with router(workers, tmp_path, config):
            until("all streams live", LIVE, 3)
            assert metric(BLOCKS) > 30
            wait_for_tokens(tmp_path)
            for i, worker in enumerate(workers):
                before = worker.metric("vllm:prefix_cache_hits_total")
                for more in range(3):
                    ask(ROUTER, f"{i} {WORDS * 6} and then {more}")
                assert worker.metric("vllm:prefix_cache_hits_total") - before > 200, f"the prompts of {worker.ip} went elsewhere"
            known = metric(BLOCKS)
            os.killpg(workers[0].process.pid, signal.SIGKILL)
            until("the dead worker's stream ends", LIVE, 2)
            assert metric(BLOCKS) < known
            workers[0].process.wait(10)
            workers[0] = spawn(worker_config("decode", tiny_model()), IPS[0], tmp_path)
            wait_ready(workers[0])
            until("its next life is read", LIVE, 3)
            ask(f"{IPS[0]}:8000", f"new life {WORDS * 6}")
            before = workers[0].metric("vllm:prefix_cache_hits_total")
            time.sleep(0.3)
            ask(ROUTER, f"new life {WORDS * 6} and on")
            assert workers[0].metric("vllm:prefix_cache_hits_total") > before
    finally:
        for worker in workers:
            stop(worker)


def wait_for_tokens(folder: Path, deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while "usable=True" not in (folder / "router.log").read_text():
        assert time.monotonic() < end, "no tokenizer"
        time.sleep(0.1)
