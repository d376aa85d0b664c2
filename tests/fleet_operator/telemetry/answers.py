"""A server on a real socket that answers as a test wants, and a fleet that is read from it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fleet_api.parse import parse_fleet
from fleet_api.v1alpha1 import InferenceFleet

LOAD = "vllm:num_requests_running 3\nvllm:num_requests_waiting 1\n"
RATIO = {"prefill": 1, "decode": 1, "min": "1:2", "max": "1:1"}
Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def served(answer: Answer, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer((host, port), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that leave are part of these tests
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def reply(handler: BaseHTTPRequestHandler, body: str, status: int = 200, **headers: str) -> None:
    raw = body.encode()
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("content-length", str(len(raw)))
    handler.end_headers()
    handler.wfile.write(raw)


def fleet(url: str | None = None, name: str = "f") -> InferenceFleet:
    telemetry = {"prometheus": {"url": url}} if url else {}
    return parse_fleet(
        {
            "apiVersion": "inferencefleet.io/v1alpha1", "kind": "InferenceFleet", "metadata": {"name": name, "namespace": "n"},
            "spec": {
                "model": {"source": "file:///m"}, "telemetry": telemetry,
                "tiers": [{"name": "t", "accelerator": {"type": "cpu"}, "ratio": RATIO}],
            },
        }
    )  # fmt: skip


def pod(name: str, role: str, ip: str, **meta: Any) -> dict[str, Any]:
    labels = {"inferencefleet.io/role": role, "inferencefleet.io/tier": "t"}
    return {"metadata": {"name": name, "labels": labels, **meta}, "status": {"podIP": ip, "phase": "Running"}}


PODS = [pod("p", "prefill", "127.87.0.1"), pod("d", "decode", "127.87.0.2")]


def dripping(released: threading.Event, head: bool = True) -> Answer:
    """A byte now and then, for ever: inside the head, or after it."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if head:
            handler.send_response(200)
            handler.send_header("content-length", "1000000")
            handler.end_headers()
        while not released.wait(0.02):
            handler.wfile.write(b" ")

    return answer


def matrix(*pods: str, at: float = 999.0) -> str:
    rows = [
        {"metric": {"__name__": name, "pod": pod}, "values": [[at, value]]}
        for pod in pods
        for name, value in (("vllm:num_requests_running", "3"), ("vllm:num_requests_waiting", "1"))
    ]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": rows}})
