"""Starts what is compared: our router, the gateways of SGLang and vLLM, and Envoy, each in front of the same workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from fleet_router.config import RouterConfig
from fleet_router.config import encode as encode_config
from fleet_wire.endpoints import ENDPOINTS_KEY, ROUTER_CONFIG_KEY, Endpoint, Endpoints
from fleet_wire.endpoints import encode as encode_endpoints

START_S = 60.0
PLAIN = RouterConfig(fleet="bench", served_name="tiny", max_input_tokens=8_192)
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Proxy:
    """A running proxy; `pid` None: no proxy, the client talks to a worker."""

    name: str
    address: str
    pid: int | None


@contextmanager
def process(argv: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block; what it says goes to `log`."""
    env = {**os.environ, "RUST_LOG": "error"}
    with log.open("wb") as out:
        started = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def wait_for(url: str, running: subprocess.Popen[bytes], log: Path) -> None:
    """Until a GET answers 200."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if running.poll() is not None:
            break
        try:
            if httpx.get(url, timeout=1, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{url} does not answer: {log.read_text(errors='replace')[-2000:]}")


@contextmanager
def workers(addresses: Sequence[str], folder: Path, name: str = "workers") -> Iterator[None]:
    """The cheap workers, in one process."""
    log = folder / f"{name}.log"
    with process([sys.executable, "-m", "e2e.bench.backend", *addresses], log) as running:
        wait_for(f"http://{addresses[-1]}/health", running, log)
        yield


def serve_from(documents: Path, prefill: Sequence[str], decode: Sequence[str]) -> None:
    """Tell the router that follows this folder who its workers are, from now on."""
    rows = [(role, *one) for role, those in (("prefill", prefill), ("decode", decode)) for one in enumerate(those)]
    found = tuple(
        Endpoint(
            name=f"{role}-{i}", uid=f"p{i}" if role == "prefill" else str(i), address=worker.split(":")[0],
            http_port=int(worker.split(":")[1]), agent_port=9000, role="prefill" if role == "prefill" else "decode",
            tier="t", revision="r", compat="c",
        )
        for role, i, worker in rows  # a worker keeps its uid when others of either role join
    )  # fmt: skip
    fresh = documents / ".fresh"
    fresh.write_bytes(encode_endpoints(Endpoints(fleet="bench", namespace="default", workers=found)))
    fresh.replace(documents / ENDPOINTS_KEY)


@contextmanager
def ours(
    name: str,
    address: str,
    prefill: Sequence[str],
    decode: Sequence[str],
    folder: Path,
    config: RouterConfig = PLAIN,
    tenants: Path | None = None,
    extra: Sequence[str] = (),
    ready: str = "",
) -> Iterator[Proxy]:
    """fleet-router as the operator runs it, following a folder; `ready`: where it says so, if not at its port."""
    documents = folder / address.replace(":", "-")
    log = documents.with_suffix(".log")
    documents.mkdir()
    (documents / ROUTER_CONFIG_KEY).write_text(encode_config(config))
    serve_from(documents, prefill, decode)
    host, port = address.split(":")
    argv = [sys.executable, "-m", "fleet_router", "--follow", f"dir:{documents}", "--host", host, "--port", port]
    argv += [*(["--tenants", str(tenants)] if tenants is not None else []), *extra]
    with process(argv, log) as running:
        wait_for(ready or f"http://{address}/ready", running, log)
        yield Proxy(name, address, running.pid)


@contextmanager
def sglang(address: str, backends: Sequence[str], folder: Path) -> Iterator[Proxy]:
    """sglang-router with the policy that is nearest to ours; health checks off, so that only requests cost CPU."""
    with _gateway("sglang-router", ["sglang_router", "launch", "--disable-health-check"], address, backends, folder) as proxy:
        yield proxy


@contextmanager
def smg(address: str, backends: Sequence[str], folder: Path) -> Iterator[Proxy]:
    """The same gateway under its new name, some versions on."""
    with _gateway("smg", ["smg", "launch", "--disable-health-check"], address, backends, folder) as proxy:
        yield proxy


@contextmanager
def vllm_router(address: str, backends: Sequence[str], folder: Path) -> Iterator[Proxy]:
    """vLLM's branch of it."""
    with _gateway("vllm-router", ["vllm_router.launch_router"], address, backends, folder) as proxy:
        yield proxy


@contextmanager
def vllm_router_pd(address: str, prefill: Sequence[str], decode: Sequence[str], folder: Path) -> Iterator[Proxy]:
    """The same with a prefill and a decode leg, as ours."""
    found = ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    found += [
        word
        for role, these in (("prefill", prefill), ("decode", decode))
        for one in these
        for word in (f"--{role}", f"http://{one}")
    ]
    with _routing("vllm-router P/D", ["vllm_router.launch_router"], address, found, folder) as proxy:
        yield proxy


@contextmanager
def _gateway(name: str, module: Sequence[str], address: str, backends: Sequence[str], folder: Path) -> Iterator[Proxy]:
    urls = ["--worker-urls", *(f"http://{backend}" for backend in backends)]
    with _routing(f"{name} cache_aware", module, address, urls, folder) as proxy:
        yield proxy


@contextmanager
def _routing(name: str, module: Sequence[str], address: str, workers_: Sequence[str], folder: Path) -> Iterator[Proxy]:
    host, port = address.split(":")
    log = folder / f"{module[0]}-{port}.log"
    argv = [
        sys.executable, "-m", *module, "--host", host, "--port", port, "--policy", "cache_aware",
        "--log-level", "error", "--prometheus-host", host, "--prometheus-port", "29000", *workers_,
    ]  # fmt: skip
    with process(argv, log) as running:
        wait_for(f"http://{address}/v1/models", running, log)
        yield Proxy(name, address, running.pid)


@contextmanager
def envoy(address: str, backends: Sequence[str], folder: Path) -> Iterator[Proxy]:
    """Plain Envoy: round robin, one worker thread, no filters but the router."""
    import envoy as package

    config, log = folder / "envoy.yaml", folder / "envoy.log"
    config.write_text(yaml.safe_dump(envoy_config(address, backends)))
    binary = Path(package.__file__).parent / "_bin/envoy"
    argv = [str(binary), "-c", str(config), "--concurrency", "1", "--log-level", "error", "--disable-hot-restart"]
    with process(argv, log) as running:
        wait_for(f"http://{address}/v1/models", running, log)
        yield Proxy("envoy", address, running.pid)


def envoy_config(address: str, backends: Sequence[str]) -> dict[str, object]:
    """Static bootstrap."""

    def endpoint(at: str) -> dict[str, object]:
        host, port = at.split(":")
        return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}

    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "workers", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
    }
    listener = {
        **endpoint(address)["endpoint"],  # type: ignore[dict-item]
        "name": "bench",
        "filter_chains": [{"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}],
    }
    cluster = {
        "name": "workers",
        "type": "STATIC",
        "connect_timeout": "1s",
        "lb_policy": "ROUND_ROBIN",
        "load_assignment": {"cluster_name": "workers", "endpoints": [{"lb_endpoints": [endpoint(at) for at in backends]}]},
    }
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
