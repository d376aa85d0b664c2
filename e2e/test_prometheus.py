"""`telemetry.prometheus.url` with a real Prometheus and the documented relabelling.

Debian's Prometheus is built without kubernetes_sd: the targets, with the meta labels that kubernetes_sd gives them, are written
to a file from what the API server says of the pods.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI

from e2e.bench.proxies import ours, workers
from e2e.fleet import Fleet, manifest
from e2e.kube.service import Service
from fleet_api.parse import parse_fleet
from fleet_cli.up.bundled import tiny_model
from fleet_operator.names import ROLE, ROUTER_ROLE, labels
from fleet_operator.telemetry.collect import open_telemetry
from fleet_operator.telemetry.series import label_name
from fleet_planner.scale import unusable
from fleet_planner.types import TierTelemetry

FOLDER = Path(__file__).parent / "prometheus"
URL = "http://127.86.0.1:9090"
PROMPT = "Two routers wait for a block of the longest prefix. " * 20

pytestmark = pytest.mark.timeout(400)


def targets(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One target per container port, as kubernetes_sd makes them."""
    found = []
    for pod in pods:
        meta, container = pod["metadata"], pod["spec"]["containers"][0]
        labels = {f"__meta_kubernetes_pod_label_{label_name(name)}": value for name, value in meta["labels"].items()}
        labels |= {"__meta_kubernetes_namespace": meta["namespace"], "__meta_kubernetes_pod_name": meta["name"]}
        labels["__meta_kubernetes_pod_container_name"] = container["name"]
        for port in container["ports"]:
            address = f"{pod['status']['podIP']}:{port['containerPort']}"
            found.append({"targets": [address], "labels": {**labels, "__meta_kubernetes_pod_container_port_name": port["name"]}})
    return found


@contextmanager
def prometheus(
    folder: Path, relabel: list[dict[str, Any]] | None = None, *, operator_port: int | None = None, rules: Path | None = None
) -> Iterator[Service]:
    """Prometheus on URL, with the configuration that the README documents, or with other relabelling; where told, it asks an
    operator, too, as the chart's ServiceMonitor does, and evaluates rules."""
    binary = subprocess.run([str(FOLDER / "get-prometheus")], check=True, capture_output=True, text=True).stdout.strip()
    config = yaml.safe_load((FOLDER / "scrape.yaml").read_text())
    del config["scrape_configs"][0]["kubernetes_sd_configs"]
    config["scrape_configs"][0]["file_sd_configs"] = [{"files": [str(folder / "targets.json")]}]
    if relabel is not None:
        config["scrape_configs"][0]["relabel_configs"] = relabel
    if operator_port is not None:
        asked = {"job_name": "operator", "scrape_interval": "1s", "honor_labels": True}
        labels = {"namespace": "inferencefleet-system", "pod": "operator-0"}
        config["scrape_configs"].append(
            asked | {"static_configs": [{"targets": [f"127.0.0.1:{operator_port}"], "labels": labels}]}
        )
    if rules is not None:
        config |= {"rule_files": [str(rules)], "global": {"evaluation_interval": "1s"}}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    argv = [
        binary, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={URL.removeprefix('http://')}", "--log.level=warn",
    ]  # fmt: skip
    service = Service("prometheus", argv, folder / "prometheus.log", dict(os.environ))
    try:
        yield service
    finally:
        service.stop()


