"""A new worker takes hot prefixes from one that serves: real agents and engines, faults included. It is ready in any case."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from fleet_cli.up.bundled import tiny_model
from fleet_router.kvindex.precise import PreciseIndex, key_of
from fleet_wire import sidechannel
from fleet_wire.blocks import NAMES, chain, root_hash
from fleet_wire.events import END_OF_REPLAY, decode
from fleet_wire.peerkey import PEER_KEY_ENV
from fleet_wire.sidechannel import PROTOCOL_VERSION, AskHot, Hottest, Message, Refused
from fleet_worker.config import ADAPTERS_ENV, SEED_PEERS_ENV, KvSettings, SeedSettings
from fleet_worker.engine.assemble import load_llama
from fleet_worker.engine.modelconfig import read_config
from fleet_worker.transfer.trust import Trust
from tests.conformance.suite import completion, eventually, tokens
from tests.conformance.workers import PEER_KEY, Worker, running, spawn, stop, wait_ready, worker_config

SHARED = "You answer in short plain sentences, and you name every source that you have. " * 20
OWNER = "127.78.90.1"
LEASE_S = 2.0
TIMEOUT_S = 3.0
SEEDED = KvSettings(lease_s=LEASE_S, seed=SeedSettings(timeout_s=TIMEOUT_S))


@pytest.fixture(scope="module")
def tiny() -> Path:
    return tiny_model()


def config(tiny: Path, **changes: Any):
    return worker_config("prefill", tiny, **{"kv": SEEDED, **changes})


@pytest.fixture(scope="module")
def owner(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with running(config(tiny), OWNER, tmp_path_factory.mktemp("owner")) as worker:
        for number in range(3):
            asked(worker, number)
        yield worker


def asked(worker: Worker, number: int) -> tuple[int, list[int]]:
    """(prompt tokens that were there, tokens of the answer)."""
    answer = worker.post("/v1/completions", completion(f"{SHARED}{number}. What moves the block?"))
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], tokens(answer)


def seed_of(worker: Worker) -> dict[str, Any]:
    return httpx.get(worker.agent + "/state", timeout=5).json()["seed"]


def no_lease(worker: Worker, within_s: float = LEASE_S + 3) -> None:
    eventually(lambda: worker.metric("fleet:kv_leases_open") == 0, within_s)
    eventually(lambda: worker.metric("fleet:kv_blocks_free") == worker.metric("fleet:kv_blocks_total"), within_s)


def heard(worker: Worker) -> PreciseIndex:
    """What a router knows of it that listens from now on."""
    found = PreciseIndex(10_000)
    found.join(worker.ip, 1, worker.config.compat)
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, 10_000)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(f"tcp://{worker.ip}:{worker.config.ports.kv_replay}")
        asking.send_multipart([b"", (0).to_bytes(8, "big")])
        while (frames := asking.recv_multipart())[-2] != END_OF_REPLAY:
            found.apply(worker.ip, decode(frames[-1]).events)
    return found


def test_the_first_answer_of_a_new_worker_has_what_the_old_one_had_and_says_the_same(tiny: Path, owner: Worker, tmp_path: Path):
    with running(config(tiny), "127.78.90.2", tmp_path, **{SEED_PEERS_ENV: f"{OWNER}:5600"}) as seeded:
        found = seed_of(seeded)
        assert (found["outcome"], found["from"], found["reason"], found["refused_blocks"]) == ("Seeded", [f"{OWNER}:5600"], "", 0)
        assert found["blocks"] > 20
        assert found["seconds"] < TIMEOUT_S
        known = heard(seeded)
        cached, answer = asked(seeded, 7)
        assert cached == found["blocks"] * SEEDED.block_tokens
        ids = seeded.post("/tokenize", {"model": "tiny", "prompt": f"{SHARED}7. What moves the block?"}).json()["tokens"]
        keys = [key_of(name) for name in chain(root_hash("suite", SEEDED.block_tokens), ids, SEEDED.block_tokens)]
        assert known.depths(keys) == [(found["blocks"], 1)], "a router that listens since then finds them by name"
        assert httpx.get(seeded.agent + "/metrics", timeout=5).text.count(f"fleet_agent_seed_blocks {found['blocks']}") == 1
        assert seeded.metric("fleet:kv_seed_blocks_taken_total") == found["blocks"]
        no_lease(seeded)
    with running(config(tiny), "127.78.90.3", tmp_path) as cold:
        assert seed_of(cold)["outcome"] == "Cold"
        assert asked(cold, 7) == (0, answer)
    no_lease(owner)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"compat": "another"}, "incompatible"), ({"kv": KvSettings(block_tokens=32, seed=SeedSettings())}, "incompatible")],
    ids=["compat", "block-size"],
)
def test_who_does_not_fit_takes_nothing(tiny: Path, owner: Worker, tmp_path: Path, changes: dict[str, Any], reason: str):
    with running(config(tiny, **changes), "127.78.90.4", tmp_path, **{SEED_PEERS_ENV: f"{OWNER}:5600"}) as other:
        found = seed_of(other)
        assert (found["outcome"], found["blocks"]) == ("Cold", 0)
        assert reason in found["reason"]
        assert asked(other, 7)[0] == 0
    no_lease(owner)


def ready_after(worker: Worker) -> float:
    """Seconds from the engine's first answer to readiness; the worker is ready afterwards."""
    while not httpx_ok(worker.engine + "/health"):
        assert worker.process.poll() is None
        time.sleep(0.02)
    begun = time.monotonic()
    wait_ready(worker)
    return time.monotonic() - begun


