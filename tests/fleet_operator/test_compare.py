"""When an object needs a write, and what manifests look like."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fleet_api.parse import parse_fleet
from fleet_operator.cluster import merge
from fleet_operator.compare import merge_patch, satisfied, stamped
from fleet_operator.names import ROLE
from fleet_operator.observe import observe_pods
from fleet_operator.render.revision import render_revision, template_of
from fleet_operator.render.worker import render_pod
from fleet_operator.settings import Platform
from fleet_planner.wanted import PodWanted
from fleet_worker.config import decode

WISH = {"kind": "X", "metadata": {"name": "a", "labels": {"l": "1"}}, "spec": {"ports": [{"port": 1}], "n": 2}}


def live(**spec: Any) -> dict[str, Any]:
    found = copy.deepcopy(stamped(WISH))
    found["metadata"]["uid"] = "u"
    found["spec"] |= {"clusterIP": "10.0.0.1", **spec}
    return found


@pytest.mark.parametrize(
    ("found", "enough"),
    [
        pytest.param(None, False, id="absent"),
        pytest.param(live(), True, id="server-defaults-are-no-difference"),
        pytest.param(live(n=3), False, id="edited"),
        pytest.param(live(ports=[{"port": 1, "protocol": "TCP"}]), True, id="defaults-inside-lists"),
        pytest.param(live(ports=[{"port": 1}, {"port": 9}]), False, id="added-entry"),
    ],
)
def test_a_write_is_needed_only_when_something_differs(found: dict[str, Any] | None, enough: bool):
    assert satisfied(stamped(WISH), found) is enough


def test_a_wish_that_lost_a_field_is_written():
    smaller = copy.deepcopy(WISH)
    del smaller["spec"]["n"]
    assert not satisfied(stamped(smaller), live())


def fleet(**spec: Any):
    tiers = [{"name": "t", "accelerator": {"type": "h100-sxm", "count": 4}, "kvTransfer": {"transport": "rdma"}}]
    base = {"model": {"source": "file:///models/llama"}, "engine": {"type": "vllm", "args": ["--dtype", "auto"]}, "tiers": tiers}
    manifest = {"apiVersion": "inferencefleet.io/v1alpha1", "kind": "InferenceFleet", "metadata": {"name": "f", "namespace": "n"}}
    return parse_fleet({**manifest, "spec": {**base, **spec}})


def rendered(**spec: Any) -> dict[str, Any]:
    wish = fleet(**spec)
    template = template_of(wish, wish.spec.tiers[0], {}, Platform())
    wanted = PodWanted("f-t-prefill-x-0", "f-t-prefill-x", "t", "prefill", template.revision, 0)
    owner = {"apiVersion": "v", "kind": "WorkerPool", "metadata": {"name": "f-t-prefill-x", "uid": "u"}}
    return render_pod(wish, wanted, render_revision(wish, wish.spec.tiers[0], template, Platform(), owner), owner)


def test_a_worker_pod_asks_for_its_devices_and_its_transport():
    pod = rendered()
    container = pod["spec"]["containers"][0]
    env = {e["name"]: e.get("value") for e in container["env"]}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert "tcp" in env["UCX_TLS"].split(",")  # not required: it may fall back, and TransportVerified says so
    assert pod["spec"]["terminationGracePeriodSeconds"] == 250  # 30 s of lease, 50 ms for each of 4096 tokens, 15 s of slack
    assert container["lifecycle"]["preStop"]["httpGet"]["path"] == "/drain"
    assert pod["spec"]["volumes"][0] == {"name": "model", "hostPath": {"path": "/models/llama", "type": ""}}
    config = decode(env["FLEET_WORKER_CONFIG"])
    assert (config.role, config.engine, config.engine_args, config.model) == (
        "prefill",
        "vllm",
        ("--dtype", "auto"),
        "/models/llama",
    )


@pytest.mark.parametrize(
    ("spec", "volume", "path"),
    [
        ({"model": {"source": "pvc://disk/a/b"}}, {"claimName": "disk", "readOnly": True}, "/models/disk/a/b"),
        ({"model": {"source": "hf://org/name", "revision": "v1"}}, None, "hf://org/name@v1"),
    ],
    ids=["claim", "hub"],
)
def test_model_sources_become_volumes(spec: dict[str, Any], volume: dict[str, Any] | None, path: str):
    pod = rendered(**spec)
    env = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
    assert pod["spec"]["volumes"][0].get("persistentVolumeClaim") == volume
    assert decode(env["FLEET_WORKER_CONFIG"]).model == path


def test_the_revision_moves_with_the_template_and_not_with_sizes():
    def revision(**spec: Any) -> str:
        wish = fleet(**spec)
        return template_of(wish, wish.spec.tiers[0], {}, Platform()).revision

    tiers = [{**fleet().spec.tiers[0].to_dict(), "decode": {"minReplicas": 3}}]
    assert revision(tiers=tiers) == revision()
    assert revision(engine={"type": "vllm", "maxBatch": 8}) != revision()


def test_another_engine_is_never_compatible():
    def compat(kind: str) -> str:
        wish = fleet(engine={"type": kind})
        return template_of(wish, wish.spec.tiers[0], {}, Platform()).compat

    assert compat("torch") != compat("vllm")


def test_a_pods_last_words_are_its_message():
    pod = rendered()
    pod["metadata"] |= {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    ended = {"exitCode": 2, "message": "BadModel: model path /x does not exist\n"}
    pod["status"] = {
        "phase": "Running",
        "containerStatuses": [{"restartCount": 2, "state": {"waiting": {}}, "lastState": {"terminated": ended}}],
    }
    seen = observe_pods([pod])[0]
    assert (seen.message, seen.restarts, seen.ready) == ("BadModel: model path /x does not exist", 2, False)


@pytest.mark.parametrize(
    ("containers", "crashes"),
    [
        ([{"name": "worker", "restartCount": 2, "state": {"running": {}}}], 2),
        ([{"name": "worker", "restartCount": 2, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}], 3),
        ([{"name": "worker", "state": {"waiting": {"reason": "ImagePullBackOff"}}}], 0),
        ([{"name": "worker", "restartCount": 1}, {"name": "somebodys-sidecar", "restartCount": 9}], 1),
    ],
    ids=["restarts", "one-more-before-the-next-start", "no-crash", "a-sidecar-is-not-ours"],
)
def test_crashes_are_those_of_the_workers_own_container(containers: list[dict[str, Any]], crashes: int):
    pod = rendered()
    pod["metadata"] |= {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    pod["status"] = {"phase": "Running", "containerStatuses": containers}
    assert observe_pods([pod])[0].crashes == crashes


@pytest.mark.parametrize(
    ("status", "since"),
    [
        ({}, 60.0),
        ({"status": "False", "lastTransitionTime": "1970-01-01T00:02:00Z"}, 120.0),
        ({"status": "Unknown", "lastTransitionTime": "1970-01-01T00:02:00Z"}, 120.0),
        ({"status": "False", "lastTransitionTime": "yesterday"}, 60.0),
        ({"status": "True", "lastTransitionTime": "1970-01-01T00:02:00Z"}, None),
    ],
)
def test_since_when_a_pod_is_not_ready(status: dict[str, str], since: float | None):
    meta = {"name": "p", "uid": "u", "labels": {ROLE: "decode"}, "creationTimestamp": "1970-01-01T00:01:00Z"}
    seen = observe_pods([{"metadata": meta, "spec": {}, "status": {"conditions": [{"type": "Ready", **status}]}}])[0]
    assert seen.unready_since == since


@pytest.mark.parametrize(
    ("present", "wish"),
    [
        pytest.param({"a": 1}, {"a": 1}, id="equal"),
        pytest.param({"a": 1, "b": 2}, {"a": 1}, id="lost"),
        pytest.param({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"d": 3}}}, id="lost-inside"),
        pytest.param({"a": [1, {"b": 1}]}, {"a": [{"c": 1}]}, id="lists-are-replaced"),
        pytest.param({"a": {"b": 1}}, {"a": 2}, id="map-becomes-value"),
        pytest.param({"a": 2}, {"a": {"b": 1}}, id="value-becomes-map"),
        pytest.param({}, {"a": {"b": 1}}, id="new"),
    ],
)
def test_a_merge_patch_makes_the_wish(present: dict[str, Any], wish: dict[str, Any]):
    assert merge.merge_patch(present, merge_patch(present, wish)) == wish
