"""The models: round trips, frozen, defaults that are shown but never written, typed values inside."""

from __future__ import annotations

import copy
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fleet_api.parse import ManifestError, parse_fleet, parse_pool
from fleet_api.v1alpha1 import ClaimSource, FileSource, FleetStatus, HubSource, RoleStatus, TierStatus

sys.path.insert(0, str(Path(__file__).parent))
from bad_manifests import GOOD, HUB, TIER, manifest

from tests.fleet_api.cascades import LARGE, cascade

names = st.from_regex(r"[a-z]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
durations = st.builds("{}s".format, st.integers(5, 300))
roles = st.builds(
    lambda low, extra: {"minReplicas": low, "maxReplicas": low + extra + 8, "warm": extra}, st.integers(1, 8), st.integers(0, 8)
)
tiers = st.fixed_dictionaries(
    {"name": names, "accelerator": st.sampled_from([{"type": "cpu"}, {"type": "h100-sxm", "count": 8}])},
    optional={
        "prefill": roles,
        "decode": roles,
        "kvTransfer": st.fixed_dictionaries(
            {"leaseDuration": durations}, optional={"transport": st.sampled_from(["tcp", "rdma"])}
        ),
        "ratio": st.just({"min": "1:16", "max": "16:1"}),
    },
)
specs = st.fixed_dictionaries(
    {
        "model": st.sampled_from([{"source": "file:///m"}, {"source": "pvc://c/m", "servedName": "x"}, {"source": "hf://o/n"}]),
        "tiers": st.lists(tiers, min_size=1, max_size=3, unique_by=lambda tier: tier["name"]),
    },
    optional={
        "engine": st.sampled_from([{"type": "vllm", "args": ["-x"]}, {"type": "torch", "cacheSize": "1Gi", "blockTokens": 32}]),
        "routing": st.builds(lambda bound: {"load": {"bound": bound}}, st.floats(1.0, 10.0)),
        "slo": st.builds(lambda p99: {"ttft": {"p99": p99}}, durations),
        "telemetry": st.just({"prometheus": {"url": "http://p:9090"}}),
    },
)


def fleet_of(**changes):
    return parse_fleet(manifest(tuple(changes.items())))


def part_of(small, large) -> bool:
    """Everything that `small` says, `large` says too."""
    if isinstance(small, dict):
        return all(key in large and part_of(value, large[key]) for key, value in small.items())
    if isinstance(small, list):
        return len(small) == len(large) and all(part_of(a, b) for a, b in zip(small, large, strict=True))
    return small == large


@given(name=names, spec=specs)
def test_round_trip_keeps_what_the_user_wrote(name, spec):
    raw = {**GOOD, "metadata": {"name": name}, "spec": spec}
    before = copy.deepcopy(raw)
    fleet = parse_fleet(raw)
    assert raw == before, "parsing must not write defaults into the user's object"
    assert part_of(spec, fleet.spec.to_dict())


@given(name=names, spec=specs)
def test_resolved_is_valid_and_resolves_to_itself(name, spec):
    fleet = parse_fleet({**GOOD, "metadata": {"name": name}, "spec": spec})
    resolved = fleet.resolved()
    again = parse_fleet({**GOOD, "metadata": {"name": name}, "spec": resolved})
    assert again.resolved() == resolved


def test_defaults():
    fleet = fleet_of()
    assert fleet.served_name == "good"
    assert fleet.spec.max_input_tokens == 2048
    assert fleet.spec.engine.cache_bytes == 64 * 1024 * 1024
    tier = fleet.spec.tiers[0]
    assert tier.ratio.min_ratio.value == Fraction(1, 4)
    assert tier.ratio.max_ratio.value == Fraction(1)
    assert tier.kv_transfer.lease_duration_s == 30.0
    assert fleet.spec.scaling.scale_down_window_s == 120.0
    assert fleet.spec.telemetry.interval_s == 5.0
    assert fleet.spec.slo.ttft is None


@pytest.mark.parametrize(
    ("source", "revision", "location"),
    [
        ("file:///models/tiny", None, FileSource("/models/tiny")),
        ("pvc://claim/a/b", None, ClaimSource("claim", "a/b")),
        ("hf://org/name", None, HubSource("org/name", "main")),
        ("hf://org/name", "v2", HubSource("org/name", "v2")),
    ],
)
def test_source_is_parsed(source, revision, location):
    model = {"source": source} | ({"revision": revision} if revision else {})
    assert fleet_of(**{"spec.model": model}).spec.model.location == location


TOKEN, CACHE = {"name": "hf"}, {"type": "nodeLocal", "path": "/c"}
FROM_HUB = {"source": "hf://org/name", "revision": "v1", "tokenSecretRef": TOKEN, "cache": CACHE}


@pytest.mark.parametrize(
    ("model", "own", "expected"),
    [
        ({"source": "file:///m"}, None, {"source": "file:///m"}),
        (FROM_HUB, None, FROM_HUB),
        (FROM_HUB, {"source": "hf://org/large"}, {"source": "hf://org/large", "tokenSecretRef": TOKEN, "cache": CACHE}),
        (FROM_HUB, {"source": "hf://org/large", "revision": "v2"}, {**FROM_HUB, "source": "hf://org/large", "revision": "v2"}),
        (FROM_HUB, LARGE, LARGE),
    ],
)
def test_the_model_of_a_tier_has_its_own_source_and_revision_and_what_else_the_fleets_says(model, own, expected):
    fleet = parse_fleet(manifest(cascade(("spec.model", {**model, "servedName": "x"}), ("spec.tiers.1.model", own))))
    first, second = (fleet.model_of(tier) for tier in fleet.spec.tiers)
    assert second.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True) | {"cache": None} == {
        **expected, "servedName": "x", "cache": None,
    }  # fmt: skip
    assert (second.cache is None) == ("cache" not in expected)
    assert first.location == fleet.spec.model.location


