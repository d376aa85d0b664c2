"""The chart, rendered by a real helm: golden files, values that must be refused, no value without an effect."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.helm.chart import CHART, NAMESPACE, ROOT, HelmError, helm, objects, render, stale
from fleet_api.v1alpha1.base import DNS_LABEL, DNS_SUBDOMAIN
from fleet_operator.leader.lease import Terms
from fleet_operator.options import WebhookOptions, parse_options
from fleet_operator.runtime.paths import expand
from fleet_operator.settings import Platform
from fleet_operator.webhook.manifests import configurations
from tests.listening import ALWAYS, documented

HERE = Path(__file__).resolve().parent
GOLDEN = ROOT / "tests/golden/chart"
VALUES = sorted((HERE / "values").glob("*.yaml"))
DIGEST = "sha256:" + "a" * 64


def crds_shortened(rendered: str) -> list[dict[str, Any]]:
    """The CRDs are compared as generated files; here their names and metadata are enough."""
    found = objects(rendered)
    return [{**o, "spec": "as in crds/"} if o["kind"] == "CustomResourceDefinition" else o for o in found]


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_golden(values: Path):
    made = yaml.safe_dump_all(crds_shortened(render(yaml.safe_load(values.read_text()))), sort_keys=False, width=130)
    golden = GOLDEN / values.name
    if os.environ.get("FLEET_GOLDEN") == "write":
        golden.write_text(made)
    assert made == golden.read_text(), f"FLEET_GOLDEN=write pytest {Path(__file__).relative_to(ROOT)} writes it anew"


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_nothing_of_a_container_is_named_twice(values: Path):
    """Server-side apply refuses a list with two entries of one name, and helm installs by it."""
    for found in objects(render(yaml.safe_load(values.read_text()))):
        pod = found["spec"] if found["kind"] == "Pod" else found.get("spec", {}).get("template", {}).get("spec", {})
        for container in pod.get("containers", []):
            for part in ("env", "ports", "volumeMounts"):
                names = [entry["name"] for entry in container.get(part, [])]
                assert len(names) == len(set(names)), f"{found['kind']} {container['name']} {part}: {names}"


MONITORED = {"enabled": True, "labels": {"app.kubernetes.io/instance": "monitoring", "team": "sre"}}


def test_labels_that_a_prometheus_selects_by_are_there_once():
    """One that the chart sets, too, was there twice: no YAML to kustomize, and so to Flux."""
    labelled: dict[str, Any] = {part: MONITORED for part in METRICS}
    rendered = render({"metrics": labelled})
    assert _keys_there_twice(yaml.compose_all(rendered)) == []
    kinds = ("ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap")
    found = [one["metadata"]["labels"] for one in objects(rendered) if one["kind"] in kinds]
    assert len(found) == 6
    for labels in found:
        assert {**MONITORED["labels"], "app.kubernetes.io/name": "inferencefleet"}.items() <= labels.items()


def _keys_there_twice(nodes: Iterable[yaml.Node]) -> list[str]:
    """At any depth."""
    twice = []
    for node in nodes:
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            twice += sorted({key for key in keys if keys.count(key) > 1})
            twice += _keys_there_twice(value for _, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            twice += _keys_there_twice(node.value)
    return twice


SERVICE_NAME = "[a-z]" + DNS_LABEL.removeprefix("^[a-z0-9]")
LONG = {"fullnameOverride": "a" * 50}
METRICS = {part: {"enabled": True} for part in ("serviceMonitor", "podMonitors", "prometheusRule", "dashboards")}
EVERYTHING = {"metrics": METRICS, "webhooks": {"enabled": True}, "rbac": {"aggregate": True}}


@pytest.mark.parametrize(
    ("release", "namespace", "values"),
    [
        ("a" * 53, "n" * 63, {}),
        ("inferencefleet", "ml", LONG),
        ("team.a", "ml", {}),
        ("a" * 49 + ".b", "ml", {}),
        ("7" * 53, "ml", {}),
        ("2024", "2025", {"serviceAccount": {"name": "7"}, "priorityClassName": "8", "watchNamespaces": ["2026", "null"]}),
        ("null", "true", {"scope": "cluster", "fullnameOverride": "1e5"}),
    ],
)
def test_any_release_has_names_that_an_api_server_takes(release: str, namespace: str, values: dict[str, Any]):
    """A Service had 67 characters, a dot, or a digit first (taken since Kubernetes 1.36); a number, true or null without
    quotes is no text."""
    text = json.dumps({**EVERYTHING, **values})
    args = ("template", release, str(CHART), "--namespace", namespace, "--values", "-")
    found = objects(helm(*args, stdin=text))
    for one in found:
        meta = one["metadata"]
        most, pattern = (63, SERVICE_NAME) if one["kind"] == "Service" else (253, DNS_SUBDOMAIN)
        assert len(meta["name"]) <= most, f"{one['kind']} {meta['name']}"
        assert re.fullmatch(pattern, meta["name"]), f"{one['kind']} {meta['name']}"
        strings = [meta.get("namespace", ""), *meta.get("labels", {}).values(), *_texts(one, ("namespace", "name", "values"))]
        strings += _texts(one, ("serviceAccountName", "priorityClassName", "resourceNames", "app.kubernetes.io/instance"))
        assert [said for said in strings if not isinstance(said, str)] == []


def test_images_that_are_built_are_those_that_are_installed():
    """`make images` tags them with the project's version; the chart and an operator without its arguments ask for theirs."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    platform = Platform()
    asked = {yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]}
    asked |= {image.rpartition(":")[2] for image in (platform.worker_image, platform.router_image)}
    assert asked == {version}


LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"


def test_a_version_with_build_metadata_is_a_label_too(tmp_path: Path):
    """Flux (`reconcileStrategy: Revision`) and many a CI put the commit behind a plus: no object had a label that is allowed."""
    chart = Path(shutil.copytree(CHART, tmp_path / "inferencefleet"))
    made = yaml.safe_load((chart / "Chart.yaml").read_text())
    version = f"0.1.0-rc.1+{'a1b2c3d4e5' * 5}"
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**made, "version": version, "appVersion": "0.1.0+a1b2c3"}))
    found = objects(render(EVERYTHING, chart=chart))
    labels = [one["metadata"].get("labels", {}) for one in found]
    labels += [one["spec"]["template"]["metadata"]["labels"] for one in found if one["kind"] == "Deployment"]
    assert [value for each in labels for value in each.values() if not re.fullmatch(LABEL_VALUE, value)] == []


def _texts(value: Any, keys: Sequence[str]) -> list[Any]:
    """Everything that stands under one of these keys, at any depth, outside of schemas."""
    if isinstance(value, list):
        return [text for item in value for text in _texts(item, keys)]
    if not isinstance(value, dict) or "openAPIV3Schema" in value:
        return []
    mine = [value[key] for key in keys if key in value]
    flat = [item for one in mine for item in (one if isinstance(one, list) else [one])]
    return [*(one for one in flat if not isinstance(one, dict)), *(text for one in value.values() for text in _texts(one, keys))]


def test_generated_files_are_up_to_date():
    assert stale() == [], "make chart"


@pytest.mark.parametrize(("webhooks", "when"), [(False, [ALWAYS]), (True, None)])
def test_s3_the_operators_ports_are_those_of_its_readme(webhooks: bool, when: list[str] | None):
    """What it is told to listen on, and what its container declares."""
    (pod,) = [
        o["spec"]["template"]["spec"] for o in objects(render({"webhooks": {"enabled": webhooks}})) if o["kind"] == "Deployment"
    ]
    (container,) = pod["containers"]
    told = parse_options(container["args"])
    ports = {("tcp", port) for port in (told.health_port, told.webhook.port if told.webhook is not None else 0) if port}
    assert ports == {(one["protocol"].lower(), one["containerPort"]) for one in container["ports"]}
    assert ports == documented(ROOT / "operator/README.md", when)


def test_crds_are_rendered_word_for_word():
    rendered = {o["metadata"]["name"]: o for o in objects(render()) if o["kind"] == "CustomResourceDefinition"}
    ours = {o["metadata"]["name"]: o for path in (ROOT / "crds").glob("*.yaml") for o in objects(path.read_text())}
    assert len(rendered) == 2
    assert {name: o["spec"] for name, o in rendered.items()} == {name: o["spec"] for name, o in ours.items()}


