"""`telemetry.prometheus.url` with a real Prometheus and the documented relabelling.

Debian's Prometheus is built without kubernetes_sd: the targets, with the meta labels that kubernetes_sd gives them, are written
to a file from what the API server says of the pods.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import OpenAI

from e2e.fleet import Fleet, manifest, tiny_model
from e2e.kube.service import Service
from fleet_operator.telemetry.series import label_name

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
def prometheus(folder: Path) -> Iterator[Service]:
    """Prometheus on URL, with the configuration that the README documents."""
    binary = subprocess.run([str(FOLDER / "get-prometheus")], check=True, capture_output=True, text=True).stdout.strip()
    config = yaml.safe_load((FOLDER / "scrape.yaml").read_text())
    del config["scrape_configs"][0]["kubernetes_sd_configs"]
    config["scrape_configs"][0]["file_sd_configs"] = [{"files": [str(folder / "targets.json")]}]
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
        fleet.wait("transfers in the status", lambda: fleet.status()["tiers"][0].get("kv", {}).get("transfers", 0) >= 6, 30)
    fleet.wait("the missing source named", lambda: fleet.condition("TelemetryFresh")["status"] == "Unknown", 30)
    assert f"Prometheus at {URL} gave no samples: ConnectionError" in fleet.condition("TelemetryFresh")["message"]
    assert fleet.desired() == (1, 2)
    assert fleet.condition("Ready")["status"] == "True"
    fleet.delete_and_leave_nothing()
