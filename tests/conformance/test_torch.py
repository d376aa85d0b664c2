"""The conformance suite on the torch engine, and what only our engine promises: nothing unproven, nothing leaked."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from fleet_cli.up.bundled import tiny_model
from fleet_operator.render.network import UCX_TCP_PORTS
from tests.conformance.suite import Conformance, Pair, completion, eventually, prefill_leg, tokens
from tests.conformance.workers import Worker, running, spawn, wait_ready, worker_config
from tests.listening import ALWAYS, documented, listening

README = Path(__file__).resolve().parents[2] / "worker/README.md"


@pytest.fixture(scope="session")
def tiny() -> Path:
    return tiny_model()


@pytest.fixture(scope="module")
def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("workers")
    with (
        running(worker_config("prefill", tiny), "127.78.0.1", folder) as prefill,
        running(worker_config("decode", tiny), "127.78.0.2", folder) as decode,
    ):
        yield prefill, decode


class TestTorch(Conformance):
    """Inherits every case."""


def free_blocks(worker: Worker) -> float:
    return worker.metric("fleet:kv_blocks_free")


def nothing_held(pair: Pair) -> None:
    for worker in pair:
        eventually(lambda worker=worker: free_blocks(worker) == worker.metric("fleet:kv_blocks_total"), 12.0)


def test_blocks_come_back_when_nobody_fetches(pair: Pair):
    prefill = pair[0]
    expired = prefill.metric("vllm:nixl_num_kv_expired_reqs_total")
    prefill_leg(prefill)
    assert prefill.metric("fleet:kv_leases_open") == 1
    assert free_blocks(prefill) < prefill.metric("fleet:kv_blocks_total")
    eventually(lambda: prefill.metric("fleet:kv_leases_open") == 0, 8.0)  # the lease is 5 s
    assert prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == expired + 1
    nothing_held(pair)


def test_a_released_lease_frees_at_once(pair: Pair):
    reference = prefill_leg(pair[0])
    answer = pair[0].post("/kv/release", {"lease_id": reference["lease_id"]})
    assert answer.json() == {"released": True}
    assert pair[0].metric("fleet:kv_leases_open") == 0
    refused = pair[1].post("/v1/completions", completion(kv_transfer_params=reference))
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "KvTransferError")
    nothing_held(pair)


def test_a_request_that_nobody_waits_for_is_given_back_by_its_name(pair: Pair):
    """Its router was told of no lease: it left before the prefill answer came."""
    prefill = pair[0]
    body = completion(max_tokens=1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
    for name in ("r-1", "r-2"):
        httpx.post(prefill.engine + "/v1/completions", json=body, headers={"x-request-id": name}, timeout=60)
    assert prefill.metric("fleet:kv_leases_open") == 2
    assert prefill.post("/kv/release", {"request_id": "r-1"}).json() == {"released": True}
    eventually(lambda: prefill.metric("fleet:kv_leases_open") == 1, 2.0)
    prefill.post("/kv/release", {"request_id": "r-2"})
    nothing_held(pair)


def test_a_running_request_is_given_back_by_its_name(pair: Pair):
    with ThreadPoolExecutor(1) as pool:
        asked = completion("hello", max_tokens=900, ignore_eos=True)
        running_one = pool.submit(
            lambda: httpx.post(pair[0].engine + "/v1/completions", json=asked, headers={"x-request-id": "r-9"}, timeout=60)
        )
        eventually(lambda: pair[0].metric("vllm:num_requests_running") == 1)
        pair[0].post("/kv/release", {"request_id": "r-9"})
        assert running_one.result(10).status_code == 400
    nothing_held(pair)


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"lease_id": ""}, 400, "KvReferenceError"),
        ({"digest": ""}, 400, "KvReferenceError"),
        ({"lease_id": "e-77"}, 503, "KvTransferError"),
        ({"remote_epoch": "older"}, 503, "KvTransferError"),
        ({"remote_num_tokens": 5}, 400, "KvReferenceError"),
        ({"remote_block_ids": [[1, 2]]}, 400, "KvReferenceError"),
    ],
    ids=["no-lease", "no-digest", "unknown-lease", "old-epoch", "wrong-count", "nested-blocks"],
)
def test_k4_no_token_ever_comes_from_an_unproven_reference(pair: Pair, change: dict[str, object], status: int, kind: str):
    reference = {**prefill_leg(pair[0]), **change}
    answer = pair[1].post("/v1/completions", completion(kv_transfer_params=reference))
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind), answer.text
    nothing_held(pair)


def test_a_vllm_reference_is_refused(pair: Pair):
    """A torch decode cannot prove what a vLLM prefill gives: no lease, epoch or digest of ours."""
    theirs = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]], "remote_engine_id": "x",
        "remote_request_id": "y", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "remote_num_tokens": 40,
    }  # fmt: skip
    answer = pair[1].post("/v1/completions", completion(kv_transfer_params=theirs))
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "KvReferenceError")


def test_workers_of_another_compatibility_are_refused(pair: Pair, tiny: Path, tmp_path: Path):
    """503 and no 400: nobody proves a refusal, so that a strict reader takes it for no word against its client."""
    with running(worker_config("decode", tiny, compat="other"), "127.78.0.3", tmp_path) as stranger:
        answer = stranger.post("/v1/completions", completion(kv_transfer_params=prefill_leg(pair[0])))
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "KvTransferError")
        assert "compatibility hash: prefill has suite, decode has other" in answer.json()["error"]["message"]


def test_s3_a_worker_listens_where_its_readme_says(tiny: Path, tmp_path: Path):
    """UCX gets the ports that the operator gives it; what it opens at this machine's other addresses counts, too."""
    ranges = "-".join(map(str, UCX_TCP_PORTS))
    with running(worker_config("prefill", tiny), "127.78.0.9", tmp_path, UCX_TCP_PORT_RANGE=ranges) as worker:
        engine = httpx.get(worker.agent + "/state", timeout=5).json()["engine_pid"]
        found, always = listening(worker.process.pid, engine), documented(README, [ALWAYS])
        assert always <= found
        assert found - always <= documented(README, ["always, some of them"])
        assert {("tcp", port) for port in msgspec.structs.asdict(worker.config.ports).values()} <= documented(README)