EFFECTS: dict[str, Any] = {
    "scope": "cluster",
    "watchNamespaces": ["ml"],
    "replicas": 3,
    "leaderElection.enabled": False,
    "leaderElection.leaseDurationSeconds": 30,
    "metrics.fleets": False,
    "metrics.serviceMonitor.enabled": True,
    "metrics.podMonitors.enabled": True,
    "metrics.prometheusRule.enabled": True,
    "metrics.dashboards.enabled": True,
    "logFormat": "json",
    "webhooks.enabled": True,
    "image.repository": "r/o",
    "image.tag": "v9",
    "image.digest": DIGEST,
    "image.pullPolicy": "Never",
    "workerImage.repository": "r/w",
    "workerImage.tag": "v9",
    "workerImage.digest": DIGEST,
    "routerImage.repository": "r/r",
    "routerImage.tag": "v9",
    "routerImage.digest": DIGEST,
    "renewRouters": True,
    "imagePullSecrets": [{"name": "s"}],
    "routerPullSecrets": [{"name": "r"}],
    "drainTimeoutSeconds": 31,
    "sickTaints": ["example.com/broken"],
    "sickConditions": ["FabricReady=False"],
    "crds.install": False,
    "crds.keep": False,
    "rbac.aggregate": True,
    "rbac.nodes": False,
    "rbac.podGroups": ["volcano"],
    "serviceAccount.name": "a",
    "serviceAccount.annotations": {"a": "b"},
    "fullnameOverride": "other",
    "podLabels": {"a": "b"},
    "podAnnotations": {"a": "b"},
    "priorityClassName": "p",
    "nodeSelector": {"a": "b"},
    "tolerations": [{"operator": "Exists"}],
    "extraEnv": [{"name": "A", "value": "b"}],
    "resources": {"requests": {"cpu": "2"}},
    "peerKeys.create": False,
    "networkPolicy.enabled": False,
    "podDisruptionBudget.enabled": False,
}
"""Every value with another one; what each does stands in the golden files."""


TOGETHER: list[tuple[str, Any, dict[str, Any]]] = [
    ("namespaceSelector", {"fleets": "here"}, {"scope": "cluster"}),
    ("metrics.serviceMonitor.interval", "5s", {"metrics": {"serviceMonitor": {"enabled": True}}}),
    ("metrics.serviceMonitor.labels", {"release": "p"}, {"metrics": {"serviceMonitor": {"enabled": True}}}),
    ("metrics.podMonitors.interval", "5s", {"metrics": {"podMonitors": {"enabled": True}}}),
    ("metrics.podMonitors.labels", {"release": "p"}, {"metrics": {"podMonitors": {"enabled": True}}}),
    ("metrics.prometheusRule.labels", {"release": "p"}, {"metrics": {"prometheusRule": {"enabled": True}}}),
    ("metrics.prometheusRule.runbookUrl", "https://wiki/runbook", {"metrics": {"prometheusRule": {"enabled": True}}}),
    ("metrics.dashboards.labels.grafana_dashboard", "yes", {"metrics": {"dashboards": {"enabled": True}}}),
    ("metrics.dashboards.annotations", {"grafana_folder": "LLM"}, {"metrics": {"dashboards": {"enabled": True}}}),
    ("webhooks.failurePolicy", "Fail", {"webhooks": {"enabled": True}}),
]
"""Values that act beside others."""


def leaves(tree: dict[str, Any], prefix: str = "") -> set[str]:
    """Paths of values; a map that is empty, or that users fill freely, is one value."""
    found = set()
    for name, value in tree.items():
        path = prefix + name
        if isinstance(value, dict) and value and path != "resources":
            found |= leaves(value, path + ".")
        else:
            found.add(path)
    return found


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def test_values_and_effects_name_the_same_things():
    assert leaves(yaml.safe_load((CHART / "values.yaml").read_text())) == EFFECTS.keys() | {path for path, _, _ in TOGETHER}


@pytest.fixture(scope="module")
def default() -> str:
    return render()


@pytest.mark.parametrize("path", EFFECTS)
def test_every_value_has_an_effect(path: str, default: str):
    other = nested(path, EFFECTS[path])
    if path == "leaderElection.enabled":
        other["replicas"] = 1
        default = render({"replicas": 1})
    assert render(other) != default


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {name: merged(below[name], above[name]) for name in below.keys() & above.keys()}
    return {**below, **above, **both}


@pytest.mark.parametrize(("path", "value", "beside"), TOGETHER, ids=[row[0] for row in TOGETHER])
def test_values_that_act_beside_others(path: str, value: Any, beside: dict[str, Any]):
    assert render(merged(beside, nested(path, value))) != render(beside)


def rules(rendered: str) -> list[dict[str, Any]]:
    roles = [o for o in objects(rendered) if o["kind"] in ("Role", "ClusterRole")]
    return [rule for role in roles for rule in role["rules"]]