def httpx_ok(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_frozen_peer_delays_a_worker_by_the_timeout_alone(tiny: Path, owner: Worker, tmp_path: Path):
    engine = httpx.get(owner.agent + "/state", timeout=5).json()["engine_pid"]
    os.kill(engine, signal.SIGSTOP)
    worker = spawn(config(tiny), "127.78.90.5", tmp_path, **{SEED_PEERS_ENV: f"{OWNER}:5600"})
    try:
        assert ready_after(worker) < TIMEOUT_S + 3
        assert (seed_of(worker)["outcome"], seed_of(worker)["blocks"]) == ("Cold", 0)
    finally:
        os.kill(engine, signal.SIGCONT)
        stop(worker)
    no_lease(owner)


def test_a_second_peer_is_asked_when_the_first_is_gone(tiny: Path, owner: Worker, tmp_path: Path):
    peers = f"127.78.90.99:5600,{OWNER}:5600"
    with running(config(tiny), "127.78.90.6", tmp_path, **{SEED_PEERS_ENV: peers}) as worker:
        found = seed_of(worker)
        assert (found["outcome"], found["from"]) == ("Seeded", peers.split(","))
        assert found["seconds"] < TIMEOUT_S
        assert asked(worker, 9)[0] == found["blocks"] * SEEDED.block_tokens


def test_a_reader_that_is_killed_leaves_leases_that_run_out(tiny: Path, owner: Worker, tmp_path: Path):
    """Its engine is stopped as soon as the peer has lent something: whatever it was about, nothing stays held."""
    lent = owner.metric("fleet:kv_seed_blocks_lent_total")
    worker = spawn(config(tiny), "127.78.90.7", tmp_path, **{SEED_PEERS_ENV: f"{OWNER}:5600"})
    try:
        while owner.metric("fleet:kv_seed_blocks_lent_total") == lent:
            assert worker.process.poll() is None
    finally:
        os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
    no_lease(owner)
    assert owner.metric("vllm:num_requests_running") == 0


def question(owner: Worker) -> AskHot:
    """Of one who knows the owner's model, weights and all."""
    config = owner.config
    llama = load_llama(Path(config.model), read_config(Path(config.model)), config.kv.block_tokens)
    return AskHot(
        call=1, version=PROTOCOL_VERSION, compat=config.compat, block_bytes=llama.new_pool(1).nbytes, names=NAMES,
        reader="somebody", block_tokens=config.kv.block_tokens, weights=llama.weights_digest, start=0, most_blocks=8,
    )  # fmt: skip


def told(owner: Worker, ask: AskHot) -> Message:
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, 10_000)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(f"tcp://{owner.ip}:{owner.config.ports.side_channel}")
        asking.send(sidechannel.encode(ask))
        return sidechannel.decode(asking.recv())


