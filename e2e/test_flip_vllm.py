"""Workers of vLLM that change their role: the engine is started anew in the same container, proven by KV that moves, and then
relabelled, while requests run; and one whose engine reads no KV, though it answers, is found out and replaced."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.fleet import Fleet, manifest
from e2e.test_canary import metric
from e2e.test_churn import say
from e2e.test_flip import told, uids
from e2e.test_vllm import local
from e2e.traffic import FIRST_PLAIN_TOKEN, VOCABULARY, Ledger, Request, send
from fleet_cli.up.bundled import cache_folder, tiny_model

ROOT = Path(__file__).resolve().parents[1]
ANEW = Path(__file__).parent / "anew"
READY_S = 500.0
"""Three vLLMs import 20,000 modules on two cores."""
FLIP_S = 480.0
"""An engine took 40 s to 200 s to start, as busy as the machine is."""
PULL_S = 40
"""What a cold start has beside its engine's: an image of 10 GB, or a model. Without it nothing is won by a flip."""
REQUESTS = 10
PROMPT_TOKENS = 300
"""More than two of vLLM's CPU blocks of 128 tokens: KV that moves is not a part of a block alone."""
OUTPUT_TOKENS = 8
PAUSE_S = 0.5
"""Between two requests: two cores have three vLLMs already."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2_700)]


@pytest.fixture
def liar() -> Iterator[Path]:
    """A file that is not there yet; not below /tmp, which is each pod's own."""
    with tempfile.TemporaryDirectory(prefix="liar-", dir=cache_folder()) as folder:
        yield Path(folder) / "liar"


def wish(namespace: str, liar: Path) -> dict[str, Any]:
    """One prefill and two decode workers on three devices, never more."""
    made = manifest(namespace, tiny_model())
    spec, tier = made["spec"], made["spec"]["tiers"][0]
    spec["engine"] = {"type": "vllm", "maxModelLen": 1024, "args": ["--dtype", "float32"]}
    spec["scaling"] = {"mode": "manual", "budget": {"gpus": 3}}
    spec["limits"] = {"maxInputTokens": 900, "maxOutputTokens": 16}
    tier["ratio"] = {"prefill": 1, "decode": 2, "min": "1:2", "max": "2:1"}
    # a prefill worker waits for it, and these operators let nobody drain for more than 10 s
    tier["kvTransfer"] = {"leaseDuration": "7s"}
    paths = [str(ANEW), *(str(Path(one).resolve()) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one)]
    env = {"PYTHONPATH": os.pathsep.join(paths), "PULL_S": str(PULL_S), "LIAR": str(liar)}
    template = {"env": [{"name": name, "value": value} for name, value in env.items()]}
    for role in ("prefill", "decode"):
        tier[role] = {"maxReplicas": 2, "podTemplate": template}
    return made


@contextmanager
def load(fleet: Fleet, requests: list[Request]) -> Iterator[Ledger]:
    """The same requests again and again, one at a time. Answers that differ are errors."""
    ledger, stop, url = Ledger(), threading.Event(), fleet.router()

    def user() -> None:
        for request in cycle(requests):
            if stop.wait(PAUSE_S):
                return
            asyncio.run(send(url, [request], 1, ledger))

    thread = threading.Thread(target=user)
    thread.start()
    try:
        yield ledger
    finally:
        stop.set()
        thread.join()


def scale(fleet: Fleet, role: str, replicas: int) -> None:
    """As a user does it; the budget has the other role give way."""
    pool = next(pool for pool in fleet.objects("workerpools") if pool["spec"]["role"] == role)["metadata"]["name"]
    fleet.kubectl("scale", "workerpool", pool, f"--replicas={replicas}")


def everybody(fleet: Fleet) -> set[str]:
    return uids(fleet, "prefill") | uids(fleet, "decode")


