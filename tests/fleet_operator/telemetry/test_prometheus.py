"""Prometheus' HTTP API on a real socket, spoken rightly and wrongly: no answer raises, and unknown is never zero."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from fleet_operator.telemetry import prometheus
from fleet_operator.telemetry.collect import FleetTelemetry, open_telemetry
from fleet_operator.telemetry.prometheus import PrometheusTelemetry, shown
from tests.fleet_operator.telemetry.answers import PODS, Answer, dripping, fleet, matrix, reply, served


def asked(answer: Answer, path: str = "", pods: list[dict[str, Any]] = PODS, tier: str = "t") -> Any:
    async def go(url: str) -> Any:
        telemetry = PrometheusTelemetry(lambda: 1_000.0)
        found = await telemetry.collect(fleet(url), url, pods)
        await telemetry.close()
        return found[tier]

    with served(answer) as url:
        return asyncio.run(go(url + path))


def test_load_with_the_samples_own_time():
    found = asked(lambda handler: reply(handler, matrix("p", "d")))
    assert (found.prefill.inflight, found.decode.inflight, found.prefill.measured_at, found.problem) == (4, 4, 999.0, None)


def test_a_pod_without_series_is_unknown_and_a_pod_that_is_gone_does_not_count():
    found = asked(lambda handler: reply(handler, matrix("p", "long-gone")))
    assert (found.prefill.inflight, found.decode.inflight) == (4, None)


def test_workers_of_a_tier_that_left_the_spec_are_read_too():
    labels = {"inferencefleet.io/role": "prefill", "inferencefleet.io/tier": "old"}
    old = {**PODS[0], "metadata": {**PODS[0]["metadata"], "labels": labels}}
    assert asked(lambda handler: reply(handler, matrix("p")), pods=[old], tier="old").busy == {"p": 4.0}


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
        (lambda handler: reply(handler, '{"data":{"result":[3]}}'), "TypeError"),
        (lambda handler: reply(handler, "[" * 100_000), "RecursionError"),
        (lambda handler: reply(handler, '{"status":"error"}', 422), "HTTP 422"),
        (lambda handler: reply(handler, "", 302, location="http://127.0.0.1:1/"), "TooManyRedirects"),
        (lambda handler: handler.connection.close(), "ConnectionError"),
    ],
    ids=["refused", "no-json", "no-series", "no-matrix", "deep", "bad-query", "redirect", "hangs-up"],
)
def test_a_failure_is_told_by_its_kind_only(answer: Answer, kind: str):
    found = asked(answer)
    assert found.problem.endswith(f"gave no samples: {kind}")
    assert "secret" not in found.problem
    assert found.prefill.inflight is None


def test_no_proxy_and_no_credentials_of_ours_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2")
    seen: list[str | None] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers["authorization"])
        reply(handler, matrix("p", "d"))

    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert asked(answer).prefill.inflight == 4
    assert seen == [None]
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    assert asked(answer).prefill.inflight == 4


@pytest.mark.parametrize("head", [False, True], ids=["in-the-head", "in-the-body"])
def test_servers_that_drip_keep_no_thread_from_others(monkeypatch: pytest.MonkeyPatch, head: bool):
    monkeypatch.setattr(prometheus, "ANSWER_TIMEOUT_S", 0.3)
    released = threading.Event()

    async def go(bad: str, good: str) -> list[Any]:
        telemetry = PrometheusTelemetry(lambda: 1_000.0)
        found = await asyncio.gather(*(telemetry.collect(fleet(bad), bad, PODS) for _ in range(prometheus.THREADS)))
        monkeypatch.setattr(prometheus, "ANSWER_TIMEOUT_S", 30.0)
        found.append(await telemetry.collect(fleet(good), good, PODS))
        await telemetry.close()
        return [tiers["t"].problem for tiers in found]

    try:
        with served(dripping(released, head)) as bad, served(lambda handler: reply(handler, matrix("p", "d"))) as good:
            *dripped, last = asyncio.run(go(bad, good))
            assert all(problem.endswith("TimeoutError") for problem in dripped)
            assert last is None
    finally:
        released.set()


def test_names_that_nobody_resolves_keep_no_thread_from_others(monkeypatch: pytest.MonkeyPatch):
    """A look-up cannot be ended: sixteen fleets with such a name kept all others without telemetry. One asks at a time."""
    monkeypatch.setattr(prometheus, "ANSWER_TIMEOUT_S", 0.3)
    released, looked_up, resolve = threading.Event(), [], socket.getaddrinfo

    def slow(host: str, *more: Any, **how: Any) -> Any:
        if not host.endswith(".invalid"):
            return resolve(host, *more, **how)
        looked_up.append(host)
        released.wait(30)
        raise socket.gaierror("released")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    urls = [f"http://p{number}.invalid" for number in range(prometheus.THREADS)]

    async def go(good: str) -> list[Any]:
        telemetry = PrometheusTelemetry(lambda: 1_000.0)
        for _ in range(3):
            found = await asyncio.gather(*(telemetry.collect(fleet(url), url, PODS) for url in urls))
        assert all(tiers["t"].problem.endswith("TimeoutError") for tiers in found)
        assert sorted(looked_up) == sorted(f"p{number}.invalid" for number in range(prometheus.THREADS))
        monkeypatch.setattr(prometheus, "ANSWER_TIMEOUT_S", 30.0)
        last = await telemetry.collect(fleet(good), good, PODS)
        released.set()
        again = await asyncio.gather(*(telemetry.collect(fleet(url), url, PODS) for url in urls))
        assert all(tiers["t"].problem.endswith("ConnectionError") for tiers in again), "a host that answers again is not asked"
        await telemetry.close()
        return [last["t"].problem, len(telemetry._left)]

    try:
        with served(lambda handler: reply(handler, matrix("p", "d"))) as good:
            assert asyncio.run(go(good)) == [None, 0]
    finally:
        released.set()


def test_a_look_up_that_came_late_fails_its_own_question_only(monkeypatch: pytest.MonkeyPatch):
    """CI of 2026-11-22: fleets share one Prometheus, and those that asked before a slow thread came back were refused at once."""
    released, reached, resolve = threading.Event(), threading.Event(), socket.getaddrinfo

    def slow(*host: Any, **how: Any) -> Any:
        reached.set()
        released.wait(30)
        return resolve(*host, **how)

    async def go(url: str) -> list[Any]:
        telemetry = PrometheusTelemetry(lambda: 1_000.0)
        monkeypatch.setattr(prometheus, "ANSWER_TIMEOUT_S", 0.3)
        late = await telemetry.collect(fleet(url), url, PODS)
        assert await asyncio.to_thread(reached.wait, 30)
        monkeypatch.setattr(prometheus, "ANSWER_TIMEOUT_S", 30.0)
        following = [asyncio.create_task(telemetry.collect(fleet(url), url, PODS)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in following)
        released.set()
        found = [late, *await asyncio.gather(*following)]
        await telemetry.close()
        return [tiers["t"].problem for tiers in found]

    try:
        with served(lambda handler: reply(handler, matrix("p", "d"))) as url:
            monkeypatch.setattr(socket, "getaddrinfo", slow)
            late, *following = asyncio.run(go(url))
            assert late.endswith("TimeoutError")
            assert following == [None] * 3
    finally:
        released.set()


def test_kv_counters_do_not_go_down_when_an_engine_starts_again():
    counts = iter([5, 9, 2])

    def answer(handler: BaseHTTPRequestHandler) -> None:
        whole = json.loads(matrix("p", "d"))
        metric = {"__name__": "vllm:nixl_xfer_time_seconds_count", "pod": "d"}
        whole["data"]["result"].append({"metric": metric, "values": [[999.0, str(next(counts))]]})
        reply(handler, json.dumps(whole))

    async def go(url: str) -> list[int]:
        telemetry = PrometheusTelemetry(lambda: 1_000.0)
        found = [(await telemetry.collect(fleet(url), url, PODS))["t"].kv.transfers for _ in range(3)]
        await telemetry.close()
        return found

    with served(answer) as url:
        assert asyncio.run(go(url)) == [5, 9, 11]


def test_two_replicas_behind_one_address_are_not_a_clock_that_goes_back():
    """A Service before two replicas of Prometheus answers by turns from scrapes that are seconds apart: each older answer was an
    engine that had begun anew, its KV counted twice in the status, its failures of last week as new ones."""
    turns = [(998.0, 9), (995.0, 8), (999.0, 10), (996.0, 9), (None, 0), (996.5, 9)]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        at, moved = turns.pop(0)
        whole = json.loads(matrix(*(("p", "d") if at else ("p",)), at=at or 999.5))
        if at:
            metric = {"__name__": "vllm:nixl_xfer_time_seconds_count", "pod": "d"}
            whole["data"]["result"].append({"metric": metric, "values": [[at, str(moved)]]})
        reply(handler, json.dumps(whole))

    async def go(url: str) -> list[Any]:
        telemetry = PrometheusTelemetry(lambda: 1_000.0)
        found = [(await telemetry.collect(fleet(url), url, PODS))["t"] for _ in range(len(turns))]
        await telemetry.close()
        return found

    with served(answer) as url:
        found = asyncio.run(go(url))
    assert [one.kv.transfers for one in found] == [9, 9, 10, 10, 10, 10]
    assert [one.decode.measured_at for one in found] == [998, 998, 999, 999, None, 999]


def test_no_more_is_read_than_allowed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prometheus, "MAX_BYTES", 1_000_000)
    bomb = gzip.compress(b" " * 2_000_000)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-encoding", "gzip")
        handler.send_header("content-length", str(len(bomb)))
        handler.end_headers()
        handler.wfile.write(bomb)

    assert asked(answer).problem.endswith("AnswerTooLarge")


def test_the_words_of_a_failure_cost_nothing():
    """Thirty times their size: an error of 146 kB, compressed, took 950 MB, and the operator's container has 512."""
    words = gzip.compress(b"ab " * 1_000_000)

    def fails(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(500)
        handler.send_header("content-encoding", "gzip")
        handler.send_header("content-length", str(len(words)))
        handler.end_headers()
        handler.wfile.write(words)

    assert "HTTP 500" in asked(fails).problem  # what is imported for it counts below otherwise
    tracemalloc.start()
    try:
        assert "HTTP 500" in asked(fails).problem
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_part_of_the_series_is_not_taken_for_all(monkeypatch: pytest.MonkeyPatch):
    """Prometheus 3 cuts the answer at `limit` and answers 200."""
    monkeypatch.setattr(prometheus, "MAX_SERIES", 3)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        limit = int(parse_qs(urlsplit(handler.path).query)["limit"][0])
        whole = json.loads(matrix("p", "d", "more"))
        whole["data"]["result"] = whole["data"]["result"][:limit]
        reply(handler, json.dumps(whole))

    found = asked(answer)
    assert found.problem.endswith("ValueError")
    assert found.prefill.inflight is None


@pytest.mark.parametrize(
    "more",
    ['"status":"success","warnings":["No StoreAPI answered: receive-2"],"infos":[]', '"status":"success","isPartial":true'],
    ids=["thanos", "victoriametrics"],
)
def test_an_answer_that_calls_itself_partial_is_not_taken_for_all(more: str):
    """The library drops these words. With a part of the receivers away a router's requests in flight were 0."""
    for body in (matrix("p", "d").replace('"status": "success"', more), "{" + more + "," + matrix("p", "d")[1:]):
        found = asked(lambda handler, body=body: reply(handler, body))  # type: ignore[misc]
        assert found.problem.endswith("gave no samples: PartialAnswer")
        assert found.prefill.inflight is None


@pytest.mark.parametrize("more", ['"warnings":[]', '"isPartial":false', '"infos":["metric might not be a counter"]'])
def test_an_answer_that_is_whole_is_taken(more: str):
    assert asked(lambda handler: reply(handler, "{" + more + "," + matrix("p", "d")[1:])).prefill.inflight == 4


@pytest.mark.parametrize(
    "url", ["http://prom:99999999", "http://prom:none", "http://[::1", "http://%", "http://.", "http://a..b"]
)
def test_an_url_that_the_schema_lets_pass_and_that_is_none(url: str):
    async def go() -> Any:
        telemetry = PrometheusTelemetry()
        found = await telemetry.collect(fleet(url), url, PODS)
        await telemetry.close()
        return found["t"]

    assert asyncio.run(go()).problem.startswith("Prometheus at ")


def test_credentials_are_never_shown():
    assert shown("https://me:hunter2@prom.example:9443/x?token=1") == "https://prom.example:9443"
    assert shown("http://me:hunter2@[fd00::9]:9090/x") == "http://[fd00::9]:9090"  # it said http://fd00::9:9090, which is none
    assert shown("http://[fd00::9]") == "http://[fd00::9]"


def test_each_fleet_has_one_source():
    async def go(url: str) -> Any:
        async with open_telemetry() as telemetry:
            return (
                (await telemetry.collect(fleet(url), PODS, []))["t"].prefill.inflight,
                (await telemetry.collect(fleet(), PODS, []))["t"].prefill.inflight,
            )

    with served(lambda handler: reply(handler, matrix("p", "d", at=time.time() - 1))) as url:
        assert asyncio.run(go(url)) == (4, None)


def test_what_no_source_expects_ends_nothing():
    class Broken:
        async def collect(self, *_: Any) -> Any:
            raise LookupError("the secret of another service")

    broken: Any = Broken()
    for url in (None, "http://prom"):
        found = asyncio.run(FleetTelemetry(broken, broken, broken).collect(fleet(url), PODS, []))
        assert found["t"].problem == "reading it failed: LookupError"


def test_the_library_costs_nothing_until_a_fleet_asks_for_it():
    heavy = "{'prometheus_api_client', 'requests', 'urllib3', 'pandas'}"
    code = f"import sys, fleet_operator.telemetry.collect; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "[]"
