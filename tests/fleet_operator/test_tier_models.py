"""Tiers with models of their own: what their pods are made from, and what a change of one model leaves alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet_api.parse import parse_fleet
from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import NODE, POD, WatchEvent
from fleet_operator.names import TIER
from fleet_operator.render.prefetch import render_fetch
from fleet_operator.render.revision import revision_inputs, template_of
from fleet_operator.render.worker import pod_spec
from fleet_operator.settings import Platform
from fleet_planner.prefetch import model_keys
from fleet_planner.types import FetchWanted
from fleet_worker.config import CONFIG_ENV, decode
from tests.fleet_operator.adapters.test_world import fetchers, node, several
from tests.fleet_operator.world import NAMESPACE, World, manifest

CPU = {"accelerator": {"type": "cpu"}}
HUB: dict[str, Any] = {
    "source": "hf://org/small", "revision": "v1", "tokenSecretRef": {"name": "hf"}, "cache": {"type": "pvc", "claim": "cache"},
}  # fmt: skip


def wish(model: dict[str, Any] | None = None, own: dict[str, Any] | None = None, *, routed: bool = True) -> dict[str, Any]:
    """Two tiers; `large` has the model `own`."""
    large = {"name": "large", **CPU, **({"model": own} if own is not None else {})}
    routing = {"routing": {"cascade": {"tiers": ["small", "large"]}}} if routed else {}
    return manifest(model=model or {"source": "file:///models/tiny"}, tiers=[{"name": "small", **CPU}, large], **routing)


def fleet(model: dict[str, Any] | None = None, own: dict[str, Any] | None = None, *, routed: bool = True) -> InferenceFleet:
    return parse_fleet(wish(model, own, routed=routed))


def templates(found: InferenceFleet) -> list[tuple[str, str]]:
    """(revision, compat) of each tier."""
    made = (template_of(found, tier, {}, Platform()) for tier in found.spec.tiers)
    return [(template.revision, template.compat) for template in made]


def pod_of(found: InferenceFleet, name: str) -> dict[str, Any]:
    tier = found.tier(name)
    return pod_spec(found, tier, "decode", template_of(found, tier, {}, Platform()), Platform())


def told(spec: dict[str, Any]) -> dict[str, str | None]:
    return {variable["name"]: variable.get("value") for variable in spec["containers"][0]["env"]}


def test_two_models_are_two_workers_two_revisions_and_no_hand_off_between_them():
    found = fleet(own={"source": "file:///models/large"})
    (first, compat), (second, other) = templates(found)
    assert (first != second, compat != other) == (True, True)
    volumes = [pod_of(found, name)["volumes"][0] for name in ("small", "large")]
    assert [volume["hostPath"]["path"] for volume in volumes] == ["/models/tiny", "/models/large"]
    configs = [decode(str(told(pod_of(found, name))[CONFIG_ENV])) for name in ("small", "large")]
    assert [config.model for config in configs] == ["/models/tiny", "/models/large"]
    assert [config.adapters.root for config in configs] == ["/models/tiny", "/models/large"]
    assert {config.served_name for config in configs} == {"f"}, "clients ask for one name"
    assert [config.compat for config in configs] == [compat, other]


def test_another_revision_of_the_same_repository_is_another_model():
    found = fleet(HUB, {"source": "hf://org/small"})
    assert len({compat for _, compat in templates(found)}) == 2
    assert [decode(str(told(pod_of(found, name))[CONFIG_ENV])).model for name in ("small", "large")] == [
        "hf://org/small@v1", "hf://org/small@main",
    ]  # fmt: skip


def test_what_fetches_from_the_hub_is_only_where_the_hub_is():
    small, large = (pod_of(fleet(HUB, {"source": "file:///models/large"}), name) for name in ("small", "large"))
    assert {"HF_TOKEN", "FLEET_MODEL_CACHE"} <= told(small).keys()
    assert not {"HF_TOKEN", "FLEET_MODEL_CACHE"} & told(large).keys()
    assert small["volumes"][0] == {"name": "model", "persistentVolumeClaim": {"claimName": "cache"}}
    assert ("fsGroup" in small["securityContext"], "fsGroup" in large["securityContext"]) == (True, False)
    turned = {**HUB, "source": "file:///models/tiny"}
    del turned["revision"]
    small, large = (pod_of(fleet(turned, {"source": "hf://org/large"}), name) for name in ("small", "large"))
    assert not {"HF_TOKEN", "FLEET_MODEL_CACHE"} & told(small).keys()
    assert {"HF_TOKEN", "FLEET_MODEL_CACHE"} <= told(large).keys()
    assert large["volumes"][0]["persistentVolumeClaim"] == {"claimName": "cache"}


LARGE = {"source": "hf://org/large"}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[bool, bool]]] = {
    "the-large-one": (HUB, {"source": "hf://org/larger"}, (False, True)),
    "its-revision": (HUB, {**LARGE, "revision": "v2"}, (False, True)),
    "the-small-one": ({**HUB, "source": "hf://org/smaller"}, LARGE, (True, False)),
    "the-small-ones-revision": ({**HUB, "revision": "v2"}, LARGE, (True, False)),
    "the-token-of-both": ({**HUB, "tokenSecretRef": {"name": "other"}}, LARGE, (True, True)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_workers_are_made_anew_where_the_model_changes_and_nowhere_else(name: str):
    model, own, expected = CHANGES[name]
    before, after = templates(fleet(HUB, LARGE)), templates(fleet(model, own))
    assert tuple(old[0] != new[0] for old, new in zip(before, after, strict=True)) == expected


def test_a_cache_that_a_tier_does_not_use_restarts_none_of_its_workers():
    own = {"source": "file:///models/large"}
    other = {**HUB, "cache": {"type": "pvc", "claim": "other"}}
    before, after = templates(fleet(HUB, own)), templates(fleet(other, own))
    assert (before[0] != after[0], before[1] == after[1]) == (True, True)


def test_saying_what_the_fleet_says_and_a_cascade_restart_nothing():
    plain = fleet(HUB, routed=False)
    for found in (fleet(HUB), fleet(HUB, {"source": "hf://org/small", "revision": "v1"})):
        assert templates(found) == templates(plain)
        assert [pod_of(found, tier.name) for tier in found.spec.tiers] == [pod_of(plain, tier.name) for tier in plain.spec.tiers]


def test_inputs_of_a_tier_without_a_model_are_those_of_earlier_operators():
    found = fleet(HUB, routed=False)
    assert revision_inputs(found, found.spec.tiers[0]) == {
        "model": HUB, "servedName": "f", "drainTimeout": "", "maxOutputTokens": 4096, "restartedAt": "",
        "tier": {"name": "small", "accelerator": {"type": "cpu"}, "prefill": {}, "decode": {}},
    }  # fmt: skip
    ((revision, compat),) = templates(found)[:1]
    assert revision == "1b2fd340", "another hash would restart every worker"
    assert compat == "e364703860e51c27", "of new templates: those that are stored keep their own, and pair with their own kind"


@pytest.mark.parametrize(
    ("engine", "args", "reads"),
    [
        ({"type": "torch"}, [], "shards"),
        ({"type": "vllm"}, [], "consolidated"),
        ({"type": "vllm", "args": ["--load-format=hf"]}, [], "all"),
        ({"type": "vllm"}, ["--load-format=hf"], "all"),
    ],
)
def test_nodes_fetch_the_weights_that_all_tiers_of_a_model_read(engine: dict[str, Any], args: list[str], reads: str):
    cached = {**HUB, "cache": {"type": "nodeLocal", "path": "/cache"}}
    wished = wish(cached)
    wished["spec"]["engine"] = {**engine, "image": "vllm"}
    wished["spec"]["tiers"][1]["decode"] = {"args": args}
    found = parse_fleet(wished)
    wanted = FetchWanted(name="f-fetch", node="n1", key=model_keys(found)["small"], tier="small")
    pod = render_fetch(found, wanted, {**wished, "metadata": {"name": "f", "uid": "u"}}, Platform())
    assert told(pod["spec"])["FLEET_FETCH_WEIGHTS"] == reads


def fetch_spec(template: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Of the pod that fetches for a tier with this podTemplate, and with `more`."""
    wished = wish({**HUB, "cache": {"type": "nodeLocal", "path": "/cache"}})
    wished["spec"]["tiers"][0] |= {"prefill": {"podTemplate": template}, **more}
    found = parse_fleet(wished)
    wanted = FetchWanted(name="f-fetch", node="n1", key=model_keys(found)["small"], tier="small")
    spec: dict[str, Any] = render_fetch(found, wanted, {**wished, "metadata": {"name": "f", "uid": "u"}}, Platform())["spec"]
    return spec