MAKES_KEYS = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_no_wildcard_and_of_secrets_the_webhooks_own_and_what_makes_keys(values: Path):
    for rule in rules(render(yaml.safe_load(values.read_text()))):
        words = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert not {word for word in words if "*" in word or word in ("escalate", "bind", "impersonate")}
        if "secrets" in rule["resources"] and rule != MAKES_KEYS:
            assert rule == {
                "apiGroups": [""], "resources": ["secrets"], "resourceNames": rule["resourceNames"],
                "verbs": ["get", "create", "patch"],
            }  # fmt: skip
            assert len(rule["resourceNames"]) == 1


def test_keys_are_made_unless_that_is_switched_off():
    for values, makes in (({}, True), ({"peerKeys": {"create": False}}, False), ({"scope": "cluster"}, True)):
        rendered = render(values)
        assert (MAKES_KEYS in rules(rendered)) is makes
        (deployment,) = [o for o in objects(rendered) if o["kind"] == "Deployment"]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert parse_options(container["args"]).platform.makes_keys is makes


def test_with_scope_namespace_nothing_reaches_beyond_it():
    found = objects(render({"watchNamespaces": ["ml"], "crds": {"install": False}, "rbac": {"nodes": False}}))
    assert {o["metadata"].get("namespace") for o in found} == {"inferencefleet-system", "ml"}
    assert {o["kind"] for o in found if o["metadata"]["namespace"] == "ml"} == {"Role", "RoleBinding", "Lease"}


def test_every_pod_meets_the_restricted_standard():
    """The API server says so, too (e2e/test_helm.py); this names the field."""
    for found in objects(render()):
        spec = found["spec"]["template"]["spec"] if found["kind"] == "Deployment" else found.get("spec", {})
        if found["kind"] not in ("Deployment", "Pod"):
            continue
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
            assert container["securityContext"] == wanted


ALIKE = ("image", "imagePullPolicy", "resources", "securityContext", "terminationMessagePolicy")


def test_the_pod_of_helm_test_runs_wherever_the_operators_does():
    """It had neither its variables (the API server's address), nor its resources (a quota asks for them), labels and annotations
    (policies and meshes go by them) or priority: `helm test` was red where the operator worked."""
    found = objects(render(yaml.safe_load((HERE / "values/everything.yaml").read_text())))
    (deployment,), (tests,) = ([o for o in found if o["kind"] == kind] for kind in ("Deployment", "Pod"))
    template = deployment["spec"]["template"]
    (operator,), (tested,) = template["spec"]["containers"], tests["spec"]["containers"]
    assert [one for one in operator["env"] if one not in tested.get("env", [])] == [
        one for one in operator["env"] if one["name"] in ("HOME", "POD_NAMESPACE")
    ]
    assert {part: tested.get(part) for part in ALIKE} == {part: operator[part] for part in ALIKE}
    own = {"containers", "restartPolicy", "topologySpreadConstraints", "volumes"}
    assert tests["spec"].keys() - own == template["spec"].keys() - own
    assert {part: tests["spec"][part] for part in tests["spec"].keys() - own} == {
        part: template["spec"][part] for part in template["spec"].keys() - own
    }
    assert template["metadata"]["annotations"].items() <= tests["metadata"]["annotations"].items()
    assert tests["metadata"]["labels"]["team"] == "serving"


def test_a_cluster_that_refuses_routers_is_refused():
    """Their preStop sleeps: alpha and off in Kubernetes 1.29 (KEP-3960): the field is dropped, the empty hook refused."""
    assert helm("template", "r", str(CHART), "--kube-version", "1.30.0")
    with pytest.raises(HelmError, match="incompatible"):
        helm("template", "r", str(CHART), "--kube-version", "1.29.14")


