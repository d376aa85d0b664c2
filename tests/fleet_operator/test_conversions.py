"""Manifests that other projects' users run, as fleets: what is rendered must have the same shape.

Each file in conversions/ names its sources (repository, path, commit), the row that its pods are held to (only facts of the
original), the fleet, and in plain words what of the original a fleet cannot say.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet_api.validate import validate
from fleet_operator.cluster.interface import CLAIM_TEMPLATE, POD
from fleet_operator.names import ROLE
from fleet_worker.agent.command import Place, vllm_command
from fleet_worker.config import WorkerConfig, decode
from tests.fleet_operator.world import NAMESPACE, World

FILES = sorted((Path(__file__).parent / "conversions").glob("*.yaml"))
NAMED = {"llm-d-pd-disaggregation", "llm-d-wide-ep", "llm-d-gke-dra", "kserve-pd-qwen2-7b", "dynamo-llama-3-70b", "ome-llama-pd",
         "kthena-gpu-pd", "kaito-deepseek-2p3d", "infera-mi300x"}  # fmt: skip
Object = dict[str, Any]


def load(path: Path) -> Object:
    found: Object = yaml.safe_load(path.read_text())
    head = {"apiVersion": "inferencefleet.io/v1alpha1", "kind": "InferenceFleet"}
    found["fleet"] = {**head, **found["fleet"], "metadata": {**found["fleet"]["metadata"], "namespace": NAMESPACE}}
    return found


def rendered(fleet: Object) -> tuple[list[Object], list[Object]]:
    """(worker pods, ResourceClaimTemplates) of the settled fleet."""

    async def scenario() -> tuple[list[Object], list[Object]]:
        world = World()
        await world.user.apply(fleet)
        await world.settle()
        pods = [pod for pod in await world.store.list(POD, NAMESPACE) if pod["metadata"]["labels"][ROLE] != "router"]
        return pods, await world.store.list(CLAIM_TEMPLATE, NAMESPACE)

    return asyncio.run(scenario())


def row_of(pods: list[Object], claims: list[Object]) -> Object:
    """The row of one role, read off its first pod."""
    pod = pods[0]
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    env = {entry["name"]: entry for entry in container["env"]}
    values = {name: entry.get("value") for name, entry in env.items()}
    config = decode(str(values["FLEET_WORKER_CONFIG"]))
    requests, limits = container["resources"]["requests"], container["resources"].get("limits", {})
    refs = [entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if "secretKeyRef" in entry.get("valueFrom", {})]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    near = spec.get("affinity", {}).get("podAffinity", {}).get("preferredDuringSchedulingIgnoredDuringExecution", [])
    ucx = (values.get("UCX_TLS") or "all,tcp").split(",")
    return {
        "replicas": len(pods), "gang": config.nodes,
        "devices": {name: amount for name, amount in limits.items() if "/" in name},
        "tensor": config.parallel.tensor, "data": config.parallel.data, "expert": config.parallel.expert,
        "maxModelLen": config.max_model_len,
        "shm": volumes["shm"]["emptyDir"].get("sizeLimit"),
        "requests": {name: amount for name, amount in requests.items() if "/" not in name},
        "limits": {name: amount for name, amount in limits.items() if "/" not in name},
        "secrets": [f"{ref['name']}/{ref['key']}" for ref in refs],
        "tcp": "tcp" in ucx, "memory": next((name for name in ucx if name.endswith("_copy")), None),
        "netDevices": values.get("UCX_NET_DEVICES"),
        "lock": container["securityContext"]["capabilities"].get("add") == ["IPC_LOCK"],
        "networks": pod["metadata"]["annotations"].get("k8s.v1.cni.cncf.io/networks"),
        "hostNetwork": spec.get("hostNetwork", False),
        "user": spec["securityContext"]["runAsUser"],
        "tolerations": [toleration["key"] for toleration in spec.get("tolerations", [])],
        "nodes": spec.get("nodeSelector"),
        "near": near[0]["podAffinityTerm"]["topologyKey"] if near else None,
        "scheduler": spec.get("schedulerName"), "serviceAccount": spec.get("serviceAccountName"),
        "labels": pod["metadata"]["labels"], "env": values,
        "hostPaths": [volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume],
        "claimVolume": volumes["model"].get("persistentVolumeClaim", {}).get("claimName"),
        "claims": len(spec.get("resourceClaims", [])),
        "claim": claim_row(claims[0]) if claims else None,
        "args": argv_of(config),
    }  # fmt: skip


def argv_of(config: WorkerConfig) -> list[str]:
    """What vLLM is really started with, on the last node of the worker."""
    place = Place("/m", "10.0.0.1", "/vllm", "/scratch", has_gpu=True, member=config.nodes - 1, master="10.0.0.9")
    return list(vllm_command(config, place).argv)


def claim_row(template: Object) -> Object:
    devices = template["spec"]["spec"]["devices"]
    classes = {request["name"]: request["exactly"]["deviceClassName"] for request in devices["requests"]}
    return {**classes, "match": devices["constraints"][0]["matchAttribute"]}


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_rendered_pods_have_the_shape_of_the_original(path: Path):
    given = load(path)
    assert validate(given["fleet"]) == []
    pods, claims = rendered(given["fleet"])
    for role, row in given["rows"].items():
        mine = [pod for pod in pods if pod["metadata"]["labels"][ROLE] == role]
        found = row_of(mine, [claim for claim in claims if claim["metadata"]["labels"][ROLE] == role])
        for name, expected in row.items():
            assert holds(name, found[name], expected), f"{role}.{name}: {found[name]} is not {expected}"
        transfer = json.loads(found["args"][found["args"].index("--kv-transfer-config") + 1])
        assert transfer["kv_connector"] == "NixlConnector"
        assert transfer["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]


def holds(name: str, found: Any, expected: Any) -> bool:
    """Environment, labels and amounts may hold more than the row says; so may lists of arguments, tolerations and paths."""
    if name in ("env", "labels", "requests", "limits"):
        return all(found.get(key) == value for key, value in expected.items())
    if name in ("args", "tolerations", "hostPaths", "secrets"):
        return all(value in found for value in expected)
    return bool(found == expected)


def test_every_named_manifest_is_here_with_its_source_and_its_limits():
    assert {path.stem for path in FILES} == NAMED
    for path in FILES:
        given = load(path)
        assert all(re.search(r" [0-9a-f]{40}$", source) or "no commit given" in source for source in given["sources"]), path.stem
        assert given["notExpressible"], path.stem
        assert set(given["rows"]) == {"prefill", "decode"}, path.stem


def test_a_wrong_row_is_seen():
    """The table can fail."""
    given = load(FILES[0])
    pods, _ = rendered(given["fleet"])
    found = row_of([pod for pod in pods if pod["metadata"]["labels"][ROLE] == "decode"], [])
    wrong: dict[str, Any] = {
        "replicas": 99,
        "tensor": 3,
        "devices": {},
        "tcp": None,
        "args": ["--nothing"],
        "requests": {"cpu": "0"},
    }
    assert not any(holds(name, found[name], value) for name, value in wrong.items())
