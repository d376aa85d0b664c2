"""Pod templates that the API server refuses, as rows of bad_manifests.py: (what is wrong, the template)."""

from __future__ import annotations

from typing import Any

EMPTY = {"name": "v", "emptyDir": {}}
BAD_TEMPLATES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("a label of ours", {"labels": {"inferencefleet.io/role": "decode"}}),
    ("our manager's label", {"labels": {"app.kubernetes.io/managed-by": "me"}}),
    ("a label that is a number", {"labels": {"team": 7}}),
    ("a label with a space", {"labels": {"team": "m l"}}),
    ("33 labels", {"labels": {f"l{n}": "" for n in range(33)}}),
    ("labels are a list", {"labels": ["team"]}),
    ("the network annotation", {"annotations": {"k8s.v1.cni.cncf.io/networks": "roce"}}),
    ("our environment", {"env": [{"name": "FLEET_POD_IP", "value": "x"}]}),
    ("UCX's transports", {"env": [{"name": "UCX_TLS", "value": "tcp"}]}),
    ("a token in plain text", {"env": [{"name": "HF_TOKEN", "value": "hf_x"}]}),
    ("a variable twice", {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}),
    ("a variable without a value", {"env": [{"name": "A"}]}),
    ("a variable with both", {"env": [{"name": "A", "value": "", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}),
    ("a variable from nowhere", {"env": [{"name": "A", "valueFrom": {}}]}),
    ("a secret without a key", {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s"}}}]}),
    ("our volume", {"volumes": [{"name": "shm", "emptyDir": {}}]}),
    ("a volume without a source", {"volumes": [{"name": "v"}]}),
    ("a volume with two", {"volumes": [{"name": "v", "emptyDir": {}, "secret": {"secretName": "s"}}]}),
    ("a mount without a volume", {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}),
    ("a mount over ours", {"volumes": [EMPTY], "volumeMounts": [{"name": "v", "mountPath": "/models/x"}]}),
    ("a mount at the root", {"volumes": [EMPTY], "volumeMounts": [{"name": "v", "mountPath": "/"}]}),
    ("a relative mount", {"volumes": [EMPTY], "volumeMounts": [{"name": "v", "mountPath": "v"}]}),
    ("devices", {"resources": {"limits": {"nvidia.com/gpu": 8}}}),
    ("more memory than its limit", {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "2147483647.999"}}}),
    ("more cores than their limit", {"resources": {"requests": {"cpu": "1001m"}, "limits": {"cpu": "1"}}}),
    (
        "more disk than its limit",
        {"resources": {"requests": {"ephemeral-storage": "1Ti"}, "limits": {"ephemeral-storage": "1T"}}},
    ),
    (
        "more huge pages than their limit",
        {"resources": {"requests": {"hugepages-2Mi": "4Mi"}, "limits": {"hugepages-2Mi": "2Mi"}}},
    ),
    ("a wrong unit and a limit below it", {"resources": {"requests": {"memory": "2GB"}, "limits": {"memory": "1G"}}}),
    ("a command", {"command": ["sh"]}),
    ("host network", {"hostNetwork": True}),
    ("a security context", {"securityContext": {"privileged": True}}),
    ("a toleration's operator", {"tolerations": [{"key": "k", "operator": "Has"}]}),
    (
        "affinity without a key",
        {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"labelSelector": {}}]}}},
    ),
    ("unknown affinity", {"affinity": {"podAffinity": {"required": []}}}),
    ("a user below zero", {"runAsUser": -1}),
    ("half a core as a number", {"resources": {"requests": {"cpu": 0.5}}}),
    ("cores as a truth", {"resources": {"requests": {"cpu": True}}}),
    ("cores as a list", {"resources": {"requests": {"cpu": [4]}}}),
    ("cores as an object", {"resources": {"requests": {"cpu": {}}}}),
    ("fewer cores than none", {"resources": {"requests": {"cpu": -1}}}),
    ("a million cores", {"resources": {"limits": {"cpu": 1_000_000}}}),
    ("cores of a wrong unit", {"resources": {"requests": {"cpu": "4k"}}}),
    ("a long text for cores", {"resources": {"requests": {"cpu": "4" * 12}}}),
    ("more cores than their limit, as numbers", {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": 1}}}),
    ("more memory than its limit, as a number", {"resources": {"requests": {"memory": 1025}, "limits": {"memory": "1Ki"}}}),
    ("a folder's size below none", {"volumes": [{"name": "v", "emptyDir": {"sizeLimit": -5}}]}),
)
