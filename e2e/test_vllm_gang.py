"""One vLLM worker over two nodes: two agents, each with an address of its own, and tensor parallel ranks that meet over TCP."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.conftest import vllm_environment
from fleet_cli.up.bundled import tiny_model
from fleet_worker.config import (
    CONFIG_ENV,
    GROUP_SIZE_ENV,
    GROUP_UID_ENV,
    HOSTS_ENV,
    LEADER_ENV,
    MEMBER_ENV,
    POD_IP_ENV,
    POD_NAME_ENV,
    POD_UID_ENV,
    Parallel,
    WorkerConfig,
    encode,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[1]
READY_S = 500.0
PROMPT, COUNT = [5, 6, 7, 8, 9, 10, 11, 12], 12
NAME, UID = "t-decode-aaaaaaaa-0-0.f-workers.n", "uid-of-the-leader"

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


class Pod:
    """An agent as PID 1 of a pod would run."""

    def __init__(self, member: int, model: Path, folder: Path) -> None:
        self.ip = f"127.78.{os.getpid() % 250 + 1}.{member + 1}"
        config = WorkerConfig(
            fleet="f", namespace="n", tier="t", role="decode", revision="r", compat="c", engine="vllm", model=str(model),
            engine_args=("--dtype", "float32"), parallel=Parallel(tensor=2), nodes=2, served_name="tiny", max_model_len=512,
        )  # fmt: skip
        own = {CONFIG_ENV: encode(config), POD_NAME_ENV: f"w-{member}", POD_IP_ENV: self.ip, MEMBER_ENV: str(member),
               POD_UID_ENV: UID if member == 0 else "another", GROUP_UID_ENV: UID if member else "", LEADER_ENV: NAME,
               GROUP_SIZE_ENV: "2", HOSTS_ENV: str(folder / "hosts")}  # fmt: skip
        self.log = folder / f"{member}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fleet_worker"], env={**os.environ, **vllm_environment(), **own}, stdout=log, stderr=log
            )

    def state(self) -> str:
        try:
            phase: str = httpx.get(f"http://{self.ip}:9000/state", timeout=5).json()["phase"]
        except httpx.HTTPError:
            return "silent"
        return phase


@pytest.fixture
def group(tmp_path: Path) -> Iterator[list[Pod]]:
    subprocess.run([str(ROOT / "e2e/vllm/get-vllm")], check=True)
    pods = [Pod(1, tiny_model(), tmp_path)]
    (tmp_path / "hosts").write_text(f"{pods[0].ip.rsplit('.', 1)[0]}.1 {NAME}\n")
    try:
        wait(pods, "the follower looks for its leader", lambda: "joining" in note(pods[0]), 60)
        assert pods[0].state() == "Preparing"
        pods.insert(0, Pod(0, tiny_model(), tmp_path))
        yield pods
    finally:
        for pod in pods:
            pod.process.terminate()
        for pod in pods:
            pod.process.wait(30)


def note(pod: Pod) -> str:
    try:
        return str(httpx.get(f"http://{pod.ip}:9000/state", timeout=5).json()["detail"])
    except httpx.HTTPError:
        return ""


def wait(pods: list[Pod], what: str, holds: object, within_s: float) -> None:
    assert callable(holds)
    end = time.monotonic() + within_s
    while not holds():
        ended = [pod.process.poll() for pod in pods]
        logs = "\n".join(pod.log.read_text()[-3_000:] for pod in pods)
        assert time.monotonic() < end, f"{what}: not within {within_s} s, exit codes {ended}\n{logs}"
        time.sleep(0.5)


def test_two_nodes_give_the_tokens_of_one_model_and_end_together(group: list[Pod]):
    leader, follower = group
    wait(group, "both serve", lambda: [pod.state() for pod in group] == ["Serving", "Serving"], READY_S)
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": COUNT,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    answer = httpx.post(f"http://{leader.ip}:8000/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == alone()
    with pytest.raises(httpx.HTTPError):  # a follower answers no requests
        httpx.get(f"http://{follower.ip}:8000/health", timeout=5)

    sessions = [engine_session(pod) for pod in group]
    assert all(map(processes, sessions))
    follower.process.kill()
    assert leader.process.wait(60) == 1
    assert "GroupLost: pod 1 of this worker is lost" in leader.log.read_text()
    wait(group, "nothing of vLLM is left", lambda: not any(map(processes, sessions)), 30)


def engine_session(pod: Pod) -> int:
    """vLLM's first process leads it."""
    pid: int = httpx.get(f"http://{pod.ip}:9000/state", timeout=5).json()["engine_pid"]
    return pid


def processes(session: int) -> list[str]:
    """What lives in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and int(its_session) == session:
                found.append(path.parent.name)
    return found


def alone() -> list[int]:
    """What the whole model says in one process."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    greedy = {"max_new_tokens": COUNT, "min_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
    made = model.generate(torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), **greedy)
    found: list[int] = made[0, len(PROMPT) :].tolist()
    return found
