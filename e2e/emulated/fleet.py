"""A router process in front of emulated worker processes, and what tests do to them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from fleet_router.config import RouterConfig
from fleet_router.config import encode as encode_config
from fleet_wire.endpoints import ENDPOINTS_KEY, ROUTER_CONFIG_KEY, Endpoint, Endpoints
from fleet_wire.endpoints import encode as encode_endpoints

START_S = 180.0
PORT = 8000
FDS_SLACK = 2
"""Descriptors that a router at rest may have more than it began with (I3 of the reliability list)."""
ZMQ_FDS = 6
"""What ZMQ opens once per process, for a router that hears events: before or after it is ready, as it comes."""
LISTENS = "0A"
CONFIG = RouterConfig(
    fleet="emulated", served_name="tiny", resume="prefill", slow_start_s=0.0, first_token_deadline_s=20.0,
    inter_token_deadline_s=3.0, silent_s=2.0, max_input_tokens=16_384,  # its words are short: prompts are long in tokens
)  # fmt: skip


class Worker:
    """One worker process at an address of its own; `start` again is another worker at the same address."""

    def __init__(
        self, role: Literal["prefill", "decode"], number: int, net: int, folder: Path, control_port: int = PORT + 1
    ) -> None:
        self.role, self.number, self.control_port = role, number, control_port
        self.host = f"127.{net}.{1 if role == 'prefill' else 2}.{number + 1}"
        self.life = 0
        self._log = folder / f"{role}-{number}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uid(self) -> str:
        return f"{self.role}-{self.number}-{self.life}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, uid: str = "") -> Worker:
        self.life += 1
        argv = [sys.executable, "-m", "e2e.emulated.worker", self.host, str(PORT), uid or self.uid, str(self.control_port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        return self

    def wait(self) -> Worker:
        until(f"{self.uid} answers", self._answers, START_S)
        return self

    def _answers(self) -> bool:
        try:
            return bool(self.stats()["uid"])
        except OSError:
            return False

    def kill(self) -> int:
        """SIGKILL; how it ended."""
        assert self._process is not None
        self._process.kill()
        return self._process.wait()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def fault(self, **faults: Any) -> None:
        get(f"http://{self.host}:{self.control_port}/fault", faults)

    def stats(self) -> dict[str, Any]:
        return json.loads(get(f"http://{self.host}:{self.control_port}/stats"))

    def endpoint(self) -> Endpoint:
        return Endpoint(
            name=f"{self.role}-{self.number}", uid=self.uid, address=self.host, http_port=PORT, agent_port=self.control_port,
            role=self.role, tier="t", revision="r", compat="c",
        )  # fmt: skip

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGCONT)
            self._process.kill()
            self._process.wait()


class Emulated:
    """Workers and a router; a context manager. Loopback addresses 127.NET.x.y, so that tests do not meet."""

    def __init__(
        self, folder: Path, net: int, prefill: int, decode: int, config: RouterConfig = CONFIG, extra: Sequence[str] = ()
    ) -> None:
        self.folder, self.config, self.extra = folder, config, extra
        self.prefill = [Worker("prefill", i, net, folder) for i in range(prefill)]
        self.decode = [Worker("decode", i, net, folder) for i in range(decode)]
        self.address = f"127.{net}.0.1:8080"
        self.documents = folder / "documents"
        self._router: subprocess.Popen[bytes] | None = None
        self._fds = 0
        """Descriptors that it began with."""
        self._stack = ExitStack()

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefill, *self.decode]

    def __enter__(self) -> Emulated:
        with ExitStack() as stack:  # a start that fails leaves nothing behind
            stack.callback(self.stop_router)
            for worker in self.workers:
                stack.callback(worker.stop)
                worker.start()
            for worker in self.workers:
                worker.wait()
            self.documents.mkdir()
            self.publish()
            self.start_router()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Whatever the test was about: the router has not leaked (I3) nor stumbled (I6). A test that failed says its own."""
        with self._stack:
            if kind is None and self._router is not None and self._router.poll() is None:
                self.lets_go()
        if kind is None:
            assert (odd := stumbles(self.folder / "router.log")) == [], odd

    # -- documents and router -----------------------------------------------------------------------------------------
    def publish(self, workers: Sequence[Worker] | None = None, **config: Any) -> None:
        """What the operator would; all workers unless said otherwise."""
        self.config = msgspec.structs.replace(self.config, **config)
        rows = tuple(worker.endpoint() for worker in (self.workers if workers is None else workers))
        self.write(ROUTER_CONFIG_KEY, encode_config(self.config).encode())
        self.write(ENDPOINTS_KEY, encode_endpoints(Endpoints(fleet="emulated", namespace="default", workers=rows)))

    def write(self, key: str, data: bytes) -> None:
        """As a mounted ConfigMap changes: at once."""
        new = self.documents / f".{key}"
        new.write_bytes(data)
        new.replace(self.documents / key)

    def follows(self) -> tuple[str, dict[str, str]]:
        """Where the router has its documents from, and what it must know for that."""
        return f"dir:{self.documents}", {}

    def start_router(self) -> None:
        host, port = self.address.split(":")
        follow, env = self.follows()
        argv = [sys.executable, "-m", "fleet_router", "--follow", follow, "--host", host, "--port", port, *self.extra]
        with (self.folder / "router.log").open("ab") as log:
            self._router = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **env})
        until("the router is ready", self._ready, START_S)
        self._fds = len(fds_of(self._router.pid) - connected(self._router.pid))

    def _ready(self) -> bool:
        assert self._router is not None
        assert self._router.poll() is None, (self.folder / "router.log").read_text()[-2000:]
        try:
            return get(f"http://{self.address}/ready") == b"ready\n"
        except OSError:
            return False

    def kill_router(self) -> int:
        assert self._router is not None
        self._router.kill()
        return self._router.wait()

    def stop_router(self) -> None:
        if self._router is not None and self._router.poll() is None:
            self.kill_router()

    def rss_mb(self) -> float:
        assert self._router is not None
        pages = int(Path(f"/proc/{self._router.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    # -- what it says of itself -----------------------------------------------------------------------------------------
    def metric(self, name: str, labels: str = "") -> float:
        """Sum over the lines of this name whose labels contain `labels`; 0 when there are none."""
        text = get(f"http://{self.address}/metrics").decode()
        found = re.findall(rf"^fleet_router_{name}(?:\{{([^}}]*)\}})? (\S+)$", text, re.M)
        return sum(float(value) for marks, value in found if labels in marks)

    def quiet(self) -> None:
        """Nothing runs and nothing is pinned: what was begun has ended everywhere."""

        def left() -> dict[str, Any]:
            found = {w.uid: {k: w.stats()[k] for k in ("pinned", "running")} for w in self.workers}
            busy = {uid: one for uid, one in found.items() if any(one.values())}
            return busy | ({"router": inflight} if (inflight := self.metric("inflight")) else {})

        until("nothing is left", lambda: not left(), 10.0, left)

    def lets_go(self) -> None:
        """Its workers are replaced by others, which tell no events: pooled connections and subscriptions close, and it has the
        descriptors that it began with. Idle clients must have gone."""
        assert self._router is not None
        pid = self._router.pid
        mute = {"events_port": 0, "replay_port": 0}
        rows = tuple(msgspec.structs.replace(worker.endpoint(), uid=f"{worker.uid}-next", **mute) for worker in self.workers)
        self.write(ENDPOINTS_KEY, encode_endpoints(Endpoints(fleet="emulated", namespace="default", workers=rows)))

        def more() -> int:
            return len(fds_of(pid)) - self._fds

        def told() -> str:
            tcp = connected(pid)
            kinds = sorted(f"{one} (TCP)" if one in tcp else one for one in fds_of(pid))
            return f"{more()} more than it began with: {kinds}"

        slack = FDS_SLACK + (ZMQ_FDS if self.config.prefix_index == "precise" else 0)
        until("descriptors are given back", lambda: more() <= slack, 15.0, told)


def stumbles(log: Path) -> list[str]:
    """Lines of a router's log that tell of a bug: tracebacks, whatever else is no line of ours, what it failed at."""
    lines = log.read_text(errors="replace").splitlines()
    return [
        line for line in lines if not line.startswith("{") or json.loads(line)["event"] in ("request-failed", "callback-failed")
    ]


def log_of(folder: Path, address: str) -> Path:
    """Where a router that `e2e.bench.proxies.ours` started writes."""
    return (folder / address.replace(":", "-")).with_suffix(".log")


def fds_of(pid: int) -> set[str]:
    """Descriptors of a process: what they are, each by itself."""
    found = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            link = os.readlink(one)
            found.add(link if link.startswith("socket:") else f"{one.name} {link}")
    return found


def connected(pid: int) -> set[str]:
    """Its TCP sockets that do not listen, under the names of `fds_of`."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return {f"socket:[{fields[9]}]" for fields in lines if fields[3] != LISTENS}


def get(url: str, body: dict[str, Any] | None = None, timeout_s: float = 5.0) -> bytes:
    """GET, or POST of JSON; OSError."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=timeout_s) as answer:
        return bytes(answer.read())


def until(what: str, check: Callable[[], bool], within_s: float, say: Callable[[], object] = lambda: "") -> float:
    """Seconds until it was so."""
    begun = time.monotonic()
    while not check():
        assert time.monotonic() - begun < within_s, f"{what}: not within {within_s} s {say()}"
        time.sleep(0.05)
    return time.monotonic() - begun
