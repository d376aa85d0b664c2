"""Everything that the operator puts into a cluster, as files: a change of a manifest is read before it is committed."""

from __future__ import annotations

import asyncio
import copy
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet_operator.cluster.interface import CLAIM_TEMPLATE
from fleet_operator.cluster.kinds import POD_GROUP_KINDS
from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.names import APPLIED
from fleet_operator.reconciler import CHILDREN
from fleet_operator.render.kept_router import ROUTER_MADE
from tests.fleet_api.bad_manifests import WHOLE_TEMPLATE
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
        routing={
            "replicas": 2, "processes": 4, "gossip": {"keySecretRef": {"name": "gossip"}},
            "tls": {"secretRef": {"name": "llama-tls"}, "clientCaSecretRef": {"name": "clients"}},
        },
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
    "vllm-rdma-required": manifest(
        "ib",
        model={"source": "hf://meta-llama/Llama-3.3-70B-Instruct", "tokenSecretRef": {"name": "hf-token"},
               "cache": {"type": "nodeLocal", "path": "/mnt/nvme/models"}},
        engine={"type": "vllm", "kvCacheDtype": "fp8", "args": ["--block-size=128"]},
        tiers=[
            {"name": "h200", "accelerator": {"type": "h200", "nodeSelector": {"nvidia.com/gpu.product": "H200"}},
             "parallelism": {"tensor": 2}, "quantization": "fp8", "sharedMemory": "20Gi",
             "placement": {"topologyKey": "topology.kubernetes.io/rack", "policy": "required", "exclusive": True},
             "kvTransfer": {"transport": "rdma", "required": True, "resource": "rdma/ib", "count": 2, "netDevices": ["mlx5_0:1"]},
             "ratio": {"decode": 1, "min": "1:1"}, "prefill": {"maxReplicas": 2, "args": ["--gpu-memory-utilization=0.9"]},
             "decode": {"maxReplicas": 2, "parallelism": {"tensor": 4}}},
        ],
    ),
    "vllm-dra": manifest(
        "dra",
        model={"source": "pvc://models/m"},
        engine={"type": "vllm"},
        tiers=[{"name": "a3u", "accelerator": {"type": "h200"}, "parallelism": {"tensor": 2}, **ONE_EACH,
                "kvTransfer": {"transport": "rdma", "required": True, "via": "dra",
                               "dra": {"gpu": "gpu.nvidia.com", "nic": "mrdma.google.com"}}}],
    ),
    "tenants": manifest(
        "shared",
        slo={"ttft": {"p99": "2s"}},
        classes=[{"name": "interactive", "priority": 100, "slo": {"ttft": {"p99": "500ms"}}},
                 {"name": "batch", "priority": -10, "maxOutputTokens": 512}],
        tenants={"secretRef": {"name": "tenants"}},
        limits={"queue": {"perSlot": 8}, "runawayPatterns": "default"},
    ),
    "vllm-host-network": manifest(
        "host",
        model={"source": "hf://org/name", "cache": {"type": "pvc", "claim": "cache"}},
        engine={"type": "vllm"},
        networkPolicy={"metricsFrom": ["monitoring"]},
        tiers=[{"name": "t", "accelerator": {"type": "mi300x", "resource": "amd.com/gpu"}, "ratio": {"decode": 2, "min": "1:2"},
                "kvTransfer": {"transport": "rdma", "via": "hostNetwork", "resource": "rdma/hca",
                               "hostPorts": {"first": 20000}}}],
    ),
    "vllm-two-nodes": manifest(
        "wide",
        model={"source": "pvc://models/m"},
        engine={"type": "vllm"},
        tiers=[{"name": "t", "accelerator": {"type": "h200"}, "ratio": {"decode": 1, "min": "1:1"},
                "parallelism": {"tensor": 16, "nodes": 2}, "prefill": {"maxReplicas": 1},
                "decode": {"maxReplicas": 1, "parallelism": {"tensor": 8}},
                "placement": {"gang": {"topologyKey": "topology.kubernetes.io/rack", "policy": "exclusive"}, "queue": "gpus",
                              "podGroup": "volcano"},
                "kvTransfer": {"transport": "rdma", "via": "hostNetwork", "resource": "rdma/ib", "hostPorts": {"first": 20000}}}],
    ),
    "torch-gang-dra": manifest(
        "gang",
        tiers=[{"name": "t", "accelerator": {"type": "h200", "count": 4}, "parallelism": {"nodes": 2},
                "placement": {"topologyKey": "zone", "gang": {"topologyKey": "rack", "policy": "preferred"},
                              "podGroup": "kubernetes"},
                "ratio": {"decode": 1, "min": "1:1"}, "prefill": {"maxReplicas": 1}, "decode": {"maxReplicas": 1},
                "kvTransfer": {"transport": "rdma", "via": "dra", "dra": {"gpu": "gpu.nvidia.com", "nic": "mrdma.google.com"}}}],
    ),
    "two-models": manifest(
        "cascade",
        model={"source": "hf://org/small", "servedName": "assistant", "tokenSecretRef": {"name": "hf-token"},
               "cache": {"type": "nodeLocal", "path": "/mnt/nvme/models"}},
        engine={"type": "vllm"},
        routing={"cascade": {"tiers": ["small", "large"], "check": {"phrases": ["I don't know"], "minMeanLogprob": -0.8}}},
        tiers=[
            {"name": "small", "accelerator": {"type": "l40s"}, **ONE_EACH},
            {"name": "large", "accelerator": {"type": "h200"}, "model": {"source": "pvc://models/large"},
             "parallelism": {"tensor": 4}, **ONE_EACH},
        ],
    ),
    "multus-template": manifest(
        "roce",
        networkPolicy={"enabled": False},
        tiers=[{"name": "t", "accelerator": {"type": "h100-sxm"}, "ratio": {"decode": 1, "min": "1:1"},
                "prefill": {"maxReplicas": 1, "accelerator": {"type": "a100", "count": 2}}, "decode": {"maxReplicas": 1,
                "podTemplate": WHOLE_TEMPLATE},
                "kvTransfer": {"transport": "rdma", "via": "multus", "network": "roce-p2", "resource": "rdma/roce_gdr"}}],
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
    return [
        _as_sent(obj)
        for kind in (*CHILDREN, CLAIM_TEMPLATE, *POD_GROUP_KINDS.values())
        for obj in await store.list(kind, NAMESPACE)
    ]


def _as_sent(obj: dict[str, Any]) -> dict[str, Any]:
    sent = copy.deepcopy(obj)
    sent.pop("status", None)
    for name in GENERATED:
        sent["metadata"].pop(name, None)
    sent["metadata"].get("annotations", {}).pop(APPLIED, None)  # a hash of the rest
    sent["metadata"].get("annotations", {}).pop(ROUTER_MADE, None)  # the Deployment's template once more
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
    """What Pod Security `restricted` wants (hostPath models, RDMA and what a user asks for aside), and what keeps a node and a
    rollout healthy."""
    (container,) = spec["containers"]
    user = 0 if any(variable["name"] == "NCCL_DEBUG" for variable in container["env"]) else 65532  # WHOLE_TEMPLATE asks for root
    shared = [v for v in spec.get("volumes", ()) if v.get("persistentVolumeClaim", {}).get("claimName") == "cache"]
    group = {"fsGroup": user} if shared else {}
    assert spec["securityContext"] == {
        "runAsNonRoot": user != 0, "runAsUser": user, "runAsGroup": user, "seccompProfile": {"type": "RuntimeDefault"}, **group,
    }  # fmt: skip
    rdma = any(variable["name"] == "UCX_TLS" and "rc" in variable["value"] for variable in container["env"])
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if rdma else {})},
    }  # fmt: skip
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    devices, limits = (
        {key: value for key, value in container["resources"].get(kind, {}).items() if "/" in key}
        for kind in ("requests", "limits")
    )
    assert devices == limits  # extended resources cannot be overcommitted
    assert {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle"} <= set(container)
    assert container["livenessProbe"]["failureThreshold"] * container["livenessProbe"]["periodSeconds"] >= 10
    assert spec["terminationGracePeriodSeconds"] >= 40
    for probe in (container["livenessProbe"], container["startupProbe"]):  # who does not answer is not waited for as for a drain
        assert 15 <= probe["terminationGracePeriodSeconds"] <= min(60, spec["terminationGracePeriodSeconds"])
    assert spec["enableServiceLinks"] is False
    mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
    assert mounted == {volume["name"] for volume in spec.get("volumes", [])} - {"disk", "settings", "keys"}  # WHOLE_TEMPLATE's
    assert spec.get("hostNetwork", False) == ("dnsPolicy" in spec)
