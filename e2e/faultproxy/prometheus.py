"""A Prometheus that answers about one lab's pods as a test wants it: real queries over HTTP, series made up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from e2e.faultproxy.lab import Lab

Series = list[dict[str, Any]]


@dataclass
class Prometheus:
    """Answers about the pods of one lab as it is told."""

    lab: Lab
    decode: float
    """Requests in flight at decode."""
    prefill: float = 1.0
    held: float = 0.0
    """Requests that wait in the router."""
    spoil: Callable[[Series], Any] = lambda series: series
    status: int = 200
    asked: int = 0
    url: str = ""
    now: Callable[[], float] = time.time

    def answer(self) -> bytes:
        self.asked += 1
        at = self.now()  # all that one scrape finds has one time
        found = self.spoil([one for pod in self.lab.pods() for one in self._series(pod, at)])
        if not isinstance(found, list):
            return str(found).encode()
        return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": found}}).encode()

    def _series(self, pod: dict[str, Any], at: float) -> Series:
        one = partial(_one, at)
        labels = pod["metadata"]["labels"]
        role, name = labels["inferencefleet.io/role"], pod["metadata"]["name"]
        target = {"namespace": self.lab.namespace, "pod": name, "inferencefleet_io_fleet": "f", "job": "j", "instance": name}
        if role == "router":
            sent = {"prefill": self.prefill, "decode": self.decode}
            clients = {"fleet_router_held": self.held, "fleet_router_arrivals_total": 1_000.0}
            return [
                *(one("fleet_router_inflight", value, **target, role=r, tier="t") for r, value in sent.items()),
                *(one(metric, value, **target) for metric, value in clients.items()),
            ]
        each = self.prefill if role == "prefill" else self.decode / max(1, len(self.lab.pods("decode")))
        moved = [one("vllm:nixl_xfer_time_seconds_count", 1_000.0, **target)]
        running = one("vllm:num_requests_running", each, **target)
        return [running, one("vllm:num_requests_waiting", 0.0, **target), *moved]


def _one(at: float, name: str, value: float, **labels: str) -> dict[str, Any]:
    return {"metric": {"__name__": name, **labels}, "values": [[at - 1, str(value)], [at, str(value)]]}


@contextmanager
def prometheus(lab: Lab, decode: float, **more: Any) -> Iterator[Prometheus]:
    source = Prometheus(lab, decode, **more)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = source.answer()
            self.send_response(source.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    source.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield source
    finally:
        server.shutdown()
        server.server_close()