def test_what_a_tiers_model_and_a_cascade_leave_open_is_resolved():
    fleet = parse_fleet(manifest(cascade(HUB, ("spec.tiers.1.model", {"source": "hf://org/large"}))))
    resolved = fleet.resolved()
    assert [tier.get("model") for tier in resolved["tiers"]] == [None, {"source": "hf://org/large", "revision": "main"}]
    assert resolved["routing"]["cascade"] == {
        "tiers": ["a", "b"], "check": {"finishReasons": [], "phrases": []}, "heldSize": "1Mi",
    }  # fmt: skip
    again = parse_fleet({**GOOD, "spec": resolved})
    assert again.resolved() == resolved
    on_disk = parse_fleet(manifest(cascade(HUB))).resolved()
    assert on_disk["tiers"][1]["model"] == LARGE, "only a hub has revisions"


@pytest.mark.parametrize(
    ("accelerator", "request_"),
    [
        ({"type": "cpu"}, None),
        ({"type": "h100-sxm"}, ("nvidia.com/gpu", 1)),
        ({"type": "mi300x", "resource": "amd.com/gpu", "count": 4}, ("amd.com/gpu", 4)),
    ],
)
def test_device_request(accelerator, request_):
    assert fleet_of(**{f"{TIER}.accelerator": accelerator}).spec.tiers[0].device_request("decode") == request_


@pytest.mark.parametrize(
    ("prefill", "decode", "initial"),
    [
        ({}, {}, (1, 2)),
        ({"minReplicas": 2}, {}, (2, 4)),
        ({}, {"minReplicas": 3}, (2, 4)),
        ({"replicas": 3}, {}, (3, 2)),
        ({}, {"maxReplicas": 1}, (1, 1)),
        ({"replicas": 2}, {"replicas": 5}, (2, 5)),
    ],
)
def test_initial_workers_follow_the_shape(prefill, decode, initial):
    assert fleet_of(**{f"{TIER}.prefill": prefill, f"{TIER}.decode": decode}).spec.tiers[0].initial == initial


def test_amounts_without_quotes_are_the_same_amounts():
    """YAML makes integers of them, and Kubernetes takes both."""
    amounts = {"cpu": 4, "memory": 1_073_741_824, "ephemeral-storage": 0}
    found = [
        parse_fleet(
            manifest(
                (
                    ("spec.engine", {"cacheSize": written(2_097_152)}),
                    (f"{TIER}.sharedMemory", written(4096)),
                    (f"{TIER}.decode", {"podTemplate": {"resources": {"limits": {k: written(v) for k, v in amounts.items()}}}}),
                )
            )
        )
        for written in (int, str)
    ]
    assert found[0] == found[1]
    assert found[0].spec.engine.cache_bytes == 2_097_152
    assert found[0].spec.tiers[0].shared_memory_bytes == 4096
    template = found[0].spec.tiers[0].decode.pod_template
    assert template is not None
    assert template.resources.limits.to_dict() == {"cpu": "4", "memory": "1073741824", "ephemeral-storage": "0"}


def test_models_are_frozen_and_closed():
    fleet = fleet_of()
    with pytest.raises(ValidationError, match="frozen"):
        fleet.spec.engine.max_batch = 1
    with pytest.raises(ValidationError, match="extra"):
        type(fleet.spec.engine).model_validate({"typ": "torch"})


def test_tier_by_name():
    assert fleet_of().tier("a").name == "a"
    with pytest.raises(KeyError):
        fleet_of().tier("b")


def test_pool():
    pool = parse_pool(
        {
            "apiVersion": "inferencefleet.io/v1alpha1",
            "kind": "WorkerPool",
            "metadata": {"name": "p", "uid": "u", "annotations": {"inferencefleet.io/planned": "2"}, "managedFields": []},
            "spec": {"fleet": "f", "tier": "t", "role": "decode", "revision": "0123abcd", "replicas": 2},
            "status": {"readyReplicas": 1},
        }
    )
    assert (pool.spec.replicas, pool.spec.role, pool.status.ready_replicas) == (2, "decode", 1)
    with pytest.raises(ManifestError, match=r"spec\.role: Unsupported value"):
        parse_pool({"metadata": {"name": "p"}, "spec": {**pool.spec.to_dict(), "role": "mixed"}})


def test_status_summary_adds_tiers_up_and_survives_a_round_trip():
    status = FleetStatus(
        tiers=(
            TierStatus(name="a", prefill=RoleStatus(desired=2, serving=1), decode=RoleStatus(desired=4, serving=2)),
            TierStatus(name="b", prefill=RoleStatus(desired=1, serving=1), decode=RoleStatus(desired=2, serving=2)),
        )
    )
    written = status.to_dict()
    assert written["summary"] == {"prefill": "3/2", "decode": "6/4", "ratio": "1:2"}
    assert FleetStatus.model_validate(written) == status