def test_k2_a_killed_prefill_worker_fails_the_pull_and_leaks_nothing(pair: Pair, tiny: Path, tmp_path: Path):
    victim = spawn(worker_config("prefill", tiny), "127.78.0.4", tmp_path)
    wait_ready(victim)
    reference = prefill_leg(victim)
    engine = httpx.get(victim.agent + "/state").json()["engine_pid"]
    os.kill(engine, signal.SIGKILL)
    assert victim.process.wait(10) == 1
    assert "torch engine ended (killed by SIGKILL)" in victim.log.read_text()
    answer = pair[1].post("/v1/completions", completion(kv_transfer_params=reference))
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "KvTransferError")
    nothing_held(pair)


def test_drain_waits_for_the_last_stream_and_readiness_is_red_at_once(tiny: Path, tmp_path: Path):
    with running(worker_config("decode", tiny), "127.78.0.5", tmp_path) as worker, ThreadPoolExecutor(1) as pool:
        body = completion(max_tokens=400, ignore_eos=True, stream=True)
        with httpx.stream("POST", worker.engine + "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            drain = pool.submit(httpx.get, worker.agent + "/drain", timeout=60)
            eventually(lambda: httpx.get(worker.agent + "/ready").status_code == 503, 2.0)
            assert not drain.done()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert drain.result(20).json()["drained"] is True


@pytest.mark.parametrize(("to_agent", "code"), [(False, 1), (True, 0)], ids=["engine-alone", "every-process"])
def test_sigterm_straight_at_the_engine_cuts_no_stream_and_new_requests_are_sent_elsewhere(
    tiny: Path, tmp_path: Path, to_agent: bool, code: int
):
    """Incident: a SIGTERM to all of a pod's processes (tini -g, systemd, kill) cut every stream of the engine after 5 s, while
    its agent drained. A worker that goes is not ready, and says 503, which a router takes to another one."""
    with running(worker_config("decode", tiny, max_model_len=4096, drain_timeout_s=120.0), "127.78.0.7", tmp_path) as worker:
        state = httpx.get(worker.agent + "/state").json()
        body = completion("hello", max_tokens=1_000, ignore_eos=True, stream=True)
        with httpx.stream("POST", worker.engine + "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(state["engine_pid"], signal.SIGTERM)
            if to_agent:
                worker.process.terminate()
            eventually(lambda: worker.post("/v1/completions", completion()).status_code == 503, 2.0)
            refused = worker.post("/v1/completions", completion())
            assert (refused.status_code, refused.json()["error"]["retryable"]) == (503, True)
            eventually(lambda: httpx.get(worker.agent + "/ready").status_code == 503, 2.0)
            assert httpx.get(worker.agent + "/live").status_code == 200
            said = [line for line in lines if line]
        assert said[-1] == "data: [DONE]"
        assert len(said) == 1_000
        assert worker.process.wait(10) == code
        assert ("torch engine ended (exit code 0)" in worker.log.read_text()) is not to_agent


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("missing", "does not exist"),
        ("no-config", "holds no config.json"),
        ("architecture", "architecture GPT2LMHeadModel is not supported; supported: LlamaForCausalLM"),
        ("truncated", "model.safetensors is not a readable safetensors file"),
        ("shape", "has shape [1024, 256], expected [1024, 128]"),
    ],
)
def test_a_model_that_cannot_be_served_is_named_and_exits_2(tiny: Path, tmp_path: Path, spoil: str, words: str):
    folder = tmp_path / "model"
    if spoil != "missing":
        folder.mkdir()
        for file in tiny.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        spoil_model(folder, spoil)
    worker = spawn(worker_config("decode", folder), "127.78.0.6", tmp_path)
    assert worker.process.wait(60) == 2
    assert words in worker.log.read_text().splitlines()[-1]


def spoil_model(folder: Path, how: str) -> None:
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    if how == "no-config":
        (folder / "config.json").unlink()
    elif how == "truncated":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100_000])
    else:
        config |= {"architectures": ["GPT2LMHeadModel"]} if how == "architecture" else {"hidden_size": 128, "head_dim": 32}
        (folder / "config.json").write_bytes(msgspec.json.encode(config))


def test_a_port_in_use_is_named_and_exits_2(pair: Pair, tiny: Path, tmp_path: Path):
    worker = spawn(worker_config("prefill", tiny), pair[0].ip, tmp_path)
    try:
        assert worker.process.wait(60) == 2
    finally:
        worker.process.kill()
    assert f"on {pair[0].ip} cannot be bound" in worker.log.read_text()
    assert tokens(pair[0].post("/v1/completions", completion()))  # the first one is not disturbed
