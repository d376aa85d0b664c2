"""Manifests that the API server refuses, as data: (what is wrong, how to spoil a good manifest).

Each change is (path, value): the value at the dotted path is replaced, DELETE removes it. The words expected for each are in
expected_words.json, recorded from kube-apiserver 1.36; e2e sends the same table to a real one.
"""

from __future__ import annotations

import copy
from typing import Any

from tests.fleet_api.bad_templates import BAD_TEMPLATES
from tests.fleet_api.cascades import BAD_CASCADES, GOOD_CASCADES

DELETE = object()
GOOD: dict[str, Any] = {
    "apiVersion": "inferencefleet.io/v1alpha1",
    "kind": "InferenceFleet",
    "metadata": {"name": "good", "namespace": "default"},
    "spec": {
        "model": {"source": "file:///models/tiny"},
        "tiers": [{"name": "a", "accelerator": {"type": "h100-sxm"}}],
    },
}
TIER = "spec.tiers.0"
VLLM = ("spec.engine", {"type": "vllm"})
HUB = ("spec.model", {"source": "hf://org/name"})
TINY = "file:///models/tiny"


def adapters(*wished: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return (("spec.model.adapters", list(wished)),)


def tier_rules(*lengths: dict[str, int]) -> tuple[tuple[str, Any], ...]:
    return (("spec.routing", {"tierRules": [{"tier": "a", "when": {"inputTokens": length}} for length in lengths]}),)


BAD: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("no spec", (("spec", DELETE),)),
    ("spec is text", (("spec", "tiny"),)),
    ("spec is null", (("spec", None),)),
    ("empty spec", (("spec", {}),)),
    ("no model source", (("spec.model", {}),)),
    ("no tiers", (("spec.tiers", []),)),
    ("tiers is an object", (("spec.tiers", {"name": "a"}),)),
    ("a tier is text", (("spec.tiers", ["a"]),)),
    ("a tier is null", (("spec.tiers", [None]),)),
    ("nine tiers", (("spec.tiers", [{"name": f"t{n}", "accelerator": {"type": "cpu"}} for n in range(9)]),)),
    ("two tiers of one name", (("spec.tiers", [{"name": "a", "accelerator": {"type": "cpu"}}] * 2),)),
    ("tier without accelerator", ((f"{TIER}.accelerator", DELETE),)),
    ("tier without name", ((f"{TIER}.name", DELETE),)),
    ("tier name of 21 characters", ((f"{TIER}.name", "a" * 21),)),
    ("tier name with a capital", ((f"{TIER}.name", "H100"),)),
    ("name of 31 characters", (("metadata.name", "a" * 31),)),
    ("name starts with a digit", (("metadata.name", "7b"),)),
    ("name with an underscore", (("metadata.name", "my_fleet"),)),
    ("name with a dot", (("metadata.name", "my.fleet"),)),
    ("no name", (("metadata.name", DELETE),)),
    ("names too long together", (("metadata.name", "a" * 25), (f"{TIER}.name", "b" * 16))),
    ("unknown field in spec", (("spec.modell", {"source": "file:///x"}),)),
    ("unknown fields in two places", (("spec.engine", {"typ": "torch"}), (f"{TIER}.gpus", 4))),
    ("unknown field at the top", (("sepc", {}),)),
    ("unknown field in metadata", (("metadata.nam", "x"),)),
    ("unknown field that is null", (("spec.modell", None),)),
    ("unknown fields inside an unknown field", (("spec.modell", {"a": {"b": 1}}), ("spec.tiers.0.decode", {"max": 1}))),
    ("spec is a list", (("spec", []),)),
    ("name of 254 characters", (("metadata.name", "a" * 254),)),
    ("source without scheme", (("spec.model.source", "/models/tiny"),)),
    ("source with another scheme", (("spec.model.source", "s3://bucket/tiny"),)),
    ("source climbs", (("spec.model.source", "file:///models/../etc"),)),
    ("source relative", (("spec.model.source", "file://models/tiny"),)),
    ("source hub without organisation", (("spec.model.source", "hf://tiny"),)),
    ("source is a number", (("spec.model.source", 7),)),
    ("source with a line break", (("spec.model.source", "file:///models\n/tiny"),)),
    ("source of 1025 characters", (("spec.model.source", "file:///" + "a" * 1017),)),
    ("revision of a file", (("spec.model.revision", "main"),)),
    ("served name with a space", (("spec.model.servedName", "my model"),)),
    ("empty served name", (("spec.model.servedName", ""),)),
    ("engine type", (("spec.engine", {"type": "sglang"}),)),
    ("served name with quotes and control characters", (("spec.model.servedName", 'a"b\\c\x01\u00e9\u200b'),)),
    ("engine type is a number", (("spec.engine", {"type": 1}),)),
    ("empty image", (("spec.engine", {"image": ""}),)),
    ("args with torch", (("spec.engine", {"args": ["--x"]}),)),
    ("args is text", (("spec.engine", {"type": "vllm", "args": "--x"}),)),
    ("an argument is a number", (("spec.engine", {"type": "vllm", "args": [1, True]}),)),
    ("65 arguments", (("spec.engine", {"type": "vllm", "args": ["x"] * 65}),)),
    ("block tokens with vllm", (("spec.engine", {"type": "vllm", "blockTokens": 16}),)),
    ("block tokens 0", (("spec.engine", {"blockTokens": 0}),)),
    ("max model length as text", (("spec.engine", {"maxModelLen": "2048"}),)),
    ("max model length 2048.5", (("spec.engine", {"maxModelLen": 2048.5}),)),
    ("max model length is true", (("spec.engine", {"maxModelLen": True}),)),
    ("max model length too small", (("spec.engine", {"maxModelLen": 1}),)),
    ("max batch too large", (("spec.engine", {"maxBatch": 1025}),)),
    ("cache size with a wrong unit", (("spec.engine", {"cacheSize": "64MB"}),)),
    ("cache size is a number", (("spec.engine", {"cacheSize": 64}),)),
    ("cache size is negative", (("spec.engine", {"cacheSize": -64}),)),
    ("cache size too small", (("spec.engine", {"cacheSize": "1k"}),)),
    ("cache size too large", (("spec.engine", {"cacheSize": "17Ti"}),)),
    ("cpu with a device", ((f"{TIER}.accelerator", {"type": "cpu", "resource": "nvidia.com/gpu"}),)),
    ("cpu with a count", ((f"{TIER}.accelerator", {"type": "cpu", "count": 1}),)),
    ("resource without a domain", ((f"{TIER}.accelerator.resource", "gpu"),)),
    ("no devices", ((f"{TIER}.accelerator.count", 0),)),
    ("ratio minimum with a zero", ((f"{TIER}.ratio", {"min": "0:4"}),)),
    ("ratio minimum as a number", ((f"{TIER}.ratio", {"min": 0.25}),)),
    ("ratio of three digits", ((f"{TIER}.ratio", {"max": "100:1"}),)),
    ("ratio minimum above maximum", ((f"{TIER}.ratio", {"min": "2:1", "max": "1:1", "prefill": 1, "decode": 1}),)),
    ("shape below the minimum", ((f"{TIER}.ratio", {"prefill": 1, "decode": 5}),)),
    ("shape above the maximum", ((f"{TIER}.ratio", {"prefill": 3, "decode": 2}),)),
    ("bounds without an allowed ratio", ((f"{TIER}.prefill", {"minReplicas": 8}), (f"{TIER}.decode", {"maxReplicas": 4}))),
    (
        "bounds without an allowed ratio in whole workers",
        (
            (f"{TIER}.ratio", {"prefill": 2, "decode": 3, "min": "2:3", "max": "2:3"}),
            (f"{TIER}.decode", {"maxReplicas": 2}),
        ),
    ),
    ("minimum above maximum", ((f"{TIER}.prefill", {"minReplicas": 4, "maxReplicas": 3}),)),
    ("minimum above the default maximum", ((f"{TIER}.decode", {"minReplicas": 9}), (f"{TIER}.prefill", {"minReplicas": 3}))),
    ("replicas outside the bounds", ((f"{TIER}.decode", {"replicas": 9}),)),
    ("replicas negative", ((f"{TIER}.decode", {"replicas": -1}),)),
    ("warm above maximum", ((f"{TIER}.decode", {"warm": 9}),)),
    ("transport", ((f"{TIER}.kvTransfer", {"transport": "nvlink"}),)),
    ("lease without unit", ((f"{TIER}.kvTransfer", {"leaseDuration": "30"}),)),
    ("lease as a number", ((f"{TIER}.kvTransfer", {"leaseDuration": 30}),)),
    ("lease too short", ((f"{TIER}.kvTransfer", {"leaseDuration": "4999ms"}),)),
    ("lease too long", ((f"{TIER}.kvTransfer", {"leaseDuration": "11m"}),)),
    ("lease of nine characters", ((f"{TIER}.kvTransfer", {"leaseDuration": "1000000ms"}),)),
    ("objective without a percentile", (("spec.slo", {"ttft": {}}),)),
    ("objective of zero", (("spec.slo", {"itl": {"p99": "0ms"}}),)),
    ("policy", (("spec.routing", {"policy": "random"}),)),
    ("a tier rule that no prompt fits", tier_rules({"ge": 10, "lt": 5})),
    ("a tier rule for no length at all", tier_rules({"ge": 5, "lt": 6}, {"lt": 1}, {"ge": 5, "lt": 5})),
    ("load bound below one", (("spec.routing", {"load": {"bound": 0.5}}),)),
    ("load bound as text", (("spec.routing", {"load": {"bound": "1.25"}}),)),
    ("no router", (("spec.routing", {"replicas": 0}),)),
    ("input limit above the model", (("spec.limits", {"maxInputTokens": 4096}),)),
    ("output limit of zero", (("spec.limits", {"maxOutputTokens": 0}),)),
    ("a queue of nothing", (("spec.limits", {"queue": {"perSlot": 0}}),)),
    ("runaway patterns", (("spec.limits", {"runawayPatterns": ["loop"]}),)),
    ("two classes of one name", (("spec.classes", [{"name": "a"}, {"name": "a", "priority": 1}]),)),
    ("class without a name", (("spec.classes", [{"priority": 1}]),)),
    ("class name with a capital", (("spec.classes", [{"name": "Gold"}]),)),
    ("class priority out of bounds", (("spec.classes", [{"name": "a", "priority": 1001}]),)),
    ("class objective without a percentile", (("spec.classes", [{"name": "a", "slo": {"ttft": {}}}]),)),
    ("class objective of itl", (("spec.classes", [{"name": "a", "slo": {"itl": {"p99": "1s"}}}]),)),
    ("class objective too long", (("spec.classes", [{"name": "a", "slo": {"ttft": {"p99": "61m"}}}]),)),
    ("class input above the model", (("spec.classes", [{"name": "a", "maxInputTokens": 4096}]),)),
    (
        "class input above the limit",
        (("spec.limits", {"maxInputTokens": 100}), ("spec.classes", [{"name": "a", "maxInputTokens": 101}])),
    ),
    ("class output above the default limit", (("spec.classes", [{"name": "a"}, {"name": "b", "maxOutputTokens": 4097}]),)),
    ("17 classes", (("spec.classes", [{"name": f"c{n}"} for n in range(17)]),)),
    ("tenants without a Secret", (("spec.tenants", {}),)),
    ("tenants in the open", (("spec.tenants", {"tenants": [{"name": "a"}]}),)),
    ("Secret with a slash", (("spec.tenants", {"secretRef": {"name": "a/b"}}),)),
    ("Secret's key with a slash", (("spec.tenants", {"secretRef": {"name": "a", "key": "../x"}}),)),
    ("scaling mode", (("spec.scaling", {"mode": "predictive"}),)),
    ("scale-down window too long", (("spec.scaling", {"scaleDownWindow": "25h"}),)),
    ("a budget of nothing", (("spec.scaling", {"budget": {}}),)),
    ("a budget of text", (("spec.scaling", {"budget": {"perHour": "200"}}),)),
    ("a budget below nothing", (("spec.scaling", {"budget": {"gpus": 8, "perHour": -0.5}}), (f"{TIER}.cost", {"perGpuHour": 4}))),
    ("money without a price", (("spec.scaling", {"budget": {"perHour": 200}}),)),
    (
        "money with one price of two",
        (
            ("spec.scaling", {"budget": {"perHour": 200}}),
            (
                "spec.tiers",
                [
                    {"name": "a", "accelerator": {"type": "h100"}, "cost": {"perGpuHour": 4.0}},
                    {"name": "b", "accelerator": {"type": "l40s"}},
                ],
            ),
        ),
    ),
    ("a price of nothing", ((f"{TIER}.cost", {}),)),
    ("a price below nothing", ((f"{TIER}.cost", {"perGpuHour": -1}),)),
    ("to zero by a number", (("spec.scaling", {"toZero": {"enabled": 1}}),)),
    ("idle for too short", (("spec.scaling", {"toZero": {"enabled": True, "idle": "4s"}}),)),
    ("idle for too long", (("spec.scaling", {"toZero": {"idle": "25h"}}),)),
    ("to zero by hand", (("spec.scaling", {"mode": "manual", "toZero": {"enabled": True}}),)),
    ("deleted without a wait", (("spec.deletion", {}),)),
    ("waits for too short", (("spec.deletion", {"wait": "999ms"}),)),
    ("waits for too long", (("spec.deletion", {"wait": "25h"}),)),
    ("waits without a unit", (("spec.deletion", {"wait": "30"}),)),
    ("nothing is held", (("spec.limits", {"hold": {"requests": 0}}),)),
    ("held bodies too small", (("spec.limits", {"hold": {"size": "1Mi"}}),)),
    ("held for too long", (("spec.limits", {"hold": {"time": "2h"}}),)),
    ("prometheus without a URL", (("spec.telemetry", {"prometheus": {}}),)),
    ("prometheus with credentials", (("spec.telemetry", {"prometheus": {"url": "http://me:pw@prom:9090"}}),)),
    ("prometheus without scheme", (("spec.telemetry", {"prometheus": {"url": "prometheus:9090"}}),)),
    ("interval too short", (("spec.telemetry", {"interval": "500ms"}),)),
    ("token for a file", (("spec.model.tokenSecretRef", {"name": "hf"}),)),
    ("token without a name", (HUB, ("spec.model.tokenSecretRef", {"key": "token"}))),
    ("cache for a claim", (("spec.model", {"source": "pvc://c/m", "cache": {"type": "pvc", "claim": "x"}}),)),
    ("an adapter twice", adapters({"name": "a", "source": f"{TINY}/a"}, {"name": "a", "source": f"{TINY}/b"})),
    ("an adapter with the fleet's name", adapters({"name": "good", "source": f"{TINY}/a"})),
    (
        "an adapter with the served name",
        (("spec.model.servedName", "m"), *adapters({"name": "m", "source": f"{TINY}/a"})),
    ),
    ("an adapter outside of the model", adapters({"name": "a", "source": "file:///srv/a"})),
    ("an adapter beside its root", (("spec.model.adapterRoot", "file:///srv"), *adapters({"name": "a", "source": f"{TINY}/a"}))),
    ("an adapter's way out", adapters({"name": "a", "source": f"{TINY}/../a"})),
    ("a root's way out", (("spec.model.adapterRoot", "file:///srv/../etc"),)),
    ("an adapter's revision of a folder", adapters({"name": "a", "source": f"{TINY}/a", "revision": "main"})),
    ("an adapter without a name", adapters({"source": f"{TINY}/a"})),
    ("an adapter called badly", adapters({"name": "-a", "source": f"{TINY}/a"})),
    ("an adapter from nowhere", adapters({"name": "a", "source": "http://somewhere/a"})),
    ("nine adapters", adapters(*({"name": f"a{n}", "source": f"{TINY}/a"} for n in range(9)))),
    ("adapters on vllm", (VLLM, *adapters({"name": "a", "source": f"{TINY}/a"}))),
    ("more adapters than room", (("spec.model.maxSimultaneousAdapters", 0), *adapters({"name": "a", "source": f"{TINY}/a"}))),
    ("a rank of nothing", (("spec.model.maxAdapterRank", 0),)),
    ("lora by argument", (("spec.engine", {"type": "vllm", "args": ["--enable-lora"]}),)),
    (
        "a prefetch into the pod",
        (HUB, ("spec.model.cache", {"type": "none", "prefetch": {"parallel": 2}})),
    ),
    (
        "a prefetch without end",
        (HUB, ("spec.model.cache", {"type": "nodeLocal", "path": "/c", "prefetch": {"wait": "25h", "parallel": 65}})),
    ),
    (
        "a prefetch for a day and more",
        (HUB, ("spec.model.cache", {"type": "nodeLocal", "path": "/c", "prefetch": {"wait": "25h"}})),
    ),
    ("node cache without a path", (HUB, ("spec.model.cache", {"type": "nodeLocal"}))),
    ("claim for a node cache", (HUB, ("spec.model.cache", {"type": "nodeLocal", "path": "/c", "claim": "x"}))),
    ("seed with vllm", (VLLM, (f"{TIER}.kvTransfer", {"seed": {"enabled": False}}))),
    ("seed of nothing", ((f"{TIER}.kvTransfer", {"seed": {"maxPercent": 0}}),)),
    ("seed of more than half", ((f"{TIER}.kvTransfer", {"seed": {"maxPercent": 51}}),)),
    ("seed for too short", ((f"{TIER}.kvTransfer", {"seed": {"timeout": "999ms"}}),)),
    ("seed for too long", ((f"{TIER}.kvTransfer", {"seed": {"timeout": "61s"}}),)),
    ("KV type with torch", (("spec.engine", {"kvCacheDtype": "fp8"}),)),
    ("parallelism with torch", ((f"{TIER}.parallelism", {"tensor": 2}),)),
    ("quantization with torch", ((f"{TIER}.quantization", "fp8"),)),
    ("role arguments with torch", ((f"{TIER}.decode", {"args": ["--x"]}),)),
    ("an argument that a field decides", (("spec.engine", {"type": "vllm", "args": ["--tensor-parallel-size=4"]}),)),
    ("the same with underscores", (("spec.engine", {"type": "vllm", "args": ["--kv_transfer_config", "{}"]}),)),
    ("the same, short, of a role", (VLLM, (f"{TIER}.prefill", {"args": ["-tp", "2"]}))),
    (
        "tensor sizes that do not divide",
        (VLLM, (f"{TIER}.parallelism", {"tensor": 3}), (f"{TIER}.decode", {"parallelism": {"tensor": 2}})),
    ),
    ("expert size between", (VLLM, (f"{TIER}.parallelism", {"tensor": 2, "data": 4, "expert": 4}))),
    ("tensor size of zero", (VLLM, (f"{TIER}.parallelism", {"tensor": 0}))),
    ("count against parallelism", (VLLM, (f"{TIER}.parallelism", {"tensor": 4}), (f"{TIER}.accelerator.count", 8))),
    (
        "count of a role against the tier's parallelism",
        (VLLM, (f"{TIER}.parallelism", {"tensor": 4}), (f"{TIER}.decode", {"accelerator": {"type": "a100", "count": 2}})),
    ),
    ("device of a cpu role", ((f"{TIER}.prefill", {"accelerator": {"type": "cpu", "count": 2}}),)),
    ("required auto", ((f"{TIER}.kvTransfer", {"required": True}),)),
    ("required rdma without a NIC", ((f"{TIER}.kvTransfer", {"transport": "rdma", "required": True}),)),
    ("a NIC for tcp", ((f"{TIER}.kvTransfer", {"transport": "tcp", "resource": "rdma/ib"}),)),
    ("count of nothing", ((f"{TIER}.kvTransfer", {"transport": "rdma", "count": 2}),)),
    ("multus without a network", ((f"{TIER}.kvTransfer", {"via": "multus"}),)),
    ("a network without multus", ((f"{TIER}.kvTransfer", {"network": "roce"}),)),
    ("network with a space", ((f"{TIER}.kvTransfer", {"via": "multus", "network": "a b"}),)),
    ("dra without classes", ((f"{TIER}.kvTransfer", {"via": "dra"}),)),
    ("dra with a resource", ((f"{TIER}.kvTransfer", {"via": "dra", "dra": {"nic": "n"}, "resource": "rdma/ib"}),)),
    ("dra without a NIC", ((f"{TIER}.kvTransfer", {"via": "dra", "dra": {"gpu": "gpu.nvidia.com"}}),)),
    ("dra on cpu", ((f"{TIER}.accelerator", {"type": "cpu"}), (f"{TIER}.kvTransfer", {"via": "dra", "dra": {"nic": "n"}}))),
    (
        "a GPU asked for twice",
        (
            (f"{TIER}.prefill", {"accelerator": {"type": "h100", "resource": "nvidia.com/gpu"}}),
            (f"{TIER}.kvTransfer", {"via": "dra", "dra": {"nic": "n", "gpu": "g"}}),
        ),
    ),
    ("host ports on the pod's network", ((f"{TIER}.kvTransfer", {"hostPorts": {"first": 20000}}),)),
    ("host ports at the end", ((f"{TIER}.kvTransfer", {"via": "hostNetwork", "hostPorts": {"first": 65535}}),)),
    ("net device with a comma", ((f"{TIER}.kvTransfer", {"netDevices": ["mlx5_0,mlx5_1"]}),)),
    ("shared memory with a wrong unit", ((f"{TIER}.sharedMemory", "20GB"),)),
    ("placement without a key", ((f"{TIER}.placement", {"policy": "required"}),)),
    ("placement of nothing", ((f"{TIER}.placement", {}),)),
    ("a gang of one", ((f"{TIER}.placement", {"gang": {"topologyKey": "rack"}}),)),
    ("a pod group of one", ((f"{TIER}.placement", {"podGroup": "volcano"}),)),
    ("another scheduler's pod group", ((f"{TIER}.placement", {"podGroup": "yarn"}),)),
    ("a gang without a key", ((f"{TIER}.parallelism", {"nodes": 2}), (f"{TIER}.placement", {"gang": {"policy": "exclusive"}}))),
    ("a queue with a dot", ((f"{TIER}.placement", {"queue": "a.b"}),)),
    ("no nodes", ((f"{TIER}.parallelism", {"nodes": 0}),)),
    ("nodes that do not divide the devices", ((f"{TIER}.parallelism", {"nodes": 2}), (f"{TIER}.accelerator.count", 3))),
    ("one device for two nodes", ((f"{TIER}.parallelism", {"nodes": 2}),)),
    ("nodes that do not divide the ranks", (VLLM, (f"{TIER}.parallelism", {"tensor": 4, "nodes": 3}))),
    ("data parallel ranks across nodes", (VLLM, (f"{TIER}.parallelism", {"tensor": 2, "data": 3, "nodes": 2}))),
    ("nodes of one role", (VLLM, (f"{TIER}.decode", {"parallelism": {"tensor": 4, "nodes": 3}}))),
    ("a rank of our own", (VLLM, (f"{TIER}.decode", {"args": ["--node-rank=1"]}))),
    ("metrics from too many", (("spec.networkPolicy", {"metricsFrom": ["n"] * 9}),)),
    *((f"template: {what}", ((f"{TIER}.decode", {"podTemplate": template}),)) for what, template in BAD_TEMPLATES),
    *BAD_CASCADES,
    ("three things at once", (("spec.engine", {"type": "x", "maxBatch": 0}), ("spec.routing", {"replicas": 99}))),
    ("structure and a rule at once", (("spec.engine", {"maxBatch": 0}), ("spec.model.revision", "main"))),
)
TERM = {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "kubernetes.io/hostname"}
FULL = {"cpu": "1500m", "memory": "1.5Gi", "ephemeral-storage": "0.001k", "hugepages-2Mi": "2Mi"}
LIMITS = {"cpu": "1.5", "memory": "1536Mi", "ephemeral-storage": "1", "hugepages-2Mi": "2048Ki"}
WHOLE_TEMPLATE: dict[str, Any] = {
    "labels": {"team": "ml", "example.com/x": ""},
    "annotations": {"prometheus.io/scrape": "true"},
    "nodeSelector": {"nvidia.com/gpu.product": "H100"},
    "tolerations": [{"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
            },
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 5, "preference": {"matchExpressions": [{"key": "spot", "operator": "DoesNotExist"}]}}
            ],
        },
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]},
        "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": TERM}]},
    },
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "schedulerName": "volcano",
    "serviceAccountName": "puller",
    "imagePullSecrets": [{"name": "registry"}],
    "runAsUser": 0,
    "env": [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "MODE", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
    ],
    "volumes": [
        {"name": "cache", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
        {"name": "disk", "hostPath": {"path": "/mnt/x", "type": "DirectoryOrCreate"}},
        {"name": "settings", "configMap": {"name": "c"}},
        {"name": "keys", "secret": {"secretName": "s"}},
    ],
    "volumeMounts": [
        {"name": "cache", "mountPath": "/.cache", "subPath": "a/b"},
        {"name": "claim", "mountPath": "/data", "readOnly": True},
    ],
    "resources": {
        "requests": {"cpu": "500m", "memory": "64Gi", "ephemeral-storage": "1Ti"},
        "limits": {"memory": "64Gi", "hugepages-2Mi": "5Gi"},
    },
}
NUMBERS = {
    "resources": {
        "requests": {"cpu": 4, "memory": 8_589_934_592, "ephemeral-storage": 0, "hugepages-2Mi": "2Mi"},
        "limits": {"cpu": 4, "memory": "8Gi", "ephemeral-storage": "1", "hugepages-2Mi": 2_097_152},
    },
    "volumes": [{"name": "v", "emptyDir": {"sizeLimit": 1_073_741_824}}],
}
GOOD_CHANGES: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("the least", ()),
    ("null is absent", (("spec.engine", {"maxModelLen": None}), (f"{TIER}.decode", {"replicas": None}))),
    ("tier rules by length", tier_rules({"ge": 5, "lt": 6}, {"ge": 1}, {"lt": 1}, {})),
    ("load bound as a whole number", (("spec.routing", {"load": {"bound": 2}}),)),
    ("hub with revision", (("spec.model", {"source": "hf://org/name", "revision": "v1"}),)),
    ("claim", (("spec.model", {"source": "pvc://models/llama/70b", "servedName": "llama-70b"}),)),
    ("vllm", (("spec.engine", {"type": "vllm", "args": ["--dtype", "bfloat16"], "image": "vllm/vllm-openai:v0.32.0"}),)),
    ("cpu", ((f"{TIER}.accelerator", {"type": "cpu"}),)),
    ("exact ratio", ((f"{TIER}.ratio", {"prefill": 2, "decode": 3, "min": "2:3", "max": "2:3"}),)),
    ("seed at the edges", ((f"{TIER}.kvTransfer", {"seed": {"enabled": True, "maxPercent": 50, "timeout": "1s"}}),)),
    ("lease at the edge", ((f"{TIER}.kvTransfer", {"leaseDuration": "600s", "transport": "shm"}),)),
    ("names of 40 characters", (("metadata.name", "a" * 24), (f"{TIER}.name", "b" * 16))),
    ("money", (("spec.scaling", {"budget": {"perHour": 200}}), (f"{TIER}.cost", {"perGpuHour": 4.25}))),
    ("money and devices", (("spec.scaling", {"budget": {"perHour": 0.5, "gpus": 0}}), (f"{TIER}.cost", {"perGpuHour": 0}))),
    ("a price without a budget", ((f"{TIER}.cost", {"perGpuHour": 1}),)),
    ("to zero", (("spec.scaling", {"toZero": {"enabled": True, "idle": "5s"}}), ("spec.limits", {"hold": {"size": "4Mi"}}))),
    ("deleted at leisure", (("spec.deletion", {"wait": "24h"}),)),
    ("no zero by hand", (("spec.scaling", {"mode": "manual", "toZero": {"enabled": False}}),)),
    ("cache at the edge", (("spec.engine", {"cacheSize": "16Ti"}),)),
    ("cache in bytes", (("spec.engine", {"cacheSize": "1048576"}),)),
    ("cache as a number", (("spec.engine", {"cacheSize": 1_048_576}),)),
    ("amounts as numbers", ((f"{TIER}.decode", {"podTemplate": NUMBERS}), (f"{TIER}.sharedMemory", 1_048_576))),
    ("objectives", (("spec.slo", {"ttft": {"p99": "2s"}, "itl": {"p99": "50ms"}}),)),
    (
        "classes and tenants",
        (
            ("spec.limits", {"maxInputTokens": 1000, "queue": {"perSlot": 8}, "runawayPatterns": "default"}),
            ("spec.tenants", {"secretRef": {"name": "tenants", "key": "t.json"}}),
            (
                "spec.classes",
                [
                    {"name": "interactive", "priority": 100, "slo": {"ttft": {"p99": "1s"}}},
                    {"name": "batch", "priority": -10, "maxInputTokens": 1000, "maxOutputTokens": 4096},
                ],
            ),
        ),
    ),
    ("everything from the README", (("spec.telemetry", {"prometheus": {"url": "http://prometheus:9090/x"}, "interval": "10s"}),)),
    (
        "token and node cache",
        (HUB, ("spec.model.tokenSecretRef", {"name": "hf"}), ("spec.model.cache", {"type": "nodeLocal", "path": "/c"})),
    ),
    (
        "prefetch",
        (HUB, ("spec.model.cache", {"type": "nodeLocal", "path": "/c", "prefetch": {"parallel": 1, "wait": "0s"}})),
    ),
    ("adapters in the model's folder", adapters({"name": "a", "source": f"{TINY}/a"}, {"name": "b/c", "source": f"{TINY}/x/b"})),
    (
        "adapters elsewhere",
        (
            ("spec.model.adapterRoot", "pvc://claim"),
            *adapters({"name": "a", "source": "pvc://claim/a"}, {"name": "b", "source": "hf://org/name", "revision": "v1"}),
            ("spec.model.tokenSecretRef", {"name": "hf"}),
        ),
    ),
    (
        "adapters on vllm with room for them",
        (
            VLLM,
            ("spec.model.maxSimultaneousAdapters", 2),
            ("spec.model.maxAdapterRank", 16),
            *adapters({"name": "a", "source": f"{TINY}/a"}),
        ),
    ),
    (
        "asymmetric tensor sizes",
        (VLLM, (f"{TIER}.parallelism", {"tensor": 2}), (f"{TIER}.decode", {"parallelism": {"tensor": 8}})),
    ),
    (
        "count as parallelism says",
        (VLLM, (f"{TIER}.parallelism", {"tensor": 2, "data": 2, "expert": 4}), (f"{TIER}.accelerator.count", 4)),
    ),
    (
        "required rdma by resource",
        ((f"{TIER}.kvTransfer", {"transport": "rdma", "required": True, "resource": "rdma/ib", "count": 2}),),
    ),
    ("multus", ((f"{TIER}.kvTransfer", {"via": "multus", "network": "net/roce-p2", "resource": "rdma/roce_gdr"}),)),
    ("dra", ((f"{TIER}.kvTransfer", {"via": "dra", "dra": {"nic": "mrdma.google.com", "gpu": "gpu.nvidia.com"}, "count": 1}),)),
    (
        "host network",
        ((f"{TIER}.kvTransfer", {"via": "hostNetwork", "hostPorts": {"first": 20000}, "netDevices": ["mlx5_0:1"]}),),
    ),
    (
        "placement",
        ((f"{TIER}.placement", {"topologyKey": "topology.kubernetes.io/rack", "policy": "required", "exclusive": True}),),
    ),
    ("two nodes", ((f"{TIER}.parallelism", {"nodes": 2}), (f"{TIER}.accelerator.count", 4))),
    ("two nodes of a cpu tier", ((f"{TIER}.accelerator", {"type": "cpu"}), (f"{TIER}.decode", {"parallelism": {"nodes": 2}}))),
    (
        "four nodes with vllm",
        (
            VLLM,
            (f"{TIER}.parallelism", {"tensor": 8, "data": 2, "nodes": 4}),
            (
                f"{TIER}.placement",
                {"gang": {"topologyKey": "rack", "policy": "exclusive"}, "queue": "q", "podGroup": "coscheduling"},
            ),
        ),
    ),
    ("a queue for workers of one node", ((f"{TIER}.placement", {"queue": "gpus"}),)),
    ("as much as its limits", ((f"{TIER}.prefill", {"podTemplate": {"resources": {"requests": FULL, "limits": LIMITS}}}),)),
    ("a whole template", ((f"{TIER}.decode", {"podTemplate": WHOLE_TEMPLATE}),)),
    *GOOD_CASCADES,
    ("label and annotation", (("metadata.labels", {"team": "ml"}), ("metadata.annotations", {"note": "x y"}))),
)


def manifest(changes: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """GOOD with the changes made."""
    spoiled = copy.deepcopy(GOOD)
    for path, value in changes:
        *steps, last = path.split(".")
        at: Any = spoiled
        for step in steps:
            at = at[int(step) if step.isdigit() else step]
        if value is DELETE:
            del at[last]
        else:
            at[last] = copy.deepcopy(value)
    return spoiled