def states(fleet: Fleet) -> list[dict[str, Any]]:
    """What each worker's agent says, its address with it."""
    pods = [*fleet.pods("prefill"), *fleet.pods("decode")]
    addresses = [pod["status"]["podIP"] for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    return [httpx.get(f"http://{ip}:9000/state", trust_env=False, timeout=10).json() | {"ip": ip} for ip in addresses]


def flipped_once(fleet: Fleet, role: str, epoch: int) -> str:
    """Address of the worker that has this role since its change of that number: agent, engine, labels and metrics agree."""
    (one,) = [state for state in states(fleet) if state["epoch"] == epoch]
    assert (one["role"], one["phase"], one["changing_to"], one["flip_problem"]) == (role, "Serving", None, "")
    command = Path(f"/proc/{one['engine_pid']}/cmdline").read_text()
    assert ("kv_producer" if role == "prefill" else "kv_consumer") in command
    pod = next(pod for pod in fleet.pods(role) if pod["metadata"]["uid"] == one["uid"])
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    assert "inferencefleet.io/flip" not in pod["metadata"]["annotations"]
    agent = f"http://{one['ip']}:9000"
    assert metric(agent, "fleet_agent_role_epoch", role=role) == epoch
    assert metric(agent, "fleet_agent_engine_start_seconds") > 0
    return str(one["ip"])


def prompts(seed: int) -> list[Request]:
    """None shares its beginning with another."""
    dice, some = random.Random(seed), range(FIRST_PLAIN_TOKEN, VOCABULARY)
    return [Request(n, tuple(dice.choices(some, k=PROMPT_TOKENS)), OUTPUT_TOKENS) for n in range(seed, seed + REQUESTS)]


def test_a_worker_flips_under_load_and_one_that_reads_no_kv_is_found_out(fleet: Fleet, liar: Path):
    subprocess.run([str(ROOT / "e2e/vllm/get-vllm")], check=True)
    requests, took = prompts(100), dict[str, float]()
    fleet.apply(wish(fleet.namespace, liar))
    fleet.wait_serving(1, 2, READY_S)
    before = everybody(fleet)
    (first,) = [f"http://{pod['status']['podIP']}:8000" for pod in fleet.pods("prefill")]
    with load(fleet, requests) as ledger:
        fleet.wait("every answer as it was before", lambda: len(ledger.tokens) == REQUESTS, 120)
        expected = dict(ledger.tokens)
        took["flip_s"] = to_prefill(fleet)
        engine, rounds = f"http://{flipped_once(fleet, 'prefill', 1)}:8000", ledger.rounds
        fleet.wait("each of them after it", lambda: ledger.rounds > rounds + REQUESTS, 120)
    assert (ledger.errors, ledger.tokens) == ({}, expected)
    assert expected == {request.number: local(first, request) for request in requests}
    new_ones(fleet, engine, first)
    assert everybody(fleet) == before, "no pod was started"
    fleet.wait("proof that KV moves", lambda: fleet.condition("Disaggregating")["status"] == "True", 30)
    assert told(fleet, "FlipFailed") == []
    took["found_out_s"] = found_out(fleet, liar)
    with load(fleet, requests) as last:
        fleet.wait("each of them at the end", lambda: len(last.tokens) == REQUESTS, 120)
    assert (last.errors, last.tokens) == ({}, expected)
    print(json.dumps({name: round(s, 1) for name, s in took.items()} | {"told": told(fleet, "Flipped")}))
    fleet.delete_and_leave_nothing()


def new_ones(fleet: Fleet, engine: str, first: str) -> None:
    """Prompts that nobody has seen: the flipped worker prefills its part of them for others, and every answer is that of one
    engine alone."""
    requests, before = prompts(200), metric(engine, "vllm:prompt_tokens_total")
    with load(fleet, requests) as ledger:
        fleet.wait("each of them", lambda: len(ledger.tokens) == REQUESTS, 120)
    prefilled = metric(engine, "vllm:prompt_tokens_total") - before
    say(f"{prefilled:.0f} prompt tokens at the flipped worker")
    assert (ledger.errors, ledger.tokens) == ({}, {request.number: local(first, request) for request in requests})
    assert prefilled >= PROMPT_TOKENS


def to_prefill(fleet: Fleet) -> float:
    """A decode worker becomes a second prefill worker."""
    say("decode to prefill")
    begun = time.monotonic()
    scale(fleet, "prefill", 2)
    fleet.wait("two prefill workers and a decode worker", lambda: fleet.serving() == (2, 1), FLIP_S)
    took_s = time.monotonic() - begun
    (note,) = told(fleet, "Flipped")
    assert "decode → prefill in" in note
    assert "tokens equal a partner's after a KV transfer" in note
    return took_s


def found_out(fleet: Fleet, liar: Path) -> float:
    """A prefill worker becomes a decode worker, as its agent says; its engine answers, with the right tokens, and reads no KV."""
    say("a liar")
    liar.touch()
    workers, begun = everybody(fleet), time.monotonic()
    scale(fleet, "prefill", 1)  # the second decode worker, which the budget took back, stays wished
    fleet.wait("that it is told", lambda: bool(told(fleet, "FlipFailed")), FLIP_S)
    took_s = time.monotonic() - begun
    liar.unlink()
    (note,) = told(fleet, "FlipFailed")
    assert "no KV transfer was counted" in note
    assert "no KV transfer was counted" in fleet.status()["tiers"][0]["flip"]["message"]
    assert fleet.serving() == (1, 1), "routers were never told to use it"
    fleet.wait("a cold start in its place", lambda: fleet.serving() == (1, 2), READY_S)
    assert len(workers - everybody(fleet)) == len(everybody(fleet) - workers) == 1, "the liar, and no other, was replaced"
    return took_s
