"""The model is on the nodes before their workers are: fetched by pods, checked, waited for, and nothing of them stays."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.fleet import Fleet, manifest, tokens
from e2e.kube.nodes import NODES
from fleet_cli.up.bundled import tiny_model
from tests.hub import Hub

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub on this machine with the tiny model."""
    files = {path.name: path.read_bytes() for path in tiny_model().iterdir() if path.is_file()}
    server = Hub({"acme/tiny": files})
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def wish(namespace: str, hub: Hub, cache: Path, **model: Any) -> dict[str, Any]:
    made = manifest(namespace, tiny_model())
    spec, tier = made["spec"], made["spec"]["tiers"][0]
    spec["model"] = {
        "source": "hf://acme/tiny",
        "servedName": "tiny",
        "cache": {"type": "nodeLocal", "path": str(cache)},
        **model,
    }
    spec["scaling"] = {"mode": "manual"}
    hub_of = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}", "HF_HUB_OFFLINE": "0"}
    env = [{"name": name, "value": value} for name, value in hub_of.items()]
    for role in ("prefill", "decode"):
        tier[role]["podTemplate"] = {"env": env}
    return made


def fetchers(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """Node → the pod that fetches there."""
    pods = fleet.objects("pods", "-l", "inferencefleet.io/role=fetch")
    return {pod["metadata"]["annotations"]["inferencefleet.io/fetch-node"]: pod for pod in pods}


def workers(fleet: Fleet) -> list[dict[str, Any]]:
    return fleet.pods("prefill") + fleet.pods("decode")


def finished_at(pod: dict[str, Any]) -> str:
    return pod["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"]


def begun_at(pod: dict[str, Any]) -> str:
    return pod["metadata"]["creationTimestamp"]


def test_nodes_have_the_model_before_workers_start(fleet: Fleet, hub: Hub, tmp_path: Path):
    fleet.apply(wish(fleet.namespace, hub, tmp_path / "cache"))
    fleet.wait("both nodes fetch", lambda: set(fetchers(fleet)) == set(NODES), 30)
    assert {pod["spec"]["nodeName"]: node for node, pod in fetchers(fleet).items() if pod["spec"].get("nodeName")} == {
        node: node for node, pod in fetchers(fleet).items() if pod["spec"].get("nodeName")
    }
    fleet.wait("the model is on both nodes", lambda: fleet.condition("ModelCached").get("reason") == "Cached", 60)
    assert fleet.condition("ModelCached")["message"] == "2 of 2 nodes have the model"
    fetched_at = {node: finished_at(pod) for node, pod in fetchers(fleet).items()}
    downloads = hub.sent.count("model.safetensors")
    fleet.wait_serving(1, 2)
    early = {pod["metadata"]["name"] for pod in workers(fleet) if begun_at(pod) < fetched_at[pod["spec"]["nodeName"]]}
    assert early == set(), "workers that were there before their node had the model"
    assert downloads == hub.sent.count("model.safetensors") == 1, "two nodes of one disk, three workers: one download"
    assert len(tokens(fleet.router(), "hello")) == 16
    pool = next(pool for pool in fleet.objects("workerpools") if pool["spec"]["role"] == "decode")["metadata"]["name"]
    begun = time.monotonic()
    fleet.kubectl("scale", "workerpool", pool, "--replicas=3")
    fleet.wait("a third decode worker", lambda: fleet.serving() == (1, 3), 150)
    print(json.dumps({"scaled_s": round(time.monotonic() - begun, 1), "downloads": hub.sent.count("model.safetensors")}))
    assert hub.sent.count("model.safetensors") == 1
    fleet.delete_and_leave_nothing()


def test_a_node_that_cannot_fetch_is_named_and_waited_for_by_nobody(fleet: Fleet, hub: Hub, tmp_path: Path):
    fleet.apply(wish(fleet.namespace, hub, tmp_path / "cache", revision="v9"))
    fleet.wait("the failure", lambda: fleet.condition("ModelCached").get("reason") == "PrefetchFailed", 60)
    message = fleet.condition("ModelCached")["message"]
    assert "0 of 2 nodes have the model" in message
    assert "Revision Not Found" in message
    fleet.wait("workers try by themselves", lambda: bool(workers(fleet)), 30)
    fleet.wait("an event", lambda: any(e["reason"] == "PrefetchFailed" for e in fleet.objects("events.events.k8s.io")), 20)
    fleet.apply(wish(fleet.namespace, hub, tmp_path / "cache", revision="v2"))
    fleet.wait_serving(1, 2)
    fleet.wait("the model is on both nodes", lambda: fleet.condition("ModelCached").get("reason") == "Cached", 60)
    keys = {pod["metadata"]["labels"]["inferencefleet.io/fetch"] for pod in fetchers(fleet).values()}
    assert len(keys) == 1, "what fetched the other revision is gone"
    fleet.delete_and_leave_nothing()
