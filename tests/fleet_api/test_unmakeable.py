"""Specs whose pods every API server refuses: said when the fleet is applied, not by pods that never come."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_api.compat import refusals
from fleet_api.parse import ManifestError, parse_fleet
from fleet_api.validate import validate
from tests.fleet_api.bad_manifests import GOOD_CHANGES, HUB, TIER, manifest

AT = "spec.tiers[0].decode.podTemplate"
NODES = "requiredDuringSchedulingIgnoredDuringExecution"
WISHES = "preferredDuringSchedulingIgnoredDuringExecution"


def near(**selector: Any) -> dict[str, Any]:
    wish = {"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": selector}}
    return {"affinity": {"podAntiAffinity": {WISHES: [wish]}}}


def node(**requirement: Any) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": "zone", **requirement}]}
    return {"affinity": {"nodeAffinity": {NODES: {"nodeSelectorTerms": [term]}}}}


def huge(requests: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    return {"resources": {"requests": requests, "limits": limits}}


MOUNTED = {"volumes": [{"name": "v", "emptyDir": {}}]}
EXPRESSION = f"{AT}.affinity.nodeAffinity.{NODES}.nodeSelectorTerms[0].matchExpressions[0].values"
NEAR = f"{AT}.affinity.podAntiAffinity.{WISHES}[0].podAffinityTerm.labelSelector"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tolerations": [{"key": "gpu"}, {"value": "a"}]}, f"{AT}.tolerations[1].operator: Invalid value: must be Exists"),
    ({"tolerations": [{"key": "gpu", "operator": "Exists", "value": "a"}]}, f'{AT}.tolerations[0].value: Invalid value: "a"'),
    ({"tolerations": [{"key": "gpu", "tolerationSeconds": 60}]}, f"{AT}.tolerations[0].effect: Invalid value: must be NoExec"),
    ({"tolerations": [{"key": "a b", "operator": "Exists"}]}, f'{AT}.tolerations[0].key: Invalid value: "a b": a qualified name'),
    (node(operator="In"), f"{EXPRESSION}: Required value: operator In"),
    (node(operator="Exists", values=["a"]), f"{EXPRESSION}: Forbidden: operator Exists takes none"),
    (node(operator="Gt", values=["1", "2"]), f"{EXPRESSION}: Required value: operator Gt needs exactly one"),
    (near(matchLabels={"a b": ""}), f'{NEAR}.matchLabels: Invalid value: "a b"'),
    (near(matchExpressions=[{"key": "a", "operator": "NotIn"}]), f"{NEAR}.matchExpressions[0].values: Required value"),
    ({"labels": {"my team": "a"}}, f'{AT}.labels: Invalid value: "my team": a qualified name'),
    ({"annotations": {"-a": ""}}, f'{AT}.annotations: Invalid value: "-a"'),
    ({"nodeSelector": {"a/b/c": ""}}, f'{AT}.nodeSelector: Invalid value: "a/b/c"'),
    (huge({"hugepages-2Mi": "2Mi"}, {}), f'{AT}.resources.requests.hugepages-2Mi: Invalid value: "2Mi": must be limits.'),
    (huge({"hugepages-2Mi": "2Mi"}, {"hugepages-2Mi": "4Mi"}), f"{AT}.resources.requests.hugepages-2Mi: Invalid value"),
    ({"volumes": [{"name": "v", "hostPath": {"path": "/a/../b"}}]}, f'{AT}.volumes[0].hostPath.path: Invalid value: "/a/../b"'),
    (
        {**MOUNTED, "volumeMounts": [{"name": "v", "mountPath": "/v", "subPath": "../x"}]},
        f'{AT}.volumeMounts[0].subPath: Invalid value: "../x": must not contain ..',
    ),
]
OTHERS = [
    ((("spec.engine", {"image": "w:1 "}),), 'spec.engine.image: Invalid value: "w:1 ": a name of an image has no blanks'),
    ((HUB, ("spec.model.cache", {"type": "nodeLocal", "path": "/c/../x"})), 'spec.model.cache.path: Invalid value: "/c/../x"'),
    (((f"{TIER}.accelerator.nodeSelector", {"": "a"}),), 'spec.tiers[0].accelerator.nodeSelector: Invalid value: ""'),
    (
        ((f"{TIER}.prefill", {"accelerator": {"type": "a", "nodeSelector": {"x" * 64: ""}}}),),
        "spec.tiers[0].prefill.accelerator.nodeSelector: Invalid value",
    ),
]
ROWS = [*((((f"{TIER}.decode", {"podTemplate": template}),), words) for template, words in BAD), *OTHERS]
GOOD: list[dict[str, Any]] = [
    {"tolerations": [{"operator": "Exists"}, {"key": "a.b/c", "value": ""}, {"operator": "Exists", "value": ""}]},
    {"tolerations": [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}]},
    node(operator="Lt", values=["5"]),
    node(operator="DoesNotExist"),
    near(matchExpressions=[{"key": "a", "operator": "In", "values": [""]}], matchLabels={"a.b/c": ""}),
    near(),
    {"annotations": {"Example.com/X": ""}},
    huge({"hugepages-2Mi": "2Mi"}, {"hugepages-2Mi": 2_097_152}),
    huge({}, {"hugepages-2Mi": "2Mi"}),
    {"volumes": [{"name": "v", "hostPath": {"path": "/a/..b"}}]},
]


@pytest.mark.parametrize(("changes", "words"), ROWS, ids=[words for _, words in ROWS])
def test_a_fleet_whose_pods_nobody_would_take_is_refused(changes: tuple[tuple[str, Any], ...], words: str):
    spoiled = manifest(changes)
    assert validate(spoiled) == []
    (told,) = refusals(spoiled)
    assert told.startswith(words)
    with pytest.raises(ManifestError):
        parse_fleet(spoiled)


@pytest.mark.parametrize("template", GOOD)
def test_what_kubernetes_takes_is_not(template: dict[str, Any]):
    found = manifest(((f"{TIER}.decode", {"podTemplate": template}),))
    assert validate(found) == refusals(found) == []


@pytest.mark.parametrize(("name", "changes"), GOOD_CHANGES)
def test_what_an_api_server_was_seen_to_take_is_not(name: str, changes: tuple[tuple[str, Any], ...]):
    assert refusals(manifest(changes)) == []
