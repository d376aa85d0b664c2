"""llm-d-inference-sim as workers behind a real router process: somebody else's stand-in for vLLM, in Go, whose source we did not
write. Every one has a port of its own, because it listens on all addresses.

It logs the bodies that it is sent and answers, so that a test sees what our router said to it, and counts as vLLM does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from openai import OpenAI

from e2e.emulated.fleet import PORT, Emulated, Worker, get, until
from e2e.kube.service import free_ports
from fleet_router.config import RouterConfig
from fleet_wire.endpoints import Endpoint

ROOT = Path(__file__).resolve().parents[2]
MODEL = "sim"
CONFIG = RouterConfig(
    fleet="emulated", served_name=MODEL, resume="replay", slow_start_s=0.0, first_token_deadline_s=20.0,
    inter_token_deadline_s=5.0,
)  # fmt: skip
COMMON = ("--force-dummy-tokenizer", "--log-http", "--v=2", "--max-num-seqs", "16", "--seed", "7")
"""Otherwise it asks a hub whether its model is there."""
ECHO = ("--mode", "echo")
"""It says the prompt again, or the last message: an answer can be compared."""
_LOGGED = re.compile(r'"HTTP (request|response)" (.*) headers=<\n(?:\t.*\n)* > body=("(?:[^"\\]|\\.)*")$', re.M)
_URI = re.compile(r'requestURI="([^"]*)"')


@lru_cache
def installed() -> str:
    """The program; `make sim` builds it once per machine."""
    done = subprocess.run([ROOT / "e2e/sim/get-sim"], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


@dataclass(frozen=True)
class Told:
    """A body that one of them was sent, or answered."""

    path: str
    """Empty in an answer."""
    body: dict[str, Any]


class Sim(Worker):
    """One of them."""

    def __init__(
        self, role: Literal["prefill", "decode"], number: int, net: int, folder: Path, port: int, flags: Sequence[str]
    ) -> None:
        super().__init__(role, number, net, folder)
        self.port, self.flags = port, tuple(flags)
        self.adapters: dict[str, str] = {}
        """As the operator tells the router; what it really has is a flag's."""
        self.events_port = 0

    def start(self, uid: str = "") -> Sim:
        self.life += 1
        model = () if "--model" in self.flags else ("--model", MODEL)
        argv = [installed(), "--port", str(self.port), *model, *COMMON, *self.flags]
        env = {**os.environ, "POD_IP": self.host}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            get(f"http://{self.host}:{self.port}/health")
        except OSError:
            return False
        return True

    def endpoint(self) -> Endpoint:
        made = super().endpoint()
        return msgspec.structs.replace(
            made, http_port=self.port, agent_port=PORT + 1, adapters=self.adapters, events_port=self.events_port
        )

    def terminate(self) -> None:
        """SIGTERM, as a kubelet."""
        assert self._process is not None
        self._process.terminate()

    def wait_end(self, within_s: float = 20.0) -> int:
        """How it ended."""
        assert self._process is not None
        return self._process.wait(within_s)

    # -- what it says of itself -----------------------------------------------------------------------------------------
    def counted(self, name: str, labels: str = "") -> float:
        """Sum of a metric of vLLM's over its lines whose labels contain `labels`."""
        text = get(f"http://{self.host}:{self.port}/metrics").decode()
        found = re.findall(rf"^vllm:{name}(?:\{{([^}}]*)\}})? (\S+)$", text, re.M)
        return sum(float(value) for marks, value in found if labels in marks)

    def finished(self, reason: str = "") -> float:
        """Requests that it answered whole."""
        return self.counted("request_success_total", f'finish_reason="{reason}' if reason else "")

    def stats(self) -> dict[str, Any]:
        running = self.counted("num_requests_running") + self.counted("num_requests_waiting")
        return {"uid": self.uid, "pinned": 0, "running": running}

    def told(self, what: Literal["request", "response"] = "request") -> list[Told]:
        """Bodies that it was sent, or answered in one piece; in order, without those that are no JSON object."""
        found = []
        for kind, marks, quoted in _LOGGED.findall(self._log.read_text()):
            body = json.loads(quoted)
            if kind == what and body.startswith("{"):
                uri = _URI.search(marks)
                found.append(Told(uri[1] if uri else "", json.loads(body)))
        return found

    def set(self, **changed: object) -> None:
        """Change its settings while it runs."""
        get(f"http://{self.host}:{self.port}/admin/config", {name.replace("_", "-"): value for name, value in changed.items()})


class Sims(Emulated):
    """Some of them and a router. `decode` and `prefill`: the flags of each."""

    def __init__(
        self, folder: Path, net: int, decode: Sequence[Sequence[str]], prefill: Sequence[Sequence[str]] = (),
        config: RouterConfig = CONFIG,
    ) -> None:  # fmt: skip
        super().__init__(folder, net, 0, 0, config)
        ports = free_ports(len(decode) + len(prefill))
        self.sims = [Sim("decode", i, net, folder, ports.pop(), flags) for i, flags in enumerate(decode)]
        self.givers = [Sim("prefill", i, net, folder, ports.pop(), flags) for i, flags in enumerate(prefill)]
        self.decode, self.prefill = list[Worker](self.sims), list[Worker](self.givers)

    def finished(self) -> dict[str, float]:
        """Requests that each has answered whole, by its name."""
        return {sim.uid: sim.finished() for sim in [*self.sims, *self.givers]}

    def client(self) -> OpenAI:
        """OpenAI's own, without a retry of its own, so that every error shows."""
        return OpenAI(base_url=f"http://{self.address}/v1", api_key="none", max_retries=0, timeout=30.0)

    def busy(self) -> Sim:
        """The only one that runs something."""
        until("one of them runs it", lambda: any(sim.stats()["running"] for sim in self.sims), 10.0)
        (found,) = [sim for sim in self.sims if sim.stats()["running"]]
        return found