def test_what_fetches_gets_its_image_as_workers_do():
    """It had the default account, which may have no pull rights: no node ever fetched, and growth waited for all of them."""
    spec = fetch_spec({"serviceAccountName": "puller", "imagePullSecrets": [{"name": "registry"}], "runAsUser": 1000})
    assert (spec.get("serviceAccountName"), spec["automountServiceAccountToken"]) == ("puller", False)
    assert (spec["imagePullSecrets"], spec["securityContext"]["runAsUser"]) == ([{"name": "registry"}], 1000)


def test_what_fetches_has_the_files_that_its_variables_name():
    """SSL_CERT_FILE of a company's proxy named a file that was not mounted: workers came through, what fetches never did. A claim
    may be on one node only, and would keep it from all others."""
    volumes = [
        {"name": "ca", "configMap": {"name": "company-ca"}}, {"name": "scratch", "emptyDir": {}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
    ]  # fmt: skip
    mounts = [{"name": "ca", "mountPath": "/ca", "readOnly": True}, {"name": "data", "mountPath": "/data"}]
    scratch = {"name": "scratch", "mountPath": "/scratch"}
    env = [{"name": "SSL_CERT_FILE", "value": "/ca/ca.pem"}]
    spec = fetch_spec({"env": env, "volumes": volumes, "volumeMounts": [*mounts, scratch]})
    (container,) = spec["containers"]
    assert told(spec)["SSL_CERT_FILE"] == "/ca/ca.pem"
    assert [mount["name"] for mount in container["volumeMounts"]] == ["model", "tmp", "ca", "scratch"]
    assert spec["volumes"][2:] == volumes[:2]
    assert container["volumeMounts"][2:] == [mounts[0], scratch]


def test_what_fetches_comes_to_every_node_of_its_tier():
    """A node may be of one role only."""
    team, spot = ({"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in ("team", "spot"))
    decode = {"podTemplate": {"tolerations": [team, spot]}}
    spec = fetch_spec({"tolerations": [team]}, decode=decode, accelerator={"type": "h100-sxm"})
    gpu, other = ({"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in ("nvidia.com/gpu", "amd.com/gpu"))
    assert spec["tolerations"] == [gpu, team, spot]
    assert "limits" not in spec["containers"][0]["resources"], "no device"
    decode = {"accelerator": {"type": "mi300x", "resource": "amd.com/gpu"}}
    assert fetch_spec({}, decode=decode, accelerator={"type": "h100-sxm"})["tolerations"] == [gpu, other]


def test_nodes_fetch_the_model_of_every_tier():
    async def scenario() -> None:
        world = World()
        world.operator.feed(NODE, WatchEvent("ADDED", node("n1")))
        cached = {**HUB, "cache": {"type": "nodeLocal", "path": "/cache"}}
        await world.user.apply(wish(cached, LARGE))
        await several(world, 4)
        pods = [p for p in await world.store.list(POD, NAMESPACE) if p["metadata"]["labels"]["inferencefleet.io/role"] == "fetch"]
        found = {pod["metadata"]["labels"][TIER]: told(pod["spec"])["FLEET_FETCH"] for pod in pods}
        assert found == {"small": "hf://org/small@v1", "large": "hf://org/large@main"}
        assert set(await fetchers(world)) == {"n1"}
        for pod in pods:
            await world.user.patch_status(POD, NAMESPACE, pod["metadata"]["name"], {"phase": "Succeeded"})
        await several(world, 6)
        assert (await world.condition("ModelCached"))["message"] == "1 of 1 nodes have the models of their tiers"
        tiers = [p["metadata"]["labels"][TIER] for p in await world.store.list(POD, NAMESPACE) if TIER in p["metadata"]["labels"]]
        assert (tiers.count("small"), tiers.count("large")) == (4, 4), "three workers and the record of each"

    asyncio.run(scenario())
