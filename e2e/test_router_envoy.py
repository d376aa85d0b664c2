"""The same policy behind a real Envoy: an Endpoint Picker asked by ext_proc, prefill and decode apart, failure modes, fallbacks.

The router process and Envoy are real; the workers are emulated ones that record what they were sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.bench.proxies import process, wait_for
from e2e.envoy_picker import config, envoy, posted_at_once
from fleet_router.config import RouterConfig
from fleet_router.config import encode as encode_config
from fleet_wire.endpoints import ENDPOINTS_KEY, ROUTER_CONFIG_KEY, Endpoint, Endpoints
from fleet_wire.endpoints import encode as encode_endpoints
from tests.fleet_router.fake_worker import FakeWorker, answer

pytestmark = pytest.mark.timeout(300)
LONG = "the same long prompt of a client " * 60
CONFIG = RouterConfig(fleet="f", served_name="m", min_uncached_tokens=64)
KEY = "sk-e2e-envoy"


def free_ports(count: int) -> list[int]:
    """Free on this machine now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return found


@dataclass
class Gateway:
    """Envoy, the picker behind it, the workers, all in one place."""

    url: str
    picker: str
    pid: int
    prefill: list[FakeWorker]
    decode: list[FakeWorker]
    documents: Path
    logs: list[Path] = field(default_factory=list)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=60)

    async def metric(self, line: str) -> float:
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"{self.picker}/metrics")).text
        found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def decisions(self) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(f"{self.picker}/debug/decisions")).json()["decisions"]

    async def idle(self) -> None:
        """Nothing may be counted as running on any worker."""
        end = time.monotonic() + 30
        while True:
            async with httpx.AsyncClient(trust_env=False) as client:
                text = (await client.get(f"{self.picker}/metrics")).text
            busy = re.findall(r"^fleet_router_worker_inflight\{.*\} [1-9]\d*$", text, re.MULTILINE)
            if not busy:
                return
            assert time.monotonic() < end, busy
            await asyncio.sleep(0.05)


def write_documents(folder: Path, prefill: Sequence[int], decode: Sequence[int], config: RouterConfig = CONFIG) -> None:
    rows = [*(("prefill", port) for port in prefill), *(("decode", port) for port in decode)]
    found = tuple(
        Endpoint(
            name=f"{role}-{i}", uid=f"{role}{port}", address="127.0.0.1", http_port=port, agent_port=1,
            role="prefill" if role == "prefill" else "decode", tier="t", revision="r", compat="c",
        )
        for i, (role, port) in enumerate(rows)
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / ROUTER_CONFIG_KEY).write_text(encode_config(config))
    (folder / ENDPOINTS_KEY).write_bytes(encode_endpoints(Endpoints(fleet="f", namespace="n", workers=found)))


@contextmanager
def gateway(
    tmp_path: Path, prefill: list[FakeWorker], decode: list[FakeWorker], *, fail_open: bool = False,
    failure_mode: str = "FailClose", body: str = "FULL_DUPLEX_STREAMED",
    subset: Sequence[str] | None = None, known: bool = True, router: bool = True,
    dead: Sequence[int] = (), tenants: Path | None = None, settings: RouterConfig = CONFIG,
) -> Iterator[Gateway]:  # fmt: skip
    """`dead`: ports of decode workers where nobody listens; `known`: the picker has read its documents."""
    at, admin, http, grpc = (f"127.0.0.1:{port}" for port in free_ports(4))
    ports = [*dead, *(worker.port for worker in decode)]
    documents = tmp_path / "documents"
    if known:
        write_documents(documents, [worker.port for worker in prefill], ports, settings)
    log = tmp_path / "router.log"
    argv = [
        sys.executable,
        "-m",
        "fleet_router",
        "--follow",
        f"dir:{documents}",
        "--host",
        "127.0.0.1",
        "--port",
        http.split(":")[1],
    ]
    argv += ["--ext-proc-port", grpc.split(":")[1], "--failure-mode", failure_mode]
    argv += ["--tenants", str(tenants)] if tenants is not None else []
    if not router:
        argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    bootstrap = config(at, admin, grpc, [f"127.0.0.1:{port}" for port in ports], fail_open=fail_open, body=body, subset=subset)
    with process(argv, log) as running:
        if router:
            wait_for(f"http://{http}/{'ready' if known and ports else 'health'}", running, log)
        with envoy(at, admin, tmp_path, bootstrap) as url:
            yield Gateway(url, f"http://{http}", running.pid, prefill, decode, documents, [log, tmp_path / "envoy.log"])


