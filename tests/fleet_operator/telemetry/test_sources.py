"""Both sources on real sockets: what answers wrongly, slowly or not at all is missing, and nothing else is."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fleet_api.parse import parse_fleet
from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.telemetry import prometheus, scrape
from fleet_operator.telemetry.collect import open_telemetry
from fleet_operator.telemetry.prometheus import PrometheusTelemetry, shown
from fleet_operator.telemetry.scrape import ScrapeTelemetry

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


def fleet(url: str | None = None) -> InferenceFleet:
    telemetry = {"prometheus": {"url": url}} if url else {}
    return parse_fleet(
        {
            "apiVersion": "inferencefleet.io/v1alpha1", "kind": "InferenceFleet", "metadata": {"name": "f", "namespace": "n"},
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


# -- scrape ---------------------------------------------------------------------------------------------------------
def scraped(answer: Answer, pods: list[dict[str, Any]] = PODS) -> Any:
    async def go() -> Any:
        telemetry = ScrapeTelemetry()
        found = await telemetry.collect(fleet(), pods, [])
        await telemetry.close()
        return found["t"]

    with served(answer, "127.87.0.1", scrape.AGENT_PORT):
        return asyncio.run(go())


def test_a_worker_that_answers_is_known_and_one_that_does_not_is_not():
    found = scraped(lambda handler: reply(handler, '{"transport":"shm"}' if handler.path == "/state" else LOAD))
    assert (found.prefill.inflight, found.decode.inflight, found.transport) == (4, None, "shm")


@pytest.mark.parametrize(
    "answer",
    [
        lambda handler: reply(handler, LOAD, 500),
        lambda handler: reply(handler, LOAD, 302, location="http://127.0.0.1:1/"),
        lambda handler: reply(handler, "\x00" * 100),
        lambda handler: reply(handler, LOAD + "x" * (scrape.MAX_BYTES + 1)),
        lambda handler: handler.wfile.write(b"no http at all\r\n\r\n"),
        lambda handler: handler.connection.close(),
    ],
    ids=["500", "redirect", "zeros", "too-large", "no-http", "hangs-up"],
)
def test_a_wrong_answer_is_no_answer(answer: Answer):
    assert scraped(answer).prefill.inflight is None


def test_a_slow_worker_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scrape, "TIMEOUT_S", 0.2)
    release = threading.Event()

    def slow(handler: BaseHTTPRequestHandler) -> None:
        release.wait(5)
        reply(handler, LOAD)

    begun = time.monotonic()
    try:
        assert scraped(slow).prefill.inflight is None
    finally:
        release.set()
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize(
    "change",
    [{"deletionTimestamp": "2026-01-01T00:00:00Z"}, {"labels": {"inferencefleet.io/role": "router"}}],
    ids=["leaving", "router"],
)
def test_only_running_workers_are_asked(change: dict[str, Any]):
    other = pod("p", "prefill", "127.87.0.1")
    other["metadata"] |= change
    assert scraped(lambda handler: reply(handler, LOAD), [other]).prefill.inflight is None


# -- Prometheus -----------------------------------------------------------------------------------------------------
def matrix(*pods: str, at: float = 999.0) -> str:
    rows = [
        {"metric": {"__name__": name, "pod": pod}, "values": [[at, value]]}
        for pod in pods
        for name, value in (("vllm:num_requests_running", "3"), ("vllm:num_requests_waiting", "1"))
    ]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": rows}})


def asked(answer: Answer, path: str = "") -> Any:
    async def go(url: str) -> Any:
        telemetry = PrometheusTelemetry(lambda: 1_000.0)
        found = await telemetry.collect(fleet(url), url, PODS)
        await telemetry.close()
        return found["t"]

    with served(answer) as url:
        return asyncio.run(go(url + path))


def test_load_with_the_samples_own_time():
    found = asked(lambda handler: reply(handler, matrix("p", "d")))
    assert (found.prefill.inflight, found.decode.inflight, found.prefill.measured_at, found.problem) == (4, 4, 999.0, None)


def test_a_pod_without_series_is_unknown_and_a_pod_that_is_gone_does_not_count():
    found = asked(lambda handler: reply(handler, matrix("p", "long-gone")))
    assert (found.prefill.inflight, found.decode.inflight) == (4, None)


def test_a_path_in_front_of_the_api_is_kept():
    seen: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.path.split("?")[0])
        reply(handler, matrix("p", "d"))

    assert asked(answer, "/prom/").prefill.inflight == 4
    assert seen == ["/prom/api/v1/query"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lambda handler: reply(handler, "the secret of another service", 404), "HTTP 404"),
        (lambda handler: reply(handler, "the secret of another service"), "JSONDecodeError"),
        (lambda handler: reply(handler, '{"data":{"result":[{"metric":{}}]}}'), "KeyError"),
        (lambda handler: reply(handler, "", 302, location="http://127.0.0.1:1/"), "TooManyRedirects"),
        (lambda handler: handler.connection.close(), "ConnectionError"),
    ],
    ids=["refused", "no-json", "no-matrix", "redirect", "hangs-up"],
)
def test_a_failure_is_told_by_its_kind_only(answer: Answer, kind: str):
    found = asked(answer)
    assert found.problem.endswith(f"gave no samples: {kind}")
    assert "secret" not in found.problem
    assert found.prefill.inflight is None


def test_an_answer_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prometheus, "ANSWER_TIMEOUT_S", 0.3)
    release = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "100")
        handler.end_headers()
        while not release.wait(0.05):
            handler.wfile.write(b" ")

    try:
        assert asked(drip).problem.endswith("TimeoutError")
    finally:
        release.set()


def test_credentials_are_never_shown():
    assert shown("https://me:hunter2@prom.example:9443/x?token=1") == "https://prom.example:9443"


def test_each_fleet_has_one_source():
    async def go(url: str) -> Any:
        async with open_telemetry() as telemetry:
            return (
                (await telemetry.collect(fleet(url), PODS, []))["t"].prefill.inflight,
                (await telemetry.collect(fleet(), PODS, []))["t"].prefill.inflight,
            )

    with served(lambda handler: reply(handler, matrix("p", "d", at=time.time() - 1))) as url:
        assert asyncio.run(go(url)) == (4, None)