def test_load_comes_from_prometheus_and_without_it_the_fleet_holds(fleet: Fleet, tmp_path: Path):
    wish = manifest(fleet.namespace, tiny_model())
    wish["spec"]["telemetry"] = {"interval": "1s", "prometheus": {"url": URL}}
    with prometheus(tmp_path) as server:
        fleet.apply(wish)
        fleet.wait_serving(1, 2)
        (tmp_path / "targets.json").write_text(json.dumps(targets(fleet.objects("pods"))))
        server.check()
        fleet.wait("load from Prometheus", lambda: fleet.condition("TelemetryFresh")["status"] == "True", 30)
        client = OpenAI(base_url=f"{fleet.router()}/v1", api_key="none", max_retries=0)
        for i in range(6):
            client.completions.create(model="tiny", prompt=f"{i} {PROMPT}", max_tokens=4, temperature=0)
        fleet.wait("transfers in the status", lambda: fleet.status()["tiers"][0].get("kv", {}).get("transfers", 0) >= 6, 45)
    fleet.wait("the missing source named", lambda: fleet.condition("TelemetryFresh")["status"] == "Unknown", 30)
    assert fleet.condition("TelemetryFresh")["reason"] == "SourceFailed"
    assert f"Prometheus at {URL} gave no samples: ConnectionError" in fleet.condition("TelemetryFresh")["message"]
    assert fleet.desired() == (1, 2)
    assert fleet.condition("Ready")["status"] == "True"
    fleet.delete_and_leave_nothing()


PLAIN = [
    {"action": "labelmap", "regex": "__meta_kubernetes_pod_label_(.+)"},
    {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
    {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
]
"""As Prometheus' own example has it: every container port of every pod, whether it answers or not."""
ROUTER, WORKERS = "127.86.1.1:8080", ("127.86.1.2:8000", "127.86.1.3:8000")


def router_pod() -> dict[str, Any]:
    host, port = ROUTER.split(":")
    ports = [{"name": "http", "containerPort": int(port)}, {"name": "silent", "containerPort": 1}]
    return {
        "metadata": {"name": "f-router-1", "namespace": "n", "labels": labels("f", **{ROLE: ROUTER_ROLE})},
        "spec": {"containers": [{"name": "router", "ports": ports}]},
        "status": {"phase": "Running", "podIP": host},
    }


def load(pods: list[dict[str, Any]]) -> TierTelemetry:
    """What the operator would know now."""
    wish = manifest("n", Path("/none"))
    wish["metadata"]["name"] = "f"
    wish["spec"]["tiers"][0]["name"] = "t"
    wish["spec"]["telemetry"] = {"interval": "1s", "prometheus": {"url": URL}}

    async def go() -> TierTelemetry:
        async with open_telemetry() as telemetry:
            return (await telemetry.collect(parse_fleet(wish), pods, []))["t"]

    return asyncio.run(go())


def until(done: Any, timeout_s: float = 30.0) -> TierTelemetry:
    """The first load that `done` accepts."""
    end = time.monotonic() + timeout_s
    while not done(found := load([router_pod()])):
        assert time.monotonic() < end, found
        time.sleep(0.3)
    return found


@pytest.mark.parametrize("relabel", [None, PLAIN], ids=["documented", "plain-labelmap"])
def test_a_real_router_through_prometheus_until_it_dies(tmp_path: Path, relabel: list[dict[str, Any]] | None):
    (tmp_path / "targets.json").write_text(json.dumps(targets([router_pod()])))
    with workers(WORKERS, tmp_path), prometheus(tmp_path, relabel):
        with ours("router", ROUTER, WORKERS[:1], WORKERS[1:], tmp_path):
            known = until(lambda found: not unusable(found, 1.0, time.time()))
            assert (known.prefill.inflight, known.decode.inflight, known.prefill.ttft_p99_s) == (0, 0, None)
            for _ in range(5):
                body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "stream": True}
                httpx.post(f"http://{ROUTER}/v1/completions", json=body, trust_env=False).raise_for_status()
            busy = until(lambda found: found.prefill.ttft_p99_s is not None)
            assert 0 < (busy.prefill.ttft_p99_s or 0) < 1
            assert 0 < (busy.decode.itl_p99_s or 0) < 1
        died_at = time.time()
        stale = until(lambda found: unusable(found, 1.0, time.time()))
        assert "prefill telemetry is" in unusable(stale, 1.0, time.time())
        assert stale.problem is None
        assert stale.prefill.measured_at is not None
        assert stale.prefill.measured_at <= died_at