def test_a_stranger_is_told_nothing_and_one_of_the_fleet_is(owner: Worker, tmp_path: Path):
    """Both reach the side channel and know all that there is to know of the model: only the key differs."""
    files = {"mine": PEER_KEY, "another": "x" * 64}
    for name, key in files.items():
        (tmp_path / name).write_text(key)
    scope = f"{owner.config.namespace}/{owner.config.fleet}"
    mate, ask, port = Trust(tmp_path / "mine", scope), question(owner), owner.config.ports.side_channel
    lent = owner.metric("fleet:kv_seed_blocks_lent_total")
    strangers = {
        "missing": ask,
        "wrong": Trust(tmp_path / "another", scope).asking(ask, OWNER, port),
        "wrong fleet": Trust(tmp_path / "mine", "default/another").asking(ask, OWNER, port),
        "wrong worker": mate.asking(ask, "127.78.90.2", port),
        "clock": Trust(tmp_path / "mine", scope, lambda: time.time_ns() // 1_000_000 - 60_000).asking(ask, OWNER, port),
    }
    for why, asked_by in strangers.items():
        assert asked_by is not None
        answer = told(owner, asked_by)
        assert isinstance(answer, Refused)
        assert answer.reason == "proof"
        assert answer.message.endswith(f"({why.split()[0]})")
    assert owner.metric("fleet:kv_seed_blocks_lent_total") == lent
    assert owner.metric("fleet:kv_seed_strangers_total") >= len(strangers)
    proven = mate.asking(ask, OWNER, port)
    assert proven is not None
    answer = told(owner, proven)
    assert isinstance(answer, Hottest)
    assert len(answer.blocks) == 8
    assert mate.believes(answer, proven.nonce)
    assert not Trust(tmp_path / "another", scope).believes(answer, proven.nonce)
    again = told(owner, proven)
    assert isinstance(again, Refused)
    assert again.message.endswith("(again)")
    no_lease(owner)
    log = owner.log.read_text(errors="replace")
    assert "refused: no proof of the fleet's key (wrong), 1 so far" in log
    assert "refused: the clock of who asks is 60 s behind, more than 30 s (clock), 1 so far" in log
    assert not any(key in log for key in files.values())


@pytest.mark.parametrize("key", ["", "x" * 64], ids=["no-key", "another-key"])
def test_a_new_worker_without_the_fleets_key_is_cold_and_serves(tiny: Path, owner: Worker, tmp_path: Path, key: str):
    file = tmp_path / "its.key"
    if key:
        file.write_text(key)
    env = {SEED_PEERS_ENV: f"{OWNER}:5600", PEER_KEY_ENV: str(file)}
    with running(config(tiny), "127.78.90.11", tmp_path, **env) as worker:
        found = seed_of(worker)
        assert (found["outcome"], found["blocks"]) == ("Cold", 0)
        assert ("proof" if key else "no_key") in found["reason"]
        assert asked(worker, 7)[0] == 0
    no_lease(owner)


def test_nobody_but_the_agent_has_an_engine_take_anything(owner: Worker):
    body = {"host": "127.78.90.99", "port": 5600, "most_share": 0.1, "within_s": 1.0}
    assert owner.post("/kv/seed", body).status_code == 403
    assert httpx.post(owner.engine + "/kv/seed", json=body, headers={"x-fleet-agent": "guess"}, timeout=5).status_code == 403
    assert ADAPTERS_ENV != SEED_PEERS_ENV


def test_a_peer_that_is_killed_in_the_midst_leaves_a_worker_that_serves(tiny: Path, tmp_path: Path):
    """Parts of 8 MiB, 32 ms apart: the peer is killed after the first ones. What was proven stays, the rest was never there."""
    large = KvSettings(lease_s=LEASE_S, cache_bytes=256 * 1024 * 1024, seed=SeedSettings(share=0.5, timeout_s=TIMEOUT_S))
    prompts = [[100 + (n * 37 + at * (n + 3)) % 400 for at in range(1000)] for n in range(24)]
    with running(config(tiny, kv=large), "127.78.90.8", tmp_path) as expected:
        whole = {n: tokens(expected.post("/v1/completions", completion(prompts[n]))) for n in (0, 23)}
    dying = spawn(config(tiny, kv=large), "127.78.90.9", tmp_path)
    worker = None
    try:
        wait_ready(dying)
        for _ in range(2):
            for prompt in prompts:
                dying.post("/v1/completions", completion(prompt, max_tokens=1))
        worker = spawn(config(tiny, kv=large), "127.78.90.10", tmp_path, **{SEED_PEERS_ENV: "127.78.90.9:5600"})
        while dying.metric("fleet:kv_seed_blocks_lent_total") == 0:
            assert worker.process.poll() is None
        os.killpg(dying.process.pid, signal.SIGKILL)
        begun = time.monotonic()
        wait_ready(worker)
        assert time.monotonic() - begun < TIMEOUT_S + 3
        found = seed_of(worker)
        assert found["reason"], found
        assert found["blocks"] < len(prompts) * 62
        assert {n: tokens(worker.post("/v1/completions", completion(prompts[n]))) for n in whole} == whole
        no_lease(worker)
    finally:
        for one in (dying, worker):
            if one is not None and one.process.poll() is None:
                stop(one)