def behind(test: Any, tmp_path: Path, prefill: int = 1, decode: int = 2, **more: Any) -> None:
    """Run `test` on a gateway with so many workers."""

    async def go() -> None:
        workers = [await FakeWorker().start() for _ in range(prefill + decode)]
        try:
            made = gateway(tmp_path, workers[:prefill], workers[prefill:], **more)
            found = await asyncio.to_thread(made.__enter__)
            try:
                await test(found)
            finally:
                await asyncio.to_thread(made.__exit__, None, None, None)
        finally:
            for worker in workers:
                await worker.stop()

    asyncio.run(go())


@pytest.mark.parametrize("body", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
def test_prefill_and_decode_are_apart_behind_envoy(tmp_path: Path, body: str):
    async def go(at: Gateway) -> None:
        async with at.client() as client:
            given = {"model": "m", "prompt": LONG, "max_tokens": 7, "priority": 9}
            headers = {"x-request-id": "mine", "x-gateway-destination-endpoint": "10.0.0.1:1", "authorization": "Bearer secret",
                       "x-vllm-priority": "-9", "x-session-id": "s", "x-data-parallel-rank": "1"}  # fmt: skip
            got = await client.post("/v1/completions", json=given, headers=headers)
            assert (got.status_code, got.json(), got.headers["x-request-id"]) == (200, {"choices": [{"text": "hello"}]}, "mine")
            first = at.prefill[0].seen[0]
            assert (first["max_tokens"], first["kv_transfer_params"]["do_remote_decode"]) == (1, True)
            (served,) = [worker for worker in at.decode if worker.seen]
            second, sent = served.seen[0], served.asked()[0]
            assert (second["max_tokens"], second["kv_transfer_params"]["lease_id"], "priority" in second) == (7, "lease-1", False)
            assert second["prompt"] == LONG
            assert not {"authorization", "x-vllm-priority", "x-session-id", "x-data-parallel-rank"} & sent.keys()
            assert sent["x-request-id"] == at.prefill[0].asked()[0]["x-request-id"] != "mine"
            # the same prefix goes where its KV is, without a prefill worker
            for _ in range(3):
                await client.post("/v1/completions", json={**given, "max_tokens": 2})
            assert (len(at.prefill[0].seen), len(served.seen)) == (1, 4)
        await at.idle()
        one = (await at.decisions())[-1]
        assert (one["state"], one["tries"][0]["reason"], one["request_id"]) == ("answered", "remote prefill", "mine")
        assert await at.metric('fleet_router_handed_over_total{tier="t"}') == 1
        assert at.prefill[0].released == []

    behind(go, tmp_path, body=body)


def test_streams_pass_and_their_tokens_are_seen(tmp_path: Path):
    async def go(at: Gateway) -> None:
        async with at.client() as client:
            events = []
            async with client.stream("POST", "/v1/completions", json={"model": "m", "prompt": "short", "stream": True}) as got:
                async for line in got.aiter_lines():
                    events += [line] if line else []
            assert events[-1] == "data: [DONE]"
            assert len(events) == 4
        await at.idle()
        (one,) = await at.decisions()
        assert one["stream"]
        assert 0 < one["first_byte_s"] <= one["last_byte_s"]

    behind(go, tmp_path)


def test_a_large_prompt_goes_in_pieces(tmp_path: Path):
    async def go(at: Gateway) -> None:
        prompt = [i % 1000 for i in range(100_000)]
        async with at.client() as client:
            got = await client.post("/v1/completions", json={"model": "m", "prompt": prompt})
            assert got.status_code == 200, got.text
            (served,) = [worker for worker in at.decode if worker.seen]
            assert served.seen[0]["prompt"] == prompt
            too_large = await client.post("/v1/completions", content=b"x" * (5 << 20))
            assert too_large.status_code == 413

    behind(go, tmp_path, settings=RouterConfig(fleet="f", served_name="m", max_input_tokens=200_000))


@pytest.mark.parametrize(
    ("path", "given", "status", "code"),
    [
        ("/v1/completions", {"model": "m"}, 400, "invalid_request"),
        ("/v1/completions", {"model": "other", "prompt": "x"}, 404, "model_not_found"),
        ("/v1/messages", {"model": "m"}, 404, None),
        ("/anything", {}, 404, "not_found"),
    ],
)
def test_bad_requests_are_refused_with_our_words(tmp_path: Path, path: str, given: Any, status: int, code: str | None):
    async def go(at: Gateway) -> None:
        async with at.client() as client:
            got = await client.post(path, json=given, headers={"x-request-id": "r1"})
        assert got.status_code == status
        assert code is None or (got.json()["error"]["code"], got.json()["error"]["request_id"]) == (code, "r1")
        assert not any(worker.seen for worker in (*at.prefill, *at.decode))

    behind(go, tmp_path)


def test_requests_without_a_body_go_to_any_decode_worker(tmp_path: Path):
    async def go(at: Gateway) -> None:
        async with at.client() as client:
            await client.get("/health", headers={"content-length": "0"})
        assert not at.prefill[0].asked()
        assert sum(len(worker.asked()) for worker in at.decode) == 1

    behind(go, tmp_path)


def test_models_are_told_by_the_router(tmp_path: Path):
    async def go(at: Gateway) -> None:
        async with at.client() as client:
            got = await client.get("/v1/models")
            assert (got.status_code, [one["id"] for one in got.json()["data"]]) == (200, ["m"])
            assert ((await client.get("/v1/models/m")).json()["id"], (await client.get("/v1/models/x")).status_code) == ("m", 404)
            head = await client.head("/v1/models")
            assert (head.status_code, head.content) == (200, b"")
            assert (await client.get("/v1/models")).status_code == 200  # the connection is in order behind it
        assert not any(worker.seen for worker in (*at.prefill, *at.decode))

    behind(go, tmp_path)


def test_a_failing_prefill_worker_is_replaced_and_no_endpoint_is_503(tmp_path: Path):
    async def go(at: Gateway) -> None:
        async def refuse(_: Any, writer: asyncio.StreamWriter) -> bool:
            answer(writer, 500, {})
            return True

        at.prefill[0].behave = refuse
        async with at.client() as client:
            got = await client.post("/v1/completions", json={"model": "m", "prompt": LONG})
            assert got.status_code == 200
            assert [len(one["tries"]) for one in await at.decisions()] == [2]
            write_documents(at.documents, [at.prefill[0].port], [])
            end = time.monotonic() + 30
            while (got := await client.post("/v1/completions", json={"model": "m", "prompt": LONG})).status_code == 200:
                assert time.monotonic() < end
            assert (got.status_code, got.json()["error"]["code"], "retry-after" in got.headers) == (503, "no_worker", True)
        await at.idle()

    behind(go, tmp_path, fail_open=True)  # known and empty is 503 in either mode


def test_envoy_falls_back_to_the_next_worker_and_we_learn_who_served(tmp_path: Path):
    (dead,) = free_ports(1)

    async def go(at: Gateway) -> None:
        async with at.client() as client:
            for i in range(12):
                got = await client.post("/v1/completions", json={"model": "m", "prompt": f"{i} short"})
                assert got.status_code == 200, got.text
        assert len(at.decode[0].seen) == 12
        await at.idle()
        told = await at.decisions()
        blamed = [one["tries"][0] for one in told if one["tries"][0].get("why")]
        # none at all when the router had asked the worker who it is before the first request, and found nobody
        assert {(one["decode"], one["why"]) for one in blamed} <= {
            ("decode-1", "the gateway could not reach it: decode-2 answered")
        }
        assert len(blamed) < 12  # after the first ones it is avoided

    behind(go, tmp_path, decode=1, dead=[dead])


def test_a_subset_is_kept_to(tmp_path: Path):
    async def go() -> None:
        workers = [await FakeWorker().start() for _ in range(3)]
        allowed = workers[2]
        made = gateway(tmp_path, [], workers, subset=[f"127.0.0.1:{allowed.port}"])
        at = await asyncio.to_thread(made.__enter__)
        try:
            async with at.client() as client:
                for i in range(6):
                    assert (await client.post("/v1/completions", json={"model": "m", "prompt": f"{i} short"})).status_code == 200
            assert [len(worker.seen) for worker in workers] == [0, 0, 6]
        finally:
            await asyncio.to_thread(made.__exit__, None, None, None)
            for worker in workers:
                await worker.stop()

    asyncio.run(go())


def test_a_subset_of_nobody_is_503(tmp_path: Path):
    async def go(at: Gateway) -> None:
        async with at.client() as client:
            assert (await client.post("/v1/completions", json={"model": "m", "prompt": "short"})).status_code == 503

    behind(go, tmp_path, subset=["10.9.9.9:1"])


BUFFERED, DUPLEX = "BUFFERED", "FULL_DUPLEX_STREAMED"


@pytest.mark.parametrize(
    ("fail_open", "failure_mode", "router", "known", "body", "status"),
    [
        (True, "FailOpen", False, True, BUFFERED, 200),  # nobody picks: any endpoint
        (False, "FailClose", False, True, BUFFERED, 500),  # Envoy's own refusal
        (False, "FailClose", False, True, DUPLEX, 500),
        (True, "FailOpen", True, False, BUFFERED, 200),  # the picker knows nothing yet
        (True, "FailOpen", True, False, DUPLEX, 500),  # Envoy has sent the body away and kept no copy (envoy#41276)
        (False, "FailClose", True, False, BUFFERED, 503),
        (False, "FailClose", True, False, DUPLEX, 503),
        (True, "FailClose", True, False, BUFFERED, 503),  # an answer is no failure
        (False, "FailOpen", True, False, BUFFERED, 500),  # the gateway's word holds
    ],
)
def test_failure_modes(tmp_path: Path, fail_open: bool, failure_mode: str, router: bool, known: bool, body: str, status: int):
    async def go(at: Gateway) -> None:
        given = json.dumps({"model": "m", "prompt": LONG}).encode()
        got, told = await posted_at_once(at.url, "/v1/completions", given)
        assert got == status, told
        reached = [worker for worker in at.decode if worker.seen]
        assert len(reached) == (1 if status == 200 else 0)
        if status == 200:
            assert "kv_transfer_params" not in reached[0].seen[0]  # it went as it came

    behind(go, tmp_path, fail_open=fail_open, failure_mode=failure_mode, router=router, known=known, body=body)


def test_a_picker_that_dies_costs_no_request_when_the_gateway_fails_open(tmp_path: Path):
    async def go(at: Gateway) -> None:
        async with at.client() as client:
            given = {"model": "m", "prompt": "short"}
            assert (await client.post("/v1/completions", json=given)).status_code == 200
            os.kill(at.pid, signal.SIGKILL)
            for _ in range(4):
                assert (await client.post("/v1/completions", json=given)).status_code == 200
        assert sum(len(worker.seen) for worker in at.decode) == 5

    behind(go, tmp_path, fail_open=True, failure_mode="FailOpen", body=BUFFERED)


def test_a_client_that_leaves_frees_the_worker_and_the_lease(tmp_path: Path):
    async def go(at: Gateway) -> None:
        async def hang(_: Any, writer: asyncio.StreamWriter) -> bool:
            await asyncio.sleep(3)
            return True

        for worker in at.decode:
            worker.behave = hang
        async with at.client() as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json={"model": "m", "prompt": LONG}, timeout=0.5)
        await at.idle()
        end = time.monotonic() + 30
        while not at.prefill[0].released:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        assert at.prefill[0].released == ["lease-1"]
        (one,) = await at.decisions()
        assert one["state"] == "left"

    behind(go, tmp_path)


