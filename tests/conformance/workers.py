"""Starts real workers (agent and engine processes) on loopback addresses of their own, and stops them without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from fleet_wire.endpoints import Endpoint
from fleet_wire.peerkey import HANDOFF_PROOF_ENV, HANDOFF_REQUIRED, PEER_KEY_ENV
from fleet_worker.config import KvSettings, WorkerConfig, encode

READY_S = 240.0
STOP_S = 30.0
PEER_KEY = "conformance" * 6


@dataclass(frozen=True)
class Worker:
    """One running worker."""

    config: WorkerConfig
    ip: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def engine(self) -> str:
        return f"http://{self.ip}:{self.config.ports.http}"

    @property
    def agent(self) -> str:
        return f"http://{self.ip}:{self.config.ports.agent}"

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 180.0) -> httpx.Response:
        return httpx.post(self.engine + path, json=body, timeout=timeout_s)

    def metric(self, name: str) -> float:
        """Sum over label sets; 0 when the metric has not been born yet (vLLM makes some lazily)."""
        lines = httpx.get(self.engine + "/metrics", timeout=10).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def worker_config(role: str, model: Path, **changes: Any) -> WorkerConfig:
    base: dict[str, Any] = {
        "fleet": "suite", "namespace": "default", "tier": "t", "role": role, "revision": "r1", "compat": "suite",
        "model": str(model), "served_name": "tiny", "max_model_len": 1024, "kv": KvSettings(lease_s=5.0),
    }  # fmt: skip
    return WorkerConfig(**{**base, **changes})


def spawn(config: WorkerConfig, ip: str, folder: Path, **env: str) -> Worker:
    """Start a worker; its output goes to a file in `folder`, and the key that a fleet shares is in one. As the operator makes
    them: a torch worker gives KV to those that prove the key."""
    log = folder / f"{config.role}-{ip}.log"
    key = folder / "peer.key"
    key.touch(mode=0o600)
    key.write_text(f"{PEER_KEY}\n")
    environment = {
        **os.environ, "FLEET_WORKER_CONFIG": encode(config), "FLEET_POD_NAME": f"pod-{ip}", "FLEET_POD_UID": f"uid-{ip}",
        "FLEET_POD_IP": ip, PEER_KEY_ENV: str(key), HANDOFF_PROOF_ENV: HANDOFF_REQUIRED, "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", **env,
    }  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "fleet_worker"], env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Worker(config, ip, process, log)


def wait_ready(worker: Worker, deadline_s: float = READY_S) -> None:
    """Until the agent says ready; AssertionError with the log's end otherwise."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        assert worker.process.poll() is None, f"exit code {worker.process.returncode}: {tail(worker)}"
        try:
            if httpx.get(worker.agent + "/ready", timeout=2).status_code == 200:
                assert descends(httpx.get(worker.agent + "/state", timeout=2).json()["engine_pid"], worker.process.pid)
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"not ready after {deadline_s} s: {tail(worker)}")


def descends(pid: int, parent: int) -> bool:
    """The one that answers is ours, and not somebody else's on the same address."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) == parent


def tail(worker: Worker) -> str:
    return worker.log.read_text(errors="replace")[-3000:]


def stop(worker: Worker) -> int:
    """SIGTERM, then wait; kills when that takes too long."""
    worker.process.terminate()
    try:
        return worker.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        worker.process.kill()
        worker.process.wait()
        raise AssertionError(f"worker at {worker.ip} ignored SIGTERM: {tail(worker)}") from None


@contextmanager
def running(config: WorkerConfig, ip: str, folder: Path, **env: str) -> Iterator[Worker]:
    """A worker that is ready inside the block and gone after it."""
    worker = spawn(config, ip, folder, **env)
    try:
        wait_ready(worker)
        yield worker
    finally:
        if worker.process.poll() is None:
            stop(worker)


def endpoint_of(worker: Worker, events_port: int = 5557, replay_port: int = 5558) -> Endpoint:
    """The worker as a router that hears its events is told of it."""
    return Endpoint(
        name=worker.ip, uid=f"uid-{worker.ip}", address=worker.ip, http_port=8000, agent_port=9000, role="decode", tier="t",
        revision="r1", compat="suite", events_port=events_port, replay_port=replay_port,
    )  # fmt: skip
