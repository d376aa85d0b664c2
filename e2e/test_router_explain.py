"""What a router says of its requests, on real processes: `fleet explain`, spans at a collector, log lines, metrics; and that
nothing that is secret is in any of them (S5)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from e2e.bench.proxies import ours, process, wait_for
from e2e.fleet_up import END_S, READY_S, free_port, running
from e2e.test_router_envoy import free_ports, write_documents
from fleet_cli.up.bundled import bundled_manifest, tiny_model
from fleet_router.config import ExplainBounds, RouterConfig, TraceConfig
from tests.fleet_router.fake_worker import FakeWorker, answer, stream
from tests.fleet_router.test_tracing import TRACE_ID, Collector, attributes, collector

pytestmark = pytest.mark.timeout(300)
KEY, SALT, PROMPT, TOKEN = "sk-canary-key-7f3a", "canary-salt-9b21" * 3, "canary-prompt-55d0", "canary-token-c4e8"
CANARIES = ("canary-key", "canary-salt", "canary-prompt", "canary-token")
LONG = f"{PROMPT} and more of it " * 40


def explain(url: str, *arguments: str, key: str = "") -> subprocess.CompletedProcess[str]:
    """The command as a user gives it."""
    argv = [sys.executable, "-m", "fleet_cli.main", "explain", *arguments, "--url", url]
    env = {**os.environ, "FLEET_API_KEY": key}
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, env=env)


def tenants(folder: Path) -> Path:
    """One tenant that may read its own decisions."""
    row = {"name": "acme", "keys": ["sha256:" + hashlib.sha256(KEY.encode()).hexdigest()], "decisions": "own"}
    file = folder / "tenants.json"
    file.write_text(json.dumps({"salt": SALT, "tenants": [row]}))
    return file


@contextmanager
def router(folder: Path, prefill: list[int], decode: list[int], config: RouterConfig, token: str) -> Iterator[tuple[str, Path]]:
    """(URL, log) of a router process with tenants, and a secret in the environment for its collector."""
    (port,) = free_ports(1)
    documents, log = folder / "documents", folder / "router.log"
    write_documents(documents, prefill, decode, config)
    argv = [sys.executable, "-m", "fleet_router", "--follow", f"dir:{documents}", "--host", "127.0.0.1", "--port", str(port)]
    before = os.environ.get("OTEL_EXPORTER_OTLP_HEADERS")
    os.environ["OTEL_EXPORTER_OTLP_HEADERS"] = f"authorization=Bearer%20{token}"
    try:
        with process([*argv, "--tenants", str(tenants(folder))], log) as started:
            wait_for(f"http://127.0.0.1:{port}/ready", started, log)
            yield f"http://127.0.0.1:{port}", log
    finally:
        os.environ.pop("OTEL_EXPORTER_OTLP_HEADERS")
        if before is not None:
            os.environ["OTEL_EXPORTER_OTLP_HEADERS"] = before


async def troubles(client: httpx.AsyncClient, workers: list[FakeWorker]) -> list[str]:
    """Every way in which a request can end; what the client was told."""
    told, auth = [], {"authorization": f"Bearer {KEY}"}

    async def post(given: Any, path: str = "/v1/completions", **more: Any) -> None:
        sent = {"content": given} if isinstance(given, bytes) else {"json": given}
        got = await client.post(path, headers=more.pop("headers", auth), **sent, **more)
        told.append(f"{got.status_code} {dict(got.headers)} {got.text}")

    good = {"model": "m", "prompt": LONG}
    await post(good, headers={**auth, "x-fleet-explain": "1", "x-request-id": "whole"})
    await post({**good, "stream": True}, headers={**auth, "x-request-id": "streamed"})
    await post(good, headers={"authorization": f"Bearer {KEY}-wrong"})
    await post(good, headers={"authorization": f"Bearer {KEY}", "x-api-key": "other"})
    for bad in (
        {"prompt": LONG},
        {**good, "max_tokens": PROMPT},
        {**good, "stream": PROMPT},
        {"model": "m", "prompt": {"x": LONG}},
    ):
        await post(bad)
    await post(f'{{"model": "m", "prompt": "{PROMPT}'.encode())
    await post({"model": "m", "messages": [{"content": PROMPT}]}, "/v1/chat/completions")
    await post({"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": PROMPT}, "/v1/messages")
    await post({"model": "m", "input": {"canary": PROMPT}}, "/v1/responses")
    for behave in (refusing, breaking, nonsense):
        for worker in workers:
            worker.behave = behave
        await post({**good, "stream": True})
    return told


async def refusing(_: Any, writer: asyncio.StreamWriter) -> bool:
    answer(writer, 500, {"error": {"message": "the engine failed"}})
    return True


async def breaking(body: Any, writer: asyncio.StreamWriter) -> bool:
    if "do_remote_decode" in json.dumps(body.get("kv_transfer_params", {})):
        return False
    await stream(writer, ["a"], end=False)
    writer.close()
    return True


async def nonsense(_: Any, writer: asyncio.StreamWriter) -> bool:
    writer.write(f"this is no HTTP but {PROMPT}\r\n\r\n".encode())
    writer.close()
    return True


def test_s5_no_secret_is_in_logs_records_metrics_spans_or_errors(tmp_path: Path):
    """Stage one: the canaries were really there (the workers saw the prompt, the key was taken, the collector the token). Stage
    two: they are nowhere else, after every way in which a request can end."""

    async def go(at: Collector) -> None:
        workers = [await FakeWorker().start() for _ in range(3)]
        traces = TraceConfig(endpoint=at.url, sample=1.0)
        explained = ExplainBounds(log="all", log_lines_per_s=1000)
        config = RouterConfig(
            fleet="f", served_name="m", min_uncached_tokens=64, first_token_deadline_s=2, explain=explained, traces=traces
        )
        made = router(tmp_path, [workers[0].port], [w.port for w in workers[1:]], config, TOKEN)
        url, log = await asyncio.to_thread(made.__enter__)
        try:
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
                told = await troubles(client, workers)
                headers = {"x-api-key": KEY}
                records = (await client.get("/debug/decisions?limit=200", headers=headers)).text
                metrics = (await client.get("/metrics")).text
                refused = (await client.get("/debug/decisions", headers={"x-api-key": f"{KEY}-wrong"})).text
            command = await asyncio.to_thread(explain, url, "whole", key=KEY)
            wrong = await asyncio.to_thread(explain, url, key=f"{KEY}-wrong")
        finally:
            await asyncio.to_thread(made.__exit__, None, None, None)  # what waits is sent
            for worker in workers:
                await worker.stop()
        # stage one
        assert any(PROMPT in json.dumps(body) for worker in workers for body in worker.seen)
        assert told[0].startswith("200 ")
        assert all(one["authorization"] == f"Bearer {TOKEN}" for one in at.headers)
        assert len(at.headers) >= 1
        statuses = {one.split(" ")[0] for one in told}
        assert {"200", "400", "401", "502"} <= statuses
        assert len(json.loads(records)["decisions"]) >= 4
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert sum(line["event"] == "request" for line in lines) >= 4
        assert "remote prefill" in command.stdout
        # stage two
        seen = {
            "logs": log.read_text(), "records": records, "metrics": metrics, "spans": "".join(map(str, at.spans)),
            "errors": "\n".join(told) + refused, "command": command.stdout + command.stderr + wrong.stdout + wrong.stderr,
        }  # fmt: skip
        leaks = {f"{canary} in {where}" for where, text in seen.items() for canary in CANARIES if canary in text}
        assert leaks == set()

    with collector() as at:
        asyncio.run(go(at))


@pytest.fixture
def traced_fleet(tmp_path: Path) -> Iterator[tuple[list[str], Collector]]:
    """Arguments of `fleet up` for a fleet whose routers send spans."""
    with collector() as at:
        manifest = bundled_manifest(tiny_model())
        manifest["spec"]["telemetry"] = {**manifest["spec"].get("telemetry", {}), "traces": {"endpoint": at.url, "sample": 0.0}}
        manifest["spec"]["routing"] = {**manifest["spec"].get("routing", {}), "explain": {"records": 8, "log": "all"}}
        path = tmp_path / "fleet.yaml"
        path.write_text(yaml.safe_dump(manifest))
        yield [str(path), "--port", str(free_port()), "--state", str(tmp_path / "state")], at


def test_a_real_fleet_explains_a_request_and_traces_it(traced_fleet: tuple[list[str], Collector]):
    """Real engines, real KV transfer: the command names the pods, the spans the legs, both the same ones."""
    arguments, at = traced_fleet
    url = f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}"
    with running(*arguments) as fleet:
        fleet.until("curl")
        body = {
            "model": "tiny",
            "prompt": "a prompt that is long enough for a prefill worker " * 12,
            "max_tokens": 4,
            "stream": True,
        }
        parent = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
        headers = {"x-request-id": "traced", "traceparent": parent, "x-fleet-explain": "1"}
        got = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=READY_S + END_S, trust_env=False)
        assert got.status_code == 200, got.text
        assert 'reason="remote prefill"' in got.headers["x-fleet-decision"]
        told = explain(url, "traced")
        assert told.returncode == 0, told.stderr
        found = re.search(r"remote prefill, (\S+) -> (\S+),", told.stdout)
        assert found is not None, told.stdout
        end = time.monotonic() + 20
        while not at.spans:
            assert time.monotonic() < end
            time.sleep(0.1)
    spans = {span.name: span for span in at.spans}
    assert {"POST /v1/completions", "prefill", "kv transfer", "decode"} <= set(spans)
    assert {span.trace_id.hex() for span in at.spans} == {TRACE_ID}
    assert attributes(spans["prefill"])["fleet.worker"] == found[1]
    assert attributes(spans["decode"])["fleet.worker"] == found[2]
    assert spans["prefill"].end_time_unix_nano <= spans["kv transfer"].start_time_unix_nano


def test_records_cost_little_next_to_a_request(tmp_path: Path):
    """The bound holds in memory too: ten times as many requests as records leave no more of them."""
    workers = [f"127.85.2.{i}:8000" for i in (1, 2)]
    bounds = ExplainBounds(records=50, troubled=5, refused=5, log="none")
    config = RouterConfig(fleet="bench", served_name="tiny", explain=bounds)
    argv = [sys.executable, "-m", "e2e.bench.backend", *workers]
    with process(argv, tmp_path / "workers.log") as backend:
        wait_for(f"http://{workers[-1]}/health", backend, tmp_path / "workers.log")
        with (
            ours("ours", "127.85.2.9:8080", [], workers, tmp_path, config) as proxy,
            httpx.Client(base_url=f"http://{proxy.address}", trust_env=False) as client,
        ):
            for i in range(500):
                assert client.post("/v1/completions", json={"model": "tiny", "prompt": f"{i}"}).status_code == 200
            for _ in range(20):
                assert client.post("/v1/completions", json={"model": "tiny"}).status_code == 400
            text = client.get("/metrics").text
            assert 'fleet_router_records{kind="answered"} 50' in text
            assert 'fleet_router_records{kind="refused"} 5' in text
            assert 'inference_objective_request_total{model_name="tiny",target_model_name="tiny"} 500' in text
            log = "".join(path.read_text() for path in tmp_path.glob("*.log"))
            assert '"event":"endpoints"' in log
            assert '"event":"request"' not in log
