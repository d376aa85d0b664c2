"""A canary is judged by what it costs its clients: one whose workers are slow goes back, by direct telemetry and by Prometheus,
and what reaches its workers is its share."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from e2e.fleet import Fleet
from e2e.test_churn import load
from e2e.test_prometheus import URL, prometheus, targets
from e2e.test_rollout import rollout_status, wish
from e2e.traffic import FIRST_PLAIN_TOKEN, VOCABULARY, Request

INTERVAL_S = 30
FEWEST = 10
"""Requests before a canary is judged (analysis.minRequests)."""
SLOW = Path(__file__).parent / "changed"
PERCENT = 25
JUDGED = {
    "ttft": ("prefill", 1.0, {"ttftP99": "2x", "itlP99": "9.9x"}, "TTFT p99"),
    "itl": ("decode", 0.25, {"ttftP99": "9.9x", "itlP99": "2x"}, "ITL p99"),
}
"""Whose steps are slow, by how many seconds each, what is allowed, and the word for it."""

pytestmark = [pytest.mark.timeout(400)]


def conversations(count: int) -> list[Request]:
    """Each is another one: a prompt that shares nothing and that a prefill worker computes."""
    dice = random.Random(5)
    return [Request(n, tuple(dice.choices(range(FIRST_PLAIN_TOKEN, VOCABULARY), k=128)), 6) for n in range(count)]


def slow(made: dict[str, Any], role: str, by_s: float) -> None:
    """The same fleet, workers of this role of a version that is slow."""
    paths = [str(SLOW), *(str(Path(one).resolve()) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one)]
    env = {"PYTHONPATH": os.pathsep.join(paths), "SLOW_S": str(by_s)}
    template = {"env": [{"name": name, "value": value} for name, value in env.items()]}
    made["spec"]["tiers"][0][role]["podTemplate"] = template


def metric(url: str, name: str, **labels: str) -> float:
    """Sum over the samples with these labels; 0 where nobody answers."""
    try:
        lines = httpx.get(f"{url}/metrics", timeout=2, trust_env=False).text.splitlines()
    except httpx.HTTPError:
        return 0.0
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = [line for line in lines if line.startswith((name + "{", name + " ")) and all(pair in line for pair in wanted)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def until(what: str, check: Callable[[], bool], timeout_s: float) -> float:
    """Polls often; when it was so."""
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end, f"{what}: not within {timeout_s} s"
        time.sleep(0.1)
    return time.monotonic()


@contextmanager
def scraped(fleet: Fleet, folder: Path) -> Iterator[None]:
    """By Prometheus, which hears of pods as they come."""
    stop = Event()

    def tell() -> None:
        while not stop.wait(0.5):
            pods = [pod for pod in fleet.objects("pods") if pod["status"].get("podIP")]
            path = folder / "targets.json"
            path.with_suffix(".new").write_text(json.dumps(targets(pods)))
            path.with_suffix(".new").replace(path)

    (folder / "targets.json").write_text("[]")
    with prometheus(folder):
        thread = Thread(target=tell)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize(("judged", "source"), [("ttft", "direct"), ("itl", "direct"), ("ttft", "prometheus")])
def test_a_canary_that_is_slow_is_rolled_back_within_one_interval(fleet: Fleet, tmp_path: Path, judged: str, source: str):
    role, by_s, bounds, words = JUDGED[judged]
    canary = {"steps": [50], "interval": f"{INTERVAL_S}s", "analysis": {"minRequests": FEWEST, "errorRate": 0.5, **bounds}}
    made = wish(fleet, rollout={"canary": canary, "drainTimeout": "20s"})
    if source == "prometheus":
        made["spec"]["telemetry"] = {"interval": "1s", "prometheus": {"url": URL}}
    with scraped(fleet, tmp_path) if source == "prometheus" else nullcontext():
        fleet.apply(made)
        fleet.wait_serving(1, 2)
        before = {pod["metadata"]["uid"] for pod in [*fleet.pods("prefill"), *fleet.pods("decode")]}
        with load(fleet, conversations(2_000)) as ledger:
            slow(made, role, by_s)
            fleet.apply(made)
            fleet.wait("the canary serving", lambda: rollout_status(fleet).get("percent") == 50)
            target, router = rollout_status(fleet)["target"], fleet.router()
            answered = lambda: metric(router, "fleet_router_revision_requests_total", revision=target)  # noqa: E731
            breached = until("enough answers of the canary", lambda: answered() >= FEWEST, 60)
            fleet.wait("rolled back", lambda: fleet.condition("RollingOut")["reason"] == "RolledBack", INTERVAL_S)
            took_s = time.monotonic() - breached
            label = f"inferencefleet.io/revision={target}"
            fleet.wait("no worker of the bad revision", lambda: not fleet.objects("pods", "-l", label), 60)
        message = fleet.condition("RollingOut")["message"]
        print(f"{judged} by {source}: rolled back {took_s:.1f} s after {FEWEST} answers: {message}")
        assert took_s <= INTERVAL_S
        assert words in message, message
        assert rollout_status(fleet)["failed"] == target
        assert ledger.errors == {}
        assert {pod["metadata"]["uid"] for pod in [*fleet.pods("prefill"), *fleet.pods("decode")]} == before
        fleet.delete_and_leave_nothing()


def test_what_reaches_a_canarys_workers_is_its_share(fleet: Fleet):
    """Counted by the engines, not by the router that decides."""
    canary = {"steps": [PERCENT], "interval": "1h", "analysis": {"ttftP99": "9.9x", "itlP99": "9.9x", "errorRate": 0.5}}
    made = wish(fleet, rollout={"canary": canary, "drainTimeout": "20s"})
    fleet.apply(made)
    fleet.wait_serving(1, 2)
    made["spec"]["engine"]["maxBatch"] = 24
    fleet.apply(made)
    fleet.wait("the canary serving", lambda: rollout_status(fleet).get("percent") == PERCENT)
    target = rollout_status(fleet)["target"]
    before = arrived(fleet, target)
    with load(fleet, conversations(2_000), apart=True) as ledger:
        fleet.wait("enough conversations", lambda: len(ledger.tokens) >= 250, 120)
    mine, others = (now - was for now, was in zip(arrived(fleet, target), before, strict=True))
    asked, share = len(ledger.tokens), mine / (mine + others)
    print(f"{share:.3f} of {mine + others:.0f} requests in {asked} conversations")
    assert abs(share - PERCENT / 100) <= 4 * math.sqrt(PERCENT / 100 * (1 - PERCENT / 100) / asked)
    assert ledger.errors == {}
    fleet.delete_and_leave_nothing()


def arrived(fleet: Fleet, target: str) -> tuple[float, float]:
    """Requests that decode workers of this revision, and of others, have finished: each request ends at one."""
    found = {True: 0.0, False: 0.0}
    for pod in fleet.pods("decode"):
        mine = pod["metadata"]["labels"]["inferencefleet.io/revision"] == target
        found[mine] += metric(f"http://{pod['status']['podIP']}:8000", "vllm:request_success_total")
    return found[True], found[False]