def test_an_operator_that_is_not_ready_holds_up_no_drain():
    (budget,) = [o for o in objects(render()) if o["kind"] == "PodDisruptionBudget"]
    assert budget["spec"] | {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow"} == budget["spec"]


def empties(node: Any, path: str = "") -> list[str]:
    """Paths of empty lists and maps."""
    if isinstance(node, dict | list):
        children = node.items() if isinstance(node, dict) else enumerate(node)
        return [path] if not node else [found for name, child in children for found in empties(child, f"{path}/{name}")]
    return []


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_nothing_empty_is_rendered(values: Path):
    """The API server drops an empty list (a NetworkPolicy's `ingress: []`): every later apply would be a change to it."""
    found = objects(render(yaml.safe_load(values.read_text())))
    assert [(o["kind"], empties(o)) for o in found if o["kind"] != "CustomResourceDefinition" and empties(o)] == []


def test_webhooks_are_the_operators_own():
    """What the chart installs is what the operator says it answers."""
    found = [o for o in objects(render({"scope": "cluster", "webhooks": {"enabled": True}})) if "webhooks" in o]
    service = {"namespace": "inferencefleet-system", "name": "inferencefleet-webhook", "port": 443}
    assert [{**o, "metadata": {"name": o["metadata"]["name"]}} for o in found] == configurations({"service": service})


@pytest.mark.parametrize("source", ["chart", "kustomize"])
def test_an_installation_is_named_after_the_namespace_that_it_is_in(source: str):
    """Overlays of the base with other namespaces (and prefixes) had one name: each took the claims of the others for its own."""
    text = render() if source == "chart" else (ROOT / "charts/kustomize/base/operator.yaml").read_text()
    (deployment,) = [o for o in objects(text) if o["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    field = next(one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"] if one["name"] == "POD_NAMESPACE")
    assert field == "metadata.namespace"
    args = [expand(word, {"POD_NAMESPACE": "elsewhere"}) for word in container["args"]]
    assert parse_options(args).installation == "elsewhere/inferencefleet-operator"
    told = f"--namespace={NAMESPACE}"  # where the chart watches its release's namespace
    assert [word for word in args if NAMESPACE in word] == ([told] if source == "chart" else [])


def test_the_operator_takes_every_flag():
    """The chart's arguments, read by the operator's own parser."""
    everything = yaml.safe_load((HERE / "values/everything.yaml").read_text())
    (deployment,) = [o for o in objects(render(everything)) if o["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    options = parse_options([expand(word, {"POD_NAMESPACE": "inferencefleet-system"}) for word in container["args"]])
    assert options.selection.names == ("ml", "research")
    assert options.election == Terms(30, 19.8)
    assert options.webhook == WebhookOptions(
        9443, frozenset({"fleets-webhook.inferencefleet-system.svc", "fleets-webhook.inferencefleet-system.svc.cluster.local"}),
        "fleets-webhook", "inferencefleet-system-fleets",
    )  # fmt: skip
    assert (options.health_port, options.log_format, options.lease) == (8081, "json", "fleets-operator")
    assert options.installation == "inferencefleet-system/fleets-operator"
    platform = options.platform
    assert (platform.worker_image, platform.drain_most_s) == ("registry.example/worker:v2", 600)
    assert platform.router_pull_secrets == ("registry", "mirror.example")
    assert platform.sick_taints[-1:] == ("example.com/broken",)
    assert platform.sick_conditions[-2:] == ("GpuOnFire", "FabricReady=False")


def test_an_overlay_adds_images_of_workers_and_routers_at_the_end():
    """As charts/README.md has it: `images` of kustomize reaches no argument."""
    (deployment,) = [o for o in objects((ROOT / "charts/kustomize/base/operator.yaml").read_text()) if o["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    added = ["--worker-image=r/w:v1", "--router-image=r/r:v1", "--router-pull-secret=registry"]
    platform = parse_options([*container["args"], *added]).platform
    assert (platform.worker_image, platform.router_image, platform.router_pull_secrets) == ("r/w:v1", "r/r:v1", ("registry",))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "runs fleets of namespace inferencefleet-system.\n"),
        ({"watchNamespaces": ["ml", "lab"]}, "runs fleets of namespaces ml, lab.\n"),
        ({"scope": "cluster"}, "runs fleets of all namespaces.\n"),
        ({"scope": "cluster", "namespaceSelector": {"team": "a", "b": "c"}}, "runs fleets of namespaces with b=c,team=a.\n"),
        ({"scope": "cluster", "namespaceSelector": None}, "runs fleets of all namespaces.\n"),
        ({}, "leaves the CRDs, and with them every fleet"),
        ({}, "their disruption budgets let no node with workers be drained"),
        ({"crds": {"keep": False}}, "deletes the CRDs and with them EVERY fleet"),
        ({"crds": {"install": False}}, "The CRDs are not part of this release"),
    ],
)
def test_the_notes_say_what_is_followed_and_what_an_uninstall_takes_along(values: dict[str, Any], words: str):
    """With a selector they said `all namespaces`; without the value, as Helm takes one away by null, there was no release."""
    given = yaml.safe_dump(values)
    assert words in helm("install", "x", str(CHART), "-n", NAMESPACE, "--dry-run=client", "--values", "-", stdin=given)