def test_keys_and_quotas_hold_behind_envoy(tmp_path: Path):
    hashed = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()
    tenants = tmp_path / "tenants.json"
    row = {"name": "acme", "keys": [hashed], "requestsPerSecond": 0.001, "requestsBurst": 1, "decisions": "own"}
    tenants.write_text(json.dumps({"salt": "s" * 32, "tenants": [row]}))

    async def go(at: Gateway) -> None:
        async with at.client() as client:
            given = {"model": "m", "prompt": "short", "stream": True}
            assert (await client.post("/v1/completions", json=given)).status_code == 401
            headers = {"authorization": f"Bearer {KEY}", "x-fleet-explain": "1"}
            got = await client.post("/v1/completions", json=given, headers=headers)
            assert got.status_code == 200
            assert got.headers["x-ratelimit-remaining-requests"] == "0"
            assert 'decode="decode-' in got.headers["x-fleet-decision"]
            refused = await client.post("/v1/completions", json=given, headers=headers)
            assert (refused.status_code, refused.json()["error"]["reason"]) == (429, "requests_per_second")
            (served,) = [worker for worker in at.decode if worker.seen]
            assert (served.asked()[0].get("authorization"), "cache_salt" in served.seen[0]) == (None, True)
            assert "stream_options" not in served.seen[0]  # its client would get a usage that nobody can cut out there
        assert not any(KEY in log.read_text() for log in at.logs)

    behind(go, tmp_path, tenants=tenants)


