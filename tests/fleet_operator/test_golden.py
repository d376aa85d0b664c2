"""Everything that the operator puts into a cluster, as files: a change of a manifest is read before it is committed."""

from __future__ import annotations

import asyncio
import copy
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.names import APPLIED
from fleet_operator.reconciler import CHILDREN
from tests.fleet_operator.world import NAMESPACE, World, manifest

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
REWRITE = "FLEET_GOLDEN=write .venv/bin/pytest tests/fleet_operator/test_golden.py"
GENERATED = ("uid", "resourceVersion", "generation", "creationTimestamp")
ONE_EACH = {"prefill": {"maxReplicas": 2}, "decode": {"maxReplicas": 2}, "ratio": {"decode": 1, "min": "1:1"}}

FLEETS: dict[str, dict[str, Any]] = {
    "torch-cpu": manifest("tiny"),
    "vllm-rdma-two-tiers": manifest(
        "llama",
        model={"source": "file:///models/llama-70b", "servedName": "llama-3.1-70b"},
        engine={"type": "vllm", "image": "registry.example/vllm:1", "args": ["--dtype", "auto"], "maxModelLen": 32768,
                "cacheSize": "40Gi"},
        routing={"replicas": 2},
        tiers=[
            {"name": "h100", "accelerator": {"type": "h100-sxm", "count": 4}, "kvTransfer": {"transport": "rdma"}, **ONE_EACH},
            {"name": "l40s", "accelerator": {"type": "l40s", "resource": "example.com/l40s"},
             "kvTransfer": {"transport": "tcp", "leaseDuration": "1m"}, **ONE_EACH},
        ],
    ),
    "pvc": manifest(
        "disk", model={"source": "pvc://models/llama/8b"}, tiers=[{"name": "t", "accelerator": {"type": "cpu"}, **ONE_EACH}]
    ),
    "hf-revision": manifest(
        "hub",
        model={"source": "hf://meta-llama/Llama-3.1-8B-Instruct", "revision": "0e9e39f249a16976918f6564b8830bc894c89659"},
        engine={"type": "vllm"},
        tiers=[{"name": "t", "accelerator": {"type": "h100-sxm"}, **ONE_EACH}],
    ),
}  # fmt: skip


def children(fleet: dict[str, Any]) -> str:
    """All children of a settled fleet as YAML, without what an API server adds."""

    async def scenario() -> list[dict[str, Any]]:
        world = World()
        await world.user.apply(fleet)
        await world.settle()
        return await _listed(world.store)

    return yaml.safe_dump_all(asyncio.run(scenario()), width=130, sort_keys=True, allow_unicode=True)


async def _listed(store: MemoryCluster) -> list[dict[str, Any]]:
    return [_as_sent(obj) for kind in CHILDREN for obj in await store.list(kind, NAMESPACE)]


def _as_sent(obj: dict[str, Any]) -> dict[str, Any]:
    sent = copy.deepcopy(obj)
    sent.pop("status", None)
    for name in GENERATED:
        sent["metadata"].pop(name, None)
    sent["metadata"].get("annotations", {}).pop(APPLIED, None)  # a hash of the rest
    if sent["kind"] == "Pod":
        del sent["spec"]["nodeName"]  # the scheduler's
    return sent


@pytest.mark.parametrize("name", FLEETS)
def test_the_children_are_those_in_the_golden_file(name: str):
    found, path = children(FLEETS[name]), GOLDEN / f"{name}.yaml"
    if os.environ.get("FLEET_GOLDEN") == "write":
        path.write_text(found)
    assert found == path.read_text(), f"if this is what you want: {REWRITE}, then read the difference"


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(FLEETS)


@pytest.mark.parametrize("name", FLEETS)
def test_every_pod_keeps_the_norms(name: str):
    objects = list(yaml.safe_load_all(children(FLEETS[name])))
    pods = [obj["spec"] for obj in objects if obj["kind"] == "Pod"]
    pods += [obj["spec"]["template"]["spec"] for obj in objects if obj["kind"] == "Deployment"]
    assert len(pods) >= 3
    for spec in pods:
        assert_norms(spec)


def assert_norms(spec: dict[str, Any]) -> None:
    """What Pod Security `restricted` wants (hostPath models aside), and what keeps a node and a rollout healthy."""
    (container,) = spec["containers"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    devices = {key: value for key, value in container["resources"]["requests"].items() if "/" in key}
    assert devices == container["resources"].get("limits", {})  # extended resources cannot be overcommitted
    assert {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle"} <= set(container)
    assert container["livenessProbe"]["failureThreshold"] * container["livenessProbe"]["periodSeconds"] >= 10
    assert spec["terminationGracePeriodSeconds"] >= 40
    assert spec["enableServiceLinks"] is False
    mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
    assert mounted == {volume["name"] for volume in spec.get("volumes", [])}
