"""Values that the chart's schema refuses, by the field's name, and those that look odd and are taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.helm.chart import CHART, HelmError, objects, render

BAD = [
    ("typo at the top", {"imgae": {}}, "imgae"),
    ("typo below", {"image": {"repo": "x"}}, "repo"),
    ("switched off without a parent", {"enabled": False}, "/enabled"),
    ("unknown scope", {"scope": "all"}, "/scope"),
    ("wildcard namespace", {"watchNamespaces": ["*"]}, "/watchNamespaces/0"),
    ("names with scope cluster", {"scope": "cluster", "watchNamespaces": ["a"]}, "/watchNamespaces"),
    ("labels with scope namespace", {"namespaceSelector": {"a": "b"}}, "/namespaceSelector"),
    ("two that do not elect", {"replicas": 2, "leaderElection": {"enabled": False}}, "/leaderElection/enabled"),
    ("a lease too short to renew", {"leaderElection": {"leaseDurationSeconds": 5}}, "/leaderElection/leaseDurationSeconds"),
    ("unknown failure policy", {"webhooks": {"failurePolicy": "Maybe"}}, "/webhooks/failurePolicy"),
    ("a tag with a space", {"image": {"repository": "x", "tag": "a b"}}, "/image/tag"),
    # these were rendered as x:v1:0.1.0, which is no image
    ("tag inside the repository", {"image": {"repository": "r.example:5000/x:v1"}}, "/image/repository"),
    ("tag inside the workers' repository", {"workerImage": {"repository": "x:v1"}}, "/workerImage/repository"),
    ("no path behind the registry's port", {"routerImage": {"repository": "r.example:5000"}}, "/routerImage/repository"),
    ("digest without algorithm", {"routerImage": {"repository": "x", "digest": "a" * 64}}, "/routerImage/digest"),
    ("unknown pull policy", {"image": {"repository": "x", "pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
    ("no drain at all", {"drainTimeoutSeconds": 0}, "/drainTimeoutSeconds"),
    ("a Go duration", {"drainTimeoutSeconds": "30s"}, "/drainTimeoutSeconds"),
    ("a condition that must be Unknown", {"sickConditions": ["A=Unknown"]}, "/sickConditions/0"),
    ("a number as a label", {"podLabels": {"a": 1}}, "/podLabels/a"),
    ("environment without a name", {"extraEnv": [{"value": "x"}]}, "/extraEnv/0"),
    ("a name that no shell has", {"extraEnv": [{"name": "A B"}]}, "/extraEnv/0/name"),
    ("unknown toleration field", {"tolerations": [{"keys": "x"}]}, "/tolerations/0"),
    ("resources beside requests", {"resources": {"cpu": "1"}}, "/resources"),
    ("an unknown scheduler", {"rbac": {"podGroups": ["yarn"]}}, "/rbac/podGroups/0"),
    ("a switch as text", {"crds": {"install": "yes"}}, "/crds/install"),
    ("a taint with its value, which was never found", {"sickTaints": ["example.com/gpu=bad:NoExecute"]}, "/sickTaints/0"),
    ("a variable that the chart sets", {"extraEnv": [{"name": "HOME", "value": "/"}]}, "/extraEnv/0/name"),
    ("one that policies are made from", {"extraEnv": [{"name": "POD_NAMESPACE", "value": "x"}]}, "/extraEnv/0/name"),
    ("a monitor that was taken away", {"metrics": {"serviceMonitor": None}}, "serviceMonitor"),
    ("monitors of pods that were taken away", {"metrics": {"podMonitors": None}}, "podMonitors"),
    ("a runbook that is no page", {"metrics": {"prometheusRule": {"runbookUrl": "RUNBOOK.md"}}}, "/prometheusRule/runbookUrl"),
    # these were rendered, and then no operator began
    ("two labels in one", {"scope": "cluster", "namespaceSelector": {"team": "a,b"}}, "/namespaceSelector/team"),
    ("a key that is none", {"scope": "cluster", "namespaceSelector": {"a/b/c": "d"}}, "'a/b/c'"),
    ("a namespace label without a value", {"scope": "cluster", "namespaceSelector": {"team": ""}}, "/namespaceSelector/team"),
    ("a label of which the operator is found", {"podLabels": {"app.kubernetes.io/name": "x"}}, "/podLabels"),
    ("a log format that was taken away", {"logFormat": None}, "logFormat"),
    ("a lease without an end", {"leaderElection": {"leaseDurationSeconds": None}}, "leaseDurationSeconds"),
    ("webhooks that were taken away", {"webhooks": None}, "webhooks"),
    # these were off: with the first the next uninstall took every fleet along
    ("what keeps the CRDs taken away", {"crds": {"keep": None}}, "'keep'"),
    ("the CRDs taken away", {"crds": {"install": None}}, "'install'"),
    ("a switch of the policy taken away", {"networkPolicy": {"enabled": None}}, "'enabled'"),
    ("a right taken away", {"rbac": {"nodes": None}}, "'nodes'"),
    # these the Prometheus operator's CRDs refuse
    ("an interval that was taken away", {"metrics": {"serviceMonitor": {"interval": None}}}, "'interval'"),
]


@pytest.mark.parametrize(("values", "field"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_values_are_refused_by_field(values: dict[str, Any], field: str):
    with pytest.raises(HelmError) as refused:
        render(values)
    assert field in str(refused.value)


def test_a_parent_chart_may_hand_down_globals():
    assert render({"global": {"region": "x"}}) == render()


@pytest.mark.parametrize(("enabled", "kinds"), [(True, {"Deployment"}), (False, set())])
def test_a_parent_chart_may_switch_it_by_the_usual_condition(enabled: bool, kinds: set[str], tmp_path: Path):
    """`condition: inferencefleet.enabled` is a value of this chart, too: switched on, it was refused."""
    dependency = {"name": "inferencefleet", "version": "0.1.0", "condition": "inferencefleet.enabled"}
    parent = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(parent))
    shutil.copytree(CHART, tmp_path / "charts/inferencefleet")
    found = objects(render({"inferencefleet": {"enabled": enabled}}, chart=tmp_path))
    assert {one["kind"] for one in found} & {"Deployment"} == kinds


REPOSITORIES = ("operator", "ghcr.io/acme/operator", "r.example:5000/acme/operator", "10.0.0.1:5000/a__b/c-d", "localhost:5000/x")


@pytest.mark.parametrize("repository", REPOSITORIES)
def test_a_registry_may_have_a_port(repository: str):
    assert f"image: {repository}:v1\n" in render({"image": {"repository": repository, "tag": "v1"}})


def test_the_schema_is_strict_everywhere():
    schema = json.loads((CHART / "values.schema.json").read_text())
    loose = []

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            if "properties" in node and node.get("additionalProperties") is not False:
                loose.append(path)
            for name, child in node.items():
                walk(child, f"{path}/{name}")
        elif isinstance(node, list):
            for index, child in enumerate(node):
                walk(child, f"{path}/{index}")

    del schema["allOf"]  # conditions over what is defined elsewhere
    walk(schema, "")
    assert loose == []
