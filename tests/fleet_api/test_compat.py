"""Specs that every schema accepts and that cannot serve, taken from what happened to users of others; and what is only a risk."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_api.arguments import parse_arguments
from fleet_api.compat import OWNED, refusals, refusals_applied, risks
from fleet_api.parse import ManifestError, parse_fleet
from fleet_api.validate import validate


def spec(*, args: list[str] | None = None, engine: dict[str, Any] | None = None, tier: dict[str, Any] | None = None, **more: Any):
    engine = {"type": "vllm", **({"args": args} if args is not None else {}), **(engine or {})}
    tiers = [{"name": "t", "accelerator": {"type": "h100-sxm"}, **(tier or {})}]
    return {
        "apiVersion": "inferencefleet.io/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": "f", "namespace": "ml"},
        "spec": {"model": {"source": "file:///m"}, "engine": engine, "tiers": tiers, **more},
    }


def roles(prefill: dict[str, Any], decode: dict[str, Any], **tier: Any) -> dict[str, Any]:
    return spec(tier={"prefill": prefill, "decode": decode, **tier})


def env(value: str) -> dict[str, Any]:
    return {"podTemplate": {"env": [{"name": "PYTHONHASHSEED", "value": value}]}}


def limited(limits: dict[str, Any], requests: dict[str, Any] | None = None, **tier: Any) -> dict[str, Any]:
    resources = {"limits": limits, **({} if requests is None else {"requests": requests})}
    return roles({}, {"podTemplate": {"resources": resources}}, **tier)


def on_torch(manifest: dict[str, Any], **engine: Any) -> dict[str, Any]:
    return {**manifest, "spec": {**manifest["spec"], "engine": engine}}


LIMITS = "spec.tiers[0].decode.podTemplate.resources.limits"
NIXL_BOTH = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
TOKENS = "--speculative-config.num_speculative_tokens=3"
SET_BY_FIELDS = "must not set what other fields set"
BAD = [
    # kserve #5987, dynamo aiconfigurator #519, llm-d #1189: each engine gets the same connector text, or none at all
    ("one connector for both", spec(args=["--kv-transfer-config", NIXL_BOTH]), SET_BY_FIELDS),
    ("dotted connector", spec(args=["--kv-transfer-config.kv_role=kv_both"]), SET_BY_FIELDS),
    ("underscores", spec(args=[f"--kv_transfer_config={NIXL_BOTH}"]), SET_BY_FIELDS),
    ("a connector for one role", roles({"args": ["--kv-transfer-config={}"]}, {}), "spec.tiers[0].prefill.args: Invalid value"),
    ("a file of arguments", spec(args=["--config", "/etc/vllm.yaml"]), "spec.engine.args[0]: Forbidden: --config"),
    ("a file for one role", roles({}, {"args": ["--config=/x"]}), "spec.tiers[0].decode.args[0]: Forbidden: --config"),
    ("another port", spec(args=["--dtype", "auto", "--port", "9999"]), SET_BY_FIELDS),
    ("a key that nobody sends", spec(args=["--api-key=abc"]), "no place for a secret"),
    # argparse: they passed, and every worker ended with these words
    ("the beginning of a name", spec(args=["--seed=1", "--tensor-par", "4"]), "engine.args[1]: Forbidden: --tensor-par is short"),
    ("a name's letters and its value", roles({}, {"args": ["-dpl", "1"]}), "decode.args[0]: Forbidden: -dpl is short for"),
    # argparse: "unrecognized arguments", in every worker; what fields decide got past, too
    # vLLM 0.32 (config/vllm.py, _post_init_kv_transfer_config) writes its own connector and kv_both over ours
    ("a cache beside the hand-off", spec(args=["--kv-offloading-size", "8"]), "takes the place of the one that hands KV over"),
    ("no metrics", spec(args=["--disable-log-stats"]), "nobody sees its load"),
    ("another length", spec(args=["--max-model-len=131072"]), SET_BY_FIELDS),
    # vLLM #14952, TRT-LLM #6507: dtypes of the two sides differ, answers are wrong or the hand-off fails
    ("dtype of one role", roles({"args": ["--dtype=bfloat16"]}, {"args": ["--dtype=float16"]}), "prefill has bfloat16"),
    ("cache dtype of one role", roles({}, {"args": ["--kv-cache-dtype", "fp8"]}), SET_BY_FIELDS),
    ("backend of one role", roles({"args": ["--attention-backend=FLASHINFER"]}, {}), "lays KV blocks out"),
    ("hybrid manager of one role", roles({"args": ["--disable-hybrid-kv-cache-manager"]}, {}), "prefill has it, decode has none"),
    ("model of one role", roles({"args": ["--revision=abc"]}, {"args": ["--revision=def"]}), "must run the same model"),
    # vLLM #14952: sizes that do not divide one another
    ("sizes that do not fit", roles({"parallelism": {"tensor": 3}}, {"parallelism": {"tensor": 2}}), "divide"),
    # llm-d: RDMA is required and no NIC is asked for
    ("no NIC", spec(tier={"kvTransfer": {"transport": "rdma", "required": True}}), "needs a NIC"),
    # LMCache #1133, #1251, #2511: block hashes differ between processes
    ("hash seed of one role", roles(env("0"), {}), "env PYTHONHASHSEED must be the same in both roles"),
    ("two hash seeds", roles(env("0"), env("1")), "env PYTHONHASHSEED must be the same in both roles"),
    ("drafter of one role", roles({}, {"args": ["-sc", '{"method":"eagle3"}']}), "its KV is handed over"),
    # key by key it got past: the hand-off then fails at the first request
    ("a drafter in dots", roles({}, {"args": ["--speculative-config.method", "eagle3"]}), "its KV is handed over"),
    ("a drafter in dots, by its letters", roles({}, {"args": ["-sc.method=eagle3"]}), "its KV is handed over"),
    (
        "a drafter in dots before what both have",
        spec(args=[TOKENS], tier={"decode": {"args": ["--speculative-config.method=mtp", TOKENS]}}),
        "its KV is handed over",
    ),
    ("a drafter by its model", roles({}, {"args": ["-sc", '{"model":"o/EAGLE3","num_speculative_tokens":2}']}), "is handed over"),
    ("a drafter by its own names", roles({}, {"args": ["--spec-method=eagle3", "--spec-model=o/d"]}), "its KV is handed over"),
    (
        "other numbers of drafted tokens",
        roles({"args": ["--spec-method=mtp", "--spec-tokens=3"]}, {"args": ["--spec-method=mtp", "--spec-tokens=2"]}),
        "its KV is handed over",
    ),
    (
        "overrides of one role, in dots",
        roles({"args": ["--hf-overrides.a=1", "--hf-overrides.b=2"]}, {"args": ["--hf-overrides.b=2"]}),
        "must run the same model",
    ),
    (
        "block sizes on CPUs",
        roles({"args": ["--block-size=128"]}, {"args": ["--block-size=16"]}, accelerator={"type": "cpu"}),
        "--block-size must be the same",
    ),
    # what the operator requests where nobody says anything else, and a limit below it
    (
        "less memory than is requested by default",
        limited({"memory": "4095Mi"}),
        f'{LIMITS}.memory: Invalid value: "4095Mi": less than the 4096Mi that are requested unless requests.memory',
    ),
    ("fewer cores than are requested by default", limited({"cpu": "1999m"}), f"{LIMITS}.cpu: Invalid value"),
    ("a core, as a number", limited({"cpu": 1}), f"{LIMITS}.cpu: Invalid value: 1: less than the 2 that"),
    ("a request of the other amount", limited({"cpu": 1, "memory": "8Gi"}, {"memory": "1Gi"}), f"{LIMITS}.cpu: Invalid value"),
    ("no request of it", limited({"cpu": "1", "memory": "8Gi"}, {}), f"{LIMITS}.cpu: Invalid value"),
    ("torch's memory", on_torch(limited({"memory": "1023Mi"})), f"{LIMITS}.memory: Invalid value"),
    (
        "torch's cache on a cpu tier",
        on_torch(limited({"memory": "1535Mi"}, accelerator={"type": "cpu"}), cacheSize="512Mi"),
        "less than the 1536Mi that are requested",
    ),
]  # fmt: skip
GOOD = [
    ("no arguments", spec()),
    ("harmless arguments", spec(args=["--dtype", "auto", "--gpu-memory-utilization=0.9", "--enforce-eager"])),
    ("blanks in values", spec(args=['--x={"b": 1}', "--override", '{"b": "--c d"}', "--note=a b", "- a b"])),
    ("the same in both roles", roles({"args": ["--dtype=float16"]}, {"args": ["--dtype", "float16"]})),
    ("for the fleet and again for a role", spec(args=["--dtype=float16"], tier={"prefill": {"args": ["--dtype=float16"]}})),
    ("one template for both", spec(args=["--chat-template=/etc/t.jinja"])),
    ("n-gram speculation where tokens are made", roles({}, {"args": ['--speculative-config={"method":"ngram"}']})),
    ("n-gram speculation by its own names", roles({}, {"args": ["--spec-method=ngram", "--spec-tokens=2"]})),
    ("n-gram speculation by its model", roles({}, {"args": ['--speculative-config={"model":"ngram"}']})),
    (
        "one drafter, by its own names and in JSON",
        roles(
            {"args": ["--spec-method=eagle3", "--spec-tokens=3"]},
            {"args": ["-sc", '{"method":"eagle3","num_speculative_tokens":3}']},
        ),
    ),
    (
        "one drafter, written in two ways",
        roles(
            {"args": ["-sc", '{"method":"eagle3","num_speculative_tokens":3}']},
            {"args": ["--speculative-config.method=eagle3", TOKENS]},
        ),
    ),
    ("block sizes between devices", roles({"args": ["--block-size=64"]}, {"args": ["--block-size=16"]})),
    ("one hash seed", roles(env("0"), env("0"))),
    ("limits at what is requested by default", limited({"cpu": "2", "memory": "4Gi"})),
    ("limits and requests below the default", limited({"cpu": 1, "memory": "1Gi"}, {"cpu": "500m", "memory": "1Gi"})),
    ("a limit of the disk", limited({"ephemeral-storage": "1Ki"})),
    ("torch's limits", on_torch(limited({"cpu": "1", "memory": "1Gi"}))),
    (
        "torch's cache beside a device",
        on_torch(limited({"memory": "1Gi"}), cacheSize="512Mi"),
    ),
    ("torch's default cache", on_torch(limited({"memory": "1088Mi"}, accelerator={"type": "cpu"}))),
    ("another engine has no such arguments", spec(engine={"type": "torch"})),
]


@pytest.mark.parametrize(("name", "manifest", "words"), BAD, ids=[row[0] for row in BAD])
def test_a_spec_that_cannot_serve_is_refused_with_the_cause(name: str, manifest: dict[str, Any], words: str):
    found = validate(manifest) or refusals(manifest)
    assert any(words in refusal for refusal in found), found
    with pytest.raises(ManifestError) as refused:  # the webhook may be off: the operator says the same (O10)
        parse_fleet(manifest)
    assert refused.value.errors == found


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (spec(args=["--seed=1", "--max-num-seqs 5"]), "spec.engine.args[1]: Invalid value: "),
        (roles({}, {"args": ["--tensor-parallel-size 4"]}), "spec.tiers[0].decode.args[0]: Invalid value: "),
    ],
)
def test_name_and_value_in_one_word_are_refused_when_they_are_applied(manifest: dict[str, Any], words: str):
    """Whoever runs already keeps its operator: its older revision may serve."""
    (told,) = refusals_applied(manifest)
    assert told.startswith(words)
    parse_fleet(manifest)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (
            roles({"args": ["--chat-template=/a"]}, {}),
            "--chat-template must be the same in both roles (prefill has /a, decode has",
        ),
        (roles({}, {"args": ["--tokenizer", "o/t"]}), "--tokenizer must be the same in both roles"),
        (roles({"podTemplate": {"env": [{"name": "TZ", "value": "UTC"}]}}, {}), "env TZ must be the same in both roles"),
        (roles({}, {"args": ["--hf-config-path=o/c"]}), "--hf-config-path must be the same in both roles (prefill has none,"),
    ],
)
def test_roles_whose_kv_nobody_compares_are_refused_when_they_are_applied(manifest: dict[str, Any], words: str):
    """Decode would answer by the KV of another prompt, or of keys that were rotated in another way, with 200: NIXL compares
    neither."""
    (told,) = refusals_applied(manifest)
    assert words in told
    parse_fleet(manifest)


@pytest.mark.parametrize(("name", "manifest"), GOOD, ids=[row[0] for row in GOOD])
def test_a_spec_that_serves_is_not(name: str, manifest: dict[str, Any]):
    assert validate(manifest) == []
    assert refusals_applied(manifest) == []
    parse_fleet(manifest)


@pytest.mark.parametrize("name", OWNED)
def test_what_the_operator_sets_cannot_be_set(name: str):
    assert refusals(spec(args=[f"--{name}=x"])) == [f"spec.engine.args[0]: Forbidden: --{name}: {OWNED[name]}"]


HUB = "hf://meta-llama/Llama-3.1-8B-Instruct"


def two_models(own: dict[str, Any], *, every: bool = False, **more: Any) -> dict[str, Any]:
    """Tier b has a model of its own; with `every`, a has it, too."""
    tiers = [{"name": name, "accelerator": {"type": "cpu"}, **({"model": own} if every or name == "b" else {})} for name in "ab"]
    return spec(tiers=tiers, routing={"cascade": {"tiers": ["a", "b"]}}, **more)


def ruled(least: int, **more: Any) -> dict[str, Any]:
    """With a rule for prompts from `least` tokens on, behind one without a length."""
    rules = [{"when": {"header": {"x-a": "b"}}, "tier": "t"}, {"when": {"inputTokens": {"ge": least}}, "tier": "t"}]
    return spec(routing={"tierRules": rules}, **more)


HOST = {"via": "hostNetwork", "hostPorts": {"first": 20_000}}
RISKS = [
    ("a tag that moves", spec(engine={"image": "vllm/vllm-openai:latest"}), "spec.engine.image"),
    ("no tag", spec(engine={"image": "registry:5000/vllm"}), "spec.engine.image"),
    ("a fixed tag", spec(engine={"image": "registry:5000/vllm:v0.32.0"}), ""),
    ("a digest", spec(engine={"image": f"vllm@sha256:{'0' * 64}"}), ""),
    ("a branch", spec(model={"source": HUB}), "spec.model.revision: main may change"),
    ("a commit", spec(model={"source": HUB, "revision": "0e9e39f249a16976918f6564b8830bc894c89659"}), ""),
    ("a version", spec(model={"source": HUB, "revision": "v1.2"}), ""),
    ("a tier's branch", two_models({"source": HUB}), "spec.tiers[1].model.revision: main may change"),
    ("a tier's version", two_models({"source": HUB, "revision": "v1.2"}), ""),
    ("a branch that no tier loads", two_models({"source": HUB, "revision": "v1.2"}, model={"source": HUB}, every=True), ""),
    ("more than fits", spec(engine={"maxModelLen": 4096}, limits={"maxInputTokens": 4000, "maxOutputTokens": 4000}), "8000"),
    ("what fits", spec(engine={"maxModelLen": 4096}, limits={"maxInputTokens": 2000, "maxOutputTokens": 2000}), ""),
    ("a rule for longer prompts", ruled(5000, limits={"maxInputTokens": 2000}), "5000 is more than limits.maxInputTokens"),
    ("a rule for the longest prompts", ruled(2000, limits={"maxInputTokens": 2000}), ""),
    (
        "a rule beyond the model",
        ruled(4097, engine={"maxModelLen": 4096}),
        "spec.routing.tierRules[1].when.inputTokens.ge: 4097 is more than engine.maxModelLen 4096: no prompt",
    ),
    ("a rule beyond the default length", ruled(2049), "2049 is more than engine.maxModelLen 2048"),
    ("code of strangers", spec(args=["--trust-remote-code"]), "spec.engine.args[0]: --trust-remote-code"),
    ("a cache on vLLM's GPUs", spec(engine={"cacheSize": "40Gi"}), "spec.engine.cacheSize: vllm does not read it on a GPU"),
    ("a cache of vLLM on CPUs", spec(engine={"cacheSize": "4Gi"}, tier={"accelerator": {"type": "cpu"}}), ""),
    ("a cache of torch", spec(engine={"type": "torch", "cacheSize": "40Gi"}), ""),
    ("no prefix cache", spec(args=["--no-enable-prefix-caching"]), "finds nothing"),
    ("shared memory", spec(tier={"kvTransfer": {"transport": "shm"}}), "only between workers of one node"),
    ("shared memory of devices", spec(tier={"kvTransfer": {"transport": "shm"}}), "reads no other pod's GPU memory"),
    ("shared memory of CPUs", spec(tier={"kvTransfer": {"transport": "shm"}, "accelerator": {"type": "cpu"}}), "hand KV over"),
    ("ranks beyond its ports", spec(tier={"kvTransfer": HOST, "parallelism": {"data": 32, "nodes": 4}}), "32 data parallel"),
    ("ranks within a worker's ports", spec(tier={"kvTransfer": HOST, "parallelism": {"data": 24, "nodes": 4}}), ""),
    ("ranks with ports of their own pod", spec(tier={"parallelism": {"data": 32, "nodes": 4}}), ""),
    ("tcp from a GPU", spec(tier={"kvTransfer": {"transport": "tcp"}}), "through host memory"),
    ("tcp between CPUs", spec(tier={"kvTransfer": {"transport": "tcp"}, "accelerator": {"type": "cpu"}}), ""),
    ("no NIC asked for", spec(tier={"kvTransfer": {"transport": "rdma"}}), "asks for no NIC"),
    ("a NIC", spec(tier={"kvTransfer": {"transport": "rdma", "resource": "rdma/ib"}}), ""),
    ("more prefill ranks", roles({"parallelism": {"tensor": 4}}, {}), "4 is more than decode's 1"),
    ("more decode ranks", roles({}, {"parallelism": {"tensor": 4}}), ""),
    ("lease too short", spec(tier={"kvTransfer": {"leaseDuration": "5s"}}, slo={"ttft": {"p99": "20s"}}), "shorter than"),
    ("lease long enough", spec(tier={"kvTransfer": {"leaseDuration": "30s"}}, slo={"ttft": {"p99": "20s"}}), ""),
    ("prefill beyond the ratio", roles({"maxReplicas": 9}, {"maxReplicas": 8}), "prefill.maxReplicas: 9 is never"),
    ("decode beyond the ratio", roles({"maxReplicas": 2}, {"maxReplicas": 9}), "decode.maxReplicas: 9 is never"),
    ("inside the ratio", roles({"maxReplicas": 2}, {"maxReplicas": 8}), ""),
    ("huge pages without a limit", limited({}, {"hugepages-2Mi": 0}), "requests.hugepages-2Mi: 0 and no limit: no pod can be"),
    ("huge pages", limited({"hugepages-2Mi": "2Mi"}, {"hugepages-2Mi": "2Mi"}), ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "manifest", "words"), RISKS, ids=[row[0] for row in RISKS])
def test_a_risk_is_told_and_nothing_else(name: str, manifest: dict[str, Any], words: str):
    assert validate(manifest) == []
    assert refusals_applied(manifest) == []
    found = risks(manifest)
    assert (len(found) == 1 and words in found[0]) if words else found == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], []),
        (["--a=b"], [("a", "b")]),
        (["--a", "b", "--c"], [("a", "b"), ("c", "")]),
        (["--a_b", "--c.d", "e"], [("a-b", ""), ("c", "d=e")]),
        (["-tp", "4", "stray", "-"], [("tensor-parallel-size", "4"), ("", "stray"), ("", "-")]),
        (["--a={\"x\": \"--y\"}"], [("a", '{"x": "--y"}')]),
    ],
)  # fmt: skip
def test_arguments_are_read_as_the_engine_reads_them(words: list[str], expected: list[tuple[str, str]]):
    assert [(argument.name, argument.value) for argument in parse_arguments(words, "f")] == expected