def test_health_says_when_decisions_can_be_made(tmp_path: Path):
    """By gRPC's health protocol, as a kubelet asks."""
    import grpc

    from fleet_router.epp.messages import HEALTH, NOT_SERVING, SERVING, UNKNOWN, HealthCheckRequest, HealthCheckResponse

    http, port = free_ports(2)
    documents = tmp_path / "documents"
    argv = [sys.executable, "-m", "fleet_router", "--follow", f"dir:{documents}", "--host", "127.0.0.1", "--port", str(http)]
    with process([*argv, "--ext-proc-port", str(port)], tmp_path / "log") as running:
        wait_for(f"http://127.0.0.1:{http}/health", running, tmp_path / "log")
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = channel.unary_unary(
                f"/{HEALTH}/Check", request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )  # fmt: skip

            def said(service: str) -> int:
                return check(HealthCheckRequest(service=service), timeout=30).status

            assert [said(one) for one in ("liveness", "readiness", "", "x")] == [SERVING, NOT_SERVING, NOT_SERVING, UNKNOWN]
            write_documents(documents, [], [1])
            end = time.monotonic() + 30
            while said("envoy.service.ext_proc.v3.ExternalProcessor") != SERVING:
                assert time.monotonic() < end
                time.sleep(0.05)
        done = subprocess.run([*argv, "--ext-proc-port", str(port)], capture_output=True, text=True, check=False, timeout=90)
        assert done.returncode == 1
        assert "AddressInUse" in done.stderr


