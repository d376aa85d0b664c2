"""What a fleet's routing fields become in the router's configuration, and in the workers' NetworkPolicy."""

from __future__ import annotations

import pytest

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.validate import validate
from fleet_operator.render.fleet import _router_config, render_router
from fleet_operator.render.network import PORTS, render_policy
from fleet_operator.settings import Platform
from fleet_router.config import AnswerCheck, Cascade, HedgeBounds, PrewarmBounds, RouterConfig, TierRule, decode, encode

OWNER = {"apiVersion": "inferencefleet.io/v1alpha1", "kind": "InferenceFleet", "metadata": {"name": "f", "uid": "u"}}
ROUTING = {
    "remotePrefill": {"decide": "cost", "minUncachedTokens": 8},
    "slowStart": "90s",
    "returnWait": "25s",
    "prewarm": {"pairs": 8, "parallel": 4, "timeout": "20s"},
    "sessionHeader": "x-session-id",
    "tierRules": [
        {"when": {"inputTokens": {"lt": 2000}}, "tier": "small"},
        {"when": {"header": {"X-Tier": "large"}, "inputTokens": {"ge": 10}}, "tier": "large"},
    ],
    "prefixIndex": "precise",
}


def manifest(**routing: object) -> dict:
    tiers = [{"name": name, "accelerator": {"type": "cpu"}} for name in ("small", "large")]
    return {
        "apiVersion": "inferencefleet.io/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": "f", "namespace": "n"},
        "spec": {"model": {"source": "file:///m"}, "tiers": tiers, "routing": routing},
    }


def test_every_field_reaches_the_router():
    found = _router_config(InferenceFleet.model_validate(manifest(**ROUTING)))
    assert (found.decide, found.min_uncached_tokens, found.slow_start_s) == ("cost", 8, 90.0)
    assert found.return_wait_s == 25.0
    assert found.prewarm == PrewarmBounds(pairs=8, parallel=4, timeout_s=20.0)
    assert (found.session_header, found.prefix_index) == ("x-session-id", "precise")
    assert found.tier_rules == (
        TierRule(tier="small", tokens_lt=2000), TierRule(tier="large", tokens_ge=10, headers={"x-tier": "large"}),
    )  # fmt: skip


def test_defaults_keep_the_threshold():
    found = _router_config(InferenceFleet.model_validate(manifest()))
    assert (found.decide, found.slow_start_s, found.prefix_index, found.tier_rules) == ("threshold", 60.0, "approximate", ())
    assert found.return_wait_s == RouterConfig(fleet="", served_name="").return_wait_s == 10.0
    assert found.prewarm == RouterConfig(fleet="", served_name="").prewarm == PrewarmBounds(pairs=0)


CHECK = {"finishReasons": ["length", "content_filter"], "phrases": ["I am not sure"], "minMeanLogprob": -0.5}


@pytest.mark.parametrize(
    ("routing", "expected"),
    [
        ({}, None),
        ({"cascade": {"tiers": ["small", "large"]}}, Cascade(tiers=("small", "large"))),
        (
            {"cascade": {"tiers": ["small", "large"], "heldSize": "2Ki", "check": CHECK}},
            Cascade(
                tiers=("small", "large"),
                held_bytes=2048,
                check=AnswerCheck(
                    finish_reasons=("length", "content_filter"), phrases=("I am not sure",), least_mean_logprob=-0.5
                ),
            ),
        ),
    ],
)
def test_a_cascade_reaches_the_router(routing: dict, expected: Cascade | None):
    made = manifest(**routing)
    made["spec"]["engine"] = {"type": "vllm"}
    assert validate(made) == []
    found = _router_config(InferenceFleet.model_validate(made))
    assert found.cascade == expected
    assert decode(encode(found)) == found


