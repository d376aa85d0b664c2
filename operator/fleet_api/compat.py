"""What CEL cannot judge: specs that every schema accepts and that then serve wrongly, slowly or not at all.

`refusals` are specs whose prefill and decode workers could never hand a KV block over or whose pods could never be made, or that
take from the operator what it must set; the sources are named at each rule (NIXL compatibility: vLLM 0.32,
`distributed/kv_transfer/kv_connector/v1/nixl`).
`risks` are legal and often a mistake. Both read the manifest as the user wrote it, and skip what is absent. `kv_settings` is what
two revisions of a tier must agree on as well, to hand KV over to each other while one takes the place of the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleet_api.arguments import Argument, of_role, parse_arguments, shortened
from fleet_api.host import host_requests
from fleet_api.quantities import Ratio, exact_quantity, parse_duration, parse_quantity, parse_ratio
from fleet_api.structure import quoted
from fleet_api.unmakeable import unlimited, unmakeable, unmakeable_everywhere
from fleet_api.v1alpha1.accelerator import CPU
from fleet_api.v1alpha1.fabric import HOST_PORT_RANKS
from fleet_api.v1alpha1.model import EngineSpec

Raw = Mapping[str, Any]
ROLES = ("prefill", "decode")

OWNED = {
    "config": "a file would set what fields set",
    "uds": "the agent and the router speak TCP",
    "grpc": "the agent and the router speak HTTP",
    "root-path": "the agent and the router know one path",
    "api-key": "the router sends none to workers, and a spec is no place for a secret",
    "ssl-keyfile": "the agent and the router speak plain HTTP inside the fleet",
    "ssl-certfile": "the agent and the router speak plain HTTP inside the fleet",
    "kv-offloading-size": "its connector takes the place of the one that hands KV over: every prompt would be computed twice",
    "disable-log-stats": "without the engine's metrics nobody sees its load: no drain would end before its time is up",
}
"""Arguments of vLLM that cut the agent, the router and the other role off from the engine; those that fields decide are CEL's
(`rules_pod.OWNED_ARGS`)."""

ALIKE = {
    "dtype": "KV blocks have the model's dtype",
    "attention-backend": "each backend lays KV blocks out in its own way",
    "disable-hybrid-kv-cache-manager": "it groups KV blocks in another way",
    "hf-overrides": "both roles must run the same model",
    "revision": "both roles must run the same model",
    "code-revision": "both roles must run the same model",
    "rope-scaling": "keys are rotated before they are stored",
    "rope-theta": "keys are rotated before they are stored",
}
"""Arguments that must say the same in both roles: vLLM's NIXL compatibility hash (dtype, cache dtype, backend, hybrid manager)
and what the blocks hold (llm-d #1189, vLLM #14952: answers are wrong or the hand-off fails at the first request)."""
PROMPTS = dict.fromkeys(
    (
        "tokenizer", "tokenizer-revision", "tokenizer-mode", "chat-template", "chat-template-content-format",
        "default-chat-template-kwargs", "exclude-tools-when-tool-choice-none", "mm-processor-kwargs", "media-io-kwargs",
        "interleave-mm-strings", "video-pruning-rate", "video-pruning-method",
    ),
    "both roles make the tokens of a request, and nothing compares them: decode would read the KV of another prompt",
)  # fmt: skip
"""Arguments that decide what tokens a request is."""
UNCOMPARED = PROMPTS | {
    "hf-config-path": "it says how keys are rotated before they are stored, and nothing compares that",
    **dict.fromkeys(
        ("mamba-cache-dtype", "mamba-ssm-cache-dtype"), "of states only the length is compared: some formats share it"
    ),
}
"""Arguments by which decode would answer from the wrong KV, with 200."""
PROMPTS_ENV = {"TZ": "templates are told the day: decode would read the KV of another prompt"}
ALIKE_ENV = {
    "PYTHONHASHSEED": "hashes of KV blocks would differ (LMCache #1133, #2511: decode never finds what prefill stored)",
    "VLLM_ATTENTION_BACKEND": "each backend lays KV blocks out in its own way",
    "VLLM_KV_CACHE_LAYOUT": "the layouts of KV blocks would differ",
}
BLOCK_ARGS = (*ALIKE, *UNCOMPARED, "attention-config", "block-size")
"""Arguments that decide what KV blocks hold and how long they are."""
STAGED = "; KV of a device goes over tcp there, too: without RDMA UCX reads no other pod's GPU memory"
"""Measured on an H100 (operator/README.md, "Without RDMA")."""
SPLIT = ("tensor", "pipeline")
"""Sizes of parallelism that split KV over ranks."""
DRAFTER = re.compile(r'"(eagle3?|\w*mtp|draft_model|dflash|dspark|extract_hidden_states)"')
"""vLLM's name of a way to draft that has KV, or hidden states of the model, of its own (0.32, config/speculative.py)."""


def refusals(manifest: Raw) -> list[str]:
    """Why a fleet that passed `validate` can still not serve, each with the field to blame; empty when it can."""
    spec = manifest["spec"]
    found = [*_owned(spec)]
    for index in range(len(spec["tiers"])):
        found += _host(spec, index)
    if _vllm(spec):
        found += _shortened(spec)
        for index in range(len(spec["tiers"])):
            found += [*_unlike(spec, index, ALIKE), *_unlike_env(spec, index, ALIKE_ENV), *_drafters(spec, index)]
            found += [*_blocks(spec, index), *_spread(spec, index)]
    return list(dict.fromkeys(found))


def refusals_applied(manifest: Raw) -> list[str]:
    """The same for who applies it, and why no pod of it would be made or start. Only there: of a fleet that was accepted before,
    or past the webhook, an older revision may serve, which an operator that refuses the whole would no longer heal."""
    spec = manifest["spec"]
    found = [*refusals(manifest), *unmakeable_everywhere(spec)]
    for index in range(len(spec["tiers"])):
        found += unmakeable(spec, index)
        found += [*_unlike(spec, index, UNCOMPARED), *_unlike_env(spec, index, PROMPTS_ENV)] if _vllm(spec) else []
    return list(dict.fromkeys([*found, *(_joined(spec) if _vllm(spec) else ())]))


def risks(manifest: Raw) -> list[str]:
    """What is legal and often a mistake, each with the field; empty when nothing is."""
    spec = manifest["spec"]
    found = [*_moving(spec), *_lengths(spec), *_long_rules(spec), *_switches(spec), *_unread(spec)]
    for index, tier in enumerate(spec["tiers"]):
        found += [*_transfer(spec, tier, index), *_asymmetric(tier, index), *_unreachable(tier, index), *unlimited(spec, index)]
    return list(dict.fromkeys(found))


def kv_settings(spec: Raw, index: int) -> dict[str, Any]:
    """By role, what arguments, variables and parallelism of a vLLM tier say of its KV; nothing where they say nothing of it."""
    found = {role: _kv_of(spec, index, role) for role in ROLES} if _vllm(spec) else {}
    return {role: settings for role, settings in found.items() if settings}


def _kv_of(spec: Raw, index: int, role: str) -> dict[str, Any]:
    tier = spec["tiers"][index]
    arguments, shape = of_role(spec, index, role), (tier.get(role) or {}).get("parallelism") or tier.get("parallelism") or {}
    found: dict[str, Any] = {f"--{name}": arguments[name].value for name in BLOCK_ARGS if name in arguments}
    drafter = arguments.get("speculative-config")
    if drafter is not None and _drafts(drafter.value):
        found["--speculative-config"] = drafter.value
    if any(found.get(f"--{name}", "").startswith("/") for name in UNCOMPARED):
        found |= _files_of(tier, role)
    variables = _env_of(tier, role)
    found |= {name: variables[name] for name in (*ALIKE_ENV, *PROMPTS_ENV) if name in variables}
    return found | {name: shape[name] for name in SPLIT if shape.get(name, 1) != 1}


def _files_of(tier: Raw, role: str) -> dict[str, Any]:
    """What is mounted in a role's pods: another ConfigMap may be another file at the path that an argument names."""
    template = (tier.get(role) or {}).get("podTemplate") or {}
    return {name: template[name] for name in ("volumes", "volumeMounts") if template.get(name)}


def _env_of(tier: Raw, role: str) -> dict[str, str]:
    """Variables of a role's pods, each as the user wrote it."""
    template = (tier.get(role) or {}).get("podTemplate") or {}
    return {entry["name"]: json.dumps(entry, sort_keys=True) for entry in template.get("env") or []}


def _vllm(spec: Raw) -> bool:
    return bool((spec.get("engine") or {}).get("type") == "vllm")


def _owned(spec: Raw) -> Iterator[str]:
    for words, field in _args(spec):
        for argument in parse_arguments(words, field):
            if argument.name in OWNED:
                yield f"{argument.field}: Forbidden: --{argument.name}: {OWNED[argument.name]}"


def _shortened(spec: Raw) -> Iterator[str]:
    """Every worker would refuse them, and so end before it begins."""
    for words, field in _args(spec):
        yield from (f"{field}[{at}]: Forbidden: {why}" for at, word in enumerate(words) if (why := shortened(str(word))))


def _joined(spec: Raw) -> Iterator[str]:
    """To argparse a word with a blank in it is no option: no worker would get further than that."""
    for words, field in _args(spec):
        for at, word in enumerate(map(str, words)):
            if re.match(r"--[A-Za-z][-\w.]*\s", word):
                yield f"{field}[{at}]: Invalid value: {quoted(word)}: write name and value as two entries, or with = between them"


def _args(spec: Raw) -> Iterator[tuple[Sequence[Any], str]]:
    """(arguments, field) of every place that has some."""
    yield (spec.get("engine") or {}).get("args") or (), "spec.engine.args"
    for index, tier in enumerate(spec["tiers"]):
        for role in ROLES:
            yield (tier.get(role) or {}).get("args") or (), f"spec.tiers[{index}].{role}.args"


def _unlike(spec: Raw, index: int, alike: Mapping[str, str]) -> Iterator[str]:
    prefill, decode = of_role(spec, index, "prefill"), of_role(spec, index, "decode")
    for name, why in alike.items():
        ours, theirs = prefill.get(name), decode.get(name)
        if (ours and ours.value) != (theirs and theirs.value):
            said = f"prefill has {_said(ours)}, decode has {_said(theirs)}"
            yield f"spec.tiers[{index}]: Invalid value: --{name} must be the same in both roles ({said}): {why}"


def _said(argument: Argument | None) -> str:
    return "none" if argument is None else argument.value or "it"


def _unlike_env(spec: Raw, index: int, alike: Mapping[str, str]) -> Iterator[str]:
    values = [_env_of(spec["tiers"][index], role) for role in ROLES]
    for name, why in alike.items():
        if values[0].get(name) != values[1].get(name):
            yield f"spec.tiers[{index}]: Invalid value: env {name} must be the same in both roles: {why}"


def _drafters(spec: Raw, index: int) -> Iterator[str]:
    """A drafter that reads hidden states has KV of its own: vLLM hashes it into the hand-off."""
    prefill, decode = (of_role(spec, index, role).get("speculative-config") for role in ("prefill", "decode"))
    texts = [argument.value if argument else "" for argument in (prefill, decode)]
    if texts[0] != texts[1] and any(map(_drafts, texts)):
        yield (
            f"spec.tiers[{index}]: Invalid value: --speculative-config with a drafter must be the same in both roles: "
            "its KV is handed over, too"
        )


def _drafts(text: str) -> bool:
    """It names a drafter, or a model that vLLM finds one in: all but ngram."""
    named = re.search(r'"model": "(?!\[?ngram\]?")', text) is not None and '"method": ' not in text
    return named or DRAFTER.search(text) is not None


def _blocks(spec: Raw, index: int) -> Iterator[str]:
    """Through a buffer in host memory, which a tier without devices always uses, blocks must be equally long."""
    sizes = [of_role(spec, index, role).get("block-size") for role in ("prefill", "decode")]
    values = [size.value if size else "" for size in sizes]
    if values[0] != values[1] and spec["tiers"][index]["accelerator"]["type"] == "cpu":
        yield f"spec.tiers[{index}]: Invalid value: --block-size must be the same in both roles of a tier on CPUs"


def _spread(spec: Raw, index: int) -> Iterator[str]:
    """A worker on several nodes runs vLLM's own multi-node executor: one rank or more on each, and no other executor."""
    tier = spec["tiers"][index]
    for role in ROLES:
        shape = (tier.get(role) or {}).get("parallelism") or tier.get("parallelism") or {}
        if shape.get("nodes", 1) < 2:
            continue
        if shape.get("tensor", 1) * shape.get("pipeline", 1) * shape.get("data", 1) == 1:
            yield f"spec.tiers[{index}].{role}: Invalid value: parallelism.nodes leaves a node without a rank"
        backend = of_role(spec, index, role).get("distributed-executor-backend")
        if backend is not None and backend.value != "mp":
            yield f"{backend.field}: Invalid value: --distributed-executor-backend must be mp for workers on several nodes"


def _host(spec: Raw, index: int) -> Iterator[str]:
    """A limit below what the operator requests where the user requests nothing: the API server would refuse every pod."""
    tier, engine = spec["tiers"][index], spec.get("engine") or {}
    cache = parse_quantity(str(engine.get("cacheSize") or EngineSpec().cache_size))
    for role in ROLES:
        own = tier.get(role) or {}
        on_cpu = (own.get("accelerator") or tier["accelerator"])["type"] == CPU
        resources = (own.get("podTemplate") or {}).get("resources") or {}
        requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
        for name, least in host_requests(engine.get("type") or EngineSpec().type, cache, on_cpu=on_cpu).items():
            limit = limits.get(name)
            if limit is None or requests.get(name) is not None or exact_quantity(str(limit)) >= exact_quantity(least):
                continue
            yield (
                f"spec.tiers[{index}].{role}.podTemplate.resources.limits.{name}: Invalid value: {quoted(limit)}: less than the "
                f"{least} that are requested unless requests.{name} says otherwise: no pod can be made"
            )


def _moving(spec: Raw) -> Iterator[str]:
    image = str((spec.get("engine") or {}).get("image") or "")
    tag = image.rpartition("/")[2].partition(":")[2]
    if image and "@sha256:" not in image and tag in ("", "latest", "nightly", "main", "stable"):
        yield (
            f"spec.engine.image: {image} may change: a worker that starts later may run another engine version, and KV of "
            "two versions does not fit"
        )
    for field, model in _models(spec):
        revision = str(model.get("revision") or "")
        if model["source"].startswith("hf://") and not re.fullmatch(r"[0-9a-f]{7,64}|v?[0-9]+(\.[0-9]+)*", revision):
            yield (
                f"{field}.revision: {revision or 'main'} may change: a worker that starts later may load other weights than its "
                "peers; a commit id does not"
            )


def _models(spec: Raw) -> Iterator[tuple[str, Raw]]:
    """(field, model) of every model that workers load."""
    if any(not tier.get("model") for tier in spec["tiers"]):
        yield "spec.model", spec["model"]
    yield from ((f"spec.tiers[{index}].model", tier["model"]) for index, tier in enumerate(spec["tiers"]) if tier.get("model"))


def _lengths(spec: Raw) -> Iterator[str]:
    longest, limits = (spec.get("engine") or {}).get("maxModelLen"), spec.get("limits") or {}
    prompt, answer = limits.get("maxInputTokens"), limits.get("maxOutputTokens")
    if longest and prompt and answer and prompt + answer > longest:
        yield (
            f"spec.limits: maxInputTokens + maxOutputTokens is {prompt + answer}, more than engine.maxModelLen {longest}: "
            "requests that use both are refused by the engine"
        )


def _long_rules(spec: Raw) -> Iterator[str]:
    """Tier rules for prompts longer than any that is served."""
    own = (spec.get("limits") or {}).get("maxInputTokens")
    most = own or (spec.get("engine") or {}).get("maxModelLen") or EngineSpec().max_model_len
    for index, rule in enumerate((spec.get("routing") or {}).get("tierRules") or ()):
        least = (rule["when"].get("inputTokens") or {}).get("ge") or 0
        if least > most:
            bound = "limits.maxInputTokens" if own else "engine.maxModelLen"
            yield (
                f"spec.routing.tierRules[{index}].when.inputTokens.ge: {least} is more than {bound} {most}: no prompt that is "
                "served is so long"
            )


def _switches(spec: Raw) -> Iterator[str]:
    for argument in parse_arguments((spec.get("engine") or {}).get("args") or (), "spec.engine.args"):
        if argument.name == "trust-remote-code":
            yield f"{argument.field}: --trust-remote-code runs code from the model's repository in every worker"
        if argument.name == "no-enable-prefix-caching":
            yield f"{argument.field}: without prefix caching, routing by prefix finds nothing"


def _unread(spec: Raw) -> Iterator[str]:
    """A size that no worker of the fleet reads."""
    devices = [(tier.get(role) or {}).get("accelerator") or tier["accelerator"] for tier in spec["tiers"] for role in ROLES]
    if _vllm(spec) and "cacheSize" in spec["engine"] and all(device["type"] != CPU for device in devices):
        yield (
            "spec.engine.cacheSize: vllm does not read it on a GPU, of which it takes a share: --gpu-memory-utilization or "
            "--kv-cache-memory-bytes among the args say how much"
        )


def _transfer(spec: Raw, tier: Raw, index: int) -> Iterator[str]:
    transfer = tier.get("kvTransfer") or {}
    if transfer.get("transport") == "shm":
        yield (
            f"spec.tiers[{index}].kvTransfer.transport: shm works only between workers of one node: pairs on two nodes cannot "
            f"hand KV over{'' if tier['accelerator']['type'] == 'cpu' else STAGED}"
        )
    if transfer.get("transport") == "rdma" and not transfer.get("resource") and not transfer.get("via"):
        yield f"spec.tiers[{index}].kvTransfer: rdma without resource or via asks for no NIC: without one, KV travels over tcp"
    if transfer.get("transport") == "tcp" and tier["accelerator"]["type"] != "cpu":
        yield f"spec.tiers[{index}].kvTransfer.transport: tcp stages KV of a device through host memory: transfers are slow"
    if transfer.get("hostPorts") and (ranks := max(_data_ranks(tier, role) for role in ROLES)) > HOST_PORT_RANKS:
        yield (
            f"spec.tiers[{index}].kvTransfer.hostPorts: of {ranks} data parallel ranks those from {HOST_PORT_RANKS} on take "
            "ports of other workers: those do not share a node with it"
        )
    lease, objective = transfer.get("leaseDuration"), ((spec.get("slo") or {}).get("ttft") or {}).get("p99")
    if lease and objective and parse_duration(lease) < parse_duration(objective):
        yield (
            f"spec.tiers[{index}].kvTransfer.leaseDuration: {lease} is shorter than slo.ttft.p99 {objective}: KV of a request "
            "that is still in time may be gone before decode reads it"
        )


def _data_ranks(tier: Raw, role: str) -> int:
    shape = (tier.get(role) or {}).get("parallelism") or tier.get("parallelism") or {}
    return int(shape.get("data", 1))


def _asymmetric(tier: Raw, index: int) -> Iterator[str]:
    """More prefill than decode ranks: vLLM 0.32 hands over only where no rank holds a copy of another one's KV heads (#43523)."""
    shapes = [(tier.get(role) or {}).get("parallelism") or tier.get("parallelism") or {} for role in ROLES]
    sizes = [shape.get("tensor", 1) for shape in shapes]
    if sizes[0] > sizes[1]:
        yield (
            f"spec.tiers[{index}].prefill.parallelism.tensor: {sizes[0]} is more than decode's {sizes[1]}: KV is handed over "
            f"only when the model has at least {sizes[0]} KV heads, and not by vLLM before its pull request 27274"
        )


def _unreachable(tier: Raw, index: int) -> Iterator[str]:
    """maxReplicas that the ratio never lets a role have."""
    ratio = tier.get("ratio") or {}
    low, high = parse_ratio(ratio.get("min", "1:4")), parse_ratio(ratio.get("max", "1:1"))
    prefill, decode = ((tier.get(role) or {}).get("maxReplicas") for role in ("prefill", "decode"))
    if prefill is None or decode is None:
        return
    for role, most, count in (
        ("prefill", prefill, _most_prefill(high, decode)),
        ("decode", decode, _most_decode(low, prefill)),
    ):
        if count < most:
            yield (
                f"spec.tiers[{index}].{role}.maxReplicas: {most} is never reached: the ratio allows {count} with the other "
                "role's maxReplicas"
            )


def _most_prefill(high: Ratio, decode: int) -> int:
    return decode * high.prefill // high.decode


def _most_decode(low: Ratio, prefill: int) -> int:
    return prefill * low.decode // low.prefill