def test_gateways_can_be_asked_for_a_certificate_and_files_may_change(tmp_path: Path):
    """mTLS by the router's files: nobody without a certificate is answered; a new one holds once it is whole."""
    import grpc

    from e2e.certs import Authority
    from fleet_router.epp.messages import HEALTH, SERVING, HealthCheckRequest, HealthCheckResponse

    http, port, admin = free_ports(3)
    servers, clients = Authority(tmp_path, "servers"), Authority(tmp_path, "clients")
    cert, key = servers.leaf("router", "127.0.0.1")
    pair = clients.leaf("gateway")
    write_documents(tmp_path / "documents", [], [1])
    argv = [sys.executable, "-m", "fleet_router", "--follow", f"dir:{tmp_path / 'documents'}", "--host", "127.0.0.1"]
    argv += ["--port", str(http), "--admin-port", str(admin), "--ext-proc-port", str(port), "--tls-cert", str(cert)]
    argv += ["--tls-key", str(key), "--tls-client-ca", str(clients.file)]

    def said(authority: Authority, *files: Path) -> int:
        chain, secret = (files[0].read_bytes(), files[1].read_bytes()) if files else (None, None)
        trusted = grpc.ssl_channel_credentials(authority.file.read_bytes(), secret, chain)
        with grpc.secure_channel(f"127.0.0.1:{port}", trusted) as channel:
            check = channel.unary_unary(
                f"/{HEALTH}/Check", request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )  # fmt: skip
            return check(HealthCheckRequest(service="readiness"), timeout=30).status

    def answered(authority: Authority, *files: Path) -> int | None:
        try:
            return said(authority, *files)
        except grpc.RpcError:
            return None

    with process(argv, tmp_path / "log") as running:
        wait_for(f"http://127.0.0.1:{admin}/ready", running, tmp_path / "log")
        assert said(servers, *pair) == SERVING
        with pytest.raises(grpc.RpcError):
            said(servers)
        cert.write_text("half of it")  # the last good pair stays in force
        assert said(servers, *pair) == SERVING
        others = Authority(tmp_path, "others")
        others.leaf("router", "127.0.0.1")
        end = time.monotonic() + 20  # a change is taken when nobody has written for a second
        while answered(others, *pair) != SERVING:
            assert time.monotonic() < end
            time.sleep(0.2)
        with pytest.raises(grpc.RpcError):
            said(servers, *pair)
