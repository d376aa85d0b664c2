"""A prefill worker that joins under a load with shared prefixes has them before it is ready, and its first requests find them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.fleet import Fleet, manifest, tokens
from fleet_cli.up.bundled import tiny_model
from tests.conformance.workers import running, worker_config

SHARED = [f"{n}: you answer in short plain sentences, and you name every source that you have. " * 10 for n in range(4)]
CLIENTS = 8
"""More than one worker should run at once: else all go to the one that was there."""
WARM_UP = 4
"""Prompt tokens of the agent's own first request."""

pytestmark = [pytest.mark.timeout(400)]


def wish(namespace: str, *, seed: bool) -> dict[str, Any]:
    made = manifest(namespace, tiny_model())
    spec, tier = made["spec"], made["spec"]["tiers"][0]
    tier["ratio"] = {"prefill": 1, "decode": 1, "min": "1:1", "max": "2:1"}
    tier["prefill"], tier["decode"] = {"maxReplicas": 2}, {"maxReplicas": 1}
    tier["kvTransfer"] = {"seed": {"enabled": seed}}
    spec["scaling"] = {"mode": "manual"}
    spec["routing"] = {"remotePrefill": {"minUncachedTokens": 0}, "slowStart": "0s"}
    spec["rollout"] = {"drainTimeout": "6s"}
    return made


def prompt(number: int) -> str:
    """A shared prefix, then what nobody else asks."""
    return SHARED[number % len(SHARED)] + f" {number} is not {number + 1}." * 15


@contextmanager
def load(url: str, answers: dict[int, list[int]]) -> Iterator[None]:
    """Clients that ask, each the next prompt, while the block runs."""
    stop, take = threading.Event(), iter(range(10**6))

    def client() -> None:
        while not stop.is_set():
            number = next(take)
            answers[number] = tokens(url, prompt(number), 4)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def metric(address: str, name: str) -> float:
    lines = httpx.get(f"http://{address}:8000/metrics", timeout=10).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name)


def grown(fleet: Fleet) -> str:
    """Address of the prefill worker that came second."""
    before = {pod["metadata"]["uid"] for pod in fleet.pods("prefill")}
    pool = next(pool for pool in fleet.objects("workerpools") if pool["spec"]["role"] == "prefill")["metadata"]["name"]
    fleet.kubectl("scale", "workerpool", pool, "--replicas=2")
    fleet.wait_serving(2, 1)
    return next(pod["status"]["podIP"] for pod in fleet.pods("prefill") if pod["metadata"]["uid"] not in before)


@pytest.mark.parametrize("seed", [True, False], ids=["seeded", "cold"])
def test_a_worker_that_joins_under_load_finds_the_shared_prefixes(fleet: Fleet, tmp_path: Path, seed: bool):
    fleet.apply(wish(fleet.namespace, seed=seed))
    fleet.wait_serving(1, 1)
    answers: dict[int, list[int]] = {}
    with load(fleet.router(), answers):
        fleet.wait("every prefix is shared", lambda: len(answers) >= 4 * len(SHARED), 120)
        new = grown(fleet)
        state = httpx.get(f"http://{new}:9000/state", timeout=5).json()["seed"]
        fleet.wait("it is asked", lambda: metric(new, "vllm:prefix_cache_queries_total") > WARM_UP, 60)
        queries, hits = (metric(new, f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits"))
    print(json.dumps({"seed": state, "first_queries": queries, "first_hits": hits, "answers": len(answers)}))
    if seed:
        assert (state["outcome"], state["refused_blocks"]) == ("Seeded", 0)
        assert state["blocks"] >= len(SHARED) * 20
        assert hits > 0.5 * queries
    else:
        assert state["outcome"] == "Off"
        assert metric(new, "fleet:kv_seed_blocks_taken_total") == 0
    with running(worker_config("decode", tiny_model()), "127.79.90.9", tmp_path) as alone:
        for number in sorted(answers)[-20:]:
            assert answers[number] == tokens(alone.engine, prompt(number), 4)
    fleet.delete_and_leave_nothing()