@pytest.mark.parametrize(
    ("routing", "words"),
    [
        ({"tierRules": [{"when": {}, "tier": "gone"}]}, "routing.tierRules"),
        ({"slowStart": "2h"}, "slowStart must be between 0s and 1h"),
        ({"returnWait": "61s"}, "returnWait must be between 0s and 1m"),
        ({"prewarm": {"timeout": "6m"}}, "timeout must be between 1s and 5m"),
        ({"sessionHeader": "X Session"}, "sessionHeader"),
        ({"remotePrefill": {"decide": "always"}}, "decide"),
        ({"prefixIndex": "exact"}, "prefixIndex"),
        ({"hedge": {"atLeast": "2m"}}, "atLeast must be between 1ms and 1m"),
        ({"hedge": {"budget": 0.6}}, "hedge.budget"),
        ({"hedge": {"after": 0.5}}, "hedge.after"),
        ({"hedge": {}, "policy": "leastLoad"}, "hedge needs policy kvAware"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(routing: dict, words: str):
    assert any(words in str(problem) for problem in validate(manifest(**routing)))


@pytest.mark.parametrize(
    ("routing", "expected"),
    [
        ({}, None),
        ({"hedge": {}}, HedgeBounds()),
        (
            {"policy": "kvAware", "hedge": {"after": 2, "atLeast": "250ms", "budget": 0.1}},
            HedgeBounds(after=2.0, least_s=0.25, share=0.1),
        ),
    ],
)
def test_hedges_reach_the_router(routing: dict, expected: HedgeBounds | None):
    made = manifest(**routing)
    assert validate(made) == []
    found = _router_config(InferenceFleet.model_validate(made))
    assert found.hedge == expected
    assert decode(encode(found)) == found


def test_what_makes_sense_is_accepted():
    assert validate(manifest(**ROUTING)) == []


def test_explain_and_traces_reach_the_router():
    found = _router_config(InferenceFleet.model_validate(manifest(explain={"records": 100, "log": "all"})))
    assert (found.explain.records, found.explain.troubled, found.explain.refused, found.explain.log) == (100, 50, 25, "all")
    assert found.traces.endpoint == ""
    wish = manifest()
    wish["spec"]["telemetry"] = {"traces": {"endpoint": "http://collector:4318", "sample": 0.5}}
    traces = _router_config(InferenceFleet.model_validate(wish)).traces
    assert (traces.endpoint, traces.sample) == ("http://collector:4318", 0.5)


def test_a_collectors_token_comes_from_a_secret_and_no_router_waits_for_it():
    """No field of the fleet set it, and the manifest is no place for one: a hosted collector could not be used."""
    wish = manifest()
    wish["spec"]["telemetry"] = {"traces": {"endpoint": "https://otlp.example.com", "headersSecretRef": {"name": "otlp"}}}
    assert validate(wish) == []
    deployment = render_router(InferenceFleet.model_validate(wish), OWNER, Platform())[-1]
    (env,) = (env for env in deployment["spec"]["template"]["spec"]["containers"][0]["env"] if env["name"].startswith("OTEL"))
    source = {"name": "otlp", "key": "headers", "optional": True}
    assert env == {"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": {"secretKeyRef": source}}


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://user:secret@collector", "ftp://x", "http://"])
def test_a_collector_is_a_url_without_credentials(endpoint: str):
    wish = manifest()
    wish["spec"]["telemetry"] = {"traces": {"endpoint": endpoint}}
    assert any("telemetry.traces.endpoint" in str(problem) for problem in validate(wish))


def test_an_endpoint_picker_is_a_port_of_the_router_and_of_its_service():
    def rendered(**routing: object) -> tuple[dict, dict]:
        found = render_router(InferenceFleet.model_validate(manifest(**routing)), OWNER, Platform())
        by_kind = {one["kind"]: one for one in found}
        return by_kind["Service"], by_kind["Deployment"]["spec"]["template"]["spec"]["containers"][0]

    service, container = rendered()
    assert [port["name"] for port in service["spec"]["ports"]] == ["http"]
    assert "--ext-proc-port" not in container["command"]
    service, container = rendered(endpointPicker={"failureMode": "FailOpen"})
    assert service["spec"]["ports"][1] == {
        "name": "grpc-ext-proc", "port": 9002, "targetPort": "grpc-ext-proc", "protocol": "TCP",
        "appProtocol": "kubernetes.io/h2c",
    }  # fmt: skip
    assert container["command"][-4:] == ["--ext-proc-port", "9002", "--failure-mode", "FailOpen"]
    assert container["ports"][1]["containerPort"] == 9002


def test_a_gateway_speaks_http2_to_an_endpoint_picker_with_tls_as_well():
    """Istio goes by `appProtocol` before the port's name, and `https` is no HTTP/2 to it: every request through it was 500."""
    fleet = InferenceFleet.model_validate(manifest(endpointPicker={}, tls={"secretRef": {"name": "cert"}}))
    (service,) = [one for one in render_router(fleet, OWNER, Platform()) if one["kind"] == "Service"]
    port = service["spec"]["ports"][1]
    assert (port["name"].split("-")[0], port.get("appProtocol")) == ("grpc", None)  # as the reference's Service, with TLS too


@pytest.mark.parametrize(("given", "names"), [({}, ["n"]), ({"gatewayNamespaces": ["b", "a"]}, ["a", "b"])])
def test_only_gateways_reach_workers_past_the_routers(given: dict, names: list[str]):
    def rules(**routing: object) -> list[dict]:
        return render_policy(InferenceFleet.model_validate(manifest(**routing)), OWNER, Platform())["spec"]["ingress"]

    added = [rule for rule in rules(endpointPicker=given) if rule not in rules()]
    allowed = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}} for name in names]
    assert added == [{"from": allowed, "ports": [{"protocol": "TCP", "port": PORTS.http}]}]
